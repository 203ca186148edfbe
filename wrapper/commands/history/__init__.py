"""`resihp history` and `resihp why`: what the ledger holds of one job or of all. Reads only.

`command` asks `db.reading`; `tables` are its views on a terminal.
"""
