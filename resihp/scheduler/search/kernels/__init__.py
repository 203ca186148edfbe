"""Machine code of the search: changes, cuts, plays and accepts layouts, again and again. Pure.

Numba compiles the functions when they are first called. Only `resihp.scheduler.search` may import these modules, and
only for a search: importing numba takes a quarter of a second. Each module calls only modules above it in the table.

=================  ==========================================================================
`compilation`      compiles functions at their first call, and keeps them on disk
`arrays`           a situation, tables of known facts, and layouts, as arrays
`pipeline_times`   seconds of a pipeline under the schedule
`partitions`       number of layers of each stage
`own_orders`       a pipeline's own orders, where they are faster
`sharing`          number of micro-batches of each pipeline
`tables`           known facts about groups and pipelines
`layouts`          scores and copies of layouts
`random_numbers`   the sequence of random numbers
`groups`           new groups of ranks
`moves`            changes of a layout
`trials`           annealing: which changes are kept
=================  ==========================================================================
"""
