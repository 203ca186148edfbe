"""Statistics over many jobs: failures by node, component, cause or job, and nodes to distrust.

Each query has two parts. The first reads one ledger and returns few rows, because the database does the counting. The
second combines the results of several ledgers: a cluster's PostgreSQL is one ledger, while a home of jobs with a SQLite
file each has many. Called by `history` and `resihp.db.reading.queries`. Reads only; `resihp.detector.lemons` judges
nodes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Literal, get_args

from sqlalchemy import ColumnElement, Select, case, func, select

from resihp.db.models import DrainRow, FailureRow, JobRow, NodeRow, ReconfigurationRow
from resihp.db.reading import hardware, health
from resihp.db.reading.reader import Reader
from resihp.db.reading.tables import Row, no_collection
from resihp.detector.lemons import NodeFailure, node_health
from resihp.detector.moved import Machine, Renewal, SeenDevice, follow
from resihp.detector.service_hours import Service

By = Literal[
    "node",
    "component",
    "cause",
    "kind",
    "job",
    "owner",
    "account",
    "partition",
    "cluster",
    "version",
    "torch",
    "hardware",
    "week",
    "month",
]
GROUPS: tuple[By, ...] = get_args(By)
"""`version`: of resihp; `hardware`: whether hardware is the cause; a `week` is named by its Monday."""
GROUP_COLUMNS = {"job": "uuid", "account": "slurm_account"} | {
    name: name for name in ("owner", "partition", "cluster", "version", "torch")
}
"""Column of `jobs` for each grouping by a property of the job. A job is identified by its uuid, because job names
repeat between folders and hosts."""
FAILURE_KINDS = ("fail-stop", "fail-slow", "communication", "program")
MEAN_COLUMNS = ("detect_seconds", "recover_seconds", "without_noticing_seconds")
"""Mean times of failures: from injection to the notice (injected faults only); from the failure to the first iteration
after it; and from the notice to that iteration."""
NO_NAME = "-"
"""Name of the group of failures without a node, or of jobs without an account."""

_NUMBERED = re.compile(r"\b(ranks?|nodes?|device|pid|iteration|step) [^\s:;,()]*[\w.-]+(?:, \d+(?:-\d+)?)*")
_FIGURE = re.compile(r"\b\d+(?:\.\d+)? ?(s|ms|%|GB|MB|iterations)(?!\w)")


# --- failures -------------------------------------------------------------------------------------------------------


def failures_by(
    reader: Reader,
    by: By,
    job_id: int | None = None,
    *,
    node: str | None = None,
    user: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
) -> list[Row]:
    """Return counts and sums over one ledger's failures, to be combined by `joined`; of all jobs, or of one job, node
    or `user`."""
    failures, transitions = FailureRow.__table__, ReconfigurationRow.__table__
    column = _group(reader, by, job_id)
    back_s, noticed_s = reader.seconds(transitions.c.finished_at), reader.seconds(failures.c.noticed_at)
    failed_s = reader.seconds(func.coalesce(failures.c.failed_at, failures.c.noticed_at))
    source = failures.outerjoin(
        transitions,
        (transitions.c.job_id == failures.c.job_id) & (transitions.c.epoch == failures.c.recovered_epoch),
    )
    if by in GROUP_COLUMNS or user is not None:
        source = source.join(JobRow.__table__, JobRow.__table__.c.id == failures.c.job_id)
    query = select(
        column.label("key"),
        *((func.max(JobRow.__table__.c.name).label("name"),) if by == "job" else ()),
        func.count().label("failures"),
        *(func.sum(case((failures.c.kind == kind, 1), else_=0)).label(kind) for kind in FAILURE_KINDS),
        func.count(failures.c.job_id.distinct()).label("jobs"),
        func.count(failures.c.detect_seconds).label("detections"),
        func.sum(failures.c.detect_seconds).label("detect_seconds"),
        func.count(transitions.c.seconds).label("recoveries"),
        func.sum(case((back_s > failed_s, back_s - failed_s), else_=0.0)).label("recover_seconds"),
        func.sum(case((back_s > noticed_s, back_s - noticed_s), else_=0.0)).label("without_noticing_seconds"),
        func.max(failures.c.noticed_at).label("last"),
    ).select_from(source)
    conditions = []
    if job_id is not None:
        conditions.append(failures.c.job_id == job_id)
    if node is not None:
        here = failures.c.node == node
        conditions.append(here if job_id is not None else reader.is_asked(node, failures.c.node, failures.c.job_id))
    if user is not None:
        conditions.append(reader.is_of(user))
    if since is not None:
        conditions.append(failures.c.noticed_at >= since)
    if until is not None:
        conditions.append(failures.c.noticed_at < until)
    groups = reader.fetch(query.where(*conditions).group_by(column))
    for row in groups:
        row["key"] = kind_of_cause(row["key"]) if by == "cause" else _words(row["key"])
    return groups


def _group(reader: Reader, by: By, job_id: int | None) -> ColumnElement[Any]:
    if by == "owner":
        return reader.owner()
    if by in GROUP_COLUMNS:
        return JobRow.__table__.c[GROUP_COLUMNS[by]]
    failures = FailureRow.__table__.c
    if by == "node" and job_id is None:
        return reader.node_name(failures.node, failures.job_id)
    return reader.period(failures.noticed_at, by) if by in ("week", "month") else failures[by]


def _words(key: object) -> str:
    """Return the name of a group: `-` for an empty name; for `hardware`, whether hardware is the cause."""
    return {True: "hardware", False: "other", None: NO_NAME}[key] if key in (None, True, False) else str(key) or NO_NAME


def joined(by: By, parts: Iterable[Row]) -> list[Row]:
    """Combine the results of `failures_by` from all ledgers: most failures first; weeks and months newest first.

    Columns: the key under its name (for jobs `job` and `uuid`), `failures`, the number of failures of each kind,
    `jobs`, `MEAN_COLUMNS` (means over known values), and `last` (when the last failure was noticed). A job that is in
    two ledgers counts twice.
    """
    sums: dict[str, Row] = {}
    for part in parts:
        if (total := sums.get(part["key"])) is None:
            sums[part["key"]] = dict(part)
            continue
        for name in ("failures", *FAILURE_KINDS, "jobs", "detections", "recoveries"):
            total[name] += part[name]
        for name in MEAN_COLUMNS:
            total[name] = (total[name] or 0.0) + (part[name] or 0.0)
        total["last"] = max(total["last"], part["last"])
    rows = [
        {
            **({"job": total["name"], "uuid": total["key"]} if by == "job" else {by: total["key"]}),
            "failures": int(total["failures"]),
            **{kind.replace("-", "_"): int(total[kind]) for kind in FAILURE_KINDS},
            "jobs": int(total["jobs"]),
            "detect_seconds": _mean(total["detect_seconds"], total["detections"]),
            "recover_seconds": _mean(total["recover_seconds"], total["recoveries"]),
            "without_noticing_seconds": _mean(total["without_noticing_seconds"], total["recoveries"]),
            "last": total["last"],
        }
        for total in sums.values()
    ]
    if by in ("week", "month"):
        return sorted(rows, key=lambda row: row[by], reverse=True)
    return sorted(rows, key=lambda row: (-row["failures"], row[by]))


def kind_of_cause(cause: str) -> str:
    """Return a cause without the parts that differ between failures: `rank 5 killed by signal 9` and `rank 7 killed by
    signal 9` both become `rank * killed by signal 9`."""
    return _FIGURE.sub(r"* \1", _NUMBERED.sub(r"\1 *", cause))


def _mean(total: float | None, count: int) -> float | None:
    return total / count if count and total is not None else None


# --- nodes ----------------------------------------------------------------------------------------------------------


class NodeRecord:
    """Data about nodes from one or several ledgers, for `lemons`."""

    def __init__(self) -> None:
        self.verdicts: list[NodeFailure] = []
        self.services: list[Service] = []
        self.placements: list[SeenDevice] = []
        self.renewals: list[Renewal] = []
        self.machines: list[Machine] = []
        self.jobs: dict[str, int] = {}
        self.drains: dict[str, int] = {}
        self.kinds: dict[str, dict[str, int]] = {}

    def read(self, reader: Reader, since: datetime, injected: bool) -> None:
        """Add a ledger's verdicts and service times since `since`. `injected`: also add verdicts on injected faults."""
        with no_collection():
            self._read(reader, since, injected)

    def _read(self, reader: Reader, since: datetime, injected: bool) -> None:
        self.verdicts += health.verdicts(reader, since, injected, with_jobs=False)
        self.services += health.services(reader, since)
        self.placements += hardware.placements(reader, since)
        self.renewals += hardware.renewals(reader, since)
        self.machines += hardware.machines(reader, since)
        nodes, drains, failures = NodeRow.__table__.c, DrainRow.__table__.c, FailureRow.__table__.c
        joined: Select[Any] = select(reader.node_name(nodes.node, nodes.job_id).label("node")).where(
            nodes.joined_at >= since, nodes.host != ""
        )
        for row in reader.fetch(_counted(reader.believed(joined, nodes.job_id))):
            self.jobs[row["node"]] = self.jobs.get(row["node"], 0) + row["n"]
        of_drain = (failures.job_id == drains.job_id) & (failures.failure == drains.failure)
        name = reader.node_name(drains.node, drains.job_id).label("node")
        drained: Select[Any] = (
            select(name, drains.job_id, drains.drained_at.label("at"), failures.code, failures.detect_seconds)
            .outerjoin(FailureRow, of_drain)
            .where(drains.drained_at >= since, drains.step != "exclusion")
        )
        for row in _counting(reader, reader.believed(drained, drains.job_id), injected):
            self.drains[row["node"]] = self.drains.get(row["node"], 0) + 1
        name = reader.node_name(failures.node, failures.job_id).label("node")
        at = failures.noticed_at.label("at")
        query: Select[Any] = select(name, failures.kind, failures.job_id, at, failures.code, failures.detect_seconds)
        query = query.where(failures.noticed_at >= since, failures.node.is_not(None))
        for row in _counting(reader, reader.believed(query, failures.job_id), injected):
            kinds = self.kinds.setdefault(row["node"], {})
            kinds[row["kind"]] = kinds.get(row["kind"], 0) + 1


