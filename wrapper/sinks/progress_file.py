"""Writes a job's progress to a small file in its folder (`job_files.ProgressFile`), so that `resihp jobs` need not open
the ledger. Also writes the job's id to job.json.

Listens to the journal (`resihp.wrapper.sinks.fanout`). A separate thread replaces the file, at most every
`WRITE_EVERY_S`, so that nothing else waits for a folder that hangs. Nothing depends on the file: a failed write is
logged once, and readers that find the file too old read the ledger.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from resihp.errors import JobNotFoundError
from resihp.record import journal
from resihp.record.job_uuid import job_uuid
from resihp.wrapper.job_files.contents import LastIteration, ProgressFile
from resihp.wrapper.job_files.job import OurJob
from resihp.wrapper.output.job_history import JobHistory, PastPlan
from resihp.wrapper.output.progress import RECENT_ITERATIONS
from resihp.wrapper.strict_modes import write_private

WRITE_EVERY_S = 2.0

_log = logging.getLogger("resihp.progress")


def after(progress: ProgressFile, record: journal.Record) -> ProgressFile:
    """Return the progress after the next record."""
    entry = record.entry
    match entry:
        case journal.JobStarted():
            return msgspec.structs.replace(progress, nodes=entry.nodes, gpus_per_node=entry.gpus_per_node)
        case journal.ModelDeclared(declare=declare):
            return msgspec.structs.replace(
                progress, target=declare.iterations, resumed_from=declare.resume_from, redone=False, recent=()
            )
        case journal.CounterSeen():
            redone = entry.iteration <= entry.furthest
            return msgspec.structs.replace(progress, target=entry.goal, redone=redone)
        case journal.IterationCommitted(outcome=outcome):
            last = LastIteration(
                iteration=outcome.iteration,
                loss=None if outcome.loss_is_unknown else outcome.loss,
                tokens=outcome.tokens,
                seconds=entry.seconds,
                finished_at=record.at,
            )
            return msgspec.structs.replace(
                progress, redone=False, recent=(*progress.recent[1 - RECENT_ITERATIONS :], last)
            )
        case journal.RollbackDecided():
            recent = tuple(last for last in progress.recent if last.iteration <= entry.iteration)
            return msgspec.structs.replace(progress, resumed_from=entry.iteration, recent=recent)
        case _:
            return progress


class ProgressSoFar:
    """The progress of a job after the records that it has followed. `history`: the job's history, shared with other
    listeners; None to build one."""

    def __init__(self, history: JobHistory | None = None) -> None:
        self.progress = ProgressFile(began_at=0.0, written_at=0.0, nodes=0, gpus_per_node=0)
        self._history = history or JobHistory(plans_kept=1)
        self._shown_plan: PastPlan | None = None

    def follow(self, record: journal.Record) -> None:
        self.progress = after(self.progress, record)
        self._history.follow(record)
        if (plan := self._history.shown_plan) is not self._shown_plan:
            self._shown_plan = plan
            layout = "" if plan is None else plan.description
            self.progress = msgspec.structs.replace(self.progress, layout=layout)


class ProgressFileWriter:
    """A listener that writes the progress file. `past`: the records written under earlier leaders."""

    def __init__(
        self,
        job: OurJob,
        past: Sequence[journal.Record] = (),
        *,
        history: JobHistory | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Start the thread that writes the file. `history`: the job's history, shared with other listeners; None to
        build one."""
        self._job = job
        self._uuid = ""
        """The job's id, from the first record of its journal; empty once it is written to job.json."""
        self._clock = clock
        self._so_far = ProgressSoFar(history)
        for record in past:
            self._follow(record)
        self._began_at: float | None = None
        self._changed, self._closing = threading.Event(), threading.Event()
        self._failed = False
        if past:
            self._changed.set()
        # A daemon thread, so that a file system that hangs cannot keep the supervisor from exiting.
        self._thread = threading.Thread(target=self._run, name="progress file", daemon=True)
        self._thread.start()

    def submit(self, record: journal.Record) -> None:
        before = self._so_far.progress
        self._follow(record)
        if self._so_far.progress is not before:
            self._changed.set()

    def close(self, deadline: float) -> None:
        """Stop writing. The last state need not be written, as the registry has the job's end."""
        self._closing.set()
        self._changed.set()

    def _follow(self, record: journal.Record) -> None:
        if isinstance(record.entry, journal.JobStarted) and record.seq == 1:
            self._uuid = job_uuid(record)
        self._so_far.follow(record)

    def _run(self) -> None:
        while True:
            self._changed.wait()
            if self._closing.is_set():
                return
            self._changed.clear()
            self._write()
            self._closing.wait(WRITE_EVERY_S)

    def _write(self) -> None:
        try:
            if self._began_at is None:  # read in this thread, since the file system may hang
                self._began_at = self._job.read().created_at
            if self._uuid:
                self._job.set_uuid(self._uuid)
                self._uuid = ""
            progress = msgspec.structs.replace(self._so_far.progress, began_at=self._began_at, written_at=self._clock())
            write_private(self._job.progress_file, msgspec.json.encode(progress))
            self._failed = False
        except (OSError, JobNotFoundError) as error:
            if not self._failed:
                _log.warning("%s: cannot be written: %s", self._job.progress_file, error)
            self._failed = True
