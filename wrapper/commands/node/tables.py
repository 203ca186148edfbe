"""Rows and tables of `resihp node list` and `resihp node health`. Called by `resihp.wrapper.commands.node.command`.

Slow imports are inside the functions.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from resihp.wrapper.output.answers import message

if TYPE_CHECKING:
    from resihp.slurm.client import Slurm


def rows_of(cluster: str, slurm: Slurm | None) -> list[dict[str, Any]]:
    """Return rows for nodes that are excluded, and for nodes that no longer are but are still drained with our
    reason."""
    from resihp.slurm.client import PREFIX
    from resihp.slurm.errors import SlurmError
    from resihp.wrapper.slurm_tasks import exclusion_lists as lists

    exclusions = lists.known(lists.lists(cluster))
    views = {}
    try:
        if slurm is not None and exclusions:
            views = dict(slurm.nodes([item.node for item in exclusions]))
    except SlurmError as error:
        message(f"{error}; drains in Slurm are not shown")
    rows = []
    now = time.time()
    for item in exclusions:
        view = views.get(item.node)
        drained_by_us = view is not None and view.draining and view.reason.startswith(PREFIX)
        if item.expires_at <= now and not drained_by_us:
            continue
        rows.append(
            {
                "cluster": cluster,
                "node": item.node,
                "excluded_until": _iso(item.expires_at) if item.expires_at > now else None,
                "excluded_because": item.reason,
                "measure": item.measure,
                "job": item.job_id or None,
                "drained_by_us": drained_by_us,
                "state": None if view is None else "+".join([view.state, *sorted(view.flags)]),
                "reason": view.reason or None if view is not None else None,
                "reason_by": view.reason_by or None if view is not None else None,
                "checked_at": _iso(item.checked_at) if item.checked_at else None,
                "check": item.check or None,
            }
        )
    return rows


def show_health(rows: Sequence[dict[str, Any]]) -> None:
    from resihp.wrapper.output.answers import console
    from resihp.wrapper.output.tables import Column, show

    cells = []
    for row in rows:
        lemon = "no" if not row["lemon"] else f"device {row['lemon_devices']}" if row["lemon_devices"] else "yes"
        outages = f"{row['observed']} in {row['window_days']} d"
        suspected = f"{row['suspected_jobs']} of {row['jobs']}" if row["suspected_jobs"] else "-"
        evidence = "; ".join(filter(None, (row["devices"], row["evidence"])))
        figures = (outages, f"{row['expected']:.2g}", f"{row['q']:.2g}")
        cells.append((row["node"], lemon, *figures, suspected, evidence))
    columns = (
        *(Column("node", wraps=True), Column("a lemon?", wraps=True, kept=True), Column("outages")),
        *(Column("expected"), Column("q"), Column("suspected"), Column("evidence", wraps=True)),
    )
    show(console(), columns, cells)


def show_list(rows: Sequence[dict[str, Any]]) -> None:
    from resihp.wrapper.output.answers import console
    from resihp.wrapper.output.tables import Column, show

    cells = []
    for row in rows:
        until = "-" if row["excluded_until"] is None else row["excluded_until"][:16].replace("T", " ")
        why = row["reason"] or row["excluded_because"]
        if row["check"]:
            why += f"; checked {row['checked_at'][:16].replace('T', ' ')}: {row['check']}"
        drained = "yes" if row["drained_by_us"] else "no"
        cells.append((row["node"], row["measure"], until, row["state"] or "-", drained, why))
    columns = (
        *(Column("node", wraps=True), Column("measure"), Column("excluded until (UTC)"), Column("state", wraps=True)),
        *(Column("drained by us"), Column("reason", wraps=True)),
    )
    show(console(), columns, cells)


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
