"""Publishes a summary of the running job in the site's folder for operators (`resihp.wrapper.site_folders.summaries`).

Listens to the journal (`resihp.wrapper.sinks.fanout`). A separate thread writes the summary every `PUBLISH_EVERY_S`,
also without news, so that an old one shows that the job's supervisor is gone; nothing else waits for a folder that
hangs. The summary is removed when the job ends. The first failure is reported, and that it works again. Decides
nothing.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from resihp.errors import ResihpError
from resihp.record import journal
from resihp.wrapper.output.job_history import JobHistory
from resihp.wrapper.sinks.hooks import entries_of
from resihp.wrapper.sinks.progress_file import ProgressSoFar
from resihp.wrapper.site_folders.summaries import JobSummary, publish, withdraw

PUBLISH_EVERY_S = 30.0
SHOWN_ENTRIES = entries_of(
    ("start", "failure", "recovery", "node", "drain", "replacement", "leader", "signal", "end")
) - {journal.NodeJoined}
"""Entries of the journal that are shown as a job's last event."""


class SharedSummary:
    """A listener that publishes the job's summary. `past`: the records written under earlier leaders."""

    def __init__(
        self,
        folder: Path,
        cluster: str,
        job: str,
        *,
        say: Callable[[str], None],
        past: Sequence[journal.Record] = (),
        history: JobHistory | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._folder, self._cluster, self._job = folder, cluster, job
        self._say = say
        self._clock = clock
        self._so_far = ProgressSoFar(history)
        self._event: journal.Record | None = None
        self._ended = False
        self._failing = False
        self._closing = threading.Event()
        for record in past:
            self.submit(record)
        # A daemon thread, so that a file system that hangs cannot keep the supervisor from exiting.
        self._thread = threading.Thread(target=self._run, name="shared summary", daemon=True)
        self._thread.start()

    def submit(self, record: journal.Record) -> None:
        self._so_far.follow(record)
        if type(record.entry) in SHOWN_ENTRIES:
            self._event = record
        self._ended = self._ended or isinstance(record.entry, journal.JobEnded)

    def close(self, deadline: float) -> None:
        """Stop publishing and, if the job has ended, remove the summary; a successor goes on with it otherwise."""
        self._closing.set()
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while not self._closing.is_set():
            self._publish()
            self._closing.wait(PUBLISH_EVERY_S if self._so_far.progress.nodes else 1.0)
        if self._ended:
            with suppress(ResihpError, OSError):
                withdraw(self._folder, self._cluster, self._job)

    def _publish(self) -> None:
        progress, event, now = self._so_far.progress, self._event, self._clock()
        if not progress.nodes:
            return  # the journal has not begun
        try:
            summary = JobSummary(
                uid=os.geteuid(),
                job=self._job,
                cluster=self._cluster,
                host=socket.gethostname(),
                written_at=now,
                progress=msgspec.structs.replace(progress, written_at=now),
                event="" if event is None else _words(event.entry),
                event_at=0.0 if event is None else event.at,
            )
            publish(self._folder, summary)
        except (ResihpError, OSError, ValueError) as error:
            if not self._failing:
                self._report(f"{error}; not reported again until it works, the job continues")
            self._failing = True
        else:
            if self._failing:
                self._report("the summary for operators is written again")
            self._failing = False

    def _report(self, text: str) -> None:
        with suppress(RuntimeError):  # raised if the event loop has ended
            self._say(text)


def _words(entry: journal.AnyEntry) -> str:
    from resihp.record.describe import explain

    return explain(entry)
