"""What commands print, and from which ledger: grids, colours, JSON, CSV, Parquet; times as users write them.

Text from a ledger or a job is escaped before it reaches a terminal. Called by `wrapper.commands`; the live view
(`wrapper.sinks.terminal`) shares `render`.
"""
