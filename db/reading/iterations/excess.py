"""How much longer an iteration took than it should have, and how much of that what is known can explain. Pure; reads
nothing. Called by `why` beside it, which finds what touched the iteration, and puts all of it into sentences."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

Row = dict[str, Any]

TOLERANCE = 0.10
LARGER = 1.05
"""From here on a workload is larger than usual."""
NEAR = 100
"""Iterations before it, and after it, that tell what is usual, and before it was slow; callers need give no more."""
FEW = 3
"""Iterations tell what is usual from here on; with fewer before it, those after it are asked, too."""
TRUSTED = 1.2
"""Iterations of the job that take more than so many times what was predicted, or less than that part: then predictions
are no measure. The detector itself corrects smaller differences."""
CAUSE = 0.5
"""What explains less than this share of the excess is not called the cause."""
PARTS = ("collective", "reduction", "data", "job")
"""Of whom the speed is that of whole iterations."""

Measure = Literal["predicted", "usual"]


class Usual(msgspec.Struct, frozen=True, kw_only=True):
    """What an iteration like this usually takes in the job, by others of the same layout, of other layouts where there
    are none; nothing slow that is known touched them."""

    seconds: float
    """Median, of those with as long sequences; or what was predicted for this one, `ratio` times, where too few of
    the same layout had."""
    rows: list[Row]
    others: bool
    """Whether some of them came after it: there were too few before."""
    ratio: float | None
    """Median of what they took over what was predicted for them; None where too little was."""
    alike: bool
    """Whether they had about as much to do."""
    scaled: bool
    """Whether `seconds` is `ratio` times the prediction."""
    shape: bool
    """Whether they are of the same layout."""

    @property
    def of(self) -> str:
        which = f"{len(self.rows)} other" if self.others else f"the last {len(self.rows)}"
        of = f"{which} iterations of {'this shape' if self.shape else 'other layouts'}"
        return f"{of}, by what was predicted for each" if self.scaled else f"median of {of}"


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """What an iteration took, and what it should have taken."""

    usual: Usual | None
    measure: Measure | None
    """By what `expected_s` is; None where there is nothing to compare it with."""
    expected_s: float | None
    took_s: float | None

    @property
    def slow(self) -> bool | None:
        """None where nobody can tell."""
        if self.took_s is None or not self.expected_s:
            return None
        return bool(self.took_s > (1.0 + TOLERANCE) * self.expected_s)

    @property
    def excess_s(self) -> float | None:
        """Of what is slow."""
        return self.took_s - self.expected_s if self.slow and self.took_s and self.expected_s else None


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """Something that touched an iteration."""

    what: str
    factor: float | None
    """How many times as long it can have made the iteration, at most; None where nobody can tell."""
    explains_s: float | None = None
    """How much of the excess that is; None where nobody can tell, and where there is no excess."""
    failure: int | None = None
    place: bool = False
    """Whether it is a slow device or link, of which an iteration has many."""


# --- what it should have taken --------------------------------------------------------------------------------------


def slows(failure: Row, row: Row) -> bool:
    """Whether something slow touched an iteration: what had no work under its plan did not
    (`db.reading.plans.idle_epochs`)."""
    return _lasts(failure, row["iteration"]) and row["epoch"] not in failure.get("idle_epochs", ())


def untouched(iteration: int, failures: Sequence[Row]) -> int:
    """The last one up to this iteration while nothing was known to be slow; 0 if there is none."""
    while since := [one["iteration"] for one in failures if _lasts(one, iteration)]:
        iteration = min(since) - 1
    return max(iteration, 0)


def _lasts(failure: Row, iteration: int) -> bool:
    return (
        failure["kind"] == "fail-slow"
        and failure["iteration"] <= iteration
        and (failure["ended_iteration"] is None or iteration < failure["ended_iteration"])
    )


def compared(number: int, iterations: Sequence[Row], failures: Sequence[Row], plans: Sequence[Row]) -> Comparison:
    """Iteration `number` of these with what was predicted for it, or with what is usual."""
    row, usual = iterations[number], _usual(number, iterations, failures, plans)
    if usual is None or usual.ratio is None:
        trusted = usual is None or len(usual.rows) < FEW
    else:
        trusted = 1.0 / TRUSTED <= usual.ratio <= TRUSTED
    if row["predicted_seconds"] and trusted:
        return Comparison(usual=usual, measure="predicted", expected_s=row["predicted_seconds"], took_s=row["seconds"])
    if usual is None:
        return Comparison(usual=None, measure=None, expected_s=None, took_s=row["seconds"])
    return Comparison(usual=usual, measure="usual", expected_s=usual.seconds, took_s=row["seconds"])


def _usual(number: int, iterations: Sequence[Row], failures: Sequence[Row], plans: Sequence[Row]) -> Usual | None:
    """By those of the same layout with as long sequences; where they are too few by the others of that layout, then by
    those of others, whose times tell only with what was predicted."""
    row, shapes = iterations[number], {one["epoch"]: one["description"] for one in plans}
    shape = shapes.get(row["epoch"], row["epoch"])
    well = [
        one
        for one in iterations
        if one is not row and one["seconds"] and not any(slows(failure, one) for failure in failures)
    ]
    same = [one for one in well if shapes.get(one["epoch"], one["epoch"]) == shape]
    as_long = [one for one in same if _as_long(one, row)]
    near = [_nearest(each, row) for each in (as_long, same, well)]
    which = next((n for n, (found, _) in enumerate(near) if len(found) >= FEW), 1)
    if which == 2 and (not row["predicted_seconds"] or _ratio(near[2][0]) is None):
        which = 1
    found, others = near[which]
    if not found:
        return None
    seconds, ratio = statistics.median(one["seconds"] for one in found), _ratio(found)
    scaled = which > 0 and ratio is not None and bool(row["predicted_seconds"])
    if scaled and ratio is not None:
        seconds = ratio * row["predicted_seconds"]
    return Usual(
        seconds=seconds, rows=found, others=others, ratio=ratio, alike=which == 0, scaled=scaled, shape=which < 2
    )


def _nearest(found: Sequence[Row], row: Row) -> tuple[list[Row], bool]:
    """Those before an iteration; or all, and that they are, where there are too few before it."""
    before = [one for one in found if one["iteration"] < row["iteration"]][-NEAR:]
    others = len(before) < FEW and len(before) < len(found)
    return (list(found) if others else before), others


def _ratio(found: Sequence[Row]) -> float | None:
    ratios = [one["seconds"] / one["predicted_seconds"] for one in found if one["predicted_seconds"]]
    return statistics.median(ratios) if len(ratios) >= FEW else None


def _as_long(one: Row, row: Row) -> bool:
    """Whether two iterations had about as much to do, by what their sequences come to."""
    return all(
        one[what] and row[what] and 1.0 / LARGER < one[what] / row[what] < LARGER
        for what in ("tokens", "sum_squared_lengths")
    )


# --- what explains how much -----------------------------------------------------------------------------------------


def cause(failure: Row, what: str) -> Cause:
    """Of something slow.

    If all of an iteration were as slow as its slowest device, or link, it would take the inverse of that speed; so it
    takes no more. The speeds of what ranks do together, and of the job as a whole, are those of whole iterations. What
    is slow now and then is known on average alone.
    """
    unknown = failure["intermittent"] or not failure["speed"]
    return Cause(
        what=what,
        factor=None if unknown else max(1.0 / failure["speed"], 1.0),
        failure=failure["failure"],
        place=failure["component"] not in PARTS,
    )


def explained(causes: Sequence[Cause], of: Comparison) -> tuple[list[Cause], float | None, list[str]]:
    """Causes with what they explain, the seconds that are left, and sentences."""
    if of.excess_s is None or of.expected_s is None:
        return list(causes), None, [one.what for one in causes]
    expected_s, excess_s = of.expected_s, of.excess_s
    found = [
        one
        if one.factor is None
        else msgspec.structs.replace(one, explains_s=min(expected_s * (one.factor - 1.0), excess_s))
        for one in causes
    ]
    left_s = max(excess_s - expected_s * (_together(causes) - 1.0), 0.0)
    return found, left_s, _sentences(found, excess_s, left_s, TOLERANCE * expected_s)


def _together(causes: Sequence[Cause]) -> float:
    """How many times as long all of them can have made it: of slow devices and links the slowest decides, what else is
    slow comes on top."""
    slowest = max((one.factor for one in causes if one.place and one.factor is not None), default=1.0)
    return slowest * math.prod(one.factor for one in causes if not one.place and one.factor is not None)


def _sentences(causes: Sequence[Cause], excess_s: float, left_s: float, little_s: float) -> list[str]:
    """What explains the most first; where all of it is less than half, none is the cause, and what is left comes
    first."""
    whole = seconds(excess_s)
    told = [
        f"{one.what}: explains up to {seconds(one.explains_s)} of the {whole} too much"
        for one in sorted(causes, key=lambda one: -(one.explains_s or 0.0))
        if one.explains_s
    ]
    unsized = [
        f"{one.what}; how much of the {whole} too much that explains is not known"
        for one in causes
        if one.explains_s is None
    ]
    beside = [one.what for one in causes if one.explains_s == 0.0]
    left = f"unexplained: {seconds(left_s)} of the {whole} too much"
    if left_s <= CAUSE * excess_s:
        return [*told, *unsized, *([left] if left_s > little_s and not unsized else []), *beside]
    small = [f"too little to be the cause: {one}" for one in told]
    if not unsized and not small:
        left = f"{left}; no failure, workload or checkpoint in the ledger explains it"
    return [*(unsized or [left]), *small, *beside]


def seconds(value: float) -> str:
    """`1.08 s`, `3.2 ms`."""
    return f"{value:.2f} s" if value >= 0.00995 or not value else f"{value * 1e3:.2g} ms"
