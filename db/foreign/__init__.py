"""Ledgers that somebody else may have written: how a SQLite file is read that is not ours, and what its cells may hold.

=============  ===================================================================================
`files`        whose a file is; a copy to read; rollback journals that are not played back
`cells`        each cell of its column's type, or the ledger is refused once its table is read
=============  ===================================================================================
"""
