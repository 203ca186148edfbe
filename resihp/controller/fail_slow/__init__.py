"""Handle devices and links that are slow but still work: from a finding to a probe, to a verdict, and to a better plan.

Decides how the job reacts to the detector's findings. `resihp.detector` decides how slowness is found.
"""
