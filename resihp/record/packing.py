"""Pack committed iterations: hundreds of journal records become one record of a tenth of their size.

A job of three months commits a million iterations. Old iterations, which no reader looks up one by one any more, are
stored as columns (`journal.IterationsPacked`). Iteration, epoch, digest and sums are exact; times are exact to the
microsecond; other figures have the seven digits of a 32-bit float. Each owner of a journal file packs its own copy
(`journal_file.Journal`), so copies may be packed differently. Reads and writes no file.
"""

from __future__ import annotations

import struct
import sys
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

from resihp.errors import ProtocolError
from resihp.protocol.messages import StepOutcome
from resihp.record.journal import IterationCommitted, IterationsPacked, Record

MIN_PACKED_ITERATIONS = 16
"""Smallest number of consecutive iterations that are packed."""
MAX_PACKED_ITERATIONS = 8192
"""Largest number of iterations in one record, far below the capacity of a network frame."""

_SUMS = ("tokens", "sum_squared_lengths", "samples", "updates")
_FIGURES = ("clip", "learning_rate", "gradient_norm", "loss")
_FLAGS = ("skip", "pause", "saving", "save")
_NUMBERS = ("passed", "seconds", "predicted_seconds", *_SUMS, *_FIGURES, "flags")
_COLUMNS = len(_NUMBERS) + 1
_DIGEST_BYTES = 8
_MICRO = 1e6


def pack(records: Sequence[Record]) -> list[Record]:
    """Return the records with each run of committed iterations replaced by one record, which has the number of the last
    record of the run."""
    packed: list[Record] = []
    run: list[Record] = []
    for record in records:
        if run and not (len(run) < MAX_PACKED_ITERATIONS and _continues(run[-1], record)):
            packed += _as_one(run)
            run = []
        if isinstance(record.entry, IterationCommitted):
            run.append(record)
        else:
            packed.append(record)
    return packed + _as_one(run)


def unpack(records: Iterable[Record]) -> Iterator[Record]:
    """Yield the records, with packed records replaced by the original ones. Raises ProtocolError for invalid
    columns."""
    for record in records:
        if isinstance(record.entry, IterationsPacked):
            try:
                yield from _rows(record.seq, record.entry)
            except (zlib.error, ValueError) as error:
                raise _cannot_unpack(record.seq, error) from error
        else:
            yield record


def column(record: Record, name: str) -> array[Any]:
    """Return one column of a packed record, for readers that need sums over many iterations rather than single records.

    `passed`: microseconds since the previous iteration; for the first iteration, since 1970. `seconds`,
    `predicted_seconds`: microseconds, negative if not known. Sums and figures are as in `StepOutcome`. Raises
    ProtocolError for invalid columns.
    """
    assert isinstance(record.entry, IterationsPacked)
    try:
        _check(record.entry)
        return _numbers(record.entry, name)
    except (zlib.error, ValueError) as error:
        raise _cannot_unpack(record.seq, error) from error


def last_commits(records: Sequence[Record], most: int) -> list[tuple[int, float, float | None]]:
    """Return the last committed iterations in order, at most `most` of them: (number, time, duration). The time is UTC
    in seconds since 1970; the duration is in seconds, None if not known."""
    commits: list[tuple[int, float, float | None]] = []
    for record in reversed(records):
        entry = record.entry
        if isinstance(entry, IterationCommitted):
            commits.append((entry.outcome.iteration, record.at, entry.seconds))
        elif isinstance(entry, IterationsPacked):
            ends = list(accumulate(column(record, "passed")))
            took = column(record, "seconds")
            for i in reversed(range(entry.count)):
                commits.append((entry.first + i, ends[i] / _MICRO, None if took[i] < 0 else took[i] / _MICRO))
        if len(commits) >= most:
            break
    return commits[:most][::-1]


def first_of(record: Record) -> int:
    """Return the number of the first record that a record stands for: its own number, unless the record is packed."""
    return record.seq - record.entry.count + 1 if isinstance(record.entry, IterationsPacked) else record.seq


def _continues(last: Record, record: Record) -> bool:
    before, after = last.entry, record.entry
    assert isinstance(before, IterationCommitted)
    return (
        isinstance(after, IterationCommitted)
        and record.seq == last.seq + 1
        and after.epoch == before.epoch
        and after.outcome.iteration == before.outcome.iteration + 1
    )


