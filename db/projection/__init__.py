"""Rows of the ledger that follow from a journal's records, with one function for each type of entry.

`applying` applies records in order, and has the table of these functions. The other modules contain the functions,
grouped by the rows that they write; all modules use `columns` and `statements`.
"""
