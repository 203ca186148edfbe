"""Reads the iterations of a script that does not report to resihp from the logs of its rank 0 and of its last rank, and
passes on those that these ranks report with `resihp.iteration`.

`LogTail` reads what is new in one log; `ScriptOutput` does so for the processes of one agent, in a thread of its own,
because the logs may be on a file system that hangs. It reads once a second, with the heartbeat, and once more when a
process has ended. Nothing else waits for it. Owned by `resihp.wrapper.agent.workers`.
"""

from __future__ import annotations

import asyncio
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from resihp.plain_files import open_plain
from resihp.protocol import messages as m

if TYPE_CHECKING:
    from resihp.detector.console.printed_progress import PrintedIteration, PrintedProgress

MAX_READ_BYTES = 256 << 10
"""Most bytes that are read of a log at one time, its last ones: a script may print a gigabyte a minute."""
MAX_PATTERN_S = 1.0
"""Time that the user's pattern may take for the output of one second. A slower one is not used any more."""

LINE_END = re.compile(rb"[\r\n]")


class LogTail:
    """Reads what is added to a log. `begin`: position of the first byte that counts."""

    def __init__(self, log: Path, begin: int = 0) -> None:
        self._log = log
        self._at = begin
        self.written_at: float | None = None
        """Time of the last output that was read, by the clock of its file system; None before the first."""

    def new(self) -> str:
        """Return new output. If output before it was skipped, it begins with the end of a line.

        Skipped is what exceeds `MAX_READ_BYTES`, and what the log's owner has freed (`log_mirror`), which reads as
        zeros. A log that became shorter is read from its beginning.
        """
        try:
            with os.fdopen(open_plain(self._log), "rb", buffering=0) as file:
                state = os.fstat(file.fileno())
                begin = self._at if state.st_size >= self._at else 0
                start = max(begin, state.st_size - MAX_READ_BYTES)
                content = os.pread(file.fileno(), state.st_size - start, start)
        except OSError:
            return ""  # it does not exist yet, or the file system is in trouble
        self._at = start + len(content)
        if content:
            self.written_at = state.st_mtime
        hole = content.rfind(b"\0") + 1
        if start > begin or hole:
            end = LINE_END.search(content, hole)  # the first line is not complete
            content = b"" if end is None else content[end.start() :]
        return content.decode(errors="replace")


@dataclass
class _Followed:
    """The output of one process."""

    rank: int
    tail: LogTail
    pattern: re.Pattern[str] | None
    progress: PrintedProgress | None = None

    def read(self) -> list[PrintedIteration]:
        from resihp.detector.console.condensing import condensed  # most nodes of a large job never need these
        from resihp.detector.console.printed_progress import PrintedProgress

        self.progress = self.progress or PrintedProgress(self.pattern)
        since = self.tail.written_at
        text = self.tail.new()
        return condensed(self.progress.feed(text, self.tail.written_at or 0.0, since)) if text else []


class ScriptOutput:
    """Follows the output of the first and of the last rank of a script, as far as they run on this node. `send` sends a
    message to the leader, from the event loop.

    `pattern`: the user's own, for lines that no known trainer prints; empty for none.
    """

    def __init__(self, send: Callable[[m.AgentMessage], None], pattern: str = "") -> None:
        self._send = send
        self._pattern = re.compile(pattern) if pattern else None
        self._followed: dict[int, _Followed] = {}
        self._requests: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_reading = self._closed = False

    def follow(self, start: m.Start, log: Path, begin: int = 0) -> None:
        """Follow the output of a new process, if its rank is the first or the last one. `begin`: size of the log when
        it was started."""
        if not self._closed and start.rank in (0, start.world_size - 1):
            self._followed[start.rank] = _Followed(start.rank, LogTail(log, begin), self._pattern)

    def called(self, start: m.Start, figures: tuple[m.PrintedFigures, ...]) -> None:
        """Pass on the iterations that a process has reported itself, if its rank is the first or the last one."""
        if not self._closed and start.rank in (0, start.world_size - 1):
            self._send(m.Printed(rank=start.rank, figures=figures, called=True))

    def follows(self, rank: int) -> bool:
        return rank in self._followed

    def look(self) -> None:
        """Read what is new, unless the last reading is still in progress. Does not wait."""
        if self._followed and not self._is_reading:
            self._is_reading = True
            self._ask(self._has_read)

    async def last_look(self, rank: int, limit_s: float) -> None:
        """Read the last output of a process that has ended, wait for that up to `limit_s`, and follow it no longer."""
        followed = self._followed.get(rank)
        if followed is not None:
            await self.look_within(limit_s)
            if self._followed.get(rank) is followed:
                del self._followed[rank]

    async def look_within(self, limit_s: float) -> None:
        """Read what is new, and wait for that up to `limit_s`."""
        done = asyncio.Event()
        self._ask(done.set)
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await done.wait()

    def close(self) -> None:
        """Stop reading, for good."""
        self._closed = True
        self._followed.clear()
        self._requests.put(None)

    def _has_read(self) -> None:
        self._is_reading = False

    def _ask(self, then: Callable[[], None]) -> None:
        """Let the thread read, and then call `then` in the event loop."""
        if self._thread is None:
            loop = asyncio.get_running_loop()
            self._thread = threading.Thread(target=self._run, args=(loop,), name="script output", daemon=True)
            self._thread.start()
        self._requests.put(then)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        while (then := self._requests.get()) is not None:
            began = time.thread_time()
            reports = [(followed, followed.read()) for followed in list(self._followed.values())]
            if self._pattern is not None and time.thread_time() - began > MAX_PATTERN_S:
                print(f"[progress] pattern {self._pattern.pattern}: too slow, not used any more", flush=True)
                self._followed.clear()
            try:
                loop.call_soon_threadsafe(self._deliver, reports, then)
            except RuntimeError:
                return  # the loop has ended

    def _deliver(
        self, reports: Sequence[tuple[_Followed, Sequence[PrintedIteration]]], then: Callable[[], None]
    ) -> None:
        for followed, printed in reports:
            if printed and self._followed.get(followed.rank) is followed:
                self._send(_message(followed.rank, printed))
        then()


def _message(rank: int, printed: Sequence[PrintedIteration]) -> m.Printed:
    figures = (
        m.PrintedFigures(iteration=iteration.iteration, seconds=iteration.seconds, loss=iteration.loss)
        for iteration in printed
    )
    return m.Printed(rank=rank, figures=tuple(figures), goal=printed[-1].goal)
