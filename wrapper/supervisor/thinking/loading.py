"""What a search needs is loaded before there is anything to search for: a loss that nobody thought of is decided in the
supervisor, which must not be silent for the seconds in which that is compiled.

Compiled once on a machine, read from the disk afterwards (`resihp.scheduler.search.kernels`). In a thread: the disk may
hang. A `Listener`, since the journal tells first what a job trains, and on devices of which size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from resihp.record.journal import ModelDeclared, Record
from resihp.scheduler import anytime
from resihp.settings import Settings


class SearchLoader:
    """`past`: the records of those who led before us."""

    def __init__(self, settings: Settings, past: Iterable[Record], load: Callable[[], None] = anytime.load) -> None:
        self._settings, self._load = settings, load
        self._begun = False
        for record in past:
            self.submit(record)

    def submit(self, record: Record) -> None:
        """Nothing is searched for where memory is not known, or by another planner."""
        if self._begun or not isinstance(record.entry, ModelDeclared) or self._settings.planner != "resihp":
            return
        if self._settings.memory_bytes is not None or record.entry.declare.memory_bytes is not None:
            self._begun = True
            threading.Thread(target=self._load, daemon=True, name="loads what searches").start()

    def close(self, deadline: float) -> None:
        """Nobody waits for it."""
