"""A ledger's tables as Parquet files in a folder, and back: what `db.exchange` writes and reads."""
