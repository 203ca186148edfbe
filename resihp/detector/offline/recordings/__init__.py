"""Reads iteration times from logs, tables and JSON of training programs. Pure functions of bytes.

`formats` recognises a file and chooses its reader: `megatron_log`, `console_log` and `text_logs` read logs, `tables`
and `named_tables` CSV, `json_rows` JSON. `fields` (with `names`, `values` and `moments`) interprets rows of named
fields, also of Parquet tables. `recording` is the common result. Nothing here judges a time."""
