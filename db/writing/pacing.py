"""The pace of the ledger's writer: a batch soon after a record that readers wait for, later if only statistics wait.

Decides how long a batch gathers; knows no database, and never drops anything. Called by `resihp.db.writer`; `wait` and
`pause` in its thread, the other methods in any.
"""

from __future__ import annotations

import random
import threading

from resihp.record import journal

BATCH_S = 0.2
"""Seconds for which a batch to a file gathers, from the first record that is more than a statistic."""
STATISTICS_S = 5.0
"""Seconds for which committed iterations and telemetry wait in memory before they are written to a file on their own:
a transaction for each of them would be most of what a supervisor computes. Any other record takes them along."""
SERVER_BATCH_S = (2.0, 5.0)
"""Seconds between two batches of a job to a server; each batch opens a connection. Drawn at random, because hundreds of
jobs that start at once would otherwise keep writing at the same moments. `flush` and `close` do not wait for it."""
MAX_CONNECTED_SHARE = 0.04
"""Largest share of its time for which a job is connected to a server, which may have hundreds of writers."""
MAX_GATHER_S = 30.0


class Pacing:
    """The pauses of one writer's thread."""

    def __init__(self, *, is_server: bool) -> None:
        self.closing = threading.Event()
        self.took_s = 0.0
        """Seconds that the last series of batches took."""
        self._is_server = is_server
        self._wake = threading.Event()
        self._due = threading.Event()
        self._hurry = threading.Event()

    @property
    def is_awake(self) -> bool:
        """Whether something was queued since the last `wait`."""
        return self._wake.is_set()

    def queued(self, entry: journal.Entry | None = None) -> None:
        """Note that a record with `entry` was queued, or telemetry (None)."""
        if entry is not None and not isinstance(entry, journal.IterationCommitted):
            self._due.set()
        self._wake.set()

    def soon(self) -> None:
        """Make the next `wait` a short one: an older journal was queued, or nothing could be written."""
        self._due.set()
        self._wake.set()

    def hurry(self) -> None:
        """End all pauses: a caller waits, or a queue is half full."""
        self._hurry.set()
        self._due.set()
        self._wake.set()

    def close(self) -> None:
        """End all pauses for good."""
        self.closing.set()
        self.hurry()

    def wait(self) -> None:
        """Wait until something is queued, and let a batch gather."""
        self._wake.wait()
        if not self._is_server:
            self._due.wait(STATISTICS_S)
        self.pause(self.gather_s())
        self._due.clear()
        self._wake.clear()
        if self.closing.is_set():
            self._due.set()

    def pause(self, pause_s: float) -> None:
        """Wait for `pause_s`, unless the writer is to hurry."""
        self._hurry.wait(pause_s)
        self._hurry.clear()
        if self.closing.is_set():
            self._hurry.set()

    def gather_s(self) -> float:
        """Return for how many seconds the next batch gathers."""
        if not self._is_server:
            return BATCH_S
        slow_s = random.uniform(0.5, 1.5) * min(self.took_s / MAX_CONNECTED_SHARE, MAX_GATHER_S)
        return max(random.uniform(*SERVER_BATCH_S), slow_s)
