"""The search for layouts: which ranks form each stage of each replica, with which layers and how many micro-batches.
Pure.

=================================  =============================================================================
`paper_planner`                    the paper's three steps: TP, then PP, then DP
`tp_groups`, `groups`, `layers`    parts of a layout: ranks of a group, groups of a pipeline, layers of a stage
`shares`, `draft`                  micro-batches of each replica; replicas under construction
`swap_pipelines`                   other neighbours for stages that a slow link joins
`vacant_stages`                    stages that lost all their ranks; other replicas do their work
`exhaustive`                       all possible layouts, for few devices
`labels`                           which of several equal ranks takes which place
`mirrors`                          standby ranks that hold copies of state with one holder
`first_layout`                     the tuned layout of a starting job
=================================  =============================================================================

Called by `scheduler.planner`, which compares the results; `mirrors` and `first_layout` are called by the controller.
"""
