"""Orders of work of the stages, and micro-batches that pass single stages in other replicas, for a fixed layout. Pure.

=================================  =============================================================================
`refinement`                       called by the planner: orders and migration where a failure affected a plan
`list_scheduling`                  orders at measured costs, within memory
`tuner`, `placements`              partition, placement and order of one pipeline, together
`warm_up`, `warm_up_depths`        the number of forwards before a stage's first backward
`migration`, `lanes`               single stages of micro-batches move to replicas that are further ahead
=================================  =============================================================================
"""
