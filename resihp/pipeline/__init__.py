"""Each rank's work in an iteration: its order, its time, and a proof that it cannot deadlock. Pure.

================================  ==============================================================================
`schedules`                       orders of F, B and W on each stage
`program`                         a plan as each rank's own list of primitives, computation and communication
`timeline`, `compiled`            the one model of time (the paper's Eq. 2): for one set of durations, for many
`checker`                         plays programs under NCCL's rules before anyone acts on them; refuses, never repairs
`computation_rules`               ... the order of computations
`communication_rules`             ... parcels and sums
`rendezvous`                      ... the end of all operations
================================  ==============================================================================

Called by the executor (which carries programs out), the scheduler (which prices them) and the controller (which has
every plan checked before it is proposed).
"""