def _counting(reader: Reader, query: Select[Any], injected: bool) -> list[Row]:
    """Return the rows, of failures or of actions after them, that count against a node; with `injected`, also rows of
    injected faults."""
    rows = reader.fetch(query)
    if injected:
        return rows
    return health.unprovoked(reader, [row for row in rows if row["detect_seconds"] is None], "at")


def _counted(query: Select[Any]) -> Select[Any]:
    """Select the distinct rows of a query, with the number of their occurrences as `n`."""
    rows = query.subquery().c
    return select(*rows, func.count().label("n")).group_by(*rows)


def lemons(record: NodeRecord, now: datetime | None = None) -> list[Row]:
    """Return all nodes that served in the last 180 days, least trustworthy first.

    Columns: `node`, `jobs`, `device_hours` (of service), `failures` (root causes on the node) and the number of each
    kind, `drains`, `mtbf_hours` (of the node's service); whether the node is a `lemon`, and the evidence: `observed`
    and `expected` outages in `window_days`, `p`, `q`, `lemon_devices`, `devices`, with the same figures as in
    `health.health_frame` and `resihp node health`; and `last`, the time of the last verdict.
    """
    now = now or datetime.now(UTC)
    device_s: dict[str, float] = {}
    node_s: dict[str, float] = {}
    for service in record.services:
        seconds = max(min(service.until, now.timestamp()) - service.since, 0.0)
        node_s[service.node] = node_s.get(service.node, 0.0) + seconds
        device_s[service.node] = device_s.get(service.node, 0.0) + seconds * service.devices
    rows = []
    with no_collection():
        counted = follow(record.verdicts, record.services, record.placements, record.renewals, record.machines)
        judged = node_health(*counted, now.timestamp())
    for judgement in judged:
        kinds = record.kinds.get(judgement.node, {})
        failures = sum(kinds.values())
        rows.append(
            {
                "node": judgement.node,
                "jobs": record.jobs.get(judgement.node, 0),
                "device_hours": device_s.get(judgement.node, 0.0) / 3600.0,
                "failures": failures,
                **{kind.replace("-", "_"): kinds.get(kind, 0) for kind in FAILURE_KINDS},
                "drains": record.drains.get(judgement.node, 0),
                "mtbf_hours": node_s.get(judgement.node, 0.0) / 3600.0 / failures if failures else None,
                **health.tally_row(judgement),
                "last": None if judgement.last is None else datetime.fromtimestamp(judgement.last, UTC),
            }
        )
    return rows


def horizon(now: datetime | None = None) -> datetime:
    """Return the time before which records no longer count against a node."""
    return (now or datetime.now(UTC)) - health.JUDGED_PERIOD
