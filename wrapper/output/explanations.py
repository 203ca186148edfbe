"""Describes in words why an iteration of a plan takes as long as it does, for `resihp plan`, `history plans`, `why` and
the report.

The facts come from `resihp.scheduler.explained.explanation`. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from resihp.parallelism.layout import spans
from resihp.wrapper.output.render import duration

if TYPE_CHECKING:
    from resihp.scheduler.explained.explanation import Explanation, Healthy, Limiting
    from resihp.scheduler.explained.idle import Idle

MIN_SHARE = 0.005
"""Shares below this are not mentioned."""
MAX_RANKS = 16
ROLE_WORDS: Mapping[str, str] = {
    "stage": "as a further stage",
    "group": "in a larger group",
    "place": "in a slower one's place",
    "replica": "as a replica of its own",
    "": "",
}
IDLE_REASONS: Mapping[str, str] = {
    "unfit": "kept out: not fit for work",
    "stopped": "stands still",
    "memory": "not enough memory for any role",
    "layers": "not enough layers for a further stage",
    "micro-batches": "not enough micro-batches for a further replica",
    "untried": "not evaluated: too many different cases",
}


def sentences(explanation: Explanation) -> list[tuple[str, str]]:
    """Return the explanation as (subject, sentence) pairs."""
    return [
        ("limits", limits(explanation.limiting, explanation.beside)),
        *(("idle", line) for line in idle_lines(explanation.idle)),
        ("bound", bound(explanation)),
        *((("all well", all_well(explanation.healthy, explanation.unit)),) if explanation.healthy is not None else ()),
    ]


def limits(stage: Limiting, beside: float) -> str:
    layers = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in stage.chunks)
    slow = f" at {stage.speed:.0%} of their speed" if stage.speed < 1 else ""
    others = "" if not stage.alike else f"; {stage.alike} more {'stage does' if stage.alike == 1 else 'stages do'}"
    sums = f"; sums and step {beside:.0%}" if beside >= MIN_SHARE else ""
    return (
        f"replica {stage.replica} stage {stage.stage} ({_ranks(stage.ranks)}{slow}, layers {layers}) works "
        f"{stage.share:.0%} of the iteration{others}{sums}"
    )


def idle_lines(idle_devices: Sequence[Idle]) -> Iterator[str]:
    """Yield a line for each reason why devices are on standby, with all devices that it applies to."""
    same: dict[str, list[int]] = {}
    for device in idle_devices:
        same.setdefault(_why(device), []).extend(device.ranks)
    for why, ranks in same.items():
        yield f"{_ranks(ranks)}: {why}"


def bound(explanation: Explanation) -> str:
    return (
        f"no layout of these devices takes less than {time(explanation.bound, explanation.unit)}; the plan takes "
        f"{max(explanation.above_bound, 0.0):.0%} more"
    )


def all_well(healthy: Healthy, unit: str) -> str:
    """Compare the layout of a healthy job with one in which layers are spread by their cost."""
    if healthy.excess < MIN_SHARE:
        text = "the layers are well spread"
    else:
        text = (
            f"its spread of layers costs {healthy.excess:.1%}: {time(healthy.plain, unit)}, spread by their cost "
            f"{time(healthy.spread, unit)}"
        )
    if healthy.tuned is None or healthy.tuned >= healthy.spread * (1 - MIN_SHARE):
        return text
    return f"{text}; with orders of its own (--tune) {time(healthy.tuned, unit)}"


def time(value: float, unit: str) -> str:
    """Format the time of an iteration, in seconds or in layer times, as `unit` says."""
    return duration(value) if unit == "s" else f"{value:.4g} layer times"


def _why(device: Idle) -> str:
    if device.why in IDLE_REASONS:
        return IDLE_REASONS[device.why]
    way, change = ROLE_WORDS[device.way], device.change or 0.0
    slowed = "the iteration" if device.way == "replica" else "its pipeline"
    if device.why == "slower":
        return f"{way} it would slow {slowed} by {change:.1%}"
    if device.why == "no gain":
        return f"{way} it would gain nothing ({change:+.1%})"
    saves = f"{way} it would save {-change:.1%} of the iteration"
    if device.why == "too slow":
        return f"too slow: at full speed, {saves}"
    if device.why == "node":
        return f"its group would have to cross nodes, where {saves}"
    if device.why == "memory unknown":
        return f"{saves}, but the available memory is unknown"
    return f"{saves}; the planner did not find it"


def _ranks(ranks: Sequence[int]) -> str:
    if not ranks:
        return "no rank"
    numbers = sorted(ranks)
    if len(numbers) > MAX_RANKS and numbers[-1] - numbers[0] + 1 != len(numbers):
        return f"{len(numbers)} ranks from {numbers[0]}"
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {spans(numbers)}"
