"""Improves whole layouts step by step, for as long as there is time: simulated annealing. Pure.

=============  =====================================================================================
`annealing`    starting layouts and results: `Search`, for `resihp.scheduler.anytime`
`pipelines`    a situation and its layouts as arrays, and back
`kernels`      the inner loops, as machine code; loaded only by a search
=============  =====================================================================================
"""
