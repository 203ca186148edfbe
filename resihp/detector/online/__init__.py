"""Detects slow ranks and links while a job runs, from the expected and the measured time of each iteration. Pure.

The controller calls `monitor` after each iteration. `monitor` predicts times with `predictor` (the paper's Eq. 1,
fitted by `regression`) on the plan as `plan_arrays`, and combines the tests of `iteration_channel`, `rank_channel`,
`link_channel`, `between_nodes` and `beside` (with `lane_channel`). It only reports findings, and never acts on them.
"""
