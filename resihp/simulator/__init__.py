"""Whole jobs on a virtual clock around the real controller: machines, network, Slurm, failures, and what must hold.

A job of hours takes milliseconds, and a seed is always the same job: `python -m resihp.simulator.harness SEED` shows
one. `scenario` draws what befalls it, `world` plays it, `rules` asserts after every event what must hold of every run.
No process, no socket, no torch; the controller inside is the real one. Used by tests and benchmarks.
"""
