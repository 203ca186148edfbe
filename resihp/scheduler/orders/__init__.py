"""In which order stages work, and which stage of a micro-batch is computed elsewhere: for a layout that stands. Pure.

=================================  =============================================================================
`refinement`                       what the planner asks for: orders and migration where a failure touched a plan
`list_scheduling`                  orders at measured costs, within memory
`tuner`, `placements`, `warm_up`   partition, placement and order of one pipeline, together
`migration`, `lanes`               single stages of micro-batches move to replicas that are further on
=================================  =============================================================================
"""
