"""Pauses between two looks at something that a job does: the dearer a look, the longer the pause.

A look may start a Slurm command or read a whole ledger. Looks without such pauses take half a core away from the job.
"""

from __future__ import annotations

import time

PAUSES_PER_LOOK = 4.0
LONGEST_S = 0.25


def pause(look_began: float, least_s: float) -> None:
    """Sleep after a look that began at `look_began` on the monotonic clock, for `least_s` or more."""
    time.sleep(max(least_s, min(LONGEST_S, PAUSES_PER_LOOK * (time.monotonic() - look_began))))
