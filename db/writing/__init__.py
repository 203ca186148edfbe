"""Parts of the ledger's writer (`db.writer`), and its use for a whole journal.

`record_queue` holds the records that wait, `transactions` writes them, `daily_pruning` removes old telemetry;
`catch_up` brings a ledger up to a journal.
"""
