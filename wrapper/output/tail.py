"""The ends of log files, and what is added to them. Knows no jobs; files may grow, shrink or go while they are read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

CHUNK_BYTES = 1 << 16
LONGEST_LINE_BYTES = 1 << 20
"""Of a line that does not end so much is waited for, and then it is shown as it is."""


def last_lines(path: Path, lines: int) -> tuple[list[str], int]:
    """The last `lines` of a file, and where it ended then, in bytes. Reads no more of it than it has to.

    A line that is still being written is one of them. Raises OSError.
    """
    with path.open("rb") as file:
        end = start = file.seek(0, os.SEEK_END)
        content = b""
        while start and content.count(b"\n", 0, -1) < lines and len(content) < lines * LONGEST_LINE_BYTES:
            size = min(CHUNK_BYTES, start)
            start = file.seek(start - size)
            content = file.read(size) + content
    found = content.removesuffix(b"\n").split(b"\n") if content else []
    return [_text(line) for line in found[max(len(found) - lines, 0) :]], end


class GrowingFiles:
    """What is added to files, line by line: a line that is not whole yet waits for its end."""

    def __init__(self) -> None:
        self._read: dict[Path, int] = {}
        self._begun: dict[Path, bytes] = {}

    def __contains__(self, path: Path) -> bool:
        return path in self._read

    def begin(self, path: Path, at: int) -> None:
        """From byte `at` on."""
        self._read[path] = at

    def new(self) -> Iterator[tuple[Path, str]]:
        """The lines that have come since the last call. A file that became shorter is read from its beginning."""
        for path, at in list(self._read.items()):
            with suppress(OSError):
                if (end := path.stat().st_size) != at:
                    yield from self._added(path, at if end > at else 0)

    def rest(self) -> Iterator[tuple[Path, str]]:
        """Lines that never ended."""
        for path, begun in self._begun.items():
            if begun:
                yield path, _text(begun)

    def _added(self, path: Path, at: int) -> Iterator[tuple[Path, str]]:
        if at == 0:
            self._begun.pop(path, None)
        with path.open("rb") as file:
            file.seek(at)
            while content := file.read(CHUNK_BYTES):
                self._read[path] = at = at + len(content)
                *whole, rest = (self._begun.get(path, b"") + content).split(b"\n")
                if len(rest) > LONGEST_LINE_BYTES:
                    whole, rest = [*whole, rest], b""
                self._begun[path] = rest
                for line in whole:
                    yield path, _text(line)


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\r")
