"""`resihp plan --plot`: the pipelines before and after as a picture. One row a stage, a box for each F, B and W.

Boxes stand where the timeline puts them (`resihp.pipeline.timeline`), which is where predictions come from; a stage's
later chunks are paler. Light grey is idle, dark grey what follows the last backward of all replicas: gradient
synchronisation and the step. Replicas that do the same at the same times are drawn once. Needs matplotlib (the extra
`plot`).
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from resihp.errors import UsageError
from resihp.parallelism.layout import spans
from resihp.parallelism.plan import Order, Plan
from resihp.scheduler.situation import Situation

if TYPE_CHECKING:
    from resihp.scheduler.what_if.answer import WhatIfAnswer
    from resihp.scheduler.what_if.question import Question

COLOURS = {"F": "#4878cf", "B": "#6acc65", "W": "#d5bb67"}
IDLE, AFTERWARDS = "#ececec", "#b8b8c8"
NAMES = {"F": "forward", "B": "backward", "W": "weight gradients"}
MOST_ROWS = 64
"""Stages of one half of the picture; what does not fit is left out and said so."""
NUMBERED = 600
"""Boxes of one half up to which micro-batches are numbered."""
ROW_INCHES = 0.28


class StageRow(msgspec.Struct, frozen=True):
    """A stage: what it computes, with starts and ends in seconds."""

    label: str
    order: Order
    starts: tuple[float, ...]
    ends: tuple[float, ...]
    numbers: tuple[int, ...]
    """Of each box: the micro-batch, counted from 0 in its home's share, or in the global batch where some migrate."""


class Half(msgspec.Struct, frozen=True):
    """A plan's lanes, replica after replica, each with how it is called; when the iteration ends."""

    title: str
    replicas: tuple[tuple[str, tuple[StageRow, ...]], ...]
    left_out: int
    computed_s: float
    """When the last box of all ends."""
    seconds: float


def draw(path: Path, asked: Question, found: WhatIfAnswer, situation: Situation) -> None:
    """Write the picture. Raises UsageError if matplotlib is absent, or `path` cannot be written."""
    from resihp.scheduler.what_if.question import situation_of

    try:
        figures = import_module("matplotlib.figure")
        patches = import_module("matplotlib.patches")
    except ImportError:
        raise UsageError("--plot needs matplotlib, which is not installed; type: pip install matplotlib") from None
    healthy = situation_of(asked, found.before.plan, (), {}, {})
    halves = [
        half("before", found.before.plan, healthy, found.before.seconds),
        half("after", found.after.plan, situation, found.after.seconds),
    ]
    rows = [sum(len(lanes) + 0.6 for _, lanes in one.replicas) for one in halves]
    figure = figures.Figure(figsize=(14, 2.2 + ROW_INCHES * sum(rows)), layout="constrained")
    axes = figure.subplots(2, 1, sharex=True, height_ratios=rows)
    end = max(one.seconds for one in halves)
    for one, axis in zip(halves, axes, strict=True):
        _draw_half(axis, one, end)
    kinds = {p.kind for one in halves for _, lanes in one.replicas for lane in lanes for p in lane.order}
    handles: list[Any] = [patches.Patch(color=COLOURS[kind], label=NAMES[kind]) for kind in "FBW" if kind in kinds]
    handles += [
        patches.Patch(color=IDLE, label="idle"),
        patches.Patch(color=AFTERWARDS, label="gradient synchronisation, step"),
    ]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), frameon=False)
    axes[-1].set_xlabel("seconds from the iteration's start")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{path}: the picture cannot be written: {reason}; name another file") from None
    print(f"resihp: picture written to {path}", file=sys.stderr)


