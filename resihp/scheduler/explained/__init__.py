"""Explains a plan's time: the limiting stage, the idle devices with reasons, the distance to a lower bound.

Called by `resihp plan` and by commands that read the ledger, never during a recovery; the controller only records
facts.
"""
