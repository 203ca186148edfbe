"""Why a plan takes as long as it does, in words: the same for `resihp plan`, `history plans`, `why` and the report.

The facts are those of `resihp.scheduler.explained.explanation`. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from resihp.parallelism.layout import spans
from wrapper.output.render import duration

if TYPE_CHECKING:
    from resihp.scheduler.explained.explanation import Explanation, Healthy, Limiting
    from resihp.scheduler.explained.idle import Idle

TELLING = 0.005
"""Shares below this are not worth a word."""
RANKS_SHOWN = 16
AS: Mapping[str, str] = {
    "stage": "as a further stage",
    "group": "in a larger group",
    "place": "in a slower one's place",
    "replica": "as a replica of its own",
    "": "",
}
SIMPLE: Mapping[str, str] = {
    "unfit": "kept out: not fit for work",
    "stopped": "stands still",
    "memory": "no room in memory for anything it could do",
    "layers": "not enough layers for a further stage",
    "micro-batches": "not enough micro-batches for a further replica",
    "untried": "not looked at: too many are unlike",
}


def sentences(found: Explanation) -> list[tuple[str, str]]:
    """(what it is about, what there is to say)."""
    return [
        ("limits", limits(found.limiting, found.beside)),
        *(("idle", line) for line in idle_lines(found.idle)),
        ("bound", bound(found)),
        *((("all well", all_well(found.healthy, found.unit)),) if found.healthy is not None else ()),
    ]


def limits(stage: Limiting, beside: float) -> str:
    layers = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in stage.chunks)
    slow = f" at {stage.speed:.0%} of their speed" if stage.speed < 1 else ""
    others = "" if not stage.alike else f"; {stage.alike} more {'stage does' if stage.alike == 1 else 'stages do'}"
    sums = f"; sums and step {beside:.0%}" if beside >= TELLING else ""
    return (
        f"replica {stage.replica} stage {stage.stage} ({_ranks(stage.ranks)}{slow}, layers {layers}) works "
        f"{stage.share:.0%} of the iteration{others}{sums}"
    )


def idle_lines(found: Sequence[Idle]) -> Iterator[str]:
    """One line for all devices that stand by for the same reason."""
    same: dict[str, list[int]] = {}
    for one in found:
        same.setdefault(_why(one), []).extend(one.ranks)
    for why, ranks in same.items():
        yield f"{_ranks(ranks)}: {why}"


def bound(found: Explanation) -> str:
    return (
        f"no layout of these devices takes less than {time(found.bound, found.unit)}; the plan takes "
        f"{max(found.above_bound, 0.0):.0%} more"
    )


def all_well(healthy: Healthy, unit: str) -> str:
    """Of the job when nothing has failed."""
    if healthy.excess < TELLING:
        told = "the layers lie well"
    else:
        told = (
            f"its layers cost {healthy.excess:.1%}: {time(healthy.plain, unit)}, spread by what they cost "
            f"{time(healthy.spread, unit)}"
        )
    if healthy.tuned is None or healthy.tuned >= healthy.spread * (1 - TELLING):
        return told
    return f"{told}; with orders of its own (--tune) {time(healthy.tuned, unit)}"


def time(value: float, unit: str) -> str:
    """Of an iteration, in seconds or in layer times."""
    return duration(value) if unit == "s" else f"{value:.4g} layer times"


def _why(one: Idle) -> str:
    if one.why in SIMPLE:
        return SIMPLE[one.why]
    way, change = AS[one.way], one.change or 0.0
    what = "the iteration" if one.way == "replica" else "its pipeline"
    if one.why == "slower":
        return f"{way} it would slow {what} by {change:.1%}"
    if one.why == "no gain":
        return f"{way} it would gain nothing ({change:+.1%})"
    saves = f"{way} it would save {-change:.1%} of the iteration"
    if one.why == "too slow":
        return f"too slow: at full speed, {saves}"
    if one.why == "node":
        return f"its group would have to cross nodes, where {saves}"
    if one.why == "memory unknown":
        return f"{saves}, but what there is room for is not known"
    return f"{saves}: the planner did not find that"


def _ranks(ranks: Sequence[int]) -> str:
    if not ranks:
        return "no rank"
    shown = sorted(ranks)
    if len(shown) > RANKS_SHOWN and shown[-1] - shown[0] + 1 != len(shown):
        return f"{len(shown)} ranks from {shown[0]}"
    return f"{'rank' if len(shown) == 1 else 'ranks'} {spans(shown)}"
