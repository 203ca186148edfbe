"""Whole layouts made better step by step, for as long as there is time: simulated annealing. Pure.

=============  =====================================================================================
`annealing`    what is tried, what is kept: `Search`, for `resihp.scheduler.anytime`
`moves`        what another layout there is beside one
`pipelines`    what a layout takes: layers of each stage, micro-batches of each replica, memory
`kernels`      its inner loops, as machine code; loaded by a search alone
=============  =====================================================================================
"""
