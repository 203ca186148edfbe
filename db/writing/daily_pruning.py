"""Removes outdated telemetry of a user's jobs once a day, while one of these jobs writes its ledger.

Decides when to remove; `resihp.db.retention` removes the rows. Called by `resihp.db.writer`, in its thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from resihp.db.retention import prune_telemetry
from resihp.db.writing.transactions import first_line
from resihp.record import journal

PRUNE_EVERY_S = 86400.0


class DailyPruning:
    """Removes telemetry older than `keep_s` once a day; removes nothing if `keep_s` is None."""

    def __init__(self, engine: Engine, keep_s: float | None, warn: Callable[[str], None]) -> None:
        """`warn` takes a message without the ledger's name."""
        self._engine = engine
        self._keep_s = keep_s
        self._warn = warn
        self._at = time.monotonic() if keep_s else float("inf")

    def prune(self, entry: journal.Entry) -> None:
        """Remove some outdated telemetry of the user's jobs, if it is time; the next call removes more, so that new
        records need not wait. `entry`: the first entry of the job's journal."""
        if time.monotonic() < self._at or self._keep_s is None:
            return
        before = datetime.now(UTC) - timedelta(seconds=self._keep_s)
        try:
            if not isinstance(entry, journal.JobStarted) or not prune_telemetry(self._engine, entry.user, before):
                self._at = time.monotonic() + PRUNE_EVERY_S
        except (DBAPIError, OSError) as error:
            self._at = time.monotonic() + PRUNE_EVERY_S
            self._warn(f"old rank reports were not removed, {first_line(error)}; retry in a day")
