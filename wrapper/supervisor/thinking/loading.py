"""What a search needs is loaded before there is anything to search for: a loss that nobody thought of is decided in the
supervisor, which must not be silent for the seconds in which that is compiled, or its agents choose another.

Compiled once on a machine, read from the disk afterwards (`resihp.scheduler.search.kernels`). In a thread: the disk may
hang. Until it is there plans are made without. A `Listener`, since the journal tells first what a job trains, and on
devices of which size.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from resihp.record.journal import ModelDeclared, Record
from resihp.scheduler import anytime, planner
from resihp.scheduler.planners import NamedPlanner
from resihp.scheduler.situation import Decision, Situation
from resihp.settings import Settings

_log = logging.getLogger("resihp.planner")


class SearchLoader:
    """`past`: the records of those who led before us."""

    def __init__(
        self, settings: Settings, past: Iterable[Record] = (), load: Callable[[], None] = anytime.load
    ) -> None:
        self._settings, self._load = settings, load
        self._begun = False
        self.ready = threading.Event()
        self.planner = NamedPlanner(decide=self._decide) if settings.planner == "resihp" else None
        """Whom a controller asks: ours, which searches once it can. None: whom the settings name."""
        for record in past:
            self.submit(record)

    def submit(self, record: Record) -> None:
        """Nothing is searched for where memory is not known, or by another planner."""
        if self._begun or not isinstance(record.entry, ModelDeclared) or self.planner is None:
            return
        if self._settings.memory_bytes is not None or record.entry.declare.memory_bytes is not None:
            self._begun = True
            threading.Thread(target=self._run, daemon=True, name="loads what searches").start()

    def close(self, deadline: float) -> None:
        """Nobody waits for it."""

    def _run(self) -> None:
        try:
            self._load()
        except Exception:  # noqa: BLE001 - logged; whatever it is, plans are made as without
            _log.exception("what searches could not be loaded")
        else:
            self.ready.set()

    def _decide(self, situation: Situation) -> Decision:
        return planner.decide(situation, search=self.ready.is_set())
