"""`resihp history` and `resihp why`: list the ledger's records of one job or of all jobs. Reads only.

`command` takes the options and prints. `views` is the table of all views; `one_job` and `all_jobs` read a view from
`resihp.db.reading`, and `costs` adds up the costs. `tables` defines the columns on a terminal, and `cells` the text of
some cells.
"""
