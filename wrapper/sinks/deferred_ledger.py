"""A ledger that is opened behind the job's back: a job that is under way does not wait for a database.

For a supervisor that takes over. Until the database can be opened, which is tried as long as the job runs, the journal
alone holds what happens; then the ledger catches up with it. Decides nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from resihp.errors import ResihpError

if TYPE_CHECKING:
    from db import report_rows
    from db.writer import Ledger
    from resihp.record.journal import Record

FIRST_S = 3.0
"""How long a new leader is left alone before the ledger is opened: until then it gathers its agents."""
AGAIN_S = 1.0
CLOSE_S = 10.0


class LateLedger:
    """`db.writer.Ledger`, as soon as there is one. `opened` opens it; `warn` may be called from another thread."""

    def __init__(self, opened: Callable[[], Ledger], journal: Path, warn: Callable[[str], None]) -> None:
        self._opened = opened
        self._journal = journal
        self._warn = warn
        self._ledger: Ledger | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._open, name="late ledger", daemon=True)
        self._thread.start()

    def submit(self, record: Record) -> None:
        """The record is in the journal: it is not lost if there is no ledger yet."""
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
        """Records that the ledger has not written yet; None while there is none."""
        return None if self._ledger is None else self._ledger.behind

    def close(self) -> bool:
        """Try once more if need be; False if the ledger lacks something, which the journal has."""
        self._closing.set()
        self._thread.join(CLOSE_S)
        if self._ledger is None or self._thread.is_alive():
            self._say("ledger: could not be opened; the next resihp status brings in what it lacks")
            return False
        return self._ledger.close()

    def _open(self) -> None:
        told = False
        self._closing.wait(FIRST_S)
        while True:
            last = self._closing.is_set()
            try:
                ledger = self._opened()
                break
            except (ResihpError, OSError) as error:
                if not told:
                    self._say(f"{error}; tried again while the job goes on")
                told = True
            if last:
                return
            self._closing.wait(AGAIN_S)
        self._ledger = ledger
        try:
            ledger.catch_up(self._journal)  # after it is there for others: nothing falls between
        except (ResihpError, OSError) as error:
            self._say(f"ledger: incomplete: {error}")

    def _say(self, text: str) -> None:
        with suppress(RuntimeError):  # whoever would tell it is gone
            self._warn(text)
