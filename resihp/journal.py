"""What is remembered of a job: the entries, and the file that holds them.

Entries are facts and decisions in the order in which the controller made them. The supervisor appends each one here,
flushed, *before* the actions that follow it take effect; the SQL ledger (`db`) is a projection of this file and may
lag behind it or be rebuilt from it. Telemetry (`resihp.protocol.Progress`, per-rank reports) is not in it.

File format: the 8 bytes `RESIHPJ1`, then records of little-endian u32 length, u32 CRC-32 of the body, body. A body is a
msgpack-encoded `Record`. A torn tail (crash in mid-append) is cut off when the file is opened for appending.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from resihp.errors import ProtocolError
from resihp.plan import Plan
from resihp.protocol.messages import StepOutcome

MAGIC = b"RESIHPJ1"
MAX_RECORD_BYTES = 16 << 20


class Entry(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all entries."""


class JobStarted(Entry, frozen=True, kw_only=True):
    """First entry. `configuration` is the effective configuration as TOML-like plain data."""

    job: str
    command: tuple[str, ...]
    nodes: int
    gpus_per_node: int
    tp: int
    pp: int
    schedule: str
    host: str
    user: str
    restart_count: int
    version: str
    configuration: dict[str, object]


class NodeJoined(Entry, frozen=True, kw_only=True):
    node: str
    host: str
    devices: int


class NodeLost(Entry, frozen=True, kw_only=True):
    node: str
    reason: str


class WorkerStarted(Entry, frozen=True, kw_only=True):
    rank: int
    node: str
    device: int
    pid: int
    epoch: int


class WorkerEnded(Entry, frozen=True, kw_only=True):
    """`exit` as in subprocess: negative for a signal; None when it died with its node and nobody saw how."""

    rank: int
    exit: int | None
    epoch: int


class PlanDecided(Entry, frozen=True, kw_only=True):
    """`action` tells what becomes of the iteration that was under way: none was, it is redone, or it counts."""

    plan: Plan
    next_iteration: int
    action: Literal["start", "redo", "commit", "between"]
    finish: StepOutcome | None
    reason: str
    bytes_planned: int = 0
    """State that has to travel between ranks, from the two layouts alone."""


class IterationCommitted(Entry, frozen=True, kw_only=True):
    """`seconds` is the slowest rank's, of the attempt that counted; None if no rank lived to report it."""

    epoch: int
    outcome: StepOutcome
    seconds: float | None
    predicted_seconds: float | None


class Suspected(Entry, frozen=True, kw_only=True):
    """Silence or lack of progress. Not a failure. `cleared` True when it has ended."""

    rank: int | None
    node: str | None
    evidence: str
    cleared: bool = False


class FailureFound(Entry, frozen=True, kw_only=True):
    """One root cause. `failure` numbers the job's failures from 1.

    `kind`: `fail-stop` (a process, device or node), `communication` (ranks alive, transfer broken), `program`
    (the training script). `detect_s` is known only where the moment of the fault is (injected), else None.
    """

    failure: int
    kind: Literal["fail-stop", "communication", "program"]
    component: Literal["process", "device", "node", "link", "script"]
    cause: str
    ranks: tuple[int, ...]
    node: str | None
    device: int | None
    iteration: int
    epoch: int
    evidence: str
    detect_s: float | None


class Reconfigured(Entry, frozen=True, kw_only=True):
    """One transition, from the failure's detection to the first committed iteration after it.

    Phases in seconds, in order: `park` (detected to all parked), `plan` (to all confirmed), `groups` and `state`
    (slowest rank's own figures), `first_iteration` (resumed to committed). `seconds` is their total as observed.
    `bytes_moved` is what ranks received in all, `extra_bytes` the most that any rank held beside its state while both
    layouts' were there. `action` "between": parked between two iterations, no work was under way.
    """

    epoch: int
    failures: tuple[int, ...]
    attempts: int
    action: Literal["redo", "commit", "between"]
    park_s: float
    plan_s: float
    groups_s: float
    state_s: float
    first_iteration_s: float
    seconds: float
    bytes_moved: int = 0
    extra_bytes: int = 0


