"""Combines iterations that a script has printed, so that a script of hundreds of iterations a second costs no more than
one of ten. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import msgspec

from resihp.detector.console.printed_progress import PrintedIteration

MAX_FIGURES = 20
"""Most iterations of one report, which is sent at most once a second."""


def condensed(printed: Sequence[PrintedIteration], most: int = MAX_FIGURES) -> list[PrintedIteration]:
    """Return at most about `most` iterations that stand for all: the last of each few, with their mean duration and
    with the first loss among them that is not finite. Iterations before and after a counter that goes back are not
    combined."""
    size = math.ceil(len(printed) / most)
    groups: list[list[PrintedIteration]] = []
    for iteration in printed:
        if not groups or len(groups[-1]) >= size or iteration.goes_back:
            groups.append([])
        groups[-1].append(iteration)
    return [_combined(group) for group in groups]


def _combined(group: Sequence[PrintedIteration]) -> PrintedIteration:
    last = group[-1]
    losses = [iteration.loss for iteration in group if iteration.loss is not None]
    seconds = [iteration.seconds for iteration in group if iteration.seconds is not None]
    return msgspec.structs.replace(
        last,
        loss=next((loss for loss in losses if not math.isfinite(loss)), losses[-1] if losses else None),
        seconds=statistics.fmean(seconds) if seconds else None,
        goes_back=group[0].goes_back,
    )
