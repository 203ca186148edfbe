"""What a ledger answers: one job's story, its costs, why an iteration was slow, nodes over all jobs. Reads only.

`reader` opens one, `tables` are what it shows; `queries` are frames for notebooks and rows for commands; `costs`,
`plans` and `iterations` reckon with rows; `fleet` and `health` look at many jobs.
"""
