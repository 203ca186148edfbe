"""Excess of an iteration's time over its expected time, and the part of it that known causes explain. Pure; reads
nothing. Called by `why`, which finds the causes and writes the sentences."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

Row = dict[str, Any]

SLOW_TOLERANCE = 0.10
LARGER_WORK_RATIO = 1.05
"""Ratio of work from which on a workload counts as larger than usual."""
NEAR_ITERATIONS = 100
"""Number of iterations that define the usual time: of those before and after the iteration, and of those before it
became slow. Callers need not pass more."""
MIN_ITERATIONS = 3
"""Fewest iterations that define the usual time. If there are fewer before the iteration, those after it are used,
too."""
MAX_TRUSTED_RATIO = 1.2
"""Predictions are used if the ratio of the job's actual to predicted times is at most this, and at least its inverse.
The detector itself corrects smaller differences."""
MIN_CAUSE_SHARE = 0.5
"""Causes are named as the cause only if they explain at least this share of the excess."""
WHOLE_ITERATION_COMPONENTS = ("collective", "reduction", "data", "job")
"""Components that slow whole iterations: their speed is the speed of the iteration."""

Measure = Literal["predicted", "usual"]


class Usual(msgspec.Struct, frozen=True, kw_only=True):
    """Usual time of an iteration in the job, from other iterations that were not affected by anything known to be slow:
    of the same layout, or of other layouts if there are none."""

    seconds: float
    """Median over iterations with equally long sequences; if there are too few of the same layout, `ratio` times this
    iteration's prediction."""
    rows: list[Row]
    others: bool
    """Whether iterations after this one were used, because there were too few before it."""
    ratio: float | None
    """Median ratio of actual to predicted time; None if too few iterations had predictions."""
    alike: bool
    """Whether the compared iterations had about as much work."""
    scaled: bool
    """Whether `seconds` is `ratio` times the prediction."""
    shape: bool
    """Whether the compared iterations are of the same layout."""

    @property
    def description(self) -> str:
        count = f"{len(self.rows)} other" if self.others else f"the last {len(self.rows)}"
        description = f"{count} iterations of {'this shape' if self.shape else 'other layouts'}"
        return f"{description}, scaled by each prediction" if self.scaled else f"median of {description}"


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Actual and expected time of an iteration. `took_s`: actual time, None if unknown."""

    usual: Usual | None
    measure: Measure | None
    """Whether `expected_s` is the prediction or the usual time; None if there is nothing to compare with."""
    expected_s: float | None
    took_s: float | None

    @property
    def slow(self) -> bool | None:
        """Whether the iteration took longer than expected; None if unknown."""
        if self.took_s is None or not self.expected_s:
            return None
        return bool(self.took_s > (1.0 + SLOW_TOLERANCE) * self.expected_s)

    @property
    def excess_s(self) -> float | None:
        """Seconds beyond the expected time; None if the iteration was not slow."""
        return self.took_s - self.expected_s if self.slow and self.took_s and self.expected_s else None


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """A cause that affected an iteration. `what`: its description; `failure`: the number of its failure, None for other
    causes."""

    what: str
    factor: float | None
    """Largest factor by which the cause can have lengthened the iteration; None if unknown."""
    explains_s: float | None = None
    """Largest part of the excess, in seconds, that the cause explains; None if unknown, or without an excess."""
    failure: int | None = None
    place: bool = False
    """Whether the cause is one slow device or link of the many that take part in an iteration."""


# --- expected time --------------------------------------------------------------------------------------------------


def affects(failure: Row, row: Row) -> bool:
    """Decide whether something slow affected an iteration; not if it had no work under the iteration's plan
    (`resihp.db.reading.plans.idle_epochs`)."""
    return _is_active(failure, row["iteration"]) and row["epoch"] not in failure.get("idle_epochs", ())


def last_unaffected(iteration: int, failures: Sequence[Row]) -> int:
    """Return the last iteration up to `iteration` at which nothing was known to be slow; 0 if there is none."""
    while since := [failure["iteration"] for failure in failures if _is_active(failure, iteration)]:
        iteration = min(since) - 1
    return max(iteration, 0)


def _is_active(failure: Row, iteration: int) -> bool:
    return (
        failure["kind"] == "fail-slow"
        and failure["iteration"] <= iteration
        and (failure["ended_iteration"] is None or iteration < failure["ended_iteration"])
    )


def compare(number: int, iterations: Sequence[Row], failures: Sequence[Row], plans: Sequence[Row]) -> Comparison:
    """Compare the iteration at index `number` with its prediction, or with the usual time."""
    row, usual = iterations[number], _usual(number, iterations, failures, plans)
    if usual is None or usual.ratio is None:
        trusted = usual is None or len(usual.rows) < MIN_ITERATIONS
    else:
        trusted = 1.0 / MAX_TRUSTED_RATIO <= usual.ratio <= MAX_TRUSTED_RATIO
    if row["predicted_seconds"] and trusted:
        return Comparison(usual=usual, measure="predicted", expected_s=row["predicted_seconds"], took_s=row["seconds"])
    if usual is None:
        return Comparison(usual=None, measure=None, expected_s=None, took_s=row["seconds"])
    return Comparison(usual=usual, measure="usual", expected_s=usual.seconds, took_s=row["seconds"])


def _usual(number: int, iterations: Sequence[Row], failures: Sequence[Row], plans: Sequence[Row]) -> Usual | None:
    """Return the usual time, from iterations of the same layout with equally long sequences; if there are too few, from
    all of the same layout; else from other layouts, which are comparable only relative to their predictions."""
    row = iterations[number]
    well = [candidate for candidate in iterations if candidate is not row and _is_unaffected(candidate, failures)]
    same = _of_same_shape(well, row, plans)
    as_long = [candidate for candidate in same if _has_similar_work(candidate, row)]
    near = [_nearest(rows, row) for rows in (as_long, same, well)]
    choice = _first_sufficient(near, row)
    chosen, others = near[choice]
    if not chosen:
        return None
    seconds, ratio = statistics.median(candidate["seconds"] for candidate in chosen), _ratio(chosen)
    scaled = choice > 0 and ratio is not None and bool(row["predicted_seconds"])
    if scaled and ratio is not None:
        seconds = ratio * row["predicted_seconds"]
    return Usual(
        seconds=seconds, rows=chosen, others=others, ratio=ratio, alike=choice == 0, scaled=scaled, shape=choice < 2
    )


def _is_unaffected(candidate: Row, failures: Sequence[Row]) -> bool:
    """Decide whether the time of an iteration is known, and nothing known to be slow affected it."""
    return bool(candidate["seconds"]) and not any(affects(failure, candidate) for failure in failures)


def _of_same_shape(candidates: Sequence[Row], row: Row, plans: Sequence[Row]) -> list[Row]:
    """Return the iterations under plans with the same layout as the plan of `row`."""
    shapes = {plan["epoch"]: plan["description"] for plan in plans}
    shape = shapes.get(row["epoch"], row["epoch"])
    return [candidate for candidate in candidates if shapes.get(candidate["epoch"], candidate["epoch"]) == shape]


def _first_sufficient(near: Sequence[tuple[list[Row], bool]], row: Row) -> int:
    """Return the index of the first of the three groups that has enough iterations: similar work, same layout, any
    layout. The third group counts only if predictions make it comparable; otherwise 1, the second, is returned."""
    choice = next((n for n, (chosen, _) in enumerate(near) if len(chosen) >= MIN_ITERATIONS), 1)
    if choice == 2 and (not row["predicted_seconds"] or _ratio(near[2][0]) is None):
        return 1
    return choice


def _nearest(candidates: Sequence[Row], row: Row) -> tuple[list[Row], bool]:
    """Return the nearest iterations before this one, and False; or all candidates, and True, if too few came before
    it."""
    before = [candidate for candidate in candidates if candidate["iteration"] < row["iteration"]][-NEAR_ITERATIONS:]
    others = len(before) < MIN_ITERATIONS and len(before) < len(candidates)
    return (list(candidates) if others else before), others


def _ratio(rows: Sequence[Row]) -> float | None:
    ratios = [row["seconds"] / row["predicted_seconds"] for row in rows if row["predicted_seconds"]]
    return statistics.median(ratios) if len(ratios) >= MIN_ITERATIONS else None


def _has_similar_work(candidate: Row, row: Row) -> bool:
    """Decide whether two iterations had about as much work, by tokens and by squared sequence lengths."""
    return all(
        candidate[figure]
        and row[figure]
        and 1.0 / LARGER_WORK_RATIO < candidate[figure] / row[figure] < LARGER_WORK_RATIO
        for figure in ("tokens", "sum_squared_lengths")
    )


# --- causes ---------------------------------------------------------------------------------------------------------


def cause(failure: Row, description: str) -> Cause:
    """Return the cause for a slow component.

    If a whole iteration were as slow as its slowest device or link, it would take the inverse of that speed; this is
    the upper limit. The speeds of work that ranks share, and of the job as a whole, are those of whole iterations.
    Intermittent slowness is known only on average, so its factor is None.
    """
    unknown = failure["intermittent"] or not failure["speed"]
    return Cause(
        what=description,
        factor=None if unknown else max(1.0 / failure["speed"], 1.0),
        failure=failure["failure"],
        place=failure["component"] not in WHOLE_ITERATION_COMPONENTS,
    )


def explained(causes: Sequence[Cause], comparison: Comparison) -> tuple[list[Cause], float | None, list[str]]:
    """Return the causes with the seconds that they explain, the unexplained seconds (None without an excess), and
    sentences."""
    if comparison.excess_s is None or comparison.expected_s is None:
        return list(causes), None, [cause.what for cause in causes]
    expected_s, excess_s = comparison.expected_s, comparison.excess_s
    sized = [
        cause
        if cause.factor is None
        else msgspec.structs.replace(cause, explains_s=min(expected_s * (cause.factor - 1.0), excess_s))
        for cause in causes
    ]
    left_s = max(excess_s - expected_s * (_combined_factor(causes) - 1.0), 0.0)
    return sized, left_s, _sentences(sized, excess_s, left_s, SLOW_TOLERANCE * expected_s)


def _combined_factor(causes: Sequence[Cause]) -> float:
    """Return the largest factor of all causes together: the slowest device or link determines it, and slowness of other
    kinds multiplies it."""
    slowest = max((cause.factor for cause in causes if cause.place and cause.factor is not None), default=1.0)
    return slowest * math.prod(cause.factor for cause in causes if not cause.place and cause.factor is not None)


def _sentences(causes: Sequence[Cause], excess_s: float, left_s: float, little_s: float) -> list[str]:
    """Return the sentences, starting with the cause that explains most. If all causes together explain less than half,
    none is named as the cause, and the unexplained part comes first."""
    whole = seconds(excess_s)
    accounted = [
        f"{cause.what}: accounts for up to {seconds(cause.explains_s)} of the {whole} excess"
        for cause in sorted(causes, key=lambda cause: -(cause.explains_s or 0.0))
        if cause.explains_s
    ]
    unsized = [
        f"{cause.what}; its share of the {whole} excess is unknown" for cause in causes if cause.explains_s is None
    ]
    beside = [cause.what for cause in causes if cause.explains_s == 0.0]
    remainder = f"unexplained: {seconds(left_s)} of the {whole} excess"
    if left_s <= MIN_CAUSE_SHARE * excess_s:
        return [*accounted, *unsized, *([remainder] if left_s > little_s and not unsized else []), *beside]
    small = [f"too little to be the cause: {cause}" for cause in accounted]
    if not unsized and not small:
        remainder = f"{remainder}; no failure, workload or checkpoint in the ledger explains it"
    return [*(unsized or [remainder]), *small, *beside]


def seconds(value: float) -> str:
    """Format seconds: `1.08 s`, `3.2 ms`."""
    return f"{value:.2f} s" if value >= 0.00995 or not value else f"{value * 1e3:.2g} ms"
