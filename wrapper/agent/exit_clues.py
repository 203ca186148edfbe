"""What a process that has ended left behind: the tail of its log, and what the kernel said on its node.

Read where they lie, by the agent, and boiled down to clues (`resihp.detector.diagnosis.clues`), which travel with the
news of the exit. Nothing here decides what they mean.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

import msgspec

from resihp.detector.diagnosis.clues import Clock, read_log
from resihp.protocol.messages import MAX_LINES_AFTER, Clue

LOG_BYTES = 64 << 10
KERNEL_BYTES = 64 << 10
KERNEL_S = 900.0
"""How far back kernel messages count."""
SILENT_S = 60.0
"""A process that has written nothing for so long before its end has lived with what it wrote last."""


class KernelClues:
    """What this node's kernel said lately. Processes that end together share a reading; one that ends while it is read
    gets the next, as the kernel may have spoken of it meanwhile. Used by several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun_at = float("-inf")
        self._clues: tuple[Clue, ...] = ()

    def since(self, ended_at: float) -> tuple[Clue, ...]:
        """Clues read after this time (`time.monotonic`)."""
        with self._lock:
            if self._begun_at < ended_at:
                self._begun_at = time.monotonic()
                clock = _clock()
                self._clues = read_log(_kernel((clock.near or 0.0) - (clock.booted or 0.0)), clock)
            return self._clues


def last_words(log: Path, kernel: KernelClues | None = None, ended_at: float | None = None) -> tuple[Clue, ...]:
    """Clues in a log's tail and in recent kernel messages. May wait for a file system, so not for an event loop.

    `ended_at`: when its process was seen to have ended (`time.monotonic`); None for now.
    """
    said = (kernel or KernelClues()).since(time.monotonic() if ended_at is None else ended_at)
    return (*_of_log(log), *said)


def _of_log(log: Path) -> tuple[Clue, ...]:
    """Clues in a log's tail. Of a process that was silent before its end, a line that it had logged is long past."""
    clues = read_log(_tail(log), _clock(), kernel_lines=False)
    with suppress(OSError):
        if time.time() - log.stat().st_mtime > SILENT_S:
            return tuple(
                clue if clue.raised else msgspec.structs.replace(clue, lines_after=MAX_LINES_AFTER) for clue in clues
            )
    return clues


async def last_words_within(limit_s: float, log: Path, kernel: KernelClues) -> tuple[Clue, ...]:
    """The same for an event loop, and nothing if it takes longer: then its thread is left behind, as a daemon, for a
    file system that hangs must not keep this process from ending.
    """
    loop = asyncio.get_running_loop()
    found: asyncio.Future[tuple[Clue, ...]] = loop.create_future()
    ended_at = time.monotonic()

    def tell(clues: tuple[Clue, ...]) -> None:
        if not found.done():
            found.set_result(clues)

    def read() -> None:
        clues: tuple[Clue, ...] = ()
        try:
            clues = last_words(log, kernel, ended_at)
        finally:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(tell, clues)

    threading.Thread(target=read, name=f"last words of {log.name}", daemon=True).start()
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            return await found
    return ()


def _clock() -> Clock:
    now = time.time()
    booted = now - time.clock_gettime(time.CLOCK_BOOTTIME)
    return Clock(near=now, booted=booted, utc_offset_s=time.localtime().tm_gmtoff)


def _tail(log: Path) -> str:
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LOG_BYTES))
            return file.read(LOG_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _kernel(uptime_s: float) -> str:
    """The newest kernel messages as dmesg prints them; nothing where that is not permitted."""
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
            said = text.partition(b"\n")[0].decode(errors="replace")
            lines.append(f"[{seconds:12.6f}] {said}")
            size += len(lines[-1]) + 1
            while size > KERNEL_BYTES and len(lines) > 1:
                size -= len(lines.popleft()) + 1
    finally:
        os.close(handle)
    return "\n".join(lines)
