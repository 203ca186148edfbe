"""Explains a plan's time: the stage that limits it, the idle devices and their reasons, the distance to a lower bound.

Never in the path of a recovery: `resihp plan` and the commands that read the ledger ask; the controller keeps facts.
"""
