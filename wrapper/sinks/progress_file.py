"""How far a job is, in a small file of its folder (`job_files.ProgressFile`): `resihp jobs` opens no ledger for it; and
in job.json, which journal is the job's.

Listens to the journal (`wrapper.sinks.fanout`). A thread of its own replaces the file, at most every `EVERY_S`, so that
nobody waits for a folder that hangs. Nothing depends on it: what cannot be written is logged once, and whoever finds
the file old asks the ledger.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from resihp.errors import JobNotFoundError
from resihp.record import fold, journal
from resihp.record.job_uuid import job_uuid
from resihp.record.state import JobRecord
from wrapper.job_files import LastIteration, OurJob, ProgressFile
from wrapper.output.progress import RECENT
from wrapper.strict_modes import write_private

EVERY_S = 2.0

_log = logging.getLogger("resihp.progress")


def after(found: ProgressFile, record: journal.Record) -> ProgressFile:
    """What one record changes."""
    match record.entry:
        case journal.JobStarted() as entry:
            return msgspec.structs.replace(found, nodes=entry.nodes, gpus_per_node=entry.gpus_per_node)
        case journal.ModelDeclared(declare=declare):
            return msgspec.structs.replace(found, target=declare.iterations, resumed_from=declare.resume_from)
        case journal.IterationCommitted(outcome=outcome) as entry:
            last = LastIteration(
                iteration=outcome.iteration,
                loss=outcome.loss,
                tokens=outcome.tokens,
                seconds=entry.seconds,
                finished_at=record.at,
            )
            return msgspec.structs.replace(found, recent=(*found.recent[1 - RECENT :], last))
        case _:
            return found


class ProgressFileWriter:
    """A listener. `past`: the records of those who led before us."""

    def __init__(
        self, job: OurJob, past: Sequence[journal.Record] = (), *, clock: Callable[[], float] = time.time
    ) -> None:
        self._job = job
        self._uuid = ""
        """Of the job, from the first record of its journal; empty once job.json has it."""
        self._clock = clock
        self._found = ProgressFile(began_at=0.0, written_at=0.0, nodes=0, gpus_per_node=0)
        self._record = JobRecord()
        """Says which plan is in effect."""
        for record in past:
            self._follow(record)
        self._began_at: float | None = None
        self._changed, self._closing = threading.Event(), threading.Event()
        self._failed = False
        if past:
            self._changed.set()
        # What hangs must not keep the supervisor's process from ending, hence a daemon.
        self._thread = threading.Thread(target=self._run, name="progress file", daemon=True)
        self._thread.start()

    def submit(self, record: journal.Record) -> None:
        before = self._found
        self._follow(record)
        if self._found is not before:
            self._changed.set()

    def close(self, deadline: float) -> None:
        """Nothing is left to be told: of a job that is over the registry knows more."""
        self._closing.set()
        self._changed.set()

    def _follow(self, record: journal.Record) -> None:
        if isinstance(record.entry, journal.JobStarted) and record.seq == 1:
            self._uuid = job_uuid(record)
        self._found = after(self._found, record)
        shown = self._record.shown_plan
        fold.apply(self._record, record.entry)
        if self._record.shown_plan is not shown:
            plan = self._record.shown_plan
            layout = "" if plan is None else plan.describe()
            self._found = msgspec.structs.replace(self._found, layout=layout)

    def _run(self) -> None:
        while True:
            self._changed.wait()
            if self._closing.is_set():
                return
            self._changed.clear()
            self._write()
            self._closing.wait(EVERY_S)

    def _write(self) -> None:
        try:
            if self._began_at is None:  # read here, since files may hang
                self._began_at = self._job.read().created_at
            if self._uuid:
                self._job.set_uuid(self._uuid)
                self._uuid = ""
            told = msgspec.structs.replace(self._found, began_at=self._began_at, written_at=self._clock())
            write_private(self._job.progress_file, msgspec.json.encode(told))
            self._failed = False
        except (OSError, JobNotFoundError) as error:
            if not self._failed:
                _log.warning("%s: cannot be written: %s", self._job.progress_file, error)
            self._failed = True
