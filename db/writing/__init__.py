"""Parts of the ledger's writer (`resihp.db.writer`), and a function that writes a whole journal.

`record_queue` contains the records that wait to be written, `pacing` decides how long they wait, `transactions` writes
them, and `daily_pruning` removes old telemetry. `catch_up` writes the records of a journal that a ledger lacks.
"""
