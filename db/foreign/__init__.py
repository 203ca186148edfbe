"""Ledgers that another user may have written: safe reading of foreign SQLite files, and type checks of their cells.

=============  ===================================================================================
`files`        ownership of a file; a private copy; rollback journals that must not be applied
`cells`        checks each cell's type, or refuses the ledger once its table is read
=============  ===================================================================================
"""
