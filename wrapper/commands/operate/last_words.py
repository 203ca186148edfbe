"""What the worker that failed first has written last: told by `resihp run` when its job has failed. Reads only."""

from __future__ import annotations

import os
from contextlib import suppress

from resihp.errors import JobNotFoundError, ProtocolError
from resihp.plain_files import open_plain
from resihp.record import journal
from wrapper.job_folder import Job

LINES = 8
MOST_BYTES = 1 << 14
"""Of a log's end."""


def last_words(job: Job) -> str:
    """Path of its log, with the last lines where nobody has shown a traceback of it; empty if no worker failed."""
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
                case journal.FailureFound() as found if cause is None:
                    cause = found
    shown = cause is not None and "Traceback" in cause.evidence
    if cause is not None and cause.diagnosed is not None and cause.diagnosed.ranks:
        failed = cause.diagnosed.ranks[0]  # who was noticed first may only have lost a peer
    if failed is None or failed not in nodes:
        return ""
    log = job.logs / f"{nodes[failed]}.rank{failed}.log"
    try:
        with os.fdopen(open_plain(log), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - MOST_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    said = [line for line in lines if line.strip()][-LINES:]
    if shown or not said:
        return f"log of rank {failed}: {log}"
    return "\n".join([f"log of rank {failed}: {log}; it ends with", *(f"  {line}" for line in said)])
