"""A ledger that is opened behind the job's back: a job does not wait for a database.

For a server's ledger, and for a supervisor that takes over. Until the database can be opened, which is tried as long
as the job runs, the journal alone holds what happens; then the ledger catches up with it. Decides nothing.
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
    from db.telemetry import report_rows
    from db.writer import Ledger
    from resihp.record.journal import Record

FIRST_S = 3.0
"""How long a new leader is left alone before the ledger is opened: until then it gathers its agents."""
AGAIN_S = 1.0
LONGEST_AGAIN_S = 15.0
"""Between tries at last: a server that is down for hours is not to be asked by hundreds of jobs each second."""
CLOSE_S = 10.0


class LateLedger:
    """`db.writer.Ledger`, as soon as there is one. `opened` opens it; `warn` may be called from another thread.

    It is opened after `pause_s`, `FIRST_S` unless it is given.
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
        self._pause_s = FIRST_S if pause_s is None else pause_s
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
        ledger = self._first_that_opens()
        if ledger is None:
            return
        self._ledger = ledger
        try:
            ledger.catch_up(self._journal)  # after it is there for others: nothing falls between
        except FileNotFoundError:
            pass  # at a first start the journal is made at the same time: nothing was written on it, nor missed
        except (ResihpError, OSError) as error:
            self._say(f"ledger: incomplete: {error}")

    def _first_that_opens(self) -> Ledger | None:
        """None if none did before the end. Each trouble is told once: another one may come after it."""
        told: set[str] = set()
        again_s = AGAIN_S
        self._closing.wait(self._pause_s)
        while True:
            last = self._closing.is_set()
            try:
                return self._opened()
            except (ResihpError, OSError) as error:
                if str(error) not in told:
                    self._say(f"{error}; tried again while the job goes on")
                told.add(str(error))
            except Exception as error:  # noqa: BLE001 - whatever it is, it is not to be silent, and the job goes on
                self._say(f"ledger: cannot be opened: {type(error).__name__}: {error}")
                return None
            if last:
                return None
            self._closing.wait(random.uniform(0.5, 1.0) * again_s)
            again_s = min(2 * again_s, LONGEST_AGAIN_S)

    def _say(self, text: str) -> None:
        with suppress(RuntimeError):  # whoever would tell it is gone
            self._warn(text)
