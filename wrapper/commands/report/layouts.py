"""Layouts before and after a plan, prepared for the page: replicas as rows, stages as columns, with ranks and nodes in
each cell.

Each rank is marked with the plan's effect on it. Replicas that the plan did not change share one line. A replica that
equals one that is drawn is not drawn again.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Literal

import msgspec

from resihp.db.layouts import from_json
from resihp.parallelism.layout import Layout, Place, Replica, Stage
from resihp.record.describe import rank_list
from resihp.wrapper.commands.report.facts import Row

PlanEffect = Literal["kept", "moved", "new", "idle", "lost", "standby"]
_TIPS: Mapping[PlanEffect, str] = {
    "kept": "",
    "moved": ", moved",
    "new": ", new work",
    "idle": ", then idle",
    "lost": ", lost",
    "standby": ", standby",
}
MAX_WHOLE_REPLICAS = 4
"""Most replicas of a layout whose replicas are all drawn."""
MAX_CHANGED_DRAWN = 8
"""Most changed replicas of a plan that are drawn; of more, the first ones."""
MAX_STANDBY_DRAWN = 64
"""Most standby ranks that are drawn."""


class Chip(msgspec.Struct, frozen=True):
    """A rank in a picture. `effect`: the effect of the plan on it: kept in place, moved, new, idle afterwards, or
    lost."""

    rank: int
    effect: PlanEffect
    tip: str


class Cell(msgspec.Struct, frozen=True):
    """A stage of a replica. `layers`: empty unless they differ from the layers in the column's heading."""

    chips: tuple[Chip, ...]
    layers: str
    nodes: str


class Line(msgspec.Struct, frozen=True):
    """A row: a replica with its cells, or a text that stands for several replicas."""

    label: str
    cells: tuple[Cell, ...]
    words: str = ""


class Picture(msgspec.Struct, frozen=True):
    """A layout as drawn. `stages`: for each stage, its layers in most replicas."""

    title: str
    stages: tuple[str, ...]
    lines: tuple[Line, ...]
    standby: tuple[Chip, ...]
    more_standby: str


class LayoutChange(msgspec.Struct, frozen=True):
    """The layouts before and after a plan that took effect. `before` is None for the first plan."""

    epoch: int
    description: str
    reason: str
    row: Row
    before: Picture | None
    after: Picture

    @property
    def chips(self) -> int:
        """Number of ranks that are drawn. The sum over all pictures limits the size of a page."""
        pictures = [picture for picture in (self.before, self.after) if picture is not None]
        return sum(
            len(picture.standby) + sum(len(cell.chips) for line in picture.lines for cell in line.cells)
            for picture in pictures
        )


def changes(plans: Sequence[Row], workers: Sequence[Row]) -> Iterator[LayoutChange]:
    """Yield the layouts before and after each plan that took effect, the last plan first, so that callers can stop
    early."""
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
    title: str, layout: Layout, other_layout: Layout | None, nodes: Mapping[int, tuple[str, int]], *, looks_ahead: bool
) -> Picture:
    """Return the picture of `layout`. With `looks_ahead`, `other_layout` is the layout after it, otherwise the one
    before it."""
    depth = max((len(replica.stages) for replica in layout.replicas), default=0)
    usual = [_usual(layout, s) for s in range(depth)]
    lines: list[Line] = []
    effects = _effects(layout, other_layout, looks_ahead=looks_ahead)
    drawn = _drawn(layout, effects)
    for is_drawn, group in groupby(range(len(layout.replicas)), lambda d: d in drawn):
        numbers = list(group)
        if not is_drawn:
            lines.append(_in_words(layout, effects, numbers))
            continue
        for d in numbers:
            cells = tuple(
                Cell(
                    tuple(_chip(rank, effect, nodes) for rank, effect in zip(stage.ranks, effects[d][s], strict=True)),
                    "" if _layers(stage) == usual[s] else _layers(stage),
                    _nodes(stage.ranks, nodes),
                )
                for s, stage in enumerate(layout.replicas[d].stages)
            )
            lines.append(Line(f"replica {d}", cells))
    # Ranks without work before and after get no mark of change.
    standby = tuple(_chip(rank, "standby", nodes) for rank in layout.standby[:MAX_STANDBY_DRAWN])
    rest = layout.standby[MAX_STANDBY_DRAWN:]
    more = f"and {len(rest)} more, {rank_list(rest)}" if rest else ""
    return Picture(title, tuple(usual), tuple(lines), standby, more)


