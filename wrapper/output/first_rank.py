"""Passes on the output of rank 0, line by line, until the job declares a model, so that it appears on the console as
with torchrun.

For a script that trains with resihp, the console shows iterations instead, and the output of rank 0 is only in the
logs, as for all ranks. This module follows the log in the job's folder in a separate thread, so that a folder that
hangs blocks nothing else. It is a listener of the job (`resihp.wrapper.sinks.fanout`). `resihp.wrapper.sinks.terminal`
gets the lines and decides whether to show them.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from resihp.record.journal import ModelDeclared, Record, WorkerStarted
from resihp.wrapper.output.tail import GrowingFiles

LOOK_EVERY_S = 0.5
MAX_LINES = 10_000
"""Most lines that are passed on at one time, the last ones, so that a flood of output does not fill the console."""


class FirstRank:
    """Follows the log of rank 0. `show` is called from a separate thread with lines, and the number of lines dropped
    before them. `past`: records written under earlier leaders, which have already shown the earlier output."""

    def __init__(self, logs: Path, show: Callable[[Sequence[str], int], None], past: Sequence[Record] = ()) -> None:
        self._logs = logs
        self._show = show
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self.follows = False
        """Whether the log is being followed, so that later output is passed on."""
        self._trains = any(isinstance(record.entry, ModelDeclared) for record in past)
        for record in past:
            if isinstance(record.entry, WorkerStarted):
                self._started(record.entry, from_its_end=True)

    def submit(self, record: Record) -> None:
        match record.entry:
            case WorkerStarted():
                self._started(record.entry)
            case ModelDeclared():
                self._trains = True
                self._over.set()
            case _:
                pass

    def close(self, deadline: float) -> None:
        """Pass on the last lines, including an unfinished one, and wait for that until `deadline`."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))

    def _started(self, worker: WorkerStarted, *, from_its_end: bool = False) -> None:
        if worker.rank == 0 and self._thread is None and not self._trains:
            log = self._logs / f"{worker.node}.rank0.log"
            self._thread = threading.Thread(
                target=self._run, args=(log, from_its_end), name="resihp-rank-0", daemon=True
            )
            self._thread.start()

    def _run(self, log: Path, from_its_end: bool) -> None:
        growing = GrowingFiles()
        at = 0
        with suppress(OSError):
            at = log.stat().st_size if from_its_end else 0
        growing.begin(log, at)
        self.follows = True
        over = False
        while not over:
            over = self._over.wait(LOOK_EVERY_S)
            lines: deque[str] = deque(maxlen=MAX_LINES)
            count = 0
            for count, (_, line) in enumerate(  # noqa: B007
                itertools.chain(growing.new(), growing.rest() if over else ()), 1
            ):
                lines.append(line)
            if lines and not self._trains:
                self._show(tuple(lines), count - len(lines))
