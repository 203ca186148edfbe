"""Derive a job's permanent, unique id from the first record of its journal.

Ledgers identify a job by this id, and job.json uses it to name the journal that belongs to the job. Reads no file and
no clock.
"""

from __future__ import annotations

import json
import uuid

from resihp.record.journal import JobStarted, Record

_NAMESPACE = uuid.UUID("5b1f6a38-7c0e-4b8e-9d55-6a1d2a9c4f10")


def job_uuid(first: Record) -> str:
    """Return the job's uuid. `first`: the first record of its journal. Raises ValueError if `first` is not a
    `JobStarted` record with number 1."""
    entry = first.entry
    if first.seq != 1 or not isinstance(entry, JobStarted):
        raise ValueError(f"record {first.seq} ({type(entry).__name__}) does not begin a journal")
    return str(uuid.uuid5(_NAMESPACE, json.dumps([entry.job, entry.host, entry.user, entry.restart_count, first.at])))
