"""States of the jobs of `resihp jobs` in Slurm, with one call to Slurm for all rows.

Decides which of Slurm's jobs is which of ours, and which of ours are over. Never raises for a Slurm that does not
answer. Called by `listing`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from wrapper.exit_codes import REQUEUE_REQUESTED
from wrapper.job_files.job import STARTS_S
from wrapper.job_files.registered import NEVER_BEGAN
from wrapper.registry import QUEUED

if TYPE_CHECKING:
    from slurm.client import JobView, Slurm

Row = dict[str, Any]
Say = Callable[[str], None]

NOT_SEEN = "not seen from here"
"""State of a job whose folder another host made and this one does not see."""
UNKNOWN_STATE = "unknown"
"""State of a job without a visible supervisor and with its journal elsewhere, or with an unreadable folder."""
SLURM_TIMEOUT_S = 3.0
"""Seconds to wait for Slurm."""


def add_slurm_states(rows: Iterable[Row], slurm: Slurm | None, say: Say) -> list[Row]:
    """Add Slurm's state to jobs not known to have ended and to jobs that Slurm may run again, with one call to Slurm.

    Return the jobs that Slurm neither runs nor holds and whose end is unknown otherwise. Slurm reuses job numbers, and
    each cluster has its own: a job of Slurm's that is older than ours, of another user or on another cluster, is a
    different job.
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
    """Return the rows of this cluster, and Slurm's jobs by their number; nothing if Slurm does not answer."""
    if slurm is None:
        from slurm.commands import CommandLine

        slurm = CommandLine(timeout_s=SLURM_TIMEOUT_S)
    from slurm.errors import SlurmError

    try:
        here = slurm.cluster() if any(row["cluster"] for row in rows) else ""
        rows_here = [row for row in rows if row["cluster"] in (None, here)]
        views = slurm.jobs(dict.fromkeys(row["slurm_job"] for row in rows_here)) if rows_here else {}
    except SlurmError as error:
        say(f"states of Slurm are missing: {error}")
        return [], {}
    return rows_here, views


def _is_over_in_slurm(row: Row, view: JobView | None) -> bool:
    """Add Slurm's state to the row; return whether Slurm neither runs nor holds the job and its end is unknown."""
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
    """Of several runs of a job in Slurm, the last one."""
    of_job = {(row["cluster"], row["slurm_job"]): row for row in sorted(rows, key=lambda row: row["began_at"])}
    return of_job.values()


def _may_run_again(row: Row) -> bool:
    """Whether it asked Slurm for that, or died in a way that Slurm may have seen."""
    return bool(row["exit_code"] == REQUEUE_REQUESTED or row["state"] == "abnormal")


def _is_same_job(view: JobView, row: Row) -> bool:
    """Return whether Slurm's job is the job of this row; a requeued job counts as submitted when it was requeued."""
    began_s: float = row["began_at"].timestamp()
    if row["ended_at"] is not None:
        in_time = view.submitted_at is None or view.submitted_at >= began_s
    else:
        in_time = row["state"] == QUEUED or view.submitted_at is None or view.submitted_at <= began_s + STARTS_S
    return in_time and view.user == str(row["user"])
