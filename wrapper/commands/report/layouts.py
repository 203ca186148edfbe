"""Layouts before and after a plan, as what the page draws: replicas by stages, in each cell the ranks and their nodes.

Each rank carries what the plan meant for it. Replicas that it did not touch are told in one line, and so are those
that are like one that is drawn.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Literal

import msgspec

from db.layouts import from_json
from resihp.parallelism.layout import Layout, Place, Replica, Stage
from resihp.record.describe import rank_list
from wrapper.commands.report.facts import Row

What = Literal["kept", "moved", "new", "idle", "lost", "standby"]
WHOLE = 4
"""Replicas up to which a layout is drawn whole."""
MOST_CHANGED = 8
"""Replicas that a plan changed and that are drawn; of more, the first ones."""
MOST_STANDBY = 64


class Chip(msgspec.Struct, frozen=True):
    """A rank in a picture. `what`: the plan left it in its place, moved it, brought it in, left it idle, or lost it."""

    rank: int
    what: What
    tip: str


class Cell(msgspec.Struct, frozen=True):
    """A stage. `layers`: only where they differ from those above the column."""

    chips: tuple[Chip, ...]
    layers: str
    nodes: str


class Line(msgspec.Struct, frozen=True):
    """A replica with its cells, or words for several that are not drawn."""

    label: str
    cells: tuple[Cell, ...]
    words: str = ""


class Picture(msgspec.Struct, frozen=True):
    """A layout. `stages`: the layers that each stage has in most replicas."""

    title: str
    stages: tuple[str, ...]
    lines: tuple[Line, ...]
    standby: tuple[Chip, ...]
    more_standby: str


class LayoutChange(msgspec.Struct, frozen=True):
    """A plan that took effect. `before` is None for the first one."""

    epoch: int
    description: str
    reason: str
    row: Row
    before: Picture | None
    after: Picture

    @property
    def chips(self) -> int:
        """Ranks that are drawn, by which a page is kept small."""
        pictures = [picture for picture in (self.before, self.after) if picture is not None]
        return sum(
            len(picture.standby) + sum(len(cell.chips) for line in picture.lines for cell in line.cells)
            for picture in pictures
        )


def changes(plans: Sequence[Row], workers: Sequence[Row]) -> Iterator[LayoutChange]:
    """A picture for each plan that took effect, the last one first: who wants few makes few."""
    places = {row["rank"]: (row["node"], row["device"]) for row in workers}
    effective = [row for row in plans if row["in_effect_at"] is not None]
    after = _layout(effective[-1]) if effective else None
    for n in range(len(effective) - 1, -1, -1):
        row, before = effective[n], _layout(effective[n - 1]) if n else None
        assert after is not None
        yield LayoutChange(
            epoch=row["epoch"],
            description=row["description"],
            reason=row["reason"],
            row=row,
            before=None if before is None else _picture("before", before, after, places, looks_ahead=True),
            after=_picture("" if before is None else "after", after, before, places, looks_ahead=False),
        )
        after = before


def _layout(row: Row) -> Layout:
    return from_json(json.dumps(row["layout"]))


def _picture(
    title: str, layout: Layout, other: Layout | None, nodes: Mapping[int, tuple[str, int]], *, looks_ahead: bool
) -> Picture:
    """`layout` against the one after it (`looks_ahead`), or before it."""
    mine, theirs = dict(layout.places()), dict(other.places()) if other is not None else {}
    idle = set(other.standby) if other is not None else set()

    def fate(rank: int) -> What:
        if other is None or _same(rank, mine, theirs, layout, other):
            return "kept"
        if rank in theirs:
            return "moved"
        if looks_ahead:
            return "idle" if rank in idle else "lost"
        return "new"

    def chip(rank: int, what: What) -> Chip:
        node, device = nodes.get(rank, ("", 0))
        where = f", {node} device {device}" if node else ""
        told = {"kept": "", "moved": ", moved", "new": ", new work", "idle": ", idle then", "lost": ", lost"}
        return Chip(rank, what, f"rank {rank}{where}{told.get(what, ', standby')}")

    depth = max((len(replica.stages) for replica in layout.replicas), default=0)
    usual = [_usual(layout, s) for s in range(depth)]
    lines: list[Line] = []
    alike = set(layout.replicas if other is None else other.replicas)
    fates: list[list[list[What]]] = [
        [["kept"] * stage.tp if replica in alike else [fate(rank) for rank in stage.ranks] for stage in replica.stages]
        for replica in layout.replicas
    ]
    drawn = _drawn(layout, fates)
    for calm, group in groupby(range(len(layout.replicas)), lambda d: d not in drawn):
        numbers = list(group)
        if calm:
            lines.append(_in_words(layout, fates, numbers))
            continue
        for d in numbers:
            stages = layout.replicas[d].stages
            cells = tuple(
                Cell(
                    tuple(chip(rank, what) for rank, what in zip(stage.ranks, fates[d][s], strict=True)),
                    "" if _layers(stage) == usual[s] else _layers(stage),
                    _nodes(stage.ranks, nodes),
                )
                for s, stage in enumerate(stages)
            )
            lines.append(Line(f"replica {d}", cells))
    # Who had no work before and has none after is no news.
    standby = [chip(rank, "standby") for rank in layout.standby[:MOST_STANDBY]]
    more = layout.standby[MOST_STANDBY:]
    return Picture(
        title, tuple(usual), tuple(lines), tuple(standby), f"and {len(more)} more, {rank_list(more)}" if more else ""
    )


def _same(rank: int, mine: Mapping[int, Place], theirs: Mapping[int, Place], layout: Layout, other: Layout) -> bool:
    """Whether the rank computes the same layers in a group of the same size; replicas may be counted anew."""
    if rank not in theirs:
        return False
    here, there = mine[rank], theirs[rank]
    one = layout.replicas[here.replica].stages[here.stage]
    two = other.replicas[there.replica].stages[there.stage]
    return (here.stage, here.t, one.tp, one.chunks) == (there.stage, there.t, two.tp, two.chunks)


def _drawn(layout: Layout, fates: Sequence[Sequence[Sequence[What]]]) -> set[int]:
    """Replicas that get a row: all of a few; of many those that changed, and the first that did not."""
    count = len(layout.replicas)
    if count <= WHOLE:
        return set(range(count))
    changed = [d for d in range(count) if any(what != "kept" for stage in fates[d] for what in stage)]
    calm = [d for d in range(count) if d not in set(changed)]
    return {*changed[:MOST_CHANGED], *calm[:1]}


def _in_words(layout: Layout, fates: Sequence[Sequence[Sequence[What]]], numbers: Sequence[int]) -> Line:
    ranks = rank_list(rank for d in numbers for rank in layout.replicas[d].ranks)
    counts = Counter(what for d in numbers for stage in fates[d] for what in stage if what != "kept")
    shapes = {_shape(layout.replicas[d]) for d in numbers}
    like = "alike" if len(shapes) == 1 else f"of {len(shapes)} shapes"
    news = ", ".join(f"{number} ranks {what}" for what, number in counts.items()) or "nothing changed"
    label = f"replica {numbers[0]}" if len(numbers) == 1 else f"replicas {numbers[0]} to {numbers[-1]}"
    shown = ranks if len(ranks) <= 60 else f"{sum(len(layout.replicas[d].ranks) for d in numbers)} ranks"
    return Line(label, (), f"{len(numbers)} {like}, {shown}; {news}" if len(numbers) > 1 else f"{shown}; {news}")


def _shape(replica: Replica) -> tuple[tuple[int, str], ...]:
    return tuple((stage.tp, _layers(stage)) for stage in replica.stages)


def _usual(layout: Layout, s: int) -> str:
    """The layers that stage `s` has in most replicas."""
    spans = Counter(_layers(replica.stages[s]) for replica in layout.replicas if s < len(replica.stages))
    return spans.most_common(1)[0][0]


def _layers(stage: Stage) -> str:
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in stage.chunks)


def _nodes(ranks: Sequence[int], nodes: Mapping[int, tuple[str, int]]) -> str:
    names = list(dict.fromkeys(nodes[rank][0] for rank in ranks if rank in nodes))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
