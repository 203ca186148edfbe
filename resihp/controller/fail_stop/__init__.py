"""Processes, devices and nodes that are gone: when to suspect them, when to give them up, the consequences, and the
causes.

The cause of a process's end is diagnosed by `resihp.detector.diagnosis`; the next plan is chosen by the scheduler.
"""
