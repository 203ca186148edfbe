"""Draws the levels of ranks over iterations: each rank's work time divided by its healthy time. Rows in, SVG out.

Some ranks have their own line, beginning with ranks that were suspected or declared slow. An area shows the range of
the others. A line has at most `MAX_POINTS` points, however many iterations there were.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from markupsafe import Markup

from resihp.wrapper.commands.report.facts import Facts
from resihp.wrapper.commands.report.svg import Drawing, ticks
from resihp.wrapper.commands.report.times import iterations_below

MAX_POINTS = 400
PLOT_HEIGHT, PLOT_TOP = 180.0, 14.0
MIN_RANGE = 0.02
"""Smallest range that is shown above and below 1, so that noise does not look like a change."""


class LevelsPicture(msgspec.Struct, frozen=True):
    """The picture, and the data for its caption."""

    picture: Markup
    ranks: tuple[tuple[int, str], ...]
    """Ranks with a separate line, each with the style of its line."""
    others: int
    """Number of ranks without a line of their own."""


def rank_levels(facts: Facts) -> LevelsPicture | None:
    """Draw the levels of all ranks that have scores; return None if no rank has any."""
    scores = facts.scores
    lines = {rank: line for rank, line in scores.lines.items() if line}
    iterations = [at for line in lines.values() for at, _ in line] + [at for at, _, _ in scores.spread]
    if not iterations:
        return None
    values = [level for line in lines.values() for _, level in line]
    values += [value for _, *ends in scores.spread for value in ends]
    first, last = float(min(iterations)), float(max(max(iterations), min(iterations) + 1))
    low, high = min([1 - MIN_RANGE, *values]), max([1 + MIN_RANGE, *values])
    low, high = low - 0.05 * (high - low), high + 0.05 * (high - low)

    def place(at: float) -> float:
        return (at - first) / (last - first)

    def share(level: float) -> float:
        return (level - low) / (high - low)

    drawing = Drawing(
        PLOT_TOP + PLOT_HEIGHT + 24, f"levels of {scores.ranks} ranks over {int(last - first)} iterations"
    )
    for value in ticks(low, high, 5):
        y = PLOT_TOP + PLOT_HEIGHT * (1 - share(value))
        drawing.rule(y, "axis" if abs(value - 1) < 1e-9 else "grid")
        drawing.beside(y + 4, f"{value:g}")
    spread = _thinned(scores.spread)
    upper = [(place(at), share(most)) for at, _, most in spread]
    lower = [(place(at), share(least)) for at, least, _ in spread]
    if len(spread) > 1:
        drawing.area(PLOT_TOP, PLOT_HEIGHT, upper, lower, "spread")
    styles = tuple((rank, f"rank-{number}") for number, rank in enumerate(lines))
    for rank, style in styles:
        points = [(place(at), share(level)) for at, level in _thinned(lines[rank])]
        drawing.line(PLOT_TOP, PLOT_HEIGHT, points, f"rank {style}")
    iterations_below(drawing, first, last, PLOT_TOP + PLOT_HEIGHT)
    return LevelsPicture(drawing.markup(), styles, max(scores.ranks - len(lines), 0))


def _thinned(rows: Sequence[tuple[float, ...]]) -> list[tuple[float, ...]]:
    """Return the rows. If there are more than `MAX_POINTS`, return the medians of that many groups of neighbouring
    rows."""
    if len(rows) <= MAX_POINTS:
        return list(rows)
    return [
        tuple(np.median(part, axis=0).tolist()) for part in np.array_split(np.asarray(rows, dtype=float), MAX_POINTS)
    ]
