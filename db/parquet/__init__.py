"""A ledger's tables as Parquet files in a folder, and back: written and read by `resihp.db.exchange`."""
