"""Fail-slow while a job runs: how long an iteration should have taken, and who or what is slow in it. Pure.

`monitor` is what the controller asks. It predicts with `predictor` (the paper's Eq. 1, fitted by `regression`) over
`plan_arrays`, and hears three channels: `iteration_channel`, `rank_channel`, `link_channel`. Only finds; never acts.
"""
