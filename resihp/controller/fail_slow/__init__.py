"""Devices and links that are slow and still at work: from a finding to a verdict, probes, and a plan that suits.

Hears the detector's findings and decides what they mean for the job; how they are found is `resihp.detector`'s.
"""
