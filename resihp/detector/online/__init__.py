"""Fail-slow detection while a job runs: how long an iteration should have taken, and which part of it is slow. Pure.

The controller asks `monitor`. It predicts with `predictor` (the paper's Eq. 1, fitted by `regression`) over
`plan_arrays`, and reads three channels: `iteration_channel`, `rank_channel`, `link_channel`. Only finds; never acts.
"""
