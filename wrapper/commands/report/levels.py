"""The picture of ranks' levels: each one's own work over what is healthy for it, over iterations. Rows in, SVG out.

Some ranks have a line of their own, those that were suspected or convicted first; between which levels the others were
is an area. However many iterations there were, the picture has no more places than `COLUMNS`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from markupsafe import Markup

from wrapper.commands.report.facts import Facts
from wrapper.commands.report.svg import Drawing, ticks
from wrapper.commands.report.times import iterations_below

COLUMNS = 400
PLOT, HEAD = 180.0, 14.0
ROOM = 0.02
"""Least room above and below 1, so that noise does not look like news."""


class LevelsPicture(msgspec.Struct, frozen=True):
    """The picture, and what its caption must say."""

    picture: Markup
    ranks: tuple[tuple[int, str], ...]
    """Those with a line of their own, each with the line's style."""
    others: int
    """Ranks beside them."""


def rank_levels(facts: Facts) -> LevelsPicture | None:
    """Levels of the ranks that there are scores of. None where there is nothing to draw."""
    scores = facts.scores
    lines = {rank: line for rank, line in scores.lines.items() if line}
    every = [at for line in lines.values() for at, _ in line] + [at for at, _, _ in scores.spread]
    if not every:
        return None
    values = [level for line in lines.values() for _, level in line]
    values += [value for _, *ends in scores.spread for value in ends]
    first, last = float(min(every)), float(max(max(every), min(every) + 1))
    low, high = min([1 - ROOM, *values]), max([1 + ROOM, *values])
    low, high = low - 0.05 * (high - low), high + 0.05 * (high - low)

    def place(at: float) -> float:
        return (at - first) / (last - first)

    def share(level: float) -> float:
        return (level - low) / (high - low)

    drawing = Drawing(HEAD + PLOT + 24, f"levels of {scores.ranks} ranks over {int(last - first)} iterations")
    for value in ticks(low, high, 5):
        y = HEAD + PLOT * (1 - share(value))
        drawing.rule(y, "axis" if abs(value - 1) < 1e-9 else "grid")
        drawing.beside(y + 4, f"{value:g}")
    spread = _thinned(scores.spread)
    upper = [(place(at), share(most)) for at, _, most in spread]
    lower = [(place(at), share(least)) for at, least, _ in spread]
    if len(spread) > 1:
        drawing.area(HEAD, PLOT, upper, lower, "spread")
    styles = tuple((rank, f"rank-{number}") for number, rank in enumerate(lines))
    for rank, style in styles:
        points = [(place(at), share(level)) for at, level in _thinned(lines[rank])]
        drawing.line(HEAD, PLOT, points, f"rank {style}")
    iterations_below(drawing, first, last, HEAD + PLOT)
    return LevelsPicture(drawing.markup(), styles, max(scores.ranks - len(lines), 0))


def _thinned(rows: Sequence[tuple[float, ...]]) -> list[tuple[float, ...]]:
    """Of many rows, the median of those at one place."""
    if len(rows) <= COLUMNS:
        return list(rows)
    return [tuple(np.median(part, axis=0).tolist()) for part in np.array_split(np.asarray(rows, dtype=float), COLUMNS)]
