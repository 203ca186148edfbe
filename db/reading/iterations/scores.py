"""Detector scores of a job's ranks over time, reduced to the size of a picture for any number of ranks. Reads only.

Scores are already thinned when they are written (`resihp.controller.fail_slow.standings`): all ranks now and then, the
most suspicious ranks more often. The range of the other ranks is computed from the iterations that have scores of all
of them.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from sqlalchemy import func, select

from resihp.db.models import RankScoreRow
from resihp.db.reading.reader import Reader

Line = list[tuple[int, float]]
"""(iteration, level) pairs."""


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """`lines`: levels of the ranks that have a line of their own, by rank. `spread`: (iteration, minimum, maximum) of
    the level over all other ranks."""

    lines: dict[int, Line]
    spread: list[tuple[int, float, float]]
    ranks: int
    """Number of ranks with scores."""


def scores(reader: Reader, job_id: int, named: Collection[int], most: int) -> Scores:
    """Return the lines of `most` ranks: first those in `named`, slowest first, then those with most evidence against
    them.

    Raises LedgerError if the ledger cannot be read.
    """
    columns = RankScoreRow.__table__.c
    own = columns.job_id == job_id
    peaks = reader.fetch(
        select(columns.rank, func.max(columns.level).label("level"), func.max(columns.evidence).label("evidence"))
        .where(own, columns.level.is_not(None))
        .group_by(columns.rank)
    )
    peaks.sort(key=lambda row: (row["rank"] not in named, row["rank"] in named and -row["level"], -row["evidence"]))
    chosen = sorted(row["rank"] for row in peaks[:most])
    levels = reader.fetch(
        select(columns.iteration, columns.rank, columns.level)
        .where(own, columns.rank.in_(chosen), columns.level.is_not(None))
        .order_by(columns.iteration)
    )
    lines: dict[int, Line] = {rank: [] for rank in chosen}
    for row in levels:
        lines[row["rank"]].append((row["iteration"], row["level"]))
    spread = reader.fetch(
        select(
            columns.iteration,
            func.min(columns.level).label("least"),
            func.max(columns.level).label("most"),
            func.count().label("ranks"),
        )
        .where(own, columns.rank.not_in(chosen), columns.level.is_not(None))
        .group_by(columns.iteration)
        .order_by(columns.iteration)
    )
    whole = max((row["ranks"] for row in spread), default=0) / 2
    return Scores(
        lines=lines,
        spread=[(row["iteration"], row["least"], row["most"]) for row in spread if row["ranks"] > whole],
        ranks=len(peaks),
    )
