"""Journal records that wait for the ledger's writer: in memory, or, if too many wait, only in the journal.

Decides which records are written next, and when the journal has to be read again; never drops a record. Not
thread-safe: `resihp.db.writer` does the locking.
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
        """`most`: limit on the number of records in memory; it applies only if there is a journal to read them from
        again."""
        self._most = most
        self._records: deque[journal.Record] = deque()
        self.journal_path = journal_path
        self.first: journal.Record | None = None
        """The journal's first record, which identifies the job."""
        self.is_read_again = False
        """Whether some of the waiting records are only in the journal, which must be read again."""
        self.last_submitted = 0
        self.applied = 0
        """Number of the last record that was written."""

    def __len__(self) -> int:
        return len(self._records)

    @property
    def behind(self) -> int:
        """Number of waiting records; a lower bound while the journal must be read again."""
        return len(self._records) + (self._most if self.is_read_again else 0)

    @property
    def is_crowded(self) -> bool:
        return 2 * len(self._records) > self._most

    def put(self, record: journal.Record) -> None:
        """Add the next record."""
        if record.seq == 1:
            self.first = record
        if self.journal_path is not None and len(self._records) >= self._most:
            self._records.clear()
            self.is_read_again = True
        self._records.append(record)
        self.last_submitted = max(self.last_submitted, record.seq)

    def take_over(self, path: Path, packed: list[journal.Record], written: int) -> None:
        """Add the records of the journal at `path`. The ledger has the records up to number `written`."""
        self.journal_path = path
        if packed:
            self.first = packed[0]
        if packed and packed[-1].seq > written:
            self.last_submitted = max(self.last_submitted, packed[-1].seq)
        self._put_before(packed, written)

    def refill(self, packed: list[journal.Record], written: int) -> None:
        """Add the journal's records after number `written`, after the journal was read again."""
        self._put_before(packed, written)
        self.first = self.first or next(iter(packed), None)
        self.is_read_again = False

    def _put_before(self, packed: list[journal.Record], written: int) -> None:
        """Insert the journal's records after number `written` before later records of the queue.

        Packed iterations stay packed until they are next: unpacked they would take a hundred times as much memory.
        """
        last = packed[-1].seq if packed else 0
        later = [record for record in self._records if record.seq > last]
        self._records = deque([*(record for record in packed if record.seq > written), *later])

    def start_again(self) -> None:
        """Note that the ledger is empty: all records are to be read from the journal again, if there is one."""
        self.applied = 0
        self.is_read_again = self.journal_path is not None

    def batch(self) -> list[journal.Record]:
        """Return the next records to write; they stay in the queue until `forget`. Raises ProtocolError for malformed
        packed iterations."""
        while self._records and not _is_unpacked(self._records[0]):
            rows = list(unpack([self._records[0]]))
            self._records.popleft()
            self._records.extendleft(reversed(rows))
        return list(takewhile(_is_unpacked, islice(self._records, BATCH_RECORDS)))

    def forget(self, records: Sequence[journal.Record], seq: int, *, handed_over: bool) -> bool:
        """Remove the written ones of `records`, up to number `seq`, from the queue. Return whether the remaining
        records can be written.

        `handed_over`: `records` were submitted, not read from the journal.
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
