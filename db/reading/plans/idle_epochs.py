"""Under which plans something slow had no work, so that no iteration of theirs is slow because of it. Pure.

A device that is too slow stands by under the next plan, and is slow still; pipelines go round a slow link. The
controller says so with each plan, and with what it finds slow while that stands by (`resihp.record.slowness`); rows of
before do not tell: then what is slow counts until it ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import msgspec

Row = dict[str, Any]


def idle_epochs(failures: Iterable[Row], plans: Iterable[Row]) -> Mapping[int, set[int]]:
    """Epochs of these plans by failure, rows of one job; none of what is not there."""
    found: defaultdict[int, set[int]] = defaultdict(set)
    for plan in plans:
        told = plan.get("unaffected_by") or ()
        if isinstance(told, str):
            told = _decoded(told)
        for failure in told:
            found[failure].add(plan["epoch"])
    for row in failures:
        if row.get("idle"):
            found[row["failure"]].add(row["epoch"])
    return found


def _decoded(told: str) -> tuple[int, ...]:
    with suppress(msgspec.DecodeError, UnicodeError):
        return msgspec.json.decode(told, type=tuple[int, ...])
    return ()  # imported, and none


def with_idle_epochs(failures: Iterable[Row], plans: Iterable[Row]) -> list[Row]:
    """Failures, each with its `idle_epochs`."""
    failures = list(failures)
    idle = idle_epochs(failures, plans)
    return [one | {"idle_epochs": idle.get(one["failure"], ())} for one in failures]
