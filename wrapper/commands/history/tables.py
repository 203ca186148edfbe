"""The columns of each view of `resihp history` on a terminal; `--json` has all fields.

`views` names these columns for each view, and `command` prints them. Rows in, columns and cells out;
`resihp.wrapper.output.tables` fits them into a terminal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC
from typing import Any

from resihp.wrapper.commands.history import cells
from resihp.wrapper.commands.history.query import COST_GROUPS, FAILURE_GROUPS
from resihp.wrapper.output.render import as_change, duration, one_line, percent, suspects
from resihp.wrapper.output.tables import Column

ALWAYS_SHOWN = frozenset(
    ("job", "id", "#", "node", "device", "node, device", "GPU", "UUID", "rank", "peer", "epoch", "at (UTC)", "money")
) | {"cause", "text"}
"""Headings of columns that are never left out on a narrow terminal, because they identify rows or describe events."""
COST_WORDS = {
    "useful": "training",
    "start": "until the first known iteration",
    "detect": "detection of failures",
    "reconfigure": "reconfiguration",
    "redo": "discarded work",
    "rollback": "iterations repeated by a later attempt",
    "slow": "slow devices and links",
    "idle": "idle GPUs",
    "capacity": "missing GPUs",
    "checkpoint": "waiting for checkpoints",
    "other": "between iterations, and the rest",
}
"""Labels of the causes of cost."""


@dataclass(frozen=True)
class ViewColumn:
    """A column of a table on a terminal: its heading, and a function that returns a cell's text from a row."""

    heading: str
    cell: Callable[[dict[str, Any]], str]
    right: bool = False
    wraps: bool = False


ViewColumns = tuple[ViewColumn, ...]


def _words(name: str, heading: str | None = None, *, wraps: bool = False) -> ViewColumn:
    return ViewColumn(heading or name, lambda row: "-" if row[name] is None else str(row[name]), wraps=wraps)


def _optional_text(name: str, heading: str | None = None) -> ViewColumn:
    """Return a column for text that may be missing; a missing text is shown as `-`."""
    return ViewColumn(heading or name, lambda row: str(row[name]) or "-", wraps=True)


def _number(name: str, heading: str | None = None, form: str = "{}") -> ViewColumn:
    return ViewColumn(heading or name, lambda row: "-" if row[name] is None else form.format(row[name]), right=True)


def _seconds(name: str, heading: str) -> ViewColumn:
    return ViewColumn(heading, lambda row: duration(row[name]), right=True)


def _amount(name: str, heading: str) -> ViewColumn:
    return ViewColumn(heading, lambda row: "-" if row[name] is None else cells.amount(row[name]), right=True)


def _share(name: str, heading: str | None = None) -> ViewColumn:
    return ViewColumn(heading or name, lambda row: percent(row[name]), right=True)


def _bytes(name: str, heading: str) -> ViewColumn:
    def cell(row: dict[str, Any]) -> str:
        from resihp.record.describe import size

        return "-" if row[name] is None else size(row[name])

    return ViewColumn(heading, cell, right=True)


def _time(name: str, heading: str) -> ViewColumn:
    return ViewColumn(heading, lambda row: "-" if row[name] is None else f"{row[name].astimezone(UTC):%m-%d %H:%M:%S}")


def _change(name: str) -> ViewColumn:
    """Return a column that shows a ratio of iteration times as a change, such as `+50 %`."""
    return ViewColumn(name, lambda row: as_change(row[name]), right=True)


ID_COLUMN = ViewColumn("id", lambda row: row["uuid"][:8])
"""Column with the beginning of a job's id, because names of jobs repeat between folders and hosts."""
JOB_ID_COLUMN = ViewColumn("id", lambda row: row["job_uuid"][:8])
"""Column with the beginning of the id of the job that a row belongs to."""


def _counted(by: str) -> ViewColumns:
    return (
        _words(by, "week of" if by == "week" else None, wraps=True),
        *((ID_COLUMN,) if by == "job" else ()),
        _number("failures"),
        *(() if by in ("cause", "kind") else (_number("fail_stop", "stop"), _number("fail_slow", "slow"))),
        *(() if by == "job" else (_number("jobs"),)),
        _seconds("detect_seconds", "to detect"),
        _seconds("recover_seconds", "to recover"),
        _time("last", "last (UTC)"),
    )


def _costs(by: str) -> ViewColumns:
    return (
        _words(by, wraps=True),
        _number("jobs"),
        _amount("gpu_hours", "GPU-h"),
        _amount("failure_gpu_hours", "lost GPU-h"),
        _share("goodput"),
        _number("failures"),
        _share("useful_share", "useful"),
        _seconds("hardware_mtbf_seconds", "HW MTBF"),
    )


