"""The search for layouts: which ranks form which stage of which replica, with which layers and how much work. Pure.

=================================  =============================================================================
`paper_planner`                    the paper's three steps: TP, then PP, then DP
`tp_groups`, `groups`, `layers`    its parts: the ranks of a group, the groups of a pipeline, the layers of a stage
`shares`, `draft`                  micro-batches by replica; replicas under construction
`swap_pipelines`                   other neighbours for stages that a slow link joins
`vacant_stages`                    stages that lost all their ranks; other replicas do their work
`exhaustive`                       all possible layouts, for few devices
`labels`                           places of equal ranks
`first_layout`                     the layout of a starting job
=================================  =============================================================================

Called by `scheduler.planner`, which compares the results.
"""
