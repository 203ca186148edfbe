"""Reads iteration times from the files that people already have, one module for each kind. Pure functions of bytes.

`formats` recognises a file, `megatron_log` and `console_log` read lines of text, `tables` CSV, `fields` JSON and
Parquet, with `values` and `moments`; `recording` is the common result.
"""
