"""Journal records that wait for the ledger's writer: in memory, or, if too many wait, in the journal alone.

Decides which records are written next, and when the journal has to be read again; never drops a record. Has no lock of
its own: `db.writer` locks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice, takewhile
from pathlib import Path

from resihp.record import journal
from resihp.record.packing import unpack

BATCH_RECORDS = 500


class RecordQueue:
    """Records of one job that are not written yet, in order."""

    def __init__(self, most: int, journal_path: Path | None) -> None:
        """`most`: number of records kept in memory, if there is a journal to read them from."""
        self._most = most
        self._records: deque[journal.Record] = deque()
        self.journal_path = journal_path
        self.first: journal.Record | None = None
        """The journal's first record, which identifies the job."""
        self.is_read_again = False
        """Whether records wait that are only in the journal."""
        self.last_submitted = 0
        self.applied = 0
        """Number of the last record written."""

    def __len__(self) -> int:
        return len(self._records)

    @property
    def behind(self) -> int:
        """Number of records that wait; a lower bound while they are read again."""
        return len(self._records) + (self._most if self.is_read_again else 0)

    @property
    def is_crowded(self) -> bool:
        return 2 * len(self._records) > self._most

    def put(self, record: journal.Record) -> None:
        """Take in the next record."""
        if record.seq == 1:
            self.first = record
        if self.journal_path is not None and len(self._records) >= self._most:
            self._records.clear()
            self.is_read_again = True
        self._records.append(record)
        self.last_submitted = max(self.last_submitted, record.seq)

    def take_over(self, path: Path, packed: list[journal.Record], written: int) -> None:
        """Take in the journal at `path`; the ledger has its records up to number `written`."""
        self.journal_path = path
        if packed:
            self.first = packed[0]
        if packed and packed[-1].seq > written:
            self.last_submitted = max(self.last_submitted, packed[-1].seq)
        self._put_before(packed, written)

    def refill(self, packed: list[journal.Record], written: int) -> None:
        """Take in the journal's records after number `written`, when it was read again."""
        self._put_before(packed, written)
        self.first = self.first or next(iter(packed), None)
        self.is_read_again = False

    def _put_before(self, packed: list[journal.Record], written: int) -> None:
        """Queue the journal's records after number `written` before the later ones.

        Packed iterations stay packed until their turn: unpacked they are a hundred times as large.
        """
        last = packed[-1].seq if packed else 0
        later = [record for record in self._records if record.seq > last]
        self._records = deque([*(record for record in packed if record.seq > written), *later])

    def start_again(self) -> None:
        """Note that the ledger is empty: everything is read again from the journal, if there is one."""
        self.applied = 0
        self.is_read_again = self.journal_path is not None

    def batch(self) -> list[journal.Record]:
        """Return the next records; they stay until `forget`. Raises ProtocolError for malformed columns."""
        while self._records and not _is_unpacked(self._records[0]):
            rows = list(unpack([self._records[0]]))
            self._records.popleft()
            self._records.extendleft(reversed(rows))
        return list(takewhile(_is_unpacked, islice(self._records, BATCH_RECORDS)))

    def forget(self, records: Sequence[journal.Record], seq: int, *, handed_over: bool) -> bool:
        """Forget the written ones of these records, up to record `seq`; return whether the rest can be written.

        `handed_over`: the records were not read from the journal.
        """
        count = 0
        while self._records and count < len(records) and self._records[0].seq <= seq:
            self._records.popleft()
            count += 1
        went_back, self.applied = seq < self.applied, seq
        is_stalled = bool(records) and not count
        if self.journal_path is not None and (went_back or (is_stalled and handed_over)):
            # A gap, or a ledger that lost rows: the missing records are in the journal.
            self.is_read_again = True
            return True
        return not is_stalled


def _is_unpacked(record: journal.Record) -> bool:
    return not isinstance(record.entry, journal.IterationsPacked)
