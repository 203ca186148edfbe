"""Whole layouts made better step by step, for as long as there is time: simulated annealing. Pure.

=============  =====================================================================================
`annealing`    what is begun with, what is told: `Search`, for `resihp.scheduler.anytime`
`pipelines`    a situation and its layouts as arrays, and back
`kernels`      all that is done again and again, as machine code; loaded by a search alone
=============  =====================================================================================
"""
