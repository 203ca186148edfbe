"""Chooses a job's detector by `[detect] mode`. Called by the controller when it begins, through its dependencies.

==============  =====================================================================================================
`sequential`    resihp's method: sequential tests of every rank, link and iteration (`resihp.detector.online.monitor`)
`paper`         the ResiHP paper's method: change points of iteration times. A change point counts if iterations take
                more than 25 % longer than predicted for their workload (`resihp.detector.rivals`)
`greyhound`     Greyhound's method: change points of iteration times. A change point counts if the mean after it is
                10 % higher (`resihp.detector.rivals`)
==============  =====================================================================================================
"""

from __future__ import annotations

from resihp.detector.interface import Detector
from resihp.detector.online.monitor import Monitor
from resihp.settings import Detection


def detector(detection: Detection) -> Detector:
    """Return a new detector of the mode in `detection`; it has learnt nothing yet."""
    match detection.mode:
        case "paper" | "greyhound":
            from resihp.detector.rivals.change_points import ChangePointDetector  # imports scipy

            return ChangePointDetector(detection.mode)
        case _:
            return Monitor(
                false_alarms_per=detection.false_alarms_per, patience=detection.patience, least=detection.least
            )
