"""The shared vocabulary: a model's size, a layout, the owner of each slice of state, a plan, a micro-batch.

Data, and the arithmetic that follows from it. This package decides nothing, uses neither torch nor a clock, and imports
nothing of resihp except its errors.

=====================================  =========================================================================
`layout`                               replicas of stages of ranks; everything else is derived from it
`model`, `parameter_outline`           a model's size; its parameters by name, without building a module
`ownership`, `transfers`               which rank holds which slice; the slices to move from one layout to the next
`workload`                             micro-batches of packed documents, and `Dataset`
`plan`                                 the agreement of all ranks: epoch, layout, work, order
=====================================  =========================================================================
"""
