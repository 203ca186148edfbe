"""Processes, devices and nodes that are gone: when to suspect, when to give up, what follows, and why it was.

Why a process ended is weighed by `resihp.detector.diagnosis`; which plan comes next, by the scheduler.
"""
