"""Plays whole simulated jobs on a virtual clock around the real controller: machines, network, Slurm, failures, rules.

A job of hours takes milliseconds, and a seed always gives the same job: `python -m resihp.simulator.harness SEED` shows
one. `scenarios` draws the job and its disturbances. `world` plays it with `machines` and `allocation` (Slurm). `rules`
and `invariants` check after every event the promises that every run must keep. The package starts no process, opens no
socket and never imports torch; only the controller is the real one. Used by tests and benchmarks.
"""
