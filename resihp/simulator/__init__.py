"""Whole simulated jobs on a virtual clock around the real controller: machines, network, Slurm, failures, rules.

A job of hours takes milliseconds, and a seed always gives the same job: `python -m resihp.simulator.harness SEED` shows
one. `scenarios` draws the job and its disturbances, `world` plays it with `machines` and `allocation` (Slurm), `rules`
and `invariants` check after every event the promises that every run keeps. No process, no socket, no torch; the
controller inside is the real one. Used by tests and benchmarks.
"""
