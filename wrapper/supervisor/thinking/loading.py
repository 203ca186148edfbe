"""Loads scipy and the compiled plan search before they are needed. The supervisor itself plans for a loss that no plan
was made ahead for; compiling the search then would take seconds, in which the agents would presume it dead and elect
another leader. Importing scipy takes as long as the rest of a supervisor's start, and only plans need it.

The search is compiled once on a machine, and read from the disk afterwards (`resihp.scheduler.search.kernels`). Loading
runs in a thread, because the disk may hang; until it has finished, plans are made without the search. `SearchLoader` is
a `Listener` of the journal, which contains the job's model and the memory of its devices early on.
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
    """Loads scipy and the plan search once the model is known. `past`: the journal records of earlier leaders."""

    def __init__(
        self, settings: Settings, past: Iterable[Record] = (), load: Callable[[], None] = anytime.load
    ) -> None:
        self._settings, self._load = settings, load
        self._begun = False
        self.ready = threading.Event()
        self.planner = NamedPlanner(decide=self._decide) if settings.planner == "resihp" else None
        """The controller's planner, which uses the search once it is loaded. None: the settings name another
        planner."""
        for record in past:
            self.submit(record)

    def submit(self, record: Record) -> None:
        """Load scipy when the model is declared, and the search unless the device memory is unknown or another planner
        is configured."""
        if self._begun or not isinstance(record.entry, ModelDeclared):
            return
        memory_is_known = self._settings.memory_bytes is not None or record.entry.declare.memory_bytes is not None
        self._begun = memory_is_known and self.planner is not None
        threading.Thread(target=self._run, args=(self._begun,), daemon=True, name="loads the search").start()

    def close(self, deadline: float) -> None:
        """Do nothing: at the job's end nothing waits for the search."""

    def _run(self, with_search: bool) -> None:
        try:
            from scipy import optimize  # noqa: F401 - decisions use it

            if with_search:
                self._load()
        except Exception:  # noqa: BLE001 - logged; plans are then made without the search
            _log.exception("plan search: cannot be loaded; plans are made without it")
        else:
            if with_search:
                self.ready.set()

    def _decide(self, situation: Situation) -> Decision:
        return planner.decide(situation, search=self.ready.is_set())
