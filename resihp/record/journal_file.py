"""The file that holds a journal (`resihp.record.journal`): the leader's own, and each agent's copy of it.

Format: the 8 bytes `RESIHPJ1`, then records of little-endian u32 length, u32 CRC-32 of the body, body. A body is a
msgpack-encoded `Record`. A torn tail (crash in mid-append) is cut off when the file is opened for appending; damage
before the tail is refused, and the file left as it is. Iterations that were committed long ago are packed
(`resihp.record.packing`): the file is written anew beside the old one and takes its place.

Decides nothing. One thread may number records (`Journal.stamp`) while another one writes them.
"""

from __future__ import annotations

import errno
import os
import threading
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec

from resihp.durable_files import sync_folder
from resihp.errors import ProtocolError
from resihp.plain_files import open_plain
from resihp.protocol.framing import MAX_MESSAGE_BYTES
from resihp.record.journal import AnyEntry, IterationCommitted, LeaderChosen, Record, first_seq
from resihp.record.packing import first_of, pack, unpack

MAGIC = b"RESIHPJ1"
MAX_RECORD_BYTES = 16 << 20
"""Of a record that is read: journals of 0.1 may hold such."""
MAX_FILE_BYTES = 4 << 30
"""Of a file that is read: journals of 0.1, which were never packed, grow by some 300 MB in three months."""
MAX_APPENDED_BYTES = MAX_MESSAGE_BYTES - (64 << 10)
"""Of a record that is written: agents get it in one message."""
PACK_AFTER = 4096
"""So many committed iterations that are not packed yet are worth writing the file anew."""
LEFT_UNPACKED = 256
"""The last ones, which whoever takes over asks about (`state.RECENT`)."""

_ANY_RECORD = b"\x83\xa3seq"
"""How the body of every record begins: a map of three, the first of which is this."""

_MOST_TRIED = 64
"""Times its length that a damaged file is looked through for whole records: one made to be slow is not ours."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


def encode(record: Record) -> bytes:
    return _encoder.encode(record)


def decode(body: bytes) -> Record:
    """Raises ProtocolError for what is no record of this version."""
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"record is of another version: {error}") from error


def read(path: Path, *, after: int = 0) -> list[Record]:
    """All whole records with later numbers than `after`; a torn tail is ignored.

    Raises ProtocolError if the file is no journal of this version, or damaged.
    """
    records = (record for _, record in scan(_content(path), str(path)) if record.seq > after)
    return [record for record in unpack(records) if record.seq > after]


def read_packed(path: Path) -> list[Record]:
    """The same, but iterations that are packed stay so: what a job of any age has come to is soon read."""
    return [record for _, record in scan(_content(path), str(path))]


def first(path: Path) -> Record | None:
    """The record that a journal begins with, without a look at the rest; None where there is no whole one. Raises
    ProtocolError, OSError as `read` does."""
    with os.fdopen(_opened(path), "rb") as file:
        content = file.read(len(MAGIC) + 8)
        content += file.read(min(int.from_bytes(content[len(MAGIC) : len(MAGIC) + 4], "little"), MAX_RECORD_BYTES))
    if content[: len(MAGIC)] != MAGIC[: len(content)]:
        raise ProtocolError(f"journal {path}: not a resihp journal")
    body = _body(content, len(MAGIC))
    return None if body is None else decode(body)


def torn_bytes(path: Path) -> int:
    """How much of a torn tail `read` passes over."""
    content = _content(path)
    end = min(len(content), len(MAGIC))
    for end, _ in scan(content, str(path)):  # noqa: B007 - wanted after the loop
        pass
    return len(content) - end


def _content(path: Path) -> bytes:
    """Of the file, which is never waited for. Raises ProtocolError for a pipe, a device, or one that is far too large,
    OSError."""
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


def _frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little") + body


def scan(content: bytes, name: str) -> Iterator[tuple[int, Record]]:
    """(end offset, record) of every whole record. Raises ProtocolError as `read` does."""
    if content[: len(MAGIC)] != MAGIC[: len(content)]:
        raise ProtocolError(f"journal {name}: not a resihp journal")
    at = len(MAGIC)
    while (body := _body(content, at)) is not None:
        try:
            record = decode(body)
        except ProtocolError as error:
            raise ProtocolError(f"journal {name}: at byte {at}: {error}") from error
        at += 8 + len(body)
        yield at, record
    found = content.find(_ANY_RECORD, at + 8 + 1)  # a torn tail has nothing whole behind it
    tried = 0
    while found != -1:
        tried += min(int.from_bytes(content[found - 8 : found - 4], "little"), MAX_RECORD_BYTES)
        if tried > _MOST_TRIED * len(content):
            raise ProtocolError(f"journal {name}: damaged at byte {at}, and what follows is none of ours")
        if _body(content, found - 8) is not None:
            raise ProtocolError(
                f"journal {name}: damaged at byte {at}, and whole records follow from byte {found - 8}: "
                "left as it is; restore it, or another node's copy of it"
            )
        found = content.find(_ANY_RECORD, found + 1)


def _body(content: bytes, at: int) -> bytes | None:
    """Of the record that begins there; None if none is whole."""
    length = int.from_bytes(content[at : at + 4], "little")
    body = content[at + 8 : at + 8 + length]
    if not 0 < length <= MAX_RECORD_BYTES or len(body) < length:
        return None
    return body if zlib.crc32(body) == int.from_bytes(content[at + 4 : at + 8], "little") else None


def _write_all(descriptor: int, content: bytes, at: int) -> None:
    written = 0
    while written < len(content):
        written += os.pwrite(descriptor, content[written:], at + written)


class _OpenFile:
    """An open file of whole records, and where each one is."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.firsts = array("q")
        """Number of the first record that each one stands for."""
        self.ends = array("q")
        self.lasts = array("q")
        """Number of each: added last, so that what another thread finds here is whole."""

    @property
    def end(self) -> int:
        return self.start(len(self.lasts))

    def start(self, at: int) -> int:
        """Where the record at this place begins."""
        return self.ends[at - 1] if at else len(MAGIC)

    def note(self, record: Record, length: int) -> None:
        """A record was written at the end."""
        end = self.end + length
        self.firsts.append(first_of(record))
        self.ends.append(end)
        self.lasts.append(record.seq)

    def following(self, seq: int) -> int:
        """Place of the first record that stands for any after this number."""
        return bisect_right(self.lasts, seq)

    def bodies(self, at: int, until: int) -> list[bytes]:
        """Of the records at these places, as encoded. Raises OSError."""
        start = self.start(at)
        content = os.pread(self.fd, self.start(until) - start, start)
        return [content[self.start(i) + 8 - start : self.ends[i] - start] for i in range(at, until)]


