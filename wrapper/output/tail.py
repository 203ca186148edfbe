"""The ends of log files, and what is added to them. Knows no jobs; files may grow, shrink or go while they are read.

Of a line that is drawn again and again after a carriage return, as progress bars are, there is what a terminal shows:
the last state.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from resihp.plain_files import is_plain, open_plain

CHUNK_BYTES = 1 << 16
LONGEST_LINE_BYTES = 1 << 20
"""Of a line that does not end so much is waited for, and then it is shown as it is."""
REDRAWN_EVERY_S = 5.0
"""How often one that is drawn again and again, and may not end for hours, is shown as it is then."""


def last_lines(path: Path, lines: int) -> tuple[list[str], int]:
    """The last `lines` of a file, and where it ended then, in bytes. Reads no more of it than it has to.

    A line that is still being written is one of them. Raises OSError, also for a link, a pipe or a device.
    """
    with os.fdopen(open_plain(path), "rb") as file:
        end = start = file.seek(0, os.SEEK_END)
        chunks: list[bytes] = []
        ends = 0
        while start and ends < lines and end - start < lines * LONGEST_LINE_BYTES:
            size = min(CHUNK_BYTES, start)
            start = file.seek(start - size)
            chunk = file.read(size)
            ends += chunk.count(b"\n") - (not chunks and chunk.endswith(b"\n"))
            chunks.append(chunk)
    content = b"".join(reversed(chunks))
    found = content.removesuffix(b"\n").split(b"\n") if content else []
    return [_text(line) for line in found[max(len(found) - lines, 0) :]], end


class GrowingFiles:
    """What is added to files, line by line: a line that is not whole yet waits for its end, but a progress bar's."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._read: dict[Path, int] = {}
        self._begun: dict[Path, bytes] = {}
        self._drawn: dict[Path, tuple[float, str]] = {}
        """When a line that is drawn again was shown last, and how; empty once it has ended."""

    def __contains__(self, path: Path) -> bool:
        return path in self._read

    def __len__(self) -> int:
        return len(self._read)

    def begin(self, path: Path, at: int) -> None:
        """From byte `at` on."""
        self._read[path] = at

    def new(self) -> Iterator[tuple[Path, str]]:
        """The lines that have come since the last call. A file that became shorter is read from its beginning."""
        for path, at in list(self._read.items()):
            with suppress(OSError):
                if is_plain(path) and (end := path.lstat().st_size) != at:
                    yield from self._added(path, at if end > at else 0)
            yield from self._redrawn(path)

    def rest(self) -> Iterator[tuple[Path, str]]:
        """Lines that never ended."""
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
                if len(rest) > LONGEST_LINE_BYTES:
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
