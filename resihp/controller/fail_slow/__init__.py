"""Devices and links that are slow but still at work: from a finding to a verdict, probes, and a plan that suits.

This package receives the detector's findings and decides what they mean for the job. How slowness is found is up to
`resihp.detector`.
"""
