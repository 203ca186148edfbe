"""What rank 0 prints, line by line, until the job says what it trains: on the console as torchrun has it.

A script that trains with resihp has its iterations there instead; its prints stay in its log, where those of all ranks
are. Follows the log in the job's folder, in a thread of its own: a folder that hangs holds up nothing else. Hears of
the job as the other listeners do (`wrapper.sinks.fanout`); who is handed the lines decides whether they are shown
(`wrapper.sinks.terminal`).
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
from wrapper.output.tail import GrowingFiles

LOOK_EVERY_S = 0.2
MOST_LINES = 10_000
"""That are handed on of one look, the last ones: a console takes no more, and a log of any length was printed."""


class FirstRank:
    """`show` is handed lines, and how many before them are left out, from our thread. `past`: records of those who led
    before us, who have shown what was printed until now."""

    def __init__(self, logs: Path, show: Callable[[Sequence[str], int], None], past: Sequence[Record] = ()) -> None:
        self._logs = logs
        self._show = show
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self.follows = False
        """Whether the log has been looked at: what comes from then on is handed on."""
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
        """The last lines, also one that never ended."""
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
            lines: deque[str] = deque(maxlen=MOST_LINES)
            count = 0
            for count, (_, line) in enumerate(  # noqa: B007
                itertools.chain(growing.new(), growing.rest() if over else ()), 1
            ):
                lines.append(line)
            if lines and not self._trains:
                self._show(tuple(lines), count - len(lines))
