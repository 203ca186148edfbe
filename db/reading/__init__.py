"""Queries of a ledger: a job's history, its costs, why an iteration was slow, and nodes over all jobs. Reads only.

`reader` opens a ledger, and `tables` describes its views. `queries` returns frames for notebooks and rows for commands.
`costs`, `plans` and `iterations` compute from rows; `fleet` and `health` read many jobs.
"""
