"""Reads the ends of log files, and the lines that are added to them. Files may grow, shrink or vanish meanwhile. Knows
nothing about jobs.

A line that is overwritten after carriage returns, such as a progress bar, is returned as a terminal shows it: in its
last state.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from resihp.plain_files import is_plain, open_plain

CHUNK_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 20
"""Largest part of an unfinished line that is held back; a longer line is returned in parts."""
REDRAWN_EVERY_S = 5.0
"""How often a line that is overwritten again and again, perhaps for hours, is returned in its present state."""


def last_lines(path: Path, lines: int) -> tuple[list[str], int]:
    """Return the last `lines` lines of a file, and its size at that time, in bytes. Reads only the end of the file.

    An unfinished line counts as a line. Raises OSError, also for a link, a pipe or a device.
    """
    with os.fdopen(open_plain(path), "rb") as file:
        end = start = file.seek(0, os.SEEK_END)
        chunks: list[bytes] = []
        ends = 0
        while start and ends < lines and end - start < lines * MAX_LINE_BYTES:
            size = min(CHUNK_BYTES, start)
            start = file.seek(start - size)
            chunk = file.read(size)
            ends += chunk.count(b"\n") - (not chunks and chunk.endswith(b"\n"))
            chunks.append(chunk)
    content = b"".join(reversed(chunks))
    lines_read = content.removesuffix(b"\n").split(b"\n") if content else []
    return [_text(line) for line in lines_read[max(len(lines_read) - lines, 0) :]], end


class GrowingFiles:
    """Reads the lines that are added to files. An unfinished line is held back until it ends, except for a progress
    bar."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._read: dict[Path, int] = {}
        self._begun: dict[Path, bytes] = {}
        self._drawn: dict[Path, tuple[float, str]] = {}
        """For an overwritten line: the earliest time (monotonic seconds) to return it again, and the text last
        returned, empty once the line has ended."""

    def __contains__(self, path: Path) -> bool:
        return path in self._read

    def __len__(self) -> int:
        return len(self._read)

    def begin(self, path: Path, at: int) -> None:
        """Start to follow a file at byte `at`."""
        self._read[path] = at

    def new(self) -> Iterator[tuple[Path, str]]:
        """Yield the lines that were added since the last call. A file that became shorter is read again from its
        beginning."""
        for path, at in list(self._read.items()):
            with suppress(OSError):
                if is_plain(path) and (end := path.lstat().st_size) != at:
                    yield from self._added(path, at if end > at else 0)
            yield from self._redrawn(path)

    def rest(self) -> Iterator[tuple[Path, str]]:
        """Yield the unfinished lines that were held back."""
        for path, begun in self._begun.items():
            if begun and _text(begun) != self._shown(path):
                yield path, _text(begun)

    def _added(self, path: Path, at: int) -> Iterator[tuple[Path, str]]:
        if at == 0:
            self._begun.pop(path, None)
        with os.fdopen(open_plain(path), "rb") as file:
            file.seek(at)
            while content := file.read(CHUNK_BYTES):
                self._read[path] = at = at + len(content)
                *whole, rest = (self._begun.get(path, b"") + content).split(b"\n")
                rest = rest[max(rest.rstrip(b"\r").rfind(b"\r"), 0) :]
                if len(rest) > MAX_LINE_BYTES:
                    whole, rest = [*whole, rest], b""
                self._begun[path] = rest
                for line in whole:
                    if (text := _text(line)) != self._shown(path):
                        yield path, text
                    self._drawn[path] = (self._drawn.get(path, (0.0, ""))[0], "")

    def _redrawn(self, path: Path) -> Iterator[tuple[Path, str]]:
        begun, now = self._begun.get(path, b""), self._clock()
        text = _text(begun) if b"\r" in begun else ""
        if text and text != self._shown(path) and now >= self._drawn.get(path, (now, ""))[0]:
            self._drawn[path] = (now + REDRAWN_EVERY_S, text)
            yield path, text

    def _shown(self, path: Path) -> str | None:
        return self._drawn.get(path, (0.0, ""))[1] or None


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
