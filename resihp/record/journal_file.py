"""Read and write the file of a journal (`resihp.record.journal`): the leader's own file, and each agent's copy of it.

`journal_format` defines the format. A torn tail (left by a crash during an append) is cut off when the file is opened
for appending. A file that is damaged before its tail is refused and left unchanged. Old committed iterations are packed
(`resihp.record.packing`): a new file is written beside the old one and then replaces it.

Makes no decision. One thread may number records (`Journal.stamp`) while another thread writes them.
"""

from __future__ import annotations

import errno
import os
import threading
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from resihp.durable_files import sync_folder
from resihp.errors import ProtocolError
from resihp.plain_files import open_plain
from resihp.protocol.framing import MAX_MESSAGE_BYTES
from resihp.record.journal import AnyEntry, IterationCommitted, LeaderChosen, Record, first_seq
from resihp.record.journal_format import MAGIC, MAX_RECORD_BYTES, as_frame, body_at, decode, encode, scan
from resihp.record.packing import first_of, pack, unpack

MAX_FILE_BYTES = 4 << 30
"""Largest size of a file that is read, in bytes. A job of 16,384 ranks needs far less, since its journal
is packed."""
MAX_APPENDED_BYTES = MAX_MESSAGE_BYTES - (64 << 10)
"""Largest size of a record that is written, in bytes: each record is sent to agents in one message."""
PACK_AFTER = 4096
"""Number of unpacked committed iterations from which on the file is rewritten with them packed."""
LEFT_UNPACKED = 256
"""Number of latest iterations that stay unpacked, because a new supervisor needs their figures
(`state.RECENT_ITERATIONS`)."""


def read(path: Path, *, after: int = 0) -> list[Record]:
    """Return all whole records with numbers above `after`. A torn tail is ignored.

    Raises ProtocolError if the file is not a journal of this version, or is damaged.
    """
    records = (record for _, record in scan(_content(path), str(path)) if record.seq > after)
    return [record for record in unpack(records) if record.seq > after]


def read_packed(path: Path) -> list[Record]:
    """Return all whole records, with packed iterations left packed. This is fast for a job of any age. Raises as `read`
    does."""
    return [record for _, record in scan(_content(path), str(path))]


def first(path: Path) -> Record | None:
    """Return the first record of a journal without reading the rest of the file; None if the record is not whole.
    Raises ProtocolError and OSError as `read` does."""
    with os.fdopen(_opened(path), "rb") as file:
        content = file.read(len(MAGIC) + 8)
        content += file.read(min(int.from_bytes(content[len(MAGIC) : len(MAGIC) + 4], "little"), MAX_RECORD_BYTES))
    if content[: len(MAGIC)] != MAGIC[: len(content)]:
        raise ProtocolError(f"journal {path}: not a resihp journal")
    body = body_at(content, len(MAGIC))
    return None if body is None else decode(body)


def torn_bytes(path: Path) -> int:
    """Return the length of the torn tail that `read` ignores, in bytes."""
    content = _content(path)
    end = min(len(content), len(MAGIC))
    for end, _ in scan(content, str(path)):  # noqa: B007 - wanted after the loop
        pass
    return len(content) - end


