"""The rows that show a job's current state: its plans, failures, nodes, workers, open suspicions and unfit devices.

`read` returns them to `resihp.wrapper.output.job_history` and to the figures of `resihp status`, with as few statements
as possible, because on a server each statement costs three round trips. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from sqlalchemy import and_, case, func, or_, select

from resihp.db.models import PlanRow, ProbeRow, ReconfigurationRow, SuspicionRow
from resihp.db.reading.tables import ACCOUNT_COLUMNS, TABLES, Row

if TYPE_CHECKING:
    from resihp.db.reading.reader import Reader

MAX_LAYOUTS = 65
"""Number of the last plans in effect with layouts that are read; a layout of 16,384 ranks has about 300 kB."""


class WatchedRows(NamedTuple):
    """Rows of one job; JSON columns are decoded, except layouts."""

    plans: Sequence[Row]
    """Columns of `Reader.narrow`, `next_iteration`, `outcome`, and `layout_json`: the LAYOUT as text, None for older
    plans."""
    reconfigurations: Sequence[Row]
    failures: Sequence[Row]
    nodes: Sequence[Row]
    workers: Sequence[Row]
    suspicions: Sequence[Row]
    """Open suspicions: `suspicion`, `component`, `ranks`; empty once the job is over."""
    probes: Sequence[Row]
    """All probes, in order, of devices that ever failed a probe."""


def read(reader: Reader, job: Row) -> WatchedRows:
    """Read the rows of a job; `job` is its row. Takes six statements, seven while the job runs, and one more
    without plans."""
    number = job["id"]
    plans, reconfigurations = _plans(reader, number)
    if not plans:  # a script that does not report to resihp has restarts, but no plans
        reconfigurations = reader.narrow("reconfigurations", number)
    return WatchedRows(
        plans=plans,
        reconfigurations=reconfigurations,
        failures=reader.rows("failures", number),
        nodes=reader.rows("nodes", number),
        workers=reader.narrow("workers", number, ("rank", "node", "device", "exit", "ended_at")),
        suspicions=_suspicions(reader, number) if job["state"] == "running" else (),
        probes=_probes(reader, number),
    )


def _plans(reader: Reader, job: int) -> tuple[list[Row], list[Row]]:
    """Return the plans, and the reconfigurations that led to them."""
    columns, outcome = PlanRow.__table__.c, TABLES["plans"].query.selected_columns.outcome
    in_effect = select(columns.epoch).where(columns.job_id == job, columns.in_effect_at.is_not(None))
    last_in_effect = in_effect.order_by(columns.epoch.desc()).limit(MAX_LAYOUTS)
    newest = select(func.max(columns.epoch)).where(columns.job_id == job).scalar_subquery()
    has_layout = or_(columns.epoch.in_(last_in_effect.correlate(None)), columns.epoch == newest)
    changes = ReconfigurationRow.__table__.c
    change_columns = [name for name in ACCOUNT_COLUMNS["reconfigurations"] if name != "epoch"]
    query = (
        select(
            *(columns[name] for name in ACCOUNT_COLUMNS["plans"]),
            *(columns.next_iteration, outcome, case((has_layout, columns.layout)).label("layout_json")),
            *(changes[name].label(f"change_{name}") for name in change_columns),
        )
        .select_from(
            PlanRow.__table__.outerjoin(
                ReconfigurationRow.__table__, and_(changes.job_id == columns.job_id, changes.epoch == columns.epoch)
            )
        )
        .where(columns.job_id == job)
        .order_by(columns.epoch)
    )
    plans, reconfigurations = reader.fetch(query), []
    for plan in plans:
        change = {name: plan.pop(f"change_{name}") for name in change_columns}
        if change["finished_at"] is not None:
            reconfigurations.append({"epoch": plan["epoch"], **change})
    return plans, reconfigurations


def _suspicions(reader: Reader, job: int) -> list[Row]:
    columns = SuspicionRow.__table__.c
    query = select(columns.suspicion, columns.component, columns.ranks)
    rows = reader.fetch(query.where(columns.job_id == job, columns.ended_at.is_(None)).order_by(columns.suspicion))
    return [{**row, "ranks": reader.decoded(row["ranks"], "ranks")} for row in rows]


def _probes(reader: Reader, job: int) -> list[Row]:
    probes = ProbeRow.__table__.c
    failing = select(probes.node, probes.device).distinct()
    failed = failing.where(probes.job_id == job, probes.kind == "device", probes.passed.is_(False)).subquery()
    query = select(probes.occasion, probes.node, probes.device, probes.speed, probes.passed).join(
        failed, and_(failed.c.node == probes.node, failed.c.device == probes.device)
    )
    return reader.fetch(query.where(probes.job_id == job, probes.kind == "device").order_by(probes.id))