def _as_one(run: list[Record]) -> list[Record]:
    if len(run) < MIN_PACKED_ITERATIONS:
        return run
    entries = [record.entry for record in run if isinstance(record.entry, IterationCommitted)]
    outcomes = [entry.outcome for entry in entries]
    if any(len(outcome.samples_digest) != 2 * _DIGEST_BYTES for outcome in outcomes):
        return run
    ats = [round(record.at * _MICRO) for record in run]
    try:
        columns = [
            _integers([later - before for before, later in zip([0, *ats], ats, strict=False)]),
            _integers(_micros([entry.seconds for entry in entries])),
            _integers(_micros([entry.predicted_seconds for entry in entries])),
            *(_integers([getattr(outcome, name) for outcome in outcomes]) for name in _SUMS),
            *(_figures([getattr(outcome, name) for outcome in outcomes]) for name in _FIGURES),
            _integers([sum(getattr(o, name) << bit for bit, name in enumerate(_FLAGS)) for o in outcomes]),
            bytes.fromhex("".join(outcome.samples_digest for outcome in outcomes)),
        ]
    except (struct.error, OverflowError, ValueError):
        return run  # a figure does not fit its column, so the run stays unpacked
    entry = IterationsPacked(
        epoch=entries[0].epoch,
        first=outcomes[0].iteration,
        count=len(run),
        columns=tuple(zlib.compress(column, 6) for column in columns),
    )
    return [Record(run[-1].seq, run[-1].at, entry)]


def _rows(seq: int, entry: IterationsPacked) -> Iterator[Record]:
    _check(entry)
    count = entry.count
    passed, seconds, predicted = (_numbers(entry, name) for name in _NUMBERS[:3])
    columns = {name: _numbers(entry, name) for name in (*_SUMS, *_FIGURES)}
    flags = _numbers(entry, "flags")
    digests = _inflated(entry.columns[-1], _DIGEST_BYTES * count).hex()
    at = 0
    for i in range(count):
        at += passed[i]
        outcome = StepOutcome(
            iteration=entry.first + i,
            samples_digest=digests[2 * _DIGEST_BYTES * i : 2 * _DIGEST_BYTES * (i + 1)],
            skip=bool(flags[i] & 1),
            pause=bool(flags[i] & 2),
            saving=bool(flags[i] & 4),
            save=bool(flags[i] & 8),
            **{name: column[i] for name, column in columns.items()},
        )
        yield Record(
            seq - count + 1 + i,
            at / _MICRO,
            IterationCommitted(
                epoch=entry.epoch,
                outcome=outcome,
                seconds=None if seconds[i] < 0 else seconds[i] / _MICRO,
                predicted_seconds=None if predicted[i] < 0 else predicted[i] / _MICRO,
            ),
        )


def _check(entry: IterationsPacked) -> None:
    """Raise ValueError if the number of iterations or columns makes unpacking impossible."""
    if not 0 < entry.count <= MAX_PACKED_ITERATIONS:
        raise ValueError(f"{entry.count} iterations, {MAX_PACKED_ITERATIONS} are the most")
    if len(entry.columns) != _COLUMNS:
        raise ValueError(f"{len(entry.columns)} columns instead of {_COLUMNS}")


def _numbers(entry: IterationsPacked, name: str) -> array[Any]:
    kind, width = ("f", 4) if name in _FIGURES else ("q", 8)
    return _unshuffled(_inflated(entry.columns[_NUMBERS.index(name)], width * entry.count), kind, width, entry.count)


def _cannot_unpack(seq: int, error: Exception) -> ProtocolError:
    return ProtocolError(f"journal: packed record {seq} cannot be unpacked: {error}")


def _micros(seconds: Iterable[float | None]) -> list[int]:
    """Return times in microseconds; -1 if not known."""
    return [-1 if value is None else round(value * _MICRO) for value in seconds]


def _integers(numbers: Sequence[int]) -> bytes:
    return _shuffled(struct.pack(f"<{len(numbers)}q", *numbers), 8)


def _figures(numbers: Sequence[float]) -> bytes:
    return _shuffled(struct.pack(f"<{len(numbers)}f", *numbers), 4)


def _shuffled(column: bytes, width: int) -> bytes:
    """Return the first bytes of all numbers, then the second bytes of all numbers, and so on. Similar bytes next to
    each other compress better."""
    return b"".join(column[at::width] for at in range(width))


def _unshuffled(column: bytes, kind: str, width: int, count: int) -> array[Any]:
    rows = bytearray(len(column))
    for at in range(width):
        rows[at::width] = column[at * count : (at + 1) * count]
    numbers: array[Any] = array(kind, bytes(rows))
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _inflated(column: bytes, size: int) -> bytes:
    """Return the decompressed column. Raises ValueError unless it has exactly `size` bytes, so that malicious data
    cannot fill the memory."""
    inflater = zlib.decompressobj()
    content = inflater.decompress(column, size + 1)
    if len(content) != size or not inflater.eof:
        raise ValueError(f"{len(content)} bytes or more instead of {size}")
    return content
