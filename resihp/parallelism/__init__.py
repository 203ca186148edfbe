"""Shared data types: a model's size, a layout, the owner of each slice of state, a plan, a micro-batch.

The modules define data, and the arithmetic that follows from the data. The package decides nothing, uses neither torch
nor a clock, and imports nothing of resihp except its errors.

=====================================  =========================================================================
`layout`                               replicas of stages of ranks; everything else is derived from a layout
`model`, `parameter_outline`           a model's size; its parameters by name, without building a module
`ownership`, `transfers`               which rank holds which slice; the slices to move from one layout to the next
`workload`                             micro-batches of packed documents, and `Dataset`
`plan`                                 the plan that all ranks agree on: epoch, layout, micro-batches, order of work
=====================================  =========================================================================
"""
