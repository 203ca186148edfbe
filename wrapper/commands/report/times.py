"""The picture of iteration times against what was predicted, and what was found slow. Rows in, SVG out.

However many iterations there were, the picture has no more places than a screen has columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from markupsafe import Markup

from resihp.words import count_of
from wrapper.commands.report.facts import Facts, Row
from wrapper.commands.report.marks import NAMED, SIGNS, every_nth, failure_line, inside, iterations_of
from wrapper.commands.report.svg import Drawing, Points, ticks
from wrapper.output.render import duration

COLUMNS = 800
"""Places at which iteration times are drawn; of more iterations, each place has the least, median and most."""
LEAST_PREDICTED = 20
"""Iterations with a prediction from which a range is told."""
AS_PREDICTED = (0.8, 1.25)
"""Shares of the prediction between which iterations usually are, for its line to stand where it is."""


class TimesPicture(msgspec.Struct, frozen=True):
    """The picture of iteration times, and what its caption must say."""

    picture: Markup
    columns: int
    """Iterations that stand at one place."""
    cut: int
    """Iterations whose time is above the picture's top."""
    longest_s: float
    band: tuple[float, float] | None
    """Between which shares of the line of the prediction nine of ten iterations were, slow spells left out."""
    usual: float
    """Times which the prediction is drawn: 1, or what iterations usually took of it where that is far from it."""
    signs: tuple[str, ...]
    """Kinds of failures that are marked."""
    kinds: tuple[str, ...]