# --- the columns of each view ---------------------------------------------------------------------------------------

JOBS_COLUMNS = (
    _words("name", "job", wraps=True),
    ID_COLUMN,
    _words("owner", wraps=True),
    _words("state"),
    ViewColumn("GPUs", lambda row: str(row["nodes"] * row["gpus_per_node"]), right=True),
    _time("started_at", "began (UTC)"),
    ViewColumn("took", lambda row: duration((row["last_entry_at"] - row["started_at"]).total_seconds()), right=True),
    _words("reason", wraps=True),
)
REPAIRS_COLUMNS = (
    _words("node", wraps=True),
    _number("device", "GPU"),
    _words("uuid", "UUID", wraps=True),
    _number("failures"),
    _words("codes", "log codes", wraps=True),
    _time("last", "last (UTC)"),
    _words("drained"),
    _words("cause", wraps=True),
)
RATE_COLUMNS = (
    _words("which"),
    _words("when"),
    _number("failures"),
    _amount("device_days", "GPU-days"),
    _number("rate", "per 1,000", form="{:.3g}"),
    _number("ratio", form="{:.2f}"),
    _number("p", form="{:.2g}"),
)
CHECKPOINTS_COLUMNS = (
    _number("iteration"),
    _bytes("bytes", "size"),
    _seconds("seconds", "took"),
    _time("committed_at", "complete (UTC)"),
    _words("folder", wraps=True),
)
EVENTS_COLUMNS = (
    _time("at", "at (UTC)"),
    _words("kind", wraps=True),
    _number("iteration"),
    _words("node", wraps=True),
    _words("text", wraps=True),
)
COST_COLUMNS = (
    ViewColumn("use of time", lambda row: COST_WORDS[row["cause"]]),
    _seconds("seconds", "time"),
    _share("share"),
    _amount("gpu_hours", "GPU-hours"),
)
PROMISES_COLUMNS = (
    _number("epoch"),
    _change("promised"),
    _change("kept"),
    _words("verdict", wraps=True),
    _number("before"),
    _number("after"),
    _words("reason", wraps=True),
)
LEMONS_COLUMNS = (
    ViewColumn("node", lambda row: f"{row['node']} !" if row["lemon"] else str(row["node"]), wraps=True),
    _number("jobs"),
    _amount("device_hours", "device-h"),
    _number("observed", "outages"),
    _number("expected", form="{:.2g}"),
    _number("window_days", "days"),
    _number("q", form="{:.2g}"),
    ViewColumn("GPU", lambda row: row["lemon_devices"] or "-", wraps=True),
    _time("last", "last (UTC)"),
)
FAILURES_COLUMNS = (
    _number("failure", "#"),
    _words("cause", wraps=True),
    ViewColumn("node, device", cells.device),
    _number("iteration"),
    _time("noticed_at", "noticed (UTC)"),
    ViewColumn("recovered in", cells.recovery, right=True, wraps=True),
)
NODES_COLUMNS = (
    _words("node"),
    _words("host", wraps=True),
    _number("devices"),
    ViewColumn("joined (UTC)", cells.arrival),
    _time("lost_at", "lost (UTC)"),
    _words("lost_reason", "reason", wraps=True),
    _words("replaced_by", "replaced by", wraps=True),
)
HOSTS_COLUMNS = (
    _words("node", wraps=True),
    _words("host", wraps=True),
    _time("joined_at", "joined (UTC)"),
    _optional_text("driver"),
    _optional_text("kernel"),
    _optional_text("changed"),
)
DEVICES_COLUMNS = (
    _words("node"),
    _number("device"),
    _optional_text("name"),
    _optional_text("uuid", "UUID"),
    _optional_text("vbios", "VBIOS"),
)
PLACEMENTS_COLUMNS = (
    _optional_text("uuid", "UUID"),
    _words("node", wraps=True),
    _number("device"),
    _time("first_seen", "first seen"),
    _time("last_seen", "last (UTC)"),
    _number("jobs"),
)
WORKERS_COLUMNS = (
    _number("rank"),
    _words("node", wraps=True),
    _number("device"),
    _number("pid"),
    _number("epoch_joined", "joined in"),
    _number("epoch_left", "left in"),
    _number("exit"),
)
ITERATIONS_COLUMNS = (
    _number("iteration"),
    _number("epoch"),
    _number("seconds", form="{:.3f}"),
    _number("predicted_seconds", "predicted", form="{:.3f}"),
    ViewColumn("tokens", lambda row: str(row["tokens"] or "-"), right=True),
    _number("loss", form="{:.4f}"),
    _time("finished_at", "finished (UTC)"),
)
PLANS_COLUMNS = (
    _number("epoch"),
    _words("description", "layout", wraps=True),
    _number("next_iteration", "from"),
    _words("action"),
    ViewColumn("in effect (UTC)", cells.effect),
    ViewColumn("reason", cells.plan_reason, wraps=True),
)
SPARES_COLUMNS = (
    _number("decisions", "changes"),
    _number("untold"),
    _seconds("measured_seconds", "measured"),
    _seconds("saved_seconds", "saved"),
    _amount("saved_gpu_hours", "GPU-h saved"),
    _amount("spare_gpu_hours", "of spare"),
)
DECISIONS_COLUMNS = (
    _time("at", "decided (UTC)"),
    _words("advice", wraps=True),
    _words("action", wraps=True),
    ViewColumn("refused", cells.rejected_candidates, wraps=True),
    ViewColumn("predicted, measured", cells.prediction, wraps=True),
    _words("outcome", wraps=True),
)
PROBES_COLUMNS = (
    _number("probe", "#"),
    _words("occasion"),
    _words("kind"),
    _number("rank"),
    ViewColumn("node, device", cells.device),
    _number("peer"),
    _number("speed", form="{:.2f}"),
    ViewColumn("fit", lambda row: "yes" if row["passed"] else "no"),
    _words("evidence", wraps=True),
)
SUSPICIONS_COLUMNS = (
    _number("suspicion", "#"),
    _words("kind"),
    ViewColumn("suspect", suspects, wraps=True),
    _number("iteration", "since"),
    _number("change", form="{:+.1%}"),
    ViewColumn("test", cells.statistic, wraps=True),
    ViewColumn("outcome", cells.outcome),
    ViewColumn("evidence", lambda row: str(row["outcome_evidence"] or row["evidence"]), wraps=True),
)
SCORES_COLUMNS = (
    _number("iteration"),
    _number("rank"),
    _number("level", form="{:.3f}"),
    _share("evidence"),
)
RECONFIGURATIONS_COLUMNS = (
    _number("epoch"),
    _words("action"),
    _number("attempts", "tries"),
    *(_number(f"{name}_seconds", name, form="{:.2f}") for name in ("park", "plan", "groups", "state")),
    _number("planning_seconds", "think", form="{:.3f}"),
    _number("first_iteration_seconds", "first", form="{:.2f}"),
    _number("seconds", "total", form="{:.2f}"),
    _bytes("bytes_moved", "moved"),
)
DRAINS_COLUMNS = (
    _number("drain", "#"),
    _words("node", wraps=True),
    ViewColumn("by", cells.drain_step),
    _time("drained_at", "decided (UTC)"),
    _time("undrained_at", "undrained (UTC)"),
    _words("reason", wraps=True),
)
REPLACEMENTS_COLUMNS = (
    _number("replacement", "#"),
    _words("instead", "for", wraps=True),
    _words("slurm_job", "job"),
    _words("node", wraps=True),
    _words("outcome"),
    _time("asked_at", "asked (UTC)"),
    _time("joined_at", "joined (UTC)"),
    ViewColumn("reason", cells.request_reason, wraps=True),
)
FAILURES_BY = {by: _counted(by) for by in FAILURE_GROUPS}
COST_BY_JOB = (
    _words("job", wraps=True),
    ID_COLUMN,
    _words("state"),
    _amount("gpu_hours", "GPU-h"),
    _amount("failure_gpu_hours", "lost GPU-h"),
    _share("goodput"),
    _number("failures"),
    _share("ettr", "ETTR"),
    _seconds("mtbf_seconds", "MTBF"),
    _seconds("wall_seconds", "wall"),
)
COST_BY = {by: COST_BY_JOB if by == "job" else _costs(by) for by in COST_GROUPS}


def history_table(view_columns: ViewColumns, rows: list[dict[str, Any]]) -> tuple[list[Column], list[list[str]]]:
    """Return the columns and cells of a view of `resihp history`.

    Rows of several jobs get a column with the job's name, and another with its id if names repeat.
    """
    columns = list(view_columns)
    if any("job_uuid" in row for row in rows):
        columns.insert(0, _words("job", wraps=True))
        names = {row["job_uuid"]: row["job"] for row in rows}
        if len(names) > len(set(names.values())):
            columns.insert(1, JOB_ID_COLUMN)
    if any("money" in row for row in rows):
        columns.append(_amount("money", "money"))
    table_columns = [
        Column(column.heading, column.right, column.wraps, column.heading in ALWAYS_SHOWN) for column in columns
    ]
    return table_columns, [[one_line(column.cell(row)) for column in columns] for row in rows]
