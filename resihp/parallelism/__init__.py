"""Words that all others speak: a model's size, a layout, who owns which slice, a plan, a micro-batch.

Data and what follows from it by arithmetic. Decides nothing, knows neither torch nor time, and imports nothing of
resihp but its errors.

=====================================  =========================================================================
`layout`                               replicas of stages of ranks; everything else is derived from it
`model`, `parameter_outline`           a model's size; its parameters by name, without building a module
`ownership`, `transfers`               who holds which slice, and what moves from one layout to the next
`workload`                             micro-batches of packed documents, and `Dataset`
`plan`                                 what all ranks agree on: epoch, layout, work, order
=====================================  =========================================================================
"""
