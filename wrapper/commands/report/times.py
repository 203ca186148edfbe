"""Draws observed and predicted iteration times, with failures and the spells in which something was slow. Rows in, SVG
out.

A line has at most `MAX_POINTS` points, however many iterations there were.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from markupsafe import Markup

from resihp.words import count_of
from resihp.wrapper.commands.report.facts import Facts, Row
from resihp.wrapper.commands.report.marks import (
    FAILURE_SHAPES,
    MAX_FAILURES_NUMBERED,
    every_nth,
    failure_line,
    inside,
    iterations_of,
)
from resihp.wrapper.commands.report.svg import Drawing, Points, ticks
from resihp.wrapper.output.render import duration

MAX_POINTS = 800
"""Most points of a line. If there are more iterations, each point has the minimum, median and maximum of a group of
iterations."""
MIN_PREDICTED = 20
"""Smallest number of undisturbed iterations with a prediction for which a range is drawn."""
UNSCALED_RANGE = (0.8, 1.25)
"""Range of the median ratio of observed to predicted time in which the prediction is drawn as it is, without
scaling."""


class TimesPicture(msgspec.Struct, frozen=True):
    """The picture of iteration times, and the data for its caption."""

    picture: Markup
    columns: int
    """Number of iterations in each point of a line."""
    cut: int
    """Number of iterations that took longer than the top of the picture shows."""
    longest_s: float
    band: tuple[float, float] | None
    """Range that contains nine of ten iterations outside slow spells, as ratios to the drawn prediction; None if there
    are too few iterations."""
    usual: float
    """Factor by which the prediction is multiplied: 1, or the usual ratio of observed to predicted time if that is far
    from 1."""
    signs: tuple[str, ...]
    """Kinds of failures that have marks in the picture."""
    kinds: tuple[str, ...]


@dataclass(frozen=True)
class _Plot:
    """The part of the picture with the lines: its first and last iteration, its place in pixels, and the seconds at its
    top."""

    first: float
    last: float
    head: float
    height: float
    top_s: float

    def place(self, iteration: float) -> float:
        return (iteration - self.first) / (self.last - self.first)

    def y(self, seconds: float) -> float:
        return self.head + self.height * (1 - seconds / self.top_s)

    def points(self, places: Sequence[float], seconds: Sequence[float]) -> Points:
        """Return the points of a line. A point above the top is drawn at the top."""
        return [(at, min(value / self.top_s, 1.0)) for at, value in zip(places, seconds, strict=True)]


def iteration_times(facts: Facts) -> TimesPicture | None:
    """Draw the seconds of each iteration, the prediction, and slow spells; return None if no time is known yet."""
    timed_rows = [row for row in facts.iterations if row["seconds"] is not None]
    if not timed_rows:
        return None
    numbers = np.array([row["iteration"] for row in timed_rows], dtype=float)
    seconds = np.array([row["seconds"] for row in timed_rows], dtype=float)
    predicted = np.array([row["predicted_seconds"] or np.nan for row in timed_rows], dtype=float)
    undisturbed = _undisturbed(facts, numbers, predicted)
    usual_ratio = _usual_ratio(seconds, predicted, undisturbed)
    predicted = predicted * usual_ratio
    first, last = numbers[0], max(numbers[-1], numbers[0] + 1)
    top_s = float(max(np.quantile(seconds, 0.995), np.nanquantile(np.append(predicted, 0.0), 0.995)) * 1.25) or 1.0
    plot = _Plot(first, last, head=22.0, height=210.0, top_s=top_s)
    groups = np.array_split(np.arange(len(timed_rows)), min(len(timed_rows), MAX_POINTS))
    places = [float(plot.place(numbers[group].mean())) for group in groups]
    title = f"times of {count_of(len(timed_rows), 'iteration')}, {duration(float(np.median(seconds)))} on median"
    drawing = Drawing(plot.head + plot.height + 24, title)
    spells = _spells(facts, first, last)
    for row, start, end in spells:
        tip = f"{failure_line(row)}, iterations {iterations_of(row)}"
        drawing.box(start, end, plot.head, plot.height, "spell", tip)
    for value in ticks(0.0, top_s, 5):
        drawing.rule(plot.y(value), "axis" if value == 0 else "grid")
    band = _band(seconds, predicted, undisturbed)
    kinds = ["observed"]
    kinds += _draw_prediction(drawing, plot, places, [_median(predicted[group]) for group in groups], band)
    kinds += _draw_observed(drawing, plot, places, [seconds[group] for group in groups])
    if spells:
        kinds.append("spell")
    _seconds_beside(drawing, plot)
    _verdicts(drawing, facts, plot)
    iterations_below(drawing, first, last, plot.head + plot.height)
    marked_kinds = {row["kind"] for row in _marked(facts, first, last)}
    return TimesPicture(
        picture=drawing.markup(),
        columns=-(-len(timed_rows) // len(groups)),
        cut=int((seconds > top_s).sum()),
        longest_s=float(seconds.max()),
        band=band,
        usual=usual_ratio,
        signs=tuple(kind for kind in FAILURE_SHAPES if kind in marked_kinds),
        kinds=tuple(dict.fromkeys(kinds)),
    )


def _draw_prediction(
    drawing: Drawing,
    plot: _Plot,
    places: Sequence[float],
    predicted: Sequence[float],
    band: tuple[float, float] | None,
) -> list[str]:
    """Draw the predicted times, with their range if `band` is given; return the kinds of lines that were drawn."""
    kinds = []
    for pieces in _pieces(places, predicted):
        piece_places, values = [at for at, _ in pieces], [value for _, value in pieces]
        if band is not None:
            upper = plot.points(piece_places, [value * band[1] for value in values])
            lower = plot.points(piece_places, [value * band[0] for value in values])
            drawing.area(plot.head, plot.height, upper, lower, "band")
            kinds.append("band")
        drawing.line(plot.head, plot.height, plot.points(piece_places, values), "predicted")
        kinds.append("predicted")
    return kinds


def _draw_observed(drawing: Drawing, plot: _Plot, places: Sequence[float], seconds: Sequence[Any]) -> list[str]:
    """Draw the observed times; if points stand for several iterations, also their spread. Return the kind `spread` if
    it was drawn."""
    has_spread = any(len(values) > 1 for values in seconds)
    if has_spread:
        high = plot.points(places, [float(values.max()) for values in seconds])
        low = plot.points(places, [float(values.min()) for values in seconds])
        drawing.area(plot.head, plot.height, high, low, "spread")
    middle = plot.points(places, [float(np.median(values)) for values in seconds])
    drawing.line(plot.head, plot.height, middle, "observed")
    return ["spread"] if has_spread else []


def _seconds_beside(drawing: Drawing, plot: _Plot) -> None:
    """Add the labels of the vertical axis, in seconds, left of the picture."""
    for value in ticks(0.0, plot.top_s, 5)[1:]:
        label = f"{value * 1000:g} ms" if plot.top_s < 1 else f"{value:g} s"
        drawing.beside(plot.y(value) + 4, label)


def iterations_below(drawing: Drawing, first: float, last: float, y: float) -> None:
    """Add the labels of the horizontal axis, the numbers of iterations, below a picture."""
    for value in ticks(first, last, 6):
        at = (value - first) / (last - first)
        if value == int(value):
            drawing.post(at, y, y + 4, "axis")
            anchor = "start" if at < 0.04 else "end" if at > 0.96 else "middle"
            drawing.text(at, y + 17, f"{int(value):,}", "tick", anchor)


def _verdicts(drawing: Drawing, facts: Facts, plot: _Plot) -> None:
    """Mark each failure with a sign and a vertical line. Mark many failures with short lines in the colours of their
    kinds."""
    last_numbered_place = -1.0
    is_numbered = len(facts.failures) <= MAX_FAILURES_NUMBERED
    for row in _marked(facts, plot.first, plot.last):
        at = plot.place(row["iteration"])
        kind = row["kind"]
        tip = f"{failure_line(row)}, iterations {iterations_of(row)}"
        if not is_numbered:
            drawing.post(at, plot.head - 16, plot.head - 4, f"verdict many {kind}", tip)
            continue
        drawing.post(at, plot.head - 6, plot.head + plot.height, f"verdict {kind}")
        has_number = at - last_numbered_place > 0.03
        last_numbered_place = at if has_number else last_numbered_place
        number = str(row["failure"]) if has_number else ""
        drawing.mark(inside(at), plot.head - 10, FAILURE_SHAPES[kind], kind, tip, number)


def _marked(facts: Facts, first: float, last: float) -> list[Row]:
    return [row for row in facts.failures[:: every_nth(len(facts.failures))] if first <= row["iteration"] <= last]


def _spells(facts: Facts, first: float, last: float) -> list[tuple[Row, float, float]]:
    """Return each slow failure with the start and the end of its slow spell, as places in the picture."""
    spells = []
    for row in facts.failures:
        end = row["ended_iteration"] if row["ended_iteration"] is not None else last
        if row["kind"] == "fail-slow" and end > first:
            places = [(min(max(n, first), last) - first) / (last - first) for n in (row["iteration"], end)]
            spells.append((row, places[0], places[1]))
    return spells


def _undisturbed(facts: Facts, numbers: Any, predicted: Any) -> Any:
    """Return a mask of the iterations that have a prediction, in which nothing was known to be slow and nothing
    failed."""
    mask: Any = ~np.isnan(predicted) & (predicted > 0)
    for row in facts.failures:
        if row["kind"] == "fail-slow":
            end = np.inf if row["ended_iteration"] is None else row["ended_iteration"]
            mask &= (numbers < row["iteration"]) | (numbers >= end)
        else:
            mask &= numbers != row["iteration"]
    return mask


def _usual_ratio(seconds: Any, predicted: Any, undisturbed: Any) -> float:
    """Return the median ratio of observed to predicted time, or 1 if it is close to 1 (`UNSCALED_RANGE`).

    It is far from 1 if there are costs that the model does not have, for example on a busy machine.
    """
    mask = undisturbed if undisturbed.sum() >= MIN_PREDICTED else predicted > 0
    if not mask.any():
        return 1.0
    share = float(np.median(seconds[mask] / predicted[mask]))
    return 1.0 if UNSCALED_RANGE[0] <= share <= UNSCALED_RANGE[1] or share <= 0 else share


def _band(seconds: Any, predicted: Any, undisturbed: Any) -> tuple[float, float] | None:
    """Return the 5th and the 95th percentile of observed time divided by drawn predicted time; None for too few
    iterations."""
    if undisturbed.sum() < MIN_PREDICTED:
        return None
    low, high = np.quantile(seconds[undisturbed] / predicted[undisturbed], [0.05, 0.95])
    return float(low), float(high)


def _pieces(places: Sequence[float], values: Sequence[float]) -> Iterator[Points]:
    """Yield the pieces of a line that has gaps where `values` is NaN."""
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
    numbers = values[~np.isnan(values)]
    return float(np.median(numbers)) if len(numbers) else float("nan")
