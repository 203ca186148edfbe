"""Returns the last lines of the worker that failed first; `resihp run` prints them when its job has failed. Reads
only."""

from __future__ import annotations

import os
from contextlib import suppress

from resihp.errors import JobNotFoundError, ProtocolError
from resihp.plain_files import open_plain
from resihp.record import journal
from resihp.wrapper.job_folder import Job

MAX_LINES = 8
MAX_BYTES = 1 << 14
"""Bytes that are read from the end of a log."""


def last_words(job: Job) -> str:
    """Return the path of the log of the worker that failed first, with its last lines unless a traceback was already
    shown; empty if no worker failed."""
    nodes: dict[int, str] = {}
    failed: int | None = None
    cause: journal.FailureFound | None = None
    with suppress(OSError, ProtocolError, JobNotFoundError):
        for record in job.records():
            match record.entry:
                case journal.WorkerStarted(rank=rank, node=node):
                    nodes[rank] = node
                case journal.WorkerEnded(rank=rank, exit=status) if status and failed is None:
                    failed = rank
                case journal.FailureFound() as failure if cause is None:
                    cause = failure
    has_traceback = cause is not None and "Traceback" in cause.evidence
    if cause is not None and cause.diagnosed is not None and cause.diagnosed.ranks:
        failed = cause.diagnosed.ranks[0]  # not the worker that ended first, as it may only have lost its peer
    if failed is None or failed not in nodes:
        return ""
    log = job.logs / f"{nodes[failed]}.rank{failed}.log"
    try:
        with os.fdopen(open_plain(log), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    last_lines = [line for line in lines if line.strip()][-MAX_LINES:]
    if has_traceback or not last_lines:
        return f"log of rank {failed}: {log}"
    return "\n".join([f"log of rank {failed}: {log}; it ends with", *(f"  {line}" for line in last_lines)])
