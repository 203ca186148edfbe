"""Follow a journal's file while another process writes it, so that each record is read once.

Each call reads the records appended since the previous call. If another file has replaced the journal's file (because
it was packed), the new file is read from its start. Makes no decision and writes nothing. Used by `resihp stop`.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from resihp.errors import ProtocolError
from resihp.record.journal import Record
from resihp.record.journal_file import MAX_FILE_BYTES
from resihp.record.journal_format import MAGIC, scan


class ReadingOn:
    """A reader of the file at `path`. `seen`: records up to this number are not returned."""

    def __init__(self, path: Path, seen: int = 0) -> None:
        self.path = path
        self.seen = seen
        self._file: tuple[int, int] | None = None
        self._end = 0

    def new(self) -> list[Record]:
        """Return the records since the previous call, in order. Packed iterations stay packed. A torn tail is left for
        the next call. Raises OSError, and ProtocolError as `journal_file.read_packed` does."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_FILE_BYTES:
                raise ProtocolError(f"journal {self.path}: is no plain file of a journal's size")
            if self._file != (status.st_dev, status.st_ino) or status.st_size < self._end:
                self._file, self._end = (status.st_dev, status.st_ino), 0
            if status.st_size == self._end:
                return []
            content = os.pread(descriptor, status.st_size - self._end, self._end)
        finally:
            os.close(descriptor)
        before = MAGIC if self._end else b""
        scanned = list(scan(before + content, str(self.path)))
        if scanned:
            self._end += scanned[-1][0] - len(before)
        records = [record for _, record in scanned if record.seq > self.seen]
        if records:
            self.seen = records[-1].seq
        return records
