"""Parts of the ledger's writer: the records that wait, and the transactions that write them (`db.writer`)."""