def _effects(layout: Layout, other_layout: Layout | None, *, looks_ahead: bool) -> list[list[list[PlanEffect]]]:
    """Return the effect of the plan on each rank, by replica and stage."""
    if other_layout is None:
        return [[["kept"] * stage.tp for stage in replica.stages] for replica in layout.replicas]
    places_here, places_there = dict(layout.places()), dict(other_layout.places())
    idle, unchanged_replicas = set(other_layout.standby), set(other_layout.replicas)

    def effect_on(rank: int) -> PlanEffect:
        if _same(rank, places_here, places_there, layout, other_layout):
            return "kept"
        if rank in places_there:
            return "moved"
        if looks_ahead:
            return "idle" if rank in idle else "lost"
        return "new"

    return [
        [
            ["kept"] * stage.tp if replica in unchanged_replicas else [effect_on(rank) for rank in stage.ranks]
            for stage in replica.stages
        ]
        for replica in layout.replicas
    ]


def _chip(rank: int, effect: PlanEffect, nodes: Mapping[int, tuple[str, int]]) -> Chip:
    node, device = nodes.get(rank, ("", 0))
    where = f", {node} device {device}" if node else ""
    return Chip(rank, effect, f"rank {rank}{where}{_TIPS[effect]}")


def _same(
    rank: int, places_here: Mapping[int, Place], places_there: Mapping[int, Place], layout: Layout, other_layout: Layout
) -> bool:
    """Return whether the rank computes the same layers in a tensor-parallel group of the same size. The number of its
    replica may differ."""
    if rank not in places_there:
        return False
    place_here, place_there = places_here[rank], places_there[rank]
    stage_here = layout.replicas[place_here.replica].stages[place_here.stage]
    stage_there = other_layout.replicas[place_there.replica].stages[place_there.stage]
    return (place_here.stage, place_here.t, stage_here.tp, stage_here.chunks) == (
        place_there.stage,
        place_there.t,
        stage_there.tp,
        stage_there.chunks,
    )


def _drawn(layout: Layout, effects: Sequence[Sequence[Sequence[PlanEffect]]]) -> set[int]:
    """Return the replicas that get a row: all replicas of a small layout; otherwise the changed ones and the first
    unchanged one."""
    count = len(layout.replicas)
    if count <= MAX_WHOLE_REPLICAS:
        return set(range(count))
    changed = [d for d in range(count) if any(effect != "kept" for stage in effects[d] for effect in stage)]
    unchanged = [d for d in range(count) if d not in set(changed)]
    return {*changed[:MAX_CHANGED_DRAWN], *unchanged[:1]}


def _in_words(layout: Layout, effects: Sequence[Sequence[Sequence[PlanEffect]]], numbers: Sequence[int]) -> Line:
    ranks = rank_list(rank for d in numbers for rank in layout.replicas[d].ranks)
    counts = Counter(effect for d in numbers for stage in effects[d] for effect in stage if effect != "kept")
    shapes = {_shape(layout.replicas[d]) for d in numbers}
    like = "equal" if len(shapes) == 1 else f"of {len(shapes)} shapes"
    news = ", ".join(f"{number} ranks {effect}" for effect, number in counts.items()) or "nothing changed"
    label = f"replica {numbers[0]}" if len(numbers) == 1 else f"replicas {numbers[0]} to {numbers[-1]}"
    ranks_shown = ranks if len(ranks) <= 60 else f"{sum(len(layout.replicas[d].ranks) for d in numbers)} ranks"
    return Line(
        label, (), f"{len(numbers)} {like}, {ranks_shown}; {news}" if len(numbers) > 1 else f"{ranks_shown}; {news}"
    )


def _shape(replica: Replica) -> tuple[tuple[int, str], ...]:
    return tuple((stage.tp, _layers(stage)) for stage in replica.stages)


def _usual(layout: Layout, s: int) -> str:
    """Return the layers of stage `s` in most replicas."""
    spans = Counter(_layers(replica.stages[s]) for replica in layout.replicas if s < len(replica.stages))
    return spans.most_common(1)[0][0]


def _layers(stage: Stage) -> str:
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in stage.chunks)


def _nodes(ranks: Sequence[int], nodes: Mapping[int, tuple[str, int]]) -> str:
    names = list(dict.fromkeys(nodes[rank][0] for rank in ranks if rank in nodes))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
