"""Other published detectors of slow devices, with the interface of resihp's own detector, for comparisons. Pure.

`change_points` has the detectors of the ResiHP paper and of Greyhound, which verify a change point differently;
`healthy_times` is the model of healthy iterations that both use. Chosen by `[detect] mode` (`resihp.detector.modes`).
Neither detector names a slow rank, so that the controller probes all ranks.
"""
