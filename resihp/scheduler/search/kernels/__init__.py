"""Machine code of the search: changes, cuts, plays and accepts layouts, again and again. Pure.

Numba compiles the functions when they are first called. Only `resihp.scheduler.search` may import these modules, for a
search alone: numba takes a quarter of a second. Each module calls only those above it.

=================  ==========================================================================
`compilation`      functions compiled when they are first called, and kept on disk
`arrays`           a situation, tables of known facts, and layouts, as arrays
`pipeline_times`   seconds of a pipeline under the schedule
`partitions`       layers of each stage
`own_orders`       orders of a pipeline's own, where these are faster
`sharing`          micro-batches of each pipeline
`tables`           known facts about groups and pipelines
`layouts`          scores and copies of layouts
`random_numbers`   the sequence of random numbers
`groups`           new groups of ranks
`moves`            changes of a layout
`trials`           annealing: the changes that are kept
=================  ==========================================================================
"""
