"""A journal's records as rows of the ledger, one function for each type of entry.

`applying` applies records in their order, and has the table of these functions; the modules beside it have the
functions, by the rows that they write. `columns` and `statements` serve all of them.
"""
