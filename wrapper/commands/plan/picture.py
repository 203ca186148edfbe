"""`resihp plan --plot`: plot the pipelines before and after, with one row per stage and a box for each F, B and W.

The positions of boxes come from the timeline behind the predictions (`resihp.pipeline.timeline`); a stage's later
chunks are paler. Light grey is idle time, dark grey the time after the last backward of all replicas: gradient
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

PRIMITIVE_COLOURS = {"F": "#4878cf", "B": "#6acc65", "W": "#d5bb67"}
IDLE_COLOUR, STEP_COLOUR = "#ececec", "#b8b8c8"
PRIMITIVE_NAMES = {"F": "forward", "B": "backward", "W": "weight gradients"}
MAX_STAGES = 64
"""Most stages in one half of the picture; the title says how many replicas were left out."""
MAX_NUMBERED_BOXES = 600
"""Most boxes in one half of the picture for which the numbers of micro-batches are drawn."""
ROW_INCHES = 0.28


class StageRow(msgspec.Struct, frozen=True):
    """A stage: its order of work, with start and end times in seconds."""

    label: str
    order: Order
    starts: tuple[float, ...]
    ends: tuple[float, ...]
    numbers: tuple[int, ...]
    """Micro-batch of each box, counted from 0: within the share of its home replica, or within the global batch if some
    micro-batches migrate."""


class Half(msgspec.Struct, frozen=True):
    """One half of the picture: the lanes of a plan by replica, each with a label, and the end of the iteration."""

    title: str
    replicas: tuple[tuple[str, tuple[StageRow, ...]], ...]
    left_out: int
    computed_s: float
    """End of the last box, in seconds from the start of the iteration."""
    seconds: float


def draw(path: Path, query: Question, outcome: WhatIfAnswer, situation: Situation) -> None:
    """Write the plot. Raises UsageError if matplotlib is missing, or `path` cannot be written."""
    from resihp.scheduler.what_if.question import situation_of

    try:
        figures = import_module("matplotlib.figure")
        patches = import_module("matplotlib.patches")
    except ImportError:
        raise UsageError("--plot needs matplotlib, which is not installed; type: pip install matplotlib") from None
    healthy = situation_of(query, outcome.before.plan, (), {}, {})
    halves = [
        half("before", outcome.before.plan, healthy, outcome.before.seconds),
        half("after", outcome.after.plan, situation, outcome.after.seconds),
    ]
    rows = [sum(len(lanes) + 0.6 for _, lanes in half_shown.replicas) for half_shown in halves]
    figure = figures.Figure(figsize=(14, 2.2 + ROW_INCHES * sum(rows)), layout="constrained")
    axes = figure.subplots(2, 1, sharex=True, height_ratios=rows)
    end = max(half_shown.seconds for half_shown in halves)
    for half_shown, axis in zip(halves, axes, strict=True):
        _draw_half(axis, half_shown, end)
    kinds = {p.kind for half_shown in halves for _, lanes in half_shown.replicas for lane in lanes for p in lane.order}
    handles: list[Any] = [
        patches.Patch(color=PRIMITIVE_COLOURS[kind], label=PRIMITIVE_NAMES[kind]) for kind in "FBW" if kind in kinds
    ]
    handles += [
        patches.Patch(color=IDLE_COLOUR, label="idle"),
        patches.Patch(color=STEP_COLOUR, label="gradient synchronisation, step"),
    ]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), frameon=False)
    axes[-1].set_xlabel("seconds from the iteration's start")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{path}: the plot cannot be written: {reason}; name another file") from None
    print(f"resihp: plot written to {path}", file=sys.stderr)


def half(name: str, plan: Plan, situation: Situation, seconds: float) -> Half:
    """Return the lanes of a plan in a situation. Equal replicas appear once."""
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
    for key_drawn, group in odd_first:
        if replicas and sum(len(lanes) for _, lanes in replicas) + len(drawn[key_drawn]) > MAX_STAGES:
            left_out += len(group)
            continue
        label = f"replica {group[0]}" if len(group) == 1 else f"replicas {spans(group)}"
        stages = plan.layout.replicas[group[0]].stages
        labelled_lanes = [
            msgspec.structs.replace(
                lane,
                label=f"{lane.label}: {len(stage.layers)} layers, "
                + (
                    f"{'rank' if stage.tp == 1 else 'ranks'} {spans(stage.ranks) or 'none'}"
                    if len(group) == 1
                    else f"TP{stage.tp}"
                ),
            )
            for lane, stage in zip(drawn[key_drawn], stages, strict=True)
        ]
        replicas.append((label, tuple(labelled_lanes)))
    return Half(name, tuple(replicas), left_out, timeline.makespan, seconds)


def _draw_half(axis: Any, half_shown: Half, end: float) -> None:
    boxes = sum(len(lane.order) for _, lanes in half_shown.replicas for lane in lanes)
    ticks: list[tuple[float, str]] = []
    y = 0.0
    for words, lanes in half_shown.replicas:
        y += 0.6
        axis.text(0, y - 0.12, words, fontsize=8, fontweight="bold", va="bottom")
        for lane in lanes:
            axis.broken_barh([(0, half_shown.computed_s)], (y + 0.06, 0.88), facecolors=IDLE_COLOUR)
            axis.broken_barh(
                [(half_shown.computed_s, half_shown.seconds - half_shown.computed_s)],
                (y + 0.06, 0.88),
                facecolors=STEP_COLOUR,
            )
            _draw_lane(axis, lane, y, numbered=boxes <= MAX_NUMBERED_BOXES, end=end)
            ticks.append((y + 0.5, lane.label))
            y += 1
    more = f" ({half_shown.left_out} more replicas not drawn)" if half_shown.left_out else ""
    axis.set_title(f"{half_shown.title}: {half_shown.seconds:.3g} s per iteration{more}", loc="left", fontsize=10)
    axis.set_yticks([at for at, _ in ticks], [label for _, label in ticks], fontsize=7)
    axis.set_ylim(y + 0.1, 0)
    axis.set_xlim(0, end * 1.005)
    axis.tick_params(left=False)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def _draw_lane(axis: Any, lane: StageRow, y: float, *, numbered: bool, end: float) -> None:
    chunks = 1 + max((p.chunk for p in lane.order), default=0)
    for chunk in range(chunks):
        for kind, colour in PRIMITIVE_COLOURS.items():
            indices = [i for i, p in enumerate(lane.order) if (p.kind, p.chunk) == (kind, chunk)]
            boxes = [(lane.starts[i], lane.ends[i] - lane.starts[i]) for i in indices]
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
