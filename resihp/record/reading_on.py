"""A journal's file that another process writes: read again and again, each record of it once.

What has come since the last look is read from where that ended. A file that has taken the place of another (it was
packed) is read whole once more. Decides nothing, writes nothing. Used by `resihp stop`.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from resihp.errors import ProtocolError
from resihp.record.journal import Record
from resihp.record.journal_file import MAGIC, MAX_FILE_BYTES, scan


class ReadingOn:
    """Of the file at `path`. `seen`: the last record that is not to be told."""

    def __init__(self, path: Path, seen: int = 0) -> None:
        self.path = path
        self.seen = seen
        self._file: tuple[int, int] | None = None
        self._end = 0

    def new(self) -> list[Record]:
        """Records that came since the last look, in order; iterations that are packed stay so. A torn tail is left for
        the next look. Raises OSError, ProtocolError as `journal_file.read_packed` does."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            there = os.fstat(descriptor)
            if not stat.S_ISREG(there.st_mode) or there.st_size > MAX_FILE_BYTES:
                raise ProtocolError(f"journal {self.path}: is no plain file of a journal's size")
            if self._file != (there.st_dev, there.st_ino) or there.st_size < self._end:
                self._file, self._end = (there.st_dev, there.st_ino), 0
            if there.st_size == self._end:
                return []
            content = os.pread(descriptor, there.st_size - self._end, self._end)
        finally:
            os.close(descriptor)
        before = MAGIC if self._end else b""
        found = list(scan(before + content, str(self.path)))
        if found:
            self._end += found[-1][0] - len(before)
        records = [record for _, record in found if record.seq > self.seen]
        if records:
            self.seen = records[-1].seq
        return records
