"""Iteration times in what people already have: how each kind of file is read. Pure functions of bytes; no files.

`formats` tells what a file is, `megatron_log` and `console_log` read lines of text, `tables` CSV, `fields` JSON and
Parquet; `recording` is what all of them come to.
"""
