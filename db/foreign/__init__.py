"""Ledgers that another user may have written: safe reading of SQLite files of other users, and type checks of their
cells.

=============  ===================================================================================
`files`        ownership of a file; a private copy; rollback journals that must not be applied
`cells`        checks the type of each cell, or refuses the ledger once its table is read
=============  ===================================================================================
"""
