"""Simulated jobs: `scenario` is their data, and each other module draws one family of them from a seed.

A seed always gives the same job. Drawing one plays nothing: that is the task of `resihp.simulator.world`.
"""
