"""Output of commands, and the choice of the ledger that they read: tables, layout grids, colours, JSON, CSV, Parquet;
times that users type.

Text from a ledger or a job is escaped before it reaches a terminal. Called by `resihp.wrapper.commands`; the live view
(`resihp.wrapper.sinks.terminal`) uses `render`, too.
"""
