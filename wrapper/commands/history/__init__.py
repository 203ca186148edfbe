"""`resihp history` and `resihp why`: list the ledger's records of one job or of all. Reads only.

`command` queries `db.reading`; `tables` shows its views on a terminal.
"""