def half(name: str, plan: Plan, situation: Situation, seconds: float) -> Half:
    """The lanes of a plan under a situation, equal replicas once."""
    from resihp.pipeline.schedules import orders_of
    from resihp.pipeline.timeline import play
    from resihp.scheduler.cost.prices import costs, transfers

    orders = orders_of(plan)
    timeline = play(plan, orders, costs(plan, situation, orders), transfers(plan, situation))
    numbers = {m: m if plan.migrations else i for share in plan.assignment for i, m in enumerate(share)}
    alike: dict[object, list[int]] = {}
    drawn: dict[object, tuple[StageRow, ...]] = {}
    for d, replica in enumerate(plan.layout.replicas):
        lanes = tuple(
            StageRow(
                f"stage {s}",
                orders[d][s],
                timeline.starts[d][s],
                timeline.ends[d][s],
                tuple(numbers[p.micro_batch] for p in orders[d][s]),
            )
            for s in range(len(replica.stages))
        )
        shapes = tuple((stage.tp, stage.chunks) for stage in replica.stages)
        key = (shapes, tuple((lane.starts, lane.ends, lane.numbers) for lane in lanes))
        alike.setdefault(key, []).append(d)
        drawn.setdefault(key, lanes)
    replicas: list[tuple[str, tuple[StageRow, ...]]] = []
    left_out = 0
    odd_first = sorted(alike.items(), key=lambda item: (len(item[1]), item[1][0]))
    for found, group in odd_first:
        if replicas and sum(len(lanes) for _, lanes in replicas) + len(drawn[found]) > MOST_ROWS:
            left_out += len(group)
            continue
        words = f"replica {group[0]}" if len(group) == 1 else f"replicas {spans(group)}"
        stages = plan.layout.replicas[group[0]].stages
        named = [
            msgspec.structs.replace(
                lane,
                label=f"{lane.label}: {len(stage.layers)} layers, "
                + (
                    f"{'rank' if stage.tp == 1 else 'ranks'} {spans(stage.ranks) or 'none'}"
                    if len(group) == 1
                    else f"TP{stage.tp}"
                ),
            )
            for lane, stage in zip(drawn[found], stages, strict=True)
        ]
        replicas.append((words, tuple(named)))
    return Half(name, tuple(replicas), left_out, timeline.makespan, seconds)


def _draw_half(axis: Any, one: Half, end: float) -> None:
    boxes = sum(len(lane.order) for _, lanes in one.replicas for lane in lanes)
    ticks: list[tuple[float, str]] = []
    y = 0.0
    for words, lanes in one.replicas:
        y += 0.6
        axis.text(0, y - 0.12, words, fontsize=8, fontweight="bold", va="bottom")
        for lane in lanes:
            axis.broken_barh([(0, one.computed_s)], (y + 0.06, 0.88), facecolors=IDLE)
            axis.broken_barh([(one.computed_s, one.seconds - one.computed_s)], (y + 0.06, 0.88), facecolors=AFTERWARDS)
            _draw_lane(axis, lane, y, numbered=boxes <= NUMBERED, end=end)
            ticks.append((y + 0.5, lane.label))
            y += 1
    more = f" ({one.left_out} more replicas not drawn)" if one.left_out else ""
    axis.set_title(f"{one.title}: {one.seconds:.3g} s an iteration{more}", loc="left", fontsize=10)
    axis.set_yticks([at for at, _ in ticks], [label for _, label in ticks], fontsize=7)
    axis.set_ylim(y + 0.1, 0)
    axis.set_xlim(0, end * 1.005)
    axis.tick_params(left=False)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def _draw_lane(axis: Any, lane: StageRow, y: float, *, numbered: bool, end: float) -> None:
    chunks = 1 + max((p.chunk for p in lane.order), default=0)
    for chunk in range(chunks):
        for kind, colour in COLOURS.items():
            mine = [i for i, p in enumerate(lane.order) if (p.kind, p.chunk) == (kind, chunk)]
            boxes = [(lane.starts[i], lane.ends[i] - lane.starts[i]) for i in mine]
            alpha = 1 - 0.4 * chunk / max(1, chunks - 1)
            if boxes:
                axis.broken_barh(
                    boxes, (y + 0.06, 0.88), facecolors=colour, edgecolors="white", linewidth=0.4, alpha=alpha
                )
    if not numbered:
        return
    for start, stop, number in zip(lane.starts, lane.ends, lane.numbers, strict=True):
        if stop - start > end * 0.008:
            axis.text((start + stop) / 2, y + 0.52, str(number), fontsize=6, ha="center", va="center", color="white")
