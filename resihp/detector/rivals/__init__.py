"""Other published ways to find slow devices, behind the same interface as ours: for side-by-side comparisons. Pure.

`change_points` is the ResiHP paper's detector and Greyhound's, which differ in how they verify a change point;
`healthy_times` what both know of healthy work. Chosen by `[detect] mode` (`resihp.detector.modes`). Neither says who is
slow: the controller measures everybody.
"""
