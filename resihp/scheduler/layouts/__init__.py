"""Which ranks form which stage of which replica, with which layers and how much work: the search for layouts. Pure.

=================================  =============================================================================
`paper_planner`                    the paper's three steps: TP, then PP, then DP
`tp_groups`, `groups`, `layers`    its parts: who stays in a group, which groups form a pipeline, who holds which layers
`shares`, `draft`                  micro-batches by replica; replicas in the making
`swap_pipelines`                   other neighbours for stages that a slow link joins
`vacant_stages`                    stages that lost all their ranks, whose work others do
`exhaustive`                       all there is, for few devices
`labels`                           which of equal ranks stand where
`first_layout`                     what a job starts with
=================================  =============================================================================

Called by `scheduler.planner`, which compares what they find.
"""
