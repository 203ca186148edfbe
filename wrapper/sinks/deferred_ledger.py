"""A ledger that is opened in the background, so that a job does not wait for a database.

Used for a ledger on a server, and by a supervisor that takes over. Opening is retried as long as the job runs. Until
the ledger is open, only the journal has the job's history; then the ledger catches up with the journal. Decides
nothing.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from resihp.errors import ResihpError

if TYPE_CHECKING:
    from resihp.db.telemetry import report_rows
    from resihp.db.writer import Ledger
    from resihp.record.journal import Record

FIRST_TRY_S = 3.0
"""How long a new leader waits before it first tries to open the ledger, because it first collects its agents."""
RETRY_S = 1.0
MAX_RETRY_S = 15.0
"""Longest pause between two attempts to open the ledger: if a server is down for hours, hundreds of jobs must not
contact it every second."""
CLOSE_TIMEOUT_S = 10.0


class DeferredLedger:
    """Ledger that opens in the background and then passes everything on to `resihp.db.writer.Ledger`.

    `opened` opens the ledger; the first attempt is made after `pause_s`, by default `FIRST_TRY_S`. `warn` reports
    errors, and may be called from another thread.
    """

    def __init__(
        self,
        opened: Callable[[], Ledger],
        journal: Path,
        warn: Callable[[str], None],
        *,
        pause_s: float | None = None,
    ) -> None:
        self._opened = opened
        self._journal = journal
        self._warn = warn
        self._pause_s = FIRST_TRY_S if pause_s is None else pause_s
        self._ledger: Ledger | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._open, name="late ledger", daemon=True)
        self._thread.start()

    def submit(self, record: Record) -> None:
        """Write the record if the ledger is open; otherwise the ledger reads it from the journal after opening."""
        if self._ledger is not None:
            self._ledger.submit(record)

    def telemetry(self, rows: list[report_rows.Report]) -> None:
        if self._ledger is not None:
            self._ledger.telemetry(rows)

    def scores(self, iteration: int, scores: Sequence[tuple[int, float | None, float]]) -> None:
        if self._ledger is not None:
            self._ledger.scores(iteration, scores)

    @property
    def dropped(self) -> int | None:
        return None if self._ledger is None else self._ledger.dropped

    @property
    def behind(self) -> int | None:
        """Number of records that the ledger has not written yet; None while the ledger is not open."""
        return None if self._ledger is None else self._ledger.behind

    def close(self) -> bool:
        """Close the ledger, after a last attempt to open it if it is not open.

        Returns False if the ledger lacks records; the journal has them.
        """
        self._closing.set()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._ledger is None or self._thread.is_alive():
            self._say("ledger: could not be opened; the next resihp status adds the missing records")
            return False
        return self._ledger.close()

    def _open(self) -> None:
        ledger = self._first_that_opens()
        if ledger is None:
            return
        self._ledger = ledger
        try:
            ledger.catch_up(self._journal)  # only after new records go to the ledger: no record is missed in between
        except FileNotFoundError:
            pass  # at a first start, the journal is created at the same time, so no record was missed
        except (ResihpError, OSError) as error:
            self._say(f"ledger: incomplete: {error}")

    def _first_that_opens(self) -> Ledger | None:
        """Open the ledger, retrying until the job ends; return None if every attempt failed. Each reason is reported
        once."""
        reported: set[str] = set()
        retry_s = RETRY_S
        self._closing.wait(self._pause_s)
        while True:
            last = self._closing.is_set()
            try:
                return self._opened()
            except (ResihpError, OSError) as error:
                if str(error) not in reported:
                    self._say(f"{error}; tried again while the job runs")
                reported.add(str(error))
            except Exception as error:  # noqa: BLE001 - any error is reported, and the job goes on
                self._say(f"ledger: cannot be opened: {type(error).__name__}: {error}")
                return None
            if last:
                return None
            self._closing.wait(random.uniform(0.5, 1.0) * retry_s)
            retry_s = min(2 * retry_s, MAX_RETRY_S)

    def _say(self, text: str) -> None:
        with suppress(RuntimeError):  # the event loop has ended
            self._warn(text)
