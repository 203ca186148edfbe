"""Computes the rows of `resihp jobs --all-users`, and finds a job for `resihp status`, from the summaries that running
jobs share with their site.

Reads only the folder that `/etc/resihp.toml` names. The owner of a summary's file is the job's user; everything else is
the user's own statement (`resihp.wrapper.site_folders.summaries`).
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from resihp.errors import ConfigurationError, UsageError
from resihp.wrapper.config.sources import SITE_FILE, read
from resihp.wrapper.job_files.registered import slurm_job_of
from resihp.wrapper.output.progress import progress_in
from resihp.wrapper.site_folders import summaries
from resihp.wrapper.site_folders.folder import SiteFolderError
from resihp.wrapper.site_folders.summaries import JobSummary, user_in

Row = dict[str, Any]

SILENT_S = 150.0
"""Seconds after which a summary is too old: its job writes one every 30 s. The job's supervisor is gone, or does not
reach the folder."""


def listed_of_all_users(now_s: float, say: Callable[[str], None]) -> list[Row]:
    """Return the rows of all shared jobs, by user. Raises UsageError if the site shares none, SiteFolderError."""
    folder = read({}).site.share
    if not folder:
        raise UsageError(
            f"jobs of other users are listed only where {SITE_FILE} names a folder for their summaries ([site] share); "
            "squeue lists the jobs that Slurm knows"
        )
    shared = summaries.read(Path(folder))
    if shared.others:
        say(f"warning: {folder}: {shared.others} files there are no summaries of the users who own them, and left out")
    rows = [row for summary in shared.jobs if (row := _row(summary, now_s)) is not None]
    return sorted(rows, key=lambda row: (row["user"], row["cluster"], row["job"]))


def shared_rows_of(job: str, now_s: float) -> list[Row]:
    """Return the rows of shared jobs with this name, or of this Slurm job. Empty if there is none, or if the site
    shares none."""
    try:
        folder = read({}).site.share
        shared_jobs = summaries.read(Path(folder)).jobs if folder else []
    except (ConfigurationError, SiteFolderError):
        return []
    name = Path(job).name
    rows = [_row(summary, now_s) for summary in shared_jobs if name in (summary.job, slurm_job_of(summary.job))]
    return [row for row in rows if row is not None]


def _row(summary: JobSummary, now_s: float) -> Row | None:
    """Return the row of a job, with the keys of `resihp jobs`; None for a summary with impossible times."""
    figures = progress_in(summary.progress, now_s)
    if figures is None:
        return None
    is_silent = summary.written_at < now_s - SILENT_S
    return {
        "job": summary.job,
        "state": "silent" if is_silent else "running",
        "slurm_state": None,
        "slurm_reason": None,
        "exit_code": None,
        **figures,
        "began_at": None,
        "ended_at": None,
        "host": summary.host,
        "user": user_in(summary),
        "cluster": summary.cluster,
        "slurm_job": slurm_job_of(summary.job),
        "ledger": None,
        "folder": None,
        "event": summary.event or None,
        "event_at": datetime.fromtimestamp(summary.event_at, UTC) if summary.event else None,
        "shared_at": datetime.fromtimestamp(summary.written_at, UTC),
    }
