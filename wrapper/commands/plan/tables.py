"""Tables of `resihp plan`: times, memory and layout before and after; and a description of the failures.

Called by `resihp.wrapper.commands.plan.command` and `resihp.wrapper.commands.plan.hurts`. Decides nothing.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from resihp.parallelism.layout import Layout, Replica, spans
from resihp.record.describe import size
from resihp.scheduler.what_if.question import Question, gone, stage_bytes
from resihp.words import count_of
from resihp.wrapper.output.render import duration
from resihp.wrapper.output.tables import Column, show

if TYPE_CHECKING:
    from rich.console import Console

    from resihp.scheduler.what_if.answer import Outlook, WhatIfAnswer

MAX_CHANGED_SHOWN = 6
"""Most changed replicas that are shown completely; `--json` has all of them."""
MAX_SLOW_SHOWN = 12
"""Most slow ranks that are named."""


def title(query: Question, model: str, hardware: str) -> str:
    """Return the title of the answer: model, sequence length, devices and failures."""
    nodes = len(set(query.nodes.values()))
    return (
        f"{Path(model).stem}, {query.model.sequence} tokens per sequence, on {len(query.nodes)} {Path(hardware).stem} "
        f"of {nodes} {'node' if nodes == 1 else 'nodes'}; {happened(query)}"
    )


def happened(query: Question) -> str:
    """Return a description of the lost and slow parts. For a job, they come in addition to the parts that it has
    already lost."""
    lost_ranks = sorted(gone(query))
    descriptions = [f"{_ranks(lost_ranks)} lost"] if lost_ranks else []
    slow = [f"{rank} at {speed:g}" for rank, speed in sorted(query.slow.items())]
    if slow:
        more = f" and {len(slow) - MAX_SLOW_SHOWN} more" if len(slow) > MAX_SLOW_SHOWN else ""
        descriptions.append(f"slow: rank {', '.join(slow[:MAX_SLOW_SHOWN])}{more}")
    descriptions += [f"link {a}-{b} at {speed:g}" for (a, b), speed in sorted(query.slow_links.items())]
    return "; ".join(descriptions) or ("nothing more has failed" if query.devices else "nothing has failed")


def _ranks(ranks: list[int]) -> str:
    words = spans(ranks)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {words}"


def gigabytes(count: int) -> str:
    """Format a number of bytes as `49.7 GB`, or as `12.3 MB` below 0.1 GB."""
    return f"{count / 1e9:.1f} GB" if count >= 0.1e9 else size(count)


def show_times(screen: Console, outcome: WhatIfAnswer) -> None:
    columns = (
        *(Column(""), Column("iteration", right=True, kept=True), Column("", right=True)),
        *(Column("worst memory", right=True), Column("layout", wraps=True)),
    )
    rows: list[tuple[str, ...]] = []

    def row(name: str, seconds: float | None, outlook: Outlook | None) -> None:
        usable = seconds is not None and math.isfinite(seconds)
        slower = f"{seconds / outcome.before.seconds:.2f} x" if usable and seconds is not None else ""
        memory = "" if outlook is None else gigabytes(outlook.worst_bytes)
        shape = "" if outlook is None else described(outlook.plan.layout)
        rows.append((name, duration(seconds) if usable else "cannot run", slower, memory, shape))

    row("before", outcome.before.seconds, outcome.before)
    row("as it is", outcome.unmitigated_s, None)
    row("after", outcome.after.seconds, outcome.after)
    show(screen, columns, rows)


def described(layout: Layout) -> str:
    """Describe a layout: `DP2 x PP4 x TP4`, or the numbers of working and standby ranks if it is not uniform."""
    words = layout.describe()
    if "|" not in words and len(words) <= 30:
        return words
    idle = f", {len(layout.standby)} on standby" if layout.standby else ""
    return f"{count_of(len(layout.active), 'rank')} {'works' if len(layout.active) == 1 else 'work'}{idle}"


def show_layouts(screen: Console, query: Question, outcome: WhatIfAnswer) -> None:
    """Print the layouts before and after. Equal replicas are printed once, with counts of ranks and layers; changed
    replicas are printed completely."""
    columns = (
        *(Column(""), Column("replicas", wraps=True, kept=True), Column("micro-batches", right=True)),
        *(Column("stages", wraps=True, kept=True), Column("ranks", wraps=True, kept=True)),
        *(Column("layers", wraps=True), Column("memory", right=True)),
    )
    rows: list[tuple[str, ...]] = []
    old = set(outcome.before.plan.layout.replicas)
    for name, outlook in (("before", outcome.before), ("after", outcome.after)):
        plan = outlook.plan
        needs = stage_bytes(query, plan)
        alike: dict[object, list[int]] = {}
        for d, replica in enumerate(plan.layout.replicas):
            shape = tuple((stage.tp, stage.chunks) for stage in replica.stages)
            same = replica in old
            alike.setdefault((same, len(plan.assignment[d]), shape if same else d), []).append(d)
        changed = [group for group in alike.values() if plan.layout.replicas[group[0]] not in old]
        hidden = {d for group in changed[MAX_CHANGED_SHOWN:] for d in group}
        label_of_row = name
        for group in alike.values():
            if hidden.intersection(group):
                continue
            replica = plan.layout.replicas[group[0]]
            label = [label_of_row, spans(group), str(len(plan.assignment[group[0]]))]
            full = replica not in old
            for stages, ranks, layers, need in _stage_rows(replica, needs[group[0]], full):
                rows.append((*label, stages, ranks, layers, gigabytes(need)))
                label = ["", "", ""]
            label_of_row = ""
        if hidden:
            rows.append(("", f"{len(hidden)} more changed: --json has them all", "", "", "", "", ""))
        if plan.layout.standby:
            rows.append(("", "standby", "", "", spans(plan.layout.standby), "", ""))
    show(screen, columns, rows)


def _stage_rows(replica: Replica, needs: tuple[int, ...], full: bool) -> list[tuple[str, str, str, int]]:
    """Return (stages, ranks, layers, bytes) of each stage, or of each run of equal stages."""
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
