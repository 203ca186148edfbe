"""Clues to the cause of a process's exit: the tail of its log, and recent kernel messages of its node.

The agent reads both on the node and reduces them to clues (`resihp.detector.diagnosis.clues`), which are sent with the
report of the exit. This module does not interpret the clues.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from resihp.detector.diagnosis.clues import Clock, read_log
from resihp.protocol.messages import MAX_LINES_AFTER, Clue, Exited
from resihp.wrapper.abandoned_threads import answer_within

LOG_BYTES = 64 << 10
KERNEL_BYTES = 64 << 10
KERNEL_S = 900.0
"""Greatest age of kernel messages that are read."""
CLUES_TIMEOUT_S = 0.2
"""Time limit of the search for clues to a worker's exit."""
SILENT_BEFORE_END_S = 60.0
"""If a process wrote nothing for this long before its end, its last log lines are not taken as signs of its end."""


class KernelClues:
    """Recent messages of this node's kernel. Processes that end together share one reading. A process that ends during
    a reading gets the next reading, because the kernel may have reported its end in the meantime. May be used by
    several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun_at = float("-inf")
        self._clues: tuple[Clue, ...] = ()

    def since(self, ended_at: float) -> tuple[Clue, ...]:
        """Return clues from a reading that began after `ended_at` (a time of `time.monotonic`); read again if the last
        reading is older."""
        with self._lock:
            if self._begun_at < ended_at:
                self._begun_at = time.monotonic()
                clock = _clock()
                self._clues = read_log(_kernel((clock.near or 0.0) - (clock.booted or 0.0)), clock)
            return self._clues


class ExitReports:
    """Reports exits of workers, each after the worker's last output and with clues to its cause. A hung file system
    delays a report by at most twice `CLUES_TIMEOUT_S`.

    `last_look(rank, timeout_s)` reads the rest of a worker's output."""

    def __init__(
        self, send: Callable[[Exited], None], last_look: Callable[[int, float], Coroutine[Any, Any, None]]
    ) -> None:
        self._send = send
        self._last_look = last_look
        self._kernel = KernelClues()
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, exited: Exited, log: Path, log_begin: int) -> None:
        """Report an exit soon. `log_begin`: position in the log at which the output of the worker begins."""
        task = asyncio.get_running_loop().create_task(self._report(exited, log, log_begin))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def finish(self, timeout_s: float) -> None:
        """Wait until all exits have been reported."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    async def _report(self, exited: Exited, log: Path, log_begin: int) -> None:
        await self._last_look(exited.rank, CLUES_TIMEOUT_S)
        if exited.status:
            clues = await last_words_within(CLUES_TIMEOUT_S, log, self._kernel, log_begin)
            exited = msgspec.structs.replace(exited, clues=clues)
        self._send(exited)


def last_words(
    log: Path, kernel: KernelClues | None = None, ended_at: float | None = None, begin: int = 0
) -> tuple[Clue, ...]:
    """Return clues from a log's tail and from recent kernel messages. May block on a file system, so do not call it in
    an event loop.

    `ended_at`: time at which the process was seen to have ended (`time.monotonic`); None for now. `begin`: position in
    the log at which the output of the process begins, in bytes.
    """
    kernel_clues = (kernel or KernelClues()).since(time.monotonic() if ended_at is None else ended_at)
    return (*_of_log(log, begin), *kernel_clues)


def _of_log(log: Path, begin: int) -> tuple[Clue, ...]:
    """Return clues from a log's tail. If the process wrote nothing for a while before its end, its log lines count as
    long past."""
    clues = read_log(_tail(log, begin), _clock(), kernel_lines=False)
    with suppress(OSError):
        if time.time() - log.stat().st_mtime > SILENT_BEFORE_END_S:
            return tuple(
                clue if clue.raised else msgspec.structs.replace(clue, lines_after=MAX_LINES_AFTER) for clue in clues
            )
    return clues


async def last_words_within(limit_s: float, log: Path, kernel: KernelClues, begin: int = 0) -> tuple[Clue, ...]:
    """Return the clues of `last_words` without blocking the event loop; none if reading takes longer than `limit_s`."""
    ended_at = time.monotonic()
    return await answer_within(
        limit_s, lambda: last_words(log, kernel, ended_at, begin), (), f"last words of {log.name}"
    )


def _clock() -> Clock:
    now = time.time()
    booted = now - time.clock_gettime(time.CLOCK_BOOTTIME)
    return Clock(near=now, booted=booted, utc_offset_s=time.localtime().tm_gmtoff)


def _tail(log: Path, begin: int) -> str:
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(begin, size - LOG_BYTES))
            return file.read(LOG_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _kernel(uptime_s: float) -> str:
    """Return the newest kernel messages in the format of dmesg; empty without permission to read them."""
    try:
        handle = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    lines: deque[str] = deque()
    size = 0
    try:
        while True:
            try:
                record = os.read(handle, 8192)
            except BrokenPipeError:
                continue  # overwritten meanwhile
            except OSError:
                break  # that was the last one
            head, _, text = record.partition(b";")
            fields = head.split(b",", 3)
            seconds = int(fields[2]) / 1e6 if len(fields) > 2 and fields[2].isdigit() else 0.0
            if uptime_s - seconds > KERNEL_S:
                continue
            line = text.partition(b"\n")[0].decode(errors="replace")
            lines.append(f"[{seconds:12.6f}] {line}")
            size += len(lines[-1]) + 1
            while size > KERNEL_BYTES and len(lines) > 1:
                size -= len(lines.popleft()) + 1
    finally:
        os.close(handle)
    return "\n".join(lines)
