"""Orders of work of the stages, and stages of micro-batches that are computed elsewhere, for a fixed layout. Pure.

=================================  =============================================================================
`refinement`                       called by the planner: orders and migration where a failure affected a plan
`list_scheduling`                  orders at measured costs, within memory
`tuner`, `placements`, `warm_up`   partition, placement and order of one pipeline, together
`migration`, `lanes`               single stages of micro-batches move to replicas that are further ahead
=================================  =============================================================================
"""
