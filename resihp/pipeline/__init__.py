"""Each rank's work in an iteration: its order, its time, and a proof that it cannot deadlock. Pure.

================================  ==============================================================================
`schedules`                       orders of F, B and W on each stage
`program`                         a plan as a program for each rank: computation and communication in one list
`timeline`, `compiled`            the model of time (the paper's Eq. 2): for one set of durations, for many sets
`checker`                         plays programs under NCCL's rules before ranks act on them; refuses, never repairs
`computation_rules`               rules of the checker: the order of computations
`communication_rules`             rules of the checker: parcels and sums of gradients
`rendezvous`                      rules of the checker: every operation completes
`parts`                           cuts of the last backward pass, so that sums of gradients begin earlier
`splits`                          the order in which ranks create NCCL communicators
================================  ==============================================================================

Called by the executor (which carries programs out), the scheduler (which predicts their time) and the controller (which
checks every plan before it proposes one).
"""
