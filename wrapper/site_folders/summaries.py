"""Summaries of running jobs that a site lets operators see: one small file for each job, written by the job itself.

A summary belongs to the job's user. A reader trusts the owner of the file and nothing else in it: it opens only small,
plain files, follows no link or path, and takes texts as texts. Any user can write a summary of a job that does not
exist, under their own name. Decides nothing. Written by `resihp.wrapper.sinks.shared_summary`; read by `resihp jobs
--all-users`, and by `resihp status` if it cannot read the job's folder.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from resihp.durable_files import replace_in
from resihp.plain_files import open_plain
from resihp.wrapper import registry
from resihp.wrapper.job_files.contents import READ_ERRORS, ProgressFile
from resihp.wrapper.job_files.registered import SLURM_NAME, slurm_job_of
from resihp.wrapper.site_folders.folder import SiteFolderError, file_mode, opened, printable, user_of

SHARE_KEY = "share"
MAX_SUMMARY_BYTES = 16 << 10
MAX_TEXT = 300
MAX_OF_USER = 500
"""Most summaries of one user that are read: jobs have one each."""
MAX_ENTRIES = 100_000
"""Most entries of the folder that are looked at."""

_NAME = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.+-]{0,150})-([0-9]{1,10})\.json", re.ASCII)
"""Name of a summary's file: its cluster and Slurm job, and the id of its user."""


class JobSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The summary of a running job. Times are UTC, in seconds since 1970. `event`: the last event in words; empty for
    none."""

    uid: int
    job: str
    cluster: str
    host: str
    written_at: float
    progress: ProgressFile
    event: str = ""
    event_at: float = 0.0


class Summaries(NamedTuple):
    """The summaries in the folder, and the number of its files that are none."""

    jobs: list[JobSummary]
    others: int


def publish(folder: Path, summary: JobSummary) -> None:
    """Write the summary of a job, in place of the former one. Raises SiteFolderError."""
    progress = msgspec.structs.replace(summary.progress, layout=printable(summary.progress.layout, MAX_TEXT))
    content = msgspec.json.encode(
        msgspec.structs.replace(summary, progress=progress, event=printable(summary.event, MAX_TEXT))
    )
    with opened(folder, SHARE_KEY) as at:
        try:
            replace_in(at, _file_name(summary.cluster, summary.job), content, file_mode(at))
        except OSError as error:
            words = (error.strerror or "cannot be written").lower()
            raise SiteFolderError(f"[site] {SHARE_KEY} {folder}: {words}; tell the administrator") from None


def withdraw(folder: Path, cluster: str, job: str) -> None:
    """Remove the summary of a job. Raises SiteFolderError."""
    with opened(folder, SHARE_KEY) as at, suppress(OSError):
        os.unlink(_file_name(cluster, job), dir_fd=at)


def _file_name(cluster: str, job: str) -> str:
    """Return the name of a job's file; the runs of one Slurm job share it, so that the next run replaces the file of
    a killed one."""
    named = re.sub(r"[^A-Za-z0-9_.+-]", "_", f"{cluster}-{slurm_job_of(job) or job}")
    return f"{named[:150]}-{os.geteuid()}.json"


def read(folder: Path) -> Summaries:
    """Return the summaries of all users' jobs, newest first. Raises SiteFolderError if the folder cannot be listed.

    A file is left out if it is not plain, too large, not of the user in its name, or not a summary.
    """
    jobs: list[JobSummary] = []
    others = 0
    with opened(folder, SHARE_KEY) as at:
        for name in _names(folder, at):
            summary = _read(at, name)
            if summary is None:
                others += 1
            else:
                jobs.append(summary)
    return Summaries(sorted(jobs, key=lambda summary: -summary.written_at), others)


def _names(folder: Path, at: int) -> Iterator[str]:
    """Yield the names of files that may be summaries, a bounded number of each user."""
    of_user: Counter[int] = Counter()
    try:
        with os.scandir(f"/proc/self/fd/{at}") as entries:
            for number, entry in enumerate(entries):
                if number >= MAX_ENTRIES:
                    return
                if _NAME.fullmatch(entry.name) is None:
                    continue
                with suppress(OSError):
                    owner = entry.stat(follow_symlinks=False).st_uid
                    of_user[owner] += 1
                    if of_user[owner] <= MAX_OF_USER:
                        yield entry.name
    except OSError as error:
        words = (error.strerror or "").lower()
        raise SiteFolderError(
            f"[site] {SHARE_KEY} {folder}: cannot be listed: {words}; the site shows it to the group of the folder"
        ) from None


def _read(at: int, name: str) -> JobSummary | None:
    match = _NAME.fullmatch(name)
    assert match is not None
    try:
        with os.fdopen(open_plain(Path(name), at=at), "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_nlink != 1 or status.st_uid != int(match[2]) or status.st_size > MAX_SUMMARY_BYTES:
                return None
            summary = msgspec.json.decode(file.read(MAX_SUMMARY_BYTES), type=JobSummary)
    except READ_ERRORS:
        return None
    times = (summary.written_at, summary.event_at, *(last.finished_at for last in summary.progress.recent))
    is_valid = summary.uid == status.st_uid and SLURM_NAME.fullmatch(summary.job) and len(summary.job) < 64
    if not is_valid or not all(0 <= time_s < registry.LATEST_S for time_s in times):
        return None
    return msgspec.structs.replace(
        summary,
        cluster=printable(summary.cluster, MAX_TEXT),
        host=printable(summary.host, MAX_TEXT),
        event=printable(summary.event, MAX_TEXT),
        progress=msgspec.structs.replace(summary.progress, layout=printable(summary.progress.layout, MAX_TEXT)),
    )


def user_in(summary: JobSummary) -> str:
    """Return the name of the job's user: the owner of the file."""
    return user_of(summary.uid)
