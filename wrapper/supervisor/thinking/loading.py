"""Loads the compiled plan search before it is needed: a loss for which no plan was made ahead is planned in the
supervisor, and compiling takes seconds in which the agents would take it for dead and elect another.

The search is compiled once on a machine, and read from the disk afterwards (`resihp.scheduler.search.kernels`). Loading
runs in a thread, because the disk may hang; until it is done, plans are made without the search. This is a `Listener`
of the journal, which reports early the job's model and the memory of its devices.
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
    """Loads the search once the model is known. `past`: the records of the leaders before us."""

    def __init__(
        self, settings: Settings, past: Iterable[Record] = (), load: Callable[[], None] = anytime.load
    ) -> None:
        self._settings, self._load = settings, load
        self._begun = False
        self.ready = threading.Event()
        self.planner = NamedPlanner(decide=self._decide) if settings.planner == "resihp" else None
        """The controller's planner: ours, which searches once the search is loaded. None: the planner of the
        settings."""
        for record in past:
            self.submit(record)

    def submit(self, record: Record) -> None:
        """Load the search when the model is declared, unless the device memory is unknown or another planner is
        configured."""
        if self._begun or not isinstance(record.entry, ModelDeclared) or self.planner is None:
            return
        if self._settings.memory_bytes is not None or record.entry.declare.memory_bytes is not None:
            self._begun = True
            threading.Thread(target=self._run, daemon=True, name="loads the search").start()

    def close(self, deadline: float) -> None:
        """Do nothing: nobody waits for the search at the end."""

    def _run(self) -> None:
        try:
            self._load()
        except Exception:  # noqa: BLE001 - logged; plans are then made without the search
            _log.exception("plan search: cannot be loaded; plans are made without it")
        else:
            self.ready.set()

    def _decide(self, situation: Situation) -> Decision:
        return planner.decide(situation, search=self.ready.is_set())
