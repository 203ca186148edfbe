"""Messages to what may take nothing for a while: a supervisor's log and, under Slurm, its stderr lie on the shared file
system, and a terminal is stopped by Ctrl-S, or by a connection that stalls.

Whoever prints or logs goes on at once; a thread writes. What does not fit the queue any more is left out, and said
so. Used by the guardian and the supervisor, which must never wait for a folder or for a reader.
"""

from __future__ import annotations

import atexit
import io
import logging
import queue
import sys
import threading
from pathlib import Path
from typing import Literal, TextIO

from wrapper.strict_modes import private

MOST_LINES = 10_000
MOST_CHARACTERS = 1 << 24
"""What waits to be written; a script may print faster than its output is read."""
LAST_WRITE_S = 2.0
"""How long the end of a process waits for what it said last."""
LAST_ON_A_TERMINAL_S = 60.0
"""The same where somebody has stopped a terminal, and may go on reading. All else is done by then."""


class PatientOutput(io.TextIOBase):
    """Stands for a stream; never blocks."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._said: queue.Queue[str | None] = queue.Queue(MOST_LINES)
        self._left_out = 0
        self._put = self._taken = 0
        """Characters, each counted by one thread alone."""
        self._is_terminal = stream.isatty()
        """Asked once: whoever asks a file that hangs waits."""
        self._thread = threading.Thread(target=self._run, name="resihp-output", daemon=True)
        self._thread.start()

    def write(self, text: str) -> int:
        try:
            if self._put - self._taken > MOST_CHARACTERS:
                raise queue.Full
            if self._left_out:
                self._queue(f"resihp: {self._left_out} messages could not be written in time\n")
                self._left_out = 0
            self._queue(text)
        except queue.Full:
            self._left_out += 1
        return len(text)

    def _queue(self, text: str) -> None:
        self._said.put_nowait(text)
        self._put += len(text)

    def flush(self) -> None: ...

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._is_terminal

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def close(self) -> None:
        """Write what is still to be written, or give it up where the file hangs."""
        if self._thread.is_alive():
            patience_s = LAST_ON_A_TERMINAL_S if self._is_terminal else LAST_WRITE_S
            try:
                self._said.put(None, timeout=patience_s)
            except queue.Full:
                return
            self._thread.join(patience_s)

    def _run(self) -> None:
        while (text := self._said.get()) is not None:
            try:
                self._stream.write(text)
                self._stream.flush()
            except (OSError, ValueError):  # a full disk, or a reader that has gone: training is more important
                self._left_out += 1
            self._taken += len(text)


def never_wait_for(*names: Literal["stdout", "stderr"]) -> None:
    """From here on, printing there does not block."""
    for name in names:
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, PatientOutput):
            setattr(sys, name, _written_behind(stream))


def log_without_waiting(path: Path) -> None:
    """What this process logs is added to the end of `path`; whoever logs does not wait for it."""
    stream = _written_behind(open(path, "a", opener=private))  # noqa: SIM115 - it is as long as we are
    logging.basicConfig(stream=stream, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def _written_behind(stream: TextIO) -> PatientOutput:
    """Its last lines are written as the process ends, or given up."""
    patient = PatientOutput(stream)
    atexit.register(patient.close)
    return patient