def _content(path: Path) -> bytes:
    """Return the content of the file; never blocks. Raises ProtocolError for a pipe, for a device and for a file that
    is far too large, and OSError."""
    with os.fdopen(_opened(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_FILE_BYTES:
            raise ProtocolError(f"journal {path}: has {size} bytes, more than any journal")
        return file.read(size)


def _opened(path: Path) -> int:
    try:
        return open_plain(path)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ELOOP):
            raise ProtocolError(f"journal {path}: is no plain file") from error
        raise


def _write_all(descriptor: int, content: bytes, at: int) -> None:
    written = 0
    while written < len(content):
        written += os.pwrite(descriptor, content[written:], at + written)


class _OpenFile:
    """An open journal file with the number and position of each whole record."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.firsts = array("q")
        """For each record, the number of the first record that it stands for (a packed record stands for several)."""
        self.ends = array("q")
        self.lasts = array("q")
        """For each record, its number. Appended after `firsts` and `ends`, so that another thread only finds complete
        data."""

    @property
    def end(self) -> int:
        return self.start(len(self.lasts))

    def start(self, at: int) -> int:
        """Return the offset in the file at which the record with index `at` begins."""
        return self.ends[at - 1] if at else len(MAGIC)

    def note(self, record: Record, length: int) -> None:
        """Note a record that has been written at the end of the file. `length`: bytes of its frame."""
        end = self.end + length
        self.firsts.append(first_of(record))
        self.ends.append(end)
        self.lasts.append(record.seq)

    def following(self, seq: int) -> int:
        """Return the index of the first record that is, or stands for, a record with a number above `seq`."""
        return bisect_right(self.lasts, seq)

    def bodies(self, at: int, until: int) -> list[bytes]:
        """Return the encoded bodies of the records with indexes from `at` up to, but not including, `until`. Raises
        OSError."""
        start = self.start(at)
        content = os.pread(self.fd, self.start(until) - start, start)
        return [content[self.start(i) + 8 - start : self.ends[i] - start] for i in range(at, until)]


class Packed(NamedTuple):
    """A packed file, written beside a journal's file, that is to replace it."""

    file: _OpenFile
    until: int
    """Number of records of the journal's file that the packed file covers."""
    settled: int
    """Number of records at the start of the packed file that need no further packing."""


class Journal:
    """A journal's file, open for appending. A file has only one writer: the supervisor that holds the job's lock, or
    the agent that owns the copy."""

    def __init__(self, path: Path, *, sync: bool = True, found: list[Record] | None = None) -> None:
        """Open or create the file, and cut off a torn tail. `sync=False` leaves flushing to the kernel (for copies,
        tests and the simulator).

        `found` receives the records that the file already holds, as `read_packed` returns them.

        Raises ProtocolError if the file is not a journal, or is damaged.
        """
        self.path = path
        self.seq = 0
        """Number of the last record that was appended or stamped; 0 if there is none."""
        self._sync = sync
        self._unpacked = 0
        """Number of committed iterations that are not packed."""
        self._settled = 0
        """Number of records at the start of the file that need no further packing."""
        self._swapping = threading.Lock()
        """Lock that is held while the file is read or replaced."""
        content = _content(path) if path.exists() else b""
        path.parent.mkdir(parents=True, exist_ok=True)
        records = [] if len(content) < len(MAGIC) and MAGIC.startswith(content) else list(scan(content, str(path)))
        self._file = _OpenFile(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        for end, record in records:
            self._note(record, end - self._file.end)
        if found is not None:
            found += [record for _, record in records]
        if len(content) < len(MAGIC):
            os.pwrite(self._file.fd, MAGIC, 0)
        os.ftruncate(self._file.fd, self._file.end)

    # --- appending --------------------------------------------------------------------------------------------

    def append(self, entry: AnyEntry, at: float) -> Record:
        """Give an entry its number and time, write it and flush the file. Raises OSError if the disk does not accept
        it, ProtocolError if it is too large; in both cases nothing is written and the number is used again."""
        before = self.seq
        record, body = self.stamp(entry, at)
        try:
            self.write([(record, body)])
        except OSError:
            self.seq = before
            raise
        return record

    def stamp(self, entry: AnyEntry, at: float) -> tuple[Record, bytes]:
        """Return the next record and its encoding, without writing it. A `LeaderChosen` entry starts the number range
        of its term.

        Raises ProtocolError if the record is too large to be sent to the agents that keep copies.
        """
        seq = self.seq + 1
        if isinstance(entry, LeaderChosen):
            seq = max(seq, first_seq(entry.term))
        record = Record(seq, at, entry)
        body = encode(record)
        if len(body) > MAX_APPENDED_BYTES:
            size = f"{type(entry).__name__} of {len(body)} bytes"
            raise ProtocolError(f"journal: {size} cannot be copied to agents; the limit is {MAX_APPENDED_BYTES} bytes")
        self.seq = seq
        return record, body

    def copy(self, body: bytes) -> Record:
        """Append a record of another journal, encoded by `encode`. Its number must be higher than any in this file.

        Raises ProtocolError for any other record, and OSError.
        """
        record = decode(body)
        if first_of(record) <= self.seq:
            raise ProtocolError(f"journal: record {first_of(record)} came after {self.seq}")
        self.write([(record, body)])
        return record

    def write(self, records: Sequence[tuple[Record, bytes]]) -> None:
        """Write and flush stamped records in order; either all of them or none. Raises OSError if the disk does not
        accept them."""
        file, frames = self._file, [as_frame(body) for _, body in records]
        try:
            _write_all(file.fd, b"".join(frames), file.end)
            if self._sync:
                os.fdatasync(file.fd)
        except OSError:
            with suppress(OSError):
                os.ftruncate(file.fd, file.end)  # the rest is overwritten, or cut when the file is opened again
            raise
        for (record, _), frame in zip(records, frames, strict=True):
            self._note(record, len(frame))

    def _note(self, record: Record, length: int) -> None:
        self._file.note(record, length)
        self._unpacked += isinstance(record.entry, IterationCommitted)
        self.seq = max(self.seq, record.seq)

    # --- reading ----------------------------------------------------------------------------------------------

    def common(self, log: int) -> int:
        """Return the number of the last record that this journal shares with a copy of it. `log`: number of the last
        record of the copy."""
        file = self._file
        at = file.following(log)
        if at < len(file.lasts) and file.firsts[at] <= log:
            return log  # inside a packed record
        return file.lasts[at - 1] if at else 0

    def after(self, seq: int, most_bytes: int) -> list[tuple[int, bytes]]:
        """Return (number, encoded record) of records with numbers above `seq`: about `most_bytes` of them, but at least
        one.

        Returns an empty list at the end of the file. Raises OSError.
        """
        with self._swapping:
            file = self._file
            at = file.following(seq)
            if at == len(file.lasts):
                return []
            until = max(at + 1, bisect_right(file.ends, file.start(at) + most_bytes))
            bodies = file.bodies(at, until)
            lasts, partial = file.lasts[at:until], file.firsts[at] <= seq
        numbered = list(zip(lasts, bodies, strict=True))
        if partial:
            numbered[:1] = [(row.seq, encode(row)) for row in unpack([decode(bodies[0])]) if row.seq > seq]
        return numbered

    # --- keeping it small -------------------------------------------------------------------------------------

    @property
    def is_to_be_packed(self) -> bool:
        return self._unpacked >= PACK_AFTER + LEFT_UNPACKED

    def pack(self) -> None:
        """Rewrite the file with all committed iterations packed except the last ones. On an OSError the file is
        unchanged."""
        self.adopt(self.packed())

    def packed(self) -> Packed:
        """Write a packed version of the file beside it. This is the slow part of packing; another thread may append
        meanwhile.

        Raises OSError and then leaves no other file.
        """
        file, start, until = self._file, self._settled, len(self._file.lasts)
        records = [decode(body) for body in file.bodies(start, until)]
        latest_first = (i for i in reversed(range(len(records))) if isinstance(records[i].entry, IterationCommitted))
        old = next(islice(latest_first, LEFT_UNPACKED - 1, None), 0)
        packed = pack(records[:old])
        return Packed(self._beside(start, [*packed, *records[old:]]), until, start + len(packed))

    def adopt(self, packed: Packed) -> None:
        """Replace the journal's file by the packed one, after appending the records written meanwhile. On an OSError
        the journal's file stays."""
        since = self._file.bodies(packed.until, len(self._file.lasts))
        self._replace(packed.file, [decode(body) for body in since])
        self._settled = packed.settled
        rest = self._file.bodies(self._settled, len(self._file.lasts))
        self._unpacked = sum(isinstance(decode(body).entry, IterationCommitted) for body in rest)
        self._sync_name()

    def cut(self, after: int) -> None:
        """Remove the records with numbers above `after`. On an OSError the file is unchanged."""
        file = self._file
        at = file.following(after)
        rows: list[Record] = []
        if at < len(file.lasts) and file.firsts[at] <= after:
            (body,) = file.bodies(at, at + 1)
            rows = [row for row in unpack([decode(body)]) if row.seq <= after]
        self._replace(self._beside(at, rows), [])
        self._settled, self._unpacked = 0, PACK_AFTER  # so that the file is packed again soon
        self.seq = self._file.lasts[-1] if self._file.lasts else 0
        self._sync_name()

    def _beside(self, at: int, records: Sequence[Record]) -> _OpenFile:
        """Write a new file beside the journal's: its first `at` records, then `records`."""
        ours = self._file
        new = _OpenFile(os.open(self._name_beside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600))
        try:
            _write_all(new.fd, os.pread(ours.fd, ours.start(at), 0), 0)
            new.firsts, new.ends, new.lasts = ours.firsts[:at], ours.ends[:at], ours.lasts[:at]
            self._extend(new, records)
        except OSError:
            self._discard(new)
            raise
        return new

    def _replace(self, new: _OpenFile, more: Sequence[Record]) -> None:
        """Append the records `more` to the file `new`, then replace the journal's file by it."""
        try:
            self._extend(new, more)
            self._name_beside.replace(self.path)
        except OSError:
            self._discard(new)
            raise
        with self._swapping:
            ours, self._file = self._file, new
            os.close(ours.fd)

    def _sync_name(self) -> None:
        """Flush the folder. Otherwise a crash could lose the name of the new file, with all records written into it."""
        if self._sync:
            sync_folder(self.path.parent)

    def _extend(self, new: _OpenFile, records: Sequence[Record]) -> None:
        frames = [as_frame(encode(record)) for record in records]
        _write_all(new.fd, b"".join(frames), new.end)
        if self._sync:
            os.fsync(new.fd)
        for record, frame in zip(records, frames, strict=True):
            new.note(record, len(frame))

    def _discard(self, new: _OpenFile) -> None:
        os.close(new.fd)
        self._name_beside.unlink(missing_ok=True)

    @property
    def _name_beside(self) -> Path:
        return self.path.with_name(f".{self.path.name}.new")  # one writer at a time: its remains are overwritten

    def close(self) -> None:
        os.close(self._file.fd)
