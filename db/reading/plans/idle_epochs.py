"""The plans under which a slow component had no work, so that it did not slow their iterations. Pure.

A device that is too slow stands by under the next plan and remains slow; pipelines are routed around a slow link. The
controller records this with each plan, and with each slow component that is found on standby
(`resihp.record.slowness`). In older rows without this record, a slow component counts until it ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import msgspec

Row = dict[str, Any]


def idle_epochs(failures: Iterable[Row], plans: Iterable[Row]) -> Mapping[int, set[int]]:
    """Return, by failure, the epochs in which the slow component had no work, from the rows of one job. Failures
    without such epochs may be missing."""
    epochs: defaultdict[int, set[int]] = defaultdict(set)
    for plan in plans:
        unaffected = plan.get("unaffected_by") or ()
        if isinstance(unaffected, str):
            unaffected = _decoded(unaffected)
        for failure in unaffected:
            epochs[failure].add(plan["epoch"])
    for row in failures:
        if row.get("idle"):
            epochs[row["failure"]].add(row["epoch"])
    return epochs


def _decoded(content: str) -> tuple[int, ...]:
    with suppress(msgspec.DecodeError, UnicodeError):
        return msgspec.json.decode(content, type=tuple[int, ...])
    return ()  # imported, and malformed


def with_idle_epochs(failures: Iterable[Row], plans: Iterable[Row]) -> list[Row]:
    """Return the failures, each with its `idle_epochs`."""
    failures = list(failures)
    idle = idle_epochs(failures, plans)
    return [failure | {"idle_epochs": idle.get(failure["failure"], ())} for failure in failures]