def iteration_times(facts: Facts) -> TimesPicture | None:
    """Seconds of each iteration, what was predicted, and what was found slow. None while there is nothing to draw."""
    known = [row for row in facts.iterations if row["seconds"] is not None]
    if not known:
        return None
    numbers = np.array([row["iteration"] for row in known], dtype=float)
    seconds = np.array([row["seconds"] for row in known], dtype=float)
    predicted = np.array([row["predicted_seconds"] or np.nan for row in known], dtype=float)
    calm = _calm(facts, numbers, predicted)
    predicted = predicted * (usual := _usual(seconds, predicted, calm))
    first, last = numbers[0], max(numbers[-1], numbers[0] + 1)
    top_s = float(max(np.quantile(seconds, 0.995), np.nanquantile(np.append(predicted, 0.0), 0.995)) * 1.25) or 1.0
    columns = min(len(known), COLUMNS)
    groups = np.array_split(np.arange(len(known)), columns)
    places = [float((numbers[group].mean() - first) / (last - first)) for group in groups]
    plot, head = 210.0, 22.0

    def share(values: Sequence[float]) -> list[float]:
        return [min(value / top_s, 1.0) for value in values]

    title = f"times of {count_of(len(known), 'iteration')}, {duration(float(np.median(seconds)))} on median"
    drawing = Drawing(head + plot + 24, title)
    kinds = []
    spells = _spells(facts, first, last)
    for row, start, end in spells:
        drawing.box(start, end, head, plot, "spell", f"{failure_line(row)}, iterations {iterations_of(row)}")
    unit = "ms" if top_s < 1 else "s"
    for value in ticks(0.0, top_s, 5):
        drawing.rule(head + plot * (1 - value / top_s), "axis" if value == 0 else "grid")
    band = _band(seconds, predicted, calm)
    for pieces in _pieces(places, [_median(predicted[group]) for group in groups]):
        if band is not None:
            upper = [(at, min(value * band[1] / top_s, 1.0)) for at, value in pieces]
            lower = [(at, min(value * band[0] / top_s, 1.0)) for at, value in pieces]
            drawing.area(head, plot, upper, lower, "band")
            kinds.append("band")
        drawing.line(head, plot, [(at, min(value / top_s, 1.0)) for at, value in pieces], "predicted")
        kinds.append("predicted")
    if len(known) > columns:
        high = share([float(seconds[group].max()) for group in groups])
        low = share([float(seconds[group].min()) for group in groups])
        drawing.area(head, plot, list(zip(places, high, strict=True)), list(zip(places, low, strict=True)), "spread")
        kinds.append("spread")
    middle = share([float(np.median(seconds[group])) for group in groups])
    drawing.line(head, plot, list(zip(places, middle, strict=True)), "observed")
    for value in ticks(0.0, top_s, 5)[1:]:
        shown = f"{value * 1000:g}" if unit == "ms" else f"{value:g}"
        drawing.beside(head + plot * (1 - value / top_s) + 4, f"{shown} {unit}")
    _verdicts(drawing, facts, first, last, head, plot)
    iterations_below(drawing, first, last, head + plot)
    return TimesPicture(
        picture=drawing.markup(),
        columns=-(-len(known) // columns),
        cut=int((seconds > top_s).sum()),
        longest_s=float(seconds.max()),
        band=band,
        usual=usual,
        signs=tuple(kind for kind in SIGNS if any(row["kind"] == kind for row in _marked(facts, first, last))),
        kinds=tuple(dict.fromkeys(["observed", *kinds, *(["spell"] if spells else [])])),
    )


def iterations_below(drawing: Drawing, first: float, last: float, y: float) -> None:
    """Numbers of iterations under a picture."""
    for value in ticks(first, last, 6):
        at = (value - first) / (last - first)
        if value == int(value):
            drawing.post(at, y, y + 4, "axis")
            anchor = "start" if at < 0.04 else "end" if at > 0.96 else "middle"
            drawing.text(at, y + 17, f"{int(value):,}", "tick", anchor)


def _verdicts(drawing: Drawing, facts: Facts, first: float, last: float, head: float, plot: float) -> None:
    """Where failures were: a sign and a line down for each; of many, a short line of their colour."""
    taken = -1.0
    few = len(facts.failures) <= NAMED
    for row in _marked(facts, first, last):
        at = (row["iteration"] - first) / (last - first)
        kind = row["kind"]
        tip = f"{failure_line(row)}, iterations {iterations_of(row)}"
        if not few:
            drawing.post(at, head - 16, head - 4, f"verdict many {kind}", tip)
            continue
        drawing.post(at, head - 6, head + plot, f"verdict {kind}")
        named = at - taken > 0.03
        taken = at if named else taken
        drawing.mark(inside(at), head - 10, SIGNS[kind], kind, tip, str(row["failure"]) if named else "")


def _marked(facts: Facts, first: float, last: float) -> list[Row]:
    return [row for row in facts.failures[:: every_nth(len(facts.failures))] if first <= row["iteration"] <= last]


def _spells(facts: Facts, first: float, last: float) -> list[tuple[Row, float, float]]:
    """What was slow, with where it begins and ends in the picture."""
    found = []
    for row in facts.failures:
        end = row["ended_iteration"] if row["ended_iteration"] is not None else last
        if row["kind"] == "fail-slow" and end > first:
            places = [(min(max(n, first), last) - first) / (last - first) for n in (row["iteration"], end)]
            found.append((row, places[0], places[1]))
    return found


def _calm(facts: Facts, numbers: Any, predicted: Any) -> Any:
    """Which iterations have a prediction, and nothing that is known to have been slow or to have failed in them."""
    calm: Any = ~np.isnan(predicted) & (predicted > 0)
    for row in facts.failures:
        if row["kind"] == "fail-slow":
            end = np.inf if row["ended_iteration"] is None else row["ended_iteration"]
            calm &= (numbers < row["iteration"]) | (numbers >= end)
        else:
            calm &= numbers != row["iteration"]
    return calm


def _usual(seconds: Any, predicted: Any, calm: Any) -> float:
    """What iterations usually take of the prediction, where that is far from it: costs that the model does not have, as
    of a busy machine. Else 1."""
    which = calm if calm.sum() >= LEAST_PREDICTED else predicted > 0
    if not which.any():
        return 1.0
    share = float(np.median(seconds[which] / predicted[which]))
    return 1.0 if AS_PREDICTED[0] <= share <= AS_PREDICTED[1] or share <= 0 else share


def _band(seconds: Any, predicted: Any, calm: Any) -> tuple[float, float] | None:
    """The 5th and 95th percentile of observed over the line of the prediction."""
    if calm.sum() < LEAST_PREDICTED:
        return None
    low, high = np.quantile(seconds[calm] / predicted[calm], [0.05, 0.95])
    return float(low), float(high)


def _pieces(places: Sequence[float], values: Sequence[float]) -> Iterator[Points]:
    """The stretches of a line that has gaps where `values` is NaN."""
    piece: list[tuple[float, float]] = []
    for at, value in zip(places, values, strict=True):
        if value != value:
            if piece:
                yield piece
            piece = []
        else:
            piece.append((at, value))
    if piece:
        yield piece


def _median(values: Any) -> float:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else float("nan")
