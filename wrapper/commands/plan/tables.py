"""What `resihp plan` prints as tables: times, memory and layout before and after; how what happened is called.

Called by `wrapper.commands.plan.command` and `wrapper.commands.plan.hurts`. Decides nothing.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from resihp.parallelism.layout import Layout, Replica, spans
from resihp.record.describe import size
from resihp.scheduler.what_if.question import Question, gone, stage_bytes
from resihp.words import count_of
from wrapper.output.render import duration
from wrapper.output.tables import Column, show

if TYPE_CHECKING:
    from rich.console import Console

    from resihp.scheduler.what_if.answer import Outlook, WhatIfAnswer

CHANGED_SHOWN = 6
"""Replicas that are shown in full; `--json` has them all."""
SLOW_SHOWN = 12


def title(asked: Question, model: str, hardware: str) -> str:
    """What is trained on what, and what has happened to it."""
    nodes = len(set(asked.nodes.values()))
    return (
        f"{Path(model).stem}, {asked.model.sequence} tokens a sequence, on {len(asked.nodes)} {Path(hardware).stem} "
        f"of {nodes} {'node' if nodes == 1 else 'nodes'}; {happened(asked)}"
    )


def happened(asked: Question) -> str:
    """What is gone, and what is slow; of a job, beside what is gone from it already."""
    lost = sorted(gone(asked))
    said = [f"{_ranks(lost)} gone"] if lost else []
    slow = [f"{rank} at {speed:g}" for rank, speed in sorted(asked.slow.items())]
    if slow:
        more = f" and {len(slow) - SLOW_SHOWN} more" if len(slow) > SLOW_SHOWN else ""
        said.append(f"slow: rank {', '.join(slow[:SLOW_SHOWN])}{more}")
    said += [f"link {a}-{b} at {speed:g}" for (a, b), speed in sorted(asked.slow_links.items())]
    return "; ".join(said) or ("nothing more has failed" if asked.devices else "nothing has failed")


def _ranks(ranks: list[int]) -> str:
    words = spans(ranks)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {words}"


def gigabytes(count: int) -> str:
    """`49.7 GB`; of little `12.3 MB`."""
    return f"{count / 1e9:.1f} GB" if count >= 0.1e9 else size(count)


def show_times(screen: Console, found: WhatIfAnswer) -> None:
    columns = (
        *(Column(""), Column("iteration", right=True, kept=True), Column("", right=True)),
        *(Column("worst memory", right=True), Column("layout", wraps=True)),
    )
    rows: list[tuple[str, ...]] = []

    def row(name: str, seconds: float | None, outlook: Outlook | None) -> None:
        usable = seconds is not None and math.isfinite(seconds)
        slower = f"{seconds / found.before.seconds:.2f} x" if usable and seconds is not None else ""
        memory = "" if outlook is None else gigabytes(outlook.worst_bytes)
        shape = "" if outlook is None else described(outlook.plan.layout)
        rows.append((name, duration(seconds) if usable else "cannot run", slower, memory, shape))

    row("before", found.before.seconds, found.before)
    row("as it is", found.unmitigated_s, None)
    row("after", found.after.seconds, found.after)
    show(screen, columns, rows)


def described(layout: Layout) -> str:
    """`DP2 x PP4 x TP4`; of a layout that is not uniform, who works."""
    words = layout.describe()
    if "|" not in words and len(words) <= 30:
        return words
    idle = f", {len(layout.standby)} standing by" if layout.standby else ""
    return f"{count_of(len(layout.active), 'rank')} {'works' if len(layout.active) == 1 else 'work'}{idle}"


def show_layouts(screen: Console, asked: Question, found: WhatIfAnswer) -> None:
    """Equal replicas once, with how many ranks and layers their stages have; changed ones in full."""
    columns = (
        *(Column(""), Column("replicas", wraps=True, kept=True), Column("micro-batches", right=True)),
        *(Column("stages", wraps=True, kept=True), Column("ranks", wraps=True, kept=True)),
        *(Column("layers", wraps=True), Column("memory", right=True)),
    )
    rows: list[tuple[str, ...]] = []
    old = set(found.before.plan.layout.replicas)
    for name, outlook in (("before", found.before), ("after", found.after)):
        plan = outlook.plan
        needs = stage_bytes(asked, plan)
        alike: dict[object, list[int]] = {}
        for d, replica in enumerate(plan.layout.replicas):
            shape = tuple((stage.tp, stage.chunks) for stage in replica.stages)
            same = replica in old
            alike.setdefault((same, len(plan.assignment[d]), shape if same else d), []).append(d)
        changed = [group for group in alike.values() if plan.layout.replicas[group[0]] not in old]
        hidden = {d for group in changed[CHANGED_SHOWN:] for d in group}
        first = name
        for group in alike.values():
            if hidden.intersection(group):
                continue
            replica = plan.layout.replicas[group[0]]
            label = [first, spans(group), str(len(plan.assignment[group[0]]))]
            full = replica not in old
            for stages, ranks, layers, need in _stage_rows(replica, needs[group[0]], full):
                rows.append((*label, stages, ranks, layers, gigabytes(need)))
                label = ["", "", ""]
            first = ""
        if hidden:
            rows.append(("", f"{len(hidden)} more changed: --json has them all", "", "", "", "", ""))
        if plan.layout.standby:
            rows.append(("", "standby", "", "", spans(plan.layout.standby), "", ""))
    show(screen, columns, rows)


def _stage_rows(replica: Replica, needs: tuple[int, ...], full: bool) -> list[tuple[str, str, str, int]]:
    """(stages, ranks, layers, bytes) of each stage, or of each run of stages that are alike."""
    if full:
        return [
            (
                str(s),
                spans(stage.ranks) or "none",
                ", ".join(f"{a}-{b}" if a != b else str(a) for a, b in stage.chunks),
                need,
            )
            for s, (stage, need) in enumerate(zip(replica.stages, needs, strict=True))
        ]
    rows: list[tuple[list[int], str, str, int]] = []
    for s, (stage, need) in enumerate(zip(replica.stages, needs, strict=True)):
        ranks, layers = f"{stage.tp} each", f"{len(stage.layers)} each"
        if rows and rows[-1][1:3] == (ranks, layers):
            rows[-1] = ([*rows[-1][0], s], ranks, layers, max(need, rows[-1][3]))
        else:
            rows.append(([s], ranks, layers, need))
    return [(spans(stages), ranks, layers, need) for stages, ranks, layers, need in rows]
