"""Output of commands, and the choice of the ledger that they read: grids, colours, JSON, CSV, Parquet; times of users.

Text from a ledger or a job is escaped before it reaches a terminal. Called by `wrapper.commands`; the live view
(`wrapper.sinks.terminal`) shares `render`.
"""
