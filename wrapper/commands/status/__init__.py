"""`resihp status`: one job, as its ledger tells of it. Reads only.

`job_status` puts it together, `tables` shows it on a terminal of 80 columns, `command` is the command line; with
`--watch` it goes on in `wrapper.commands.watch`.
"""
