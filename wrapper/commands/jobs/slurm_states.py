"""Slurm's states of the jobs in `resihp jobs`, with one call to Slurm for all rows.

Decides which of Slurm's jobs belongs to which row, and which jobs are over. Never raises an error if Slurm does not
answer. Called by `listing`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from resihp.wrapper.exit_codes import REQUEUE_REQUESTED
from resihp.wrapper.job_files.job import STARTS_S
from resihp.wrapper.job_files.registered import NEVER_BEGAN
from resihp.wrapper.registry import QUEUED

if TYPE_CHECKING:
    from resihp.slurm.client import JobView, Slurm

Row = dict[str, Any]
Say = Callable[[str], None]

NOT_SEEN = "not seen from here"
"""State of a job whose folder was created on another host and is not visible on this host."""
UNKNOWN_STATE = "unknown"
"""State of a job without a visible supervisor whose journal is on another machine, or whose folder cannot be read."""
SLURM_TIMEOUT_S = 3.0
"""Seconds to wait for an answer of Slurm."""


def add_slurm_states(rows: Iterable[Row], slurm: Slurm | None, say: Say) -> list[Row]:
    """Add Slurm's state to the rows of jobs that are not known to have ended, and of jobs that Slurm may run again.

    Returns the rows of jobs that are over according to Slurm and whose end is not known otherwise. Slurm reuses the
    numbers of jobs, and each cluster has its own numbers: a job in Slurm that is older than the row's job, of another
    user, or on another cluster is a different job.
    """
    slurm_rows = [row for row in rows if row["slurm_job"]]
    newest = _newest(slurm_rows)
    queried_rows = [row for row in slurm_rows if row["ended_at"] is None or (row in newest and _may_run_again(row))]
    if not queried_rows or (slurm is None and shutil.which("squeue") is None):
        return []
    queried_rows, views = _ask(slurm, queried_rows, say)
    over = []
    for row in queried_rows:
        view = views.get(row["slurm_job"])
        if view is not None and not _is_same_job(view, row):
            view = None
        if _is_over_in_slurm(row, view):
            over.append(row)
    return over


def _ask(slurm: Slurm | None, rows: list[Row], say: Say) -> tuple[list[Row], Mapping[str, JobView]]:
    """Return the rows of this cluster, and Slurm's jobs by number. Both are empty if Slurm does not answer."""
    if slurm is None:
        from resihp.slurm.commands import CommandLine

        slurm = CommandLine(timeout_s=SLURM_TIMEOUT_S)
    from resihp.slurm.errors import SlurmError

    try:
        here = slurm.cluster() if any(row["cluster"] for row in rows) else ""
        rows_here = [row for row in rows if row["cluster"] in (None, here)]
        views = slurm.jobs(dict.fromkeys(row["slurm_job"] for row in rows_here)) if rows_here else {}
    except SlurmError as error:
        say(f"states of Slurm are missing: {error}")
        return [], {}
    return rows_here, views


def _is_over_in_slurm(row: Row, view: JobView | None) -> bool:
    """Add Slurm's state to the row. Return whether Slurm has the job neither running nor waiting, and its end is not
    known otherwise."""
    if row["ended_at"] is not None and (view is None or view.state != "pending"):
        return False
    is_active = False
    if view is not None:
        row["slurm_state"] = view.state
        row["slurm_reason"] = view.why or None
        is_active = view.active
    if row["state"] == QUEUED and (view is None or view.state != "pending"):
        row["state"] = "starting" if is_active else NEVER_BEGAN
    return not is_active and row["state"] in (NEVER_BEGAN, NOT_SEEN, UNKNOWN_STATE)


def _newest(rows: Iterable[Row]) -> Collection[Row]:
    """Return the last run of each Slurm job."""
    of_job = {(row["cluster"], row["slurm_job"]): row for row in sorted(rows, key=lambda row: row["began_at"])}
    return of_job.values()


def _may_run_again(row: Row) -> bool:
    """Return whether Slurm may run the job again: the job requested that, or died in a way that Slurm may have noticed,
    or was stopped, perhaps because somebody requeued it."""
    return row["exit_code"] == REQUEUE_REQUESTED or row["state"] in ("abnormal", "cancelled")


def _is_same_job(view: JobView, row: Row) -> bool:
    """Return whether Slurm's job is the job of this row. A requeued job counts as submitted at the time when it was
    requeued."""
    began_s: float = row["began_at"].timestamp()
    if row["ended_at"] is not None:
        in_time = view.submitted_at is None or view.submitted_at >= began_s
    else:
        in_time = row["state"] == QUEUED or view.submitted_at is None or view.submitted_at <= began_s + STARTS_S
    return in_time and view.user == str(row["user"])
