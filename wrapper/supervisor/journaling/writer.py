"""The leader's journal, written by its own thread, so that a slow or failing disk does not stop the event loop, which
sends heartbeats.

`append` numbers a record and returns. The thread writes all waiting records at once; then `on_disk` is called. A failed
write is repeated until it succeeds; the shell decides how long to lead while writes fail. The last records stay in
memory for the agents' copies (`replication`); older ones are read from the file, outside the event loop. Decides
nothing. Owned by `resihp.wrapper.supervisor.shell`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from bisect import bisect_right
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from resihp.errors import ProtocolError
from resihp.process import name_thread
from resihp.record.journal import AnyEntry, Record
from resihp.record.journal_file import Journal, Packed

RETRY_S = 0.5
PACK_RETRY_S = 300.0
MAX_RECENT_BYTES = 4 << 20
"""Limit on the bytes of written records that are kept in memory."""

_log = logging.getLogger("supervisor")

Encoded = tuple[int, bytes]
"""(number of a record, the encoded record)."""


class JournalWriter:
    """Writer of one journal, created and used in the event loop. `on_disk()` is called in the loop whenever more of the
    journal is on disk."""

    def __init__(self, journal: Journal, on_disk: Callable[[], None]) -> None:
        self._journal = journal
        self._on_disk = on_disk
        self._loop = asyncio.get_running_loop()
        self.trouble = ""
        """Reason why the last write failed; empty if it succeeded or is in progress."""
        self.written = journal.seq
        """Number of the last record that is on disk."""
        self._reached = journal.seq
        """Number of the last record that the thread has written; `written` follows once the loop is told."""
        self._waiting: list[tuple[Record, bytes]] = []
        """Records that were appended, but not handed to the thread yet."""
        self._waiting_since: float | None = None
        """Time at which the oldest of the `_waiting` records was appended; None if there are none."""
        self._writing_since: float | None = None
        """Time at which the oldest record that the thread is now writing was appended; None if it writes none. Set by
        the thread, so that a busy event loop does not look like a slow disk."""
        self._before = journal.seq
        self._seqs: list[int] = []
        self._bodies: list[bytes] = []
        self._recent_bytes = 0
        self._wake = threading.Condition()
        self._closing = False
        self._fetches: set[asyncio.Task[None]] = set()
        self._packed: Packed | None = None
        """The packed file that is to replace the journal; set by the thread that packs, None if there is none."""
        self._is_packing = False
        self._pack_at = 0.0
        self._thread = threading.Thread(target=self._write_until_closed, name="journal", daemon=True)
        self._thread.start()

    @property
    def path(self) -> Path:
        return self._journal.path

    @property
    def seq(self) -> int:
        """Number of the last record that was appended."""
        return self._journal.seq

    @property
    def behind_s(self) -> float:
        """Seconds for which the oldest unwritten record has waited; 0 if all are written."""
        since = [at for at in (self._writing_since, self._waiting_since) if at is not None]
        return time.monotonic() - min(since) if since else 0.0

    def append(self, entry: AnyEntry, at: float) -> Record:
        """Number an entry and queue it for writing. Raises ProtocolError if the entry is too large; the journal is then
        unchanged."""
        record, body = self._journal.stamp(entry, at)
        self._seqs.append(record.seq)
        self._bodies.append(body)
        self._recent_bytes += len(body)
        with self._wake:
            self._waiting.append((record, body))
            self._waiting_since = self._waiting_since or time.monotonic()
            self._wake.notify()
        return record

    # --- for the copies ----------------------------------------------------------------------------------------

    def common(self, log: int) -> int:
        """Return the number of the last record that this journal shares with a copy which ends with record `log`."""
        if log < self._before or not self._seqs:
            return self._journal.common(log)
        at = bisect_right(self._seqs, log)
        return self._seqs[at - 1] if at else self._before

    def recent(self, seq: int, most_bytes: int) -> list[Encoded] | None:
        """Return the records after `seq` that are on disk, about `most_bytes` in total; None if they are only in the
        file (use `fetch`)."""
        if seq < self._before:
            return None
        records, size = [], 0
        for at in range(bisect_right(self._seqs, seq), bisect_right(self._seqs, self.written)):
            records.append((self._seqs[at], self._bodies[at]))
            size += len(self._bodies[at])
            if size >= most_bytes:
                break
        return records

    def fetch(self, seq: int, most_bytes: int, give: Callable[[list[Encoded]], None]) -> None:
        """Read the records after `seq`, about `most_bytes` in total, from the file, and pass them to `give` later; an
        empty list if the file cannot be read."""

        async def read() -> None:
            try:
                records = await asyncio.to_thread(self._journal.after, seq, most_bytes)
            except OSError as error:
                _log.warning("journal %s: cannot be read: %s", self._journal.path, error)
                records = []
            give(records)

        task = self._loop.create_task(read())
        self._fetches.add(task)
        task.add_done_callback(self._fetches.discard)

    # --- the thread -------------------------------------------------------------------------------------------

    def _write_until_closed(self) -> None:
        name_thread("journal")
        batch: list[tuple[Record, bytes]] = []
        while True:
            with self._wake:
                if not batch:
                    self._wake.wait_for(lambda: self._waiting or self._packed or self._closing)
                batch += self._waiting
                self._writing_since = self._writing_since or self._waiting_since
                self._waiting, self._waiting_since = [], None
                closing = self._closing
            if batch:
                try:
                    self._journal.write(batch)
                except OSError as error:
                    self._call_in_loop(self._write_failed, error)
                    if closing:
                        return
                    with self._wake:
                        self._wake.wait_for(lambda: self._closing, RETRY_S)
                    continue
                self._writing_since = None
                self._reached = batch[-1][0].seq
                self._call_in_loop(self._written, self._reached)
                batch = []
            if closing:
                return
            self._pack()

    def _pack(self) -> None:
        """Start a thread that packs the journal into a new file while writing continues; replace the journal once the
        file is complete."""
        try:
            if self._packed is not None:
                self._journal.adopt(self._packed)
                self._packed, self._is_packing = None, False
            elif self._journal.is_to_be_packed and not self._is_packing and time.monotonic() >= self._pack_at:
                self._is_packing = True
                threading.Thread(target=self._pack_beside, name="packing", daemon=True).start()
        except OSError as error:
            self._packed = None
            self._not_packed(error)

    def _pack_beside(self) -> None:
        name_thread("packing")
        try:
            packed = self._journal.packed()
        except (OSError, ProtocolError) as error:
            self._not_packed(error)
        else:
            with self._wake:
                self._packed = packed
                self._wake.notify()

    def _not_packed(self, error: Exception) -> None:
        """Note that packing failed. The journal is unchanged, only larger than necessary."""
        self._pack_at = time.monotonic() + PACK_RETRY_S
        self._is_packing = False
        _log.warning("journal %s: not packed: %s", self._journal.path, error)

    def _call_in_loop(self, callback: Callable[..., None], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(callback, *arguments)

    # --- in the loop again ------------------------------------------------------------------------------------

    def _written(self, seq: int) -> None:
        self.written, self.trouble = seq, ""
        self._forget()
        self._on_disk()

    def _write_failed(self, error: OSError) -> None:
        if not self.trouble:
            _log.warning("journal %s: %s", self._journal.path, error)
        self.trouble = error.strerror or str(error)

    def _forget(self) -> None:
        """Remove the oldest written records from memory once they exceed twice the limit."""
        if self._recent_bytes <= 2 * MAX_RECENT_BYTES:
            return
        count = 0
        while self._recent_bytes > MAX_RECENT_BYTES and self._seqs[count] <= self.written:
            self._recent_bytes -= len(self._bodies[count])
            count += 1
        if count:
            self._before = self._seqs[count - 1]
            del self._seqs[:count], self._bodies[:count]

    def close(self, timeout_s: float) -> bool:
        """Write the waiting records within `timeout_s`; return False if some are not written. Blocks: do not call it in
        the event loop."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False  # the thread hangs in the disk, and ends with the process
        complete = self._reached == self._journal.seq
        self._journal.close()
        return complete
