"""`resihp history` and `resihp why`: list the ledger's records of one job or of all. Reads only.

`command` takes the options and prints; `views` is the table of views, which `one_job` and `all_jobs` read from
`db.reading` (`costs` adds up the costs); `tables` shows them on a terminal.
"""
