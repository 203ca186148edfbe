"""Other published detectors of slow devices, behind the same interface as ours, for side-by-side comparisons. Pure.

`change_points` has the ResiHP paper's detector and Greyhound's, which differ in how they verify a change point;
`healthy_times` their shared model of healthy work. Chosen by `[detect] mode` (`resihp.detector.modes`). Neither names
a slow rank: the controller probes all of them.
"""
