"""`resihp status`: show one job from its ledger. Reads only.

`job_status` collects the data, `tables` shows them on a terminal of 80 columns, `command` is the command line; with
`--watch`, `resihp.wrapper.commands.watch` takes over.
"""
