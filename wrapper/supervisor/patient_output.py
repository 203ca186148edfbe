"""Output that never blocks the writing thread. Streams may stall: a supervisor's log and, under Slurm, its stderr are
on the shared file system, and a terminal may be stopped by Ctrl-S or by a slow connection.

Printing and logging return at once; a thread writes. Messages that do not fit into the queue are dropped, and the
number of dropped messages is reported. Used by the guardian and the supervisor, which must never wait for a folder or
for a reader.
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

from resihp.wrapper.strict_modes import private

MAX_QUEUED_LINES = 10_000
MAX_QUEUED_CHARACTERS = 1 << 24
"""Limit on the number of characters that wait to be written: a script may print faster than its output is read."""
CLOSE_TIMEOUT_S = 2.0
"""How long the process waits at its exit for its last messages to be written."""
TERMINAL_CLOSE_TIMEOUT_S = 60.0
"""How long the process waits at its exit for a terminal, which the user may have stopped and may resume. By then there
is nothing else left to do."""


class PatientOutput(io.TextIOBase):
    """Replaces a text stream by one that never blocks."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._messages: queue.Queue[str | None] = queue.Queue(MAX_QUEUED_LINES)
        self._left_out = 0
        self._queued_characters = self._written_characters = 0
        """Total numbers of characters. Each counter is updated by one thread only."""
        self._is_terminal = stream.isatty()
        """Determined only once, because the call may block if the file hangs."""
        self._thread = threading.Thread(target=self._run, name="resihp-output", daemon=True)
        self._thread.start()

    def write(self, text: str) -> int:
        try:
            if self._queued_characters - self._written_characters > MAX_QUEUED_CHARACTERS:
                raise queue.Full
            if self._left_out:
                self._queue(f"resihp: {self._left_out} messages could not be written in time\n")
                self._left_out = 0
            self._queue(text)
        except queue.Full:
            self._left_out += 1
        return len(text)

    def _queue(self, text: str) -> None:
        self._messages.put_nowait(text)
        self._queued_characters += len(text)

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
        """Write the remaining messages; give up after a time limit if the file hangs."""
        if self._thread.is_alive():
            patience_s = TERMINAL_CLOSE_TIMEOUT_S if self._is_terminal else CLOSE_TIMEOUT_S
            try:
                self._messages.put(None, timeout=patience_s)
            except queue.Full:
                return
            self._thread.join(patience_s)

    def _run(self) -> None:
        while (text := self._messages.get()) is not None:
            try:
                self._stream.write(text)
                self._stream.flush()
            except (OSError, ValueError):  # a full disk, or a closed pipe: training is more important
                self._left_out += 1
            self._written_characters += len(text)


def never_wait_for(*names: Literal["stdout", "stderr"]) -> None:
    """Replace these streams of this process, so that printing to them never blocks."""
    for name in names:
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, PatientOutput):
            setattr(sys, name, _written_behind(stream))


def log_without_waiting(path: Path) -> None:
    """Append this process's log to `path`, without blocking the threads that log."""
    stream = _written_behind(open(path, "a", opener=private))  # noqa: SIM115 - it is as long as we are
    logging.basicConfig(stream=stream, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def _written_behind(stream: TextIO) -> PatientOutput:
    """Return a replacement for `stream`. When the process exits, its last lines are written, or dropped after a time
    limit."""
    patient = PatientOutput(stream)
    atexit.register(patient.close)
    return patient