class Packed(NamedTuple):
    """A file that is to take the place of a journal's."""

    file: _OpenFile
    until: int
    """So many of the journal's records are in it."""
    settled: int
    """So many of its own are packed as well as they can be."""


class Journal:
    """The file, open for appending. One writer: the supervisor that holds the job's lock, or the agent whose copy it
    is."""

    def __init__(self, path: Path, *, sync: bool = True, found: list[Record] | None = None) -> None:
        """Open or create; cut a torn tail. `sync=False` leaves flushing to the kernel (copies, tests, simulator).

        `found` gets the records that are there, as `read_packed` gives them.

        Raises ProtocolError for what is no journal, or a damaged one.
        """
        self.path = path
        self.seq = 0
        """Number of the last record that was appended or stamped."""
        self._sync = sync
        self._unpacked = 0
        """Committed iterations that are not packed."""
        self._settled = 0
        """Records before this place are packed as well as they can be."""
        self._swapping = threading.Lock()
        """Held while the file is read from, or another one takes its place."""
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
        """Number, stamp, write and flush one entry. Raises OSError when the disk does not take it, ProtocolError if it
        is too large: nothing is written, and its number is the next one's."""
        before = self.seq
        record, body = self.stamp(entry, at)
        try:
            self.write([(record, body)])
        except OSError:
            self.seq = before
            raise
        return record

    def stamp(self, entry: AnyEntry, at: float) -> tuple[Record, bytes]:
        """The next record and how it is encoded, still to be written. A `LeaderChosen` begins its term's numbers.

        Raises ProtocolError if it is too large for those who keep copies.
        """
        seq = self.seq + 1
        if isinstance(entry, LeaderChosen):
            seq = max(seq, first_seq(entry.term))
        record = Record(seq, at, entry)
        body = encode(record)
        if len(body) > MAX_APPENDED_BYTES:
            what = f"{type(entry).__name__} of {len(body)} bytes"
            raise ProtocolError(f"journal: {what} cannot be copied to agents; {MAX_APPENDED_BYTES} bytes can")
        self.seq = seq
        return record, body

    def copy(self, body: bytes) -> Record:
        """Append a record that another journal holds, as encoded there (`encode`): its number must be a later one.

        Raises ProtocolError for anything else, OSError.
        """
        record = decode(body)
        if first_of(record) <= self.seq:
            raise ProtocolError(f"journal: record {first_of(record)} came after {self.seq}")
        self.write([(record, body)])
        return record

    def write(self, records: Sequence[tuple[Record, bytes]]) -> None:
        """Write and flush what was stamped, in order, all or nothing. Raises OSError when the disk does not take it."""
        file, frames = self._file, [_frame(body) for _, body in records]
        try:
            _write_all(file.fd, b"".join(frames), file.end)
            if self._sync:
                os.fdatasync(file.fd)
        except OSError:
            with suppress(OSError):
                os.ftruncate(file.fd, file.end)  # what stays behind it is written over, or cut when it is opened again
            raise
        for (record, _), frame in zip(records, frames, strict=True):
            self._note(record, len(frame))

    def _note(self, record: Record, length: int) -> None:
        self._file.note(record, length)
        self._unpacked += isinstance(record.entry, IterationCommitted)
        self.seq = max(self.seq, record.seq)

    # --- reading ----------------------------------------------------------------------------------------------

    def common(self, log: int) -> int:
        """Number of the last record that this journal shares with a copy of it that ends with `log`."""
        file = self._file
        at = file.following(log)
        if at < len(file.lasts) and file.firsts[at] <= log:
            return log  # in the midst of what is packed here
        return file.lasts[at - 1] if at else 0

    def after(self, seq: int, most_bytes: int) -> list[tuple[int, bytes]]:
        """(number, record as encoded) of what follows record `seq` in the file: about so much of it, at least one.

        Empty at its end. Raises OSError.
        """
        with self._swapping:
            file = self._file
            at = file.following(seq)
            if at == len(file.lasts):
                return []
            until = max(at + 1, bisect_right(file.ends, file.start(at) + most_bytes))
            bodies = file.bodies(at, until)
            lasts, partial = file.lasts[at:until], file.firsts[at] <= seq
        found = list(zip(lasts, bodies, strict=True))
        if partial:
            found[:1] = [(row.seq, encode(row)) for row in unpack([decode(bodies[0])]) if row.seq > seq]
        return found

    # --- keeping it small -------------------------------------------------------------------------------------

    @property
    def is_to_be_packed(self) -> bool:
        return self._unpacked >= PACK_AFTER + LEFT_UNPACKED

    def pack(self) -> None:
        """Write the file anew, all committed iterations packed but the last ones. Raises OSError: it is as before."""
        self.adopt(self.packed())

    def packed(self) -> Packed:
        """The file as it is now, packed, beside it: the long part, in which another thread may go on appending.

        Raises OSError: nothing is left beside it.
        """
        file, start, until = self._file, self._settled, len(self._file.lasts)
        records = [decode(body) for body in file.bodies(start, until)]
        latest_first = (i for i in reversed(range(len(records))) if isinstance(records[i].entry, IterationCommitted))
        old = next(islice(latest_first, LEFT_UNPACKED - 1, None), 0)
        packed = pack(records[:old])
        return Packed(self._beside(start, [*packed, *records[old:]]), until, start + len(packed))

    def adopt(self, packed: Packed) -> None:
        """Put it in the place of ours, with what was appended meanwhile. Raises OSError: ours is as before."""
        since = self._file.bodies(packed.until, len(self._file.lasts))
        self._replace(packed.file, [decode(body) for body in since])
        self._settled = packed.settled
        left = self._file.bodies(self._settled, len(self._file.lasts))
        self._unpacked = sum(isinstance(decode(body).entry, IterationCommitted) for body in left)
        self._sync_name()

    def cut(self, after: int) -> None:
        """Forget the records that come after this number. Raises OSError: it is as before."""
        file = self._file
        at = file.following(after)
        rows: list[Record] = []
        if at < len(file.lasts) and file.firsts[at] <= after:
            (body,) = file.bodies(at, at + 1)
            rows = [row for row in unpack([decode(body)]) if row.seq <= after]
        self._replace(self._beside(at, rows), [])
        self._settled, self._unpacked = 0, PACK_AFTER  # looked at once more, soon
        self.seq = self._file.lasts[-1] if self._file.lasts else 0
        self._sync_name()

    def _beside(self, at: int, records: Sequence[Record]) -> _OpenFile:
        """A file beside ours, on disk, that has these records from place `at` on."""
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
        """It takes the place of ours, with these records at its end."""
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
        """Else what is written from now on could be lost with the name of its file."""
        if self._sync:
            sync_folder(self.path.parent)

    def _extend(self, new: _OpenFile, records: Sequence[Record]) -> None:
        frames = [_frame(encode(record)) for record in records]
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
        return self.path.with_name(
            f".{self.path.name}.new"
        )  # one writer at a time: what it left behind is written over

    def close(self) -> None:
        os.close(self._file.fd)
