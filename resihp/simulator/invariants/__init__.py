"""Invariants by subject: functions that check one action, journal entry or state against the simulated truth.

Each function gets the `Rules` of the run, which record everything that the controller was told and has decided, and
raises Violation. They never act on the simulated world. Called by `rules`, which decides when each is checked.
"""
