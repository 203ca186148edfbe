"""Questions to a ledger: one job's story, its costs, why an iteration was slow, nodes over all jobs. Reads only.

`reader` opens a ledger, `tables` describes its views; `queries` returns frames for notebooks and rows for commands;
`costs`, `plans` and `iterations` compute from rows; `fleet` and `health` look at many jobs.
"""
