"""Invariants by subject: functions that check one action, entry or state against the simulated truth.

Each function takes the `Rules` of the run, which hold everything that the controller was told and has decided, and
raises Violation. Called by `rules`, which decides when each is checked. They never act on the simulated world.
"""