class PlanInEffect(Entry, frozen=True, kw_only=True):
    """Every rank has acknowledged its state: from here on the state is where this epoch's layout says."""

    epoch: int


class PlanRefused(Entry, frozen=True, kw_only=True):
    """A plan that no rank acted on: `rank` objected, or the controller's own check failed (`rank` None)."""

    epoch: int
    rank: int | None
    reason: str


class JoinRefused(Entry, frozen=True, kw_only=True):
    """A new process on a device was turned away; the job goes on without it."""

    rank: int
    node: str
    device: int
    reason: str


class FaultInjected(Entry, frozen=True, kw_only=True):
    """Written before the fault is carried out."""

    fault: int
    text: str
    rank: int | None
    node: str | None
    iteration: int


class CheckpointCommitted(Entry, frozen=True, kw_only=True):
    iteration: int
    folder: str
    bytes: int
    seconds: float


class JobEnded(Entry, frozen=True, kw_only=True):
    """`state`: completed, failed, cancelled (signalled), abnormal (found dead by a successor or a reader)."""

    exit_code: int | None
    state: Literal["completed", "failed", "cancelled", "abnormal"]
    reason: str


AnyEntry = (
    JobStarted
    | NodeJoined
    | NodeLost
    | WorkerStarted
    | WorkerEnded
    | PlanDecided
    | IterationCommitted
    | Suspected
    | FailureFound
    | Reconfigured
    | PlanInEffect
    | PlanRefused
    | JoinRefused
    | FaultInjected
    | CheckpointCommitted
    | JobEnded
)


class Record(msgspec.Struct, frozen=True):
    """One journal record: consecutive number from 1, UTC time in seconds since 1970, entry."""

    seq: int
    at: float
    entry: AnyEntry


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


def _scan(content: bytes, name: str) -> Iterator[tuple[int, Record]]:
    """(end offset, record) of every whole record."""
    if content[: len(MAGIC)] != MAGIC[: len(content)]:
        raise ProtocolError(f"journal {name}: not a resihp journal")
    at = len(MAGIC)
    while at + 8 <= len(content):
        length = int.from_bytes(content[at : at + 4], "little")
        crc = int.from_bytes(content[at + 4 : at + 8], "little")
        body = content[at + 8 : at + 8 + length]
        if not 0 < length <= MAX_RECORD_BYTES or len(body) < length or zlib.crc32(body) != crc:
            return
        try:
            record = _decoder.decode(body)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"journal {name}: record at byte {at} is of another version: {error}") from error
        at += 8 + length
        yield at, record


def read(path: Path) -> list[Record]:
    """All whole records; a torn tail is ignored. Raises ProtocolError if the file is no journal of this version."""
    return [record for _, record in _scan(path.read_bytes(), str(path))]


class Journal:
    """The file, open for appending. One writer: the supervisor that holds the job's lock."""

    def __init__(self, path: Path, *, sync: bool = True) -> None:
        """Open or create; cut a torn tail. `sync=False` leaves flushing to the kernel (tests, simulator)."""
        self._sync = sync
        self.seq = 0
        end = 0
        if path.exists():
            content = path.read_bytes()
            end = min(len(content), len(MAGIC)) if content[: len(MAGIC)] == MAGIC else 0
            for end, record in _scan(content, str(path)):  # noqa: B007 - both are wanted after the loop
                self.seq = record.seq
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._fd, end)
        os.lseek(self._fd, end, os.SEEK_SET)
        if end == 0:
            os.write(self._fd, MAGIC)

    def append(self, entry: AnyEntry, at: float) -> Record:
        """Number, stamp, write and flush one entry. Raises OSError when the disk does not take it."""
        record = Record(self.seq + 1, at, entry)
        body = _encoder.encode(record)
        frame = len(body).to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little") + body
        start = os.lseek(self._fd, 0, os.SEEK_CUR)
        try:
            written = 0
            while written < len(frame):
                written += os.write(self._fd, frame[written:])
            if self._sync:
                os.fdatasync(self._fd)
        except OSError:
            os.ftruncate(self._fd, start)
            os.lseek(self._fd, start, os.SEEK_SET)
            raise
        self.seq += 1
        return record

    def close(self) -> None:
        os.close(self._fd)
