"""The job's nodes: what Slurm sees of them, told when it changes; and the drain ladder for one with a verdict.

Which node deserves a rung is the controller's to decide, which rung there is `slurm.drains.drain`'s. Called by
`wrapper.slurm_tasks.desk`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from resihp.controller import interface as api
from slurm.client import NodeView
from slurm.drains import drain
from slurm.drains.exclusions import EXCLUSION_S, Exclusions
from slurm.drains.spool import folder_of
from slurm.errors import SlurmError
from slurm.rate_limited import Polite
from wrapper.config.run_spec import RunRequest
from wrapper.slurm_tasks.agenda import Done
from wrapper.slurm_tasks.replacements import Replacements

LOOK_EVERY_S = 180.0
"""At the nodes, all in one call, while nothing is known to have changed."""
WATCH_PAUSES_S = (5.0, 10.0, 20.0, 40.0, *(60.0,) * 10)
"""Between looks at nodes that are lost, until Slurm does not count them to any job: up to SlurmdTimeout, 300 s usually,
after they died."""

_TELLING = frozenset({"drain", "fail", "not_responding"})
"""Flags of a node that mean something to a job; others come and go."""

_log = logging.getLogger("slurm")


class Nodes:
    def __init__(
        self,
        request: RunRequest,
        slurm: Polite,
        replacements: Replacements,
        exclusions: Exclusions,
        now: Callable[[], float],
    ) -> None:
        """`now`: UTC in seconds since 1970."""
        assert request.slurm is not None
        self._request = request
        self._main = request.slurm
        self._slurm = slurm
        self._replacements = replacements
        self._exclusions = exclusions
        self._now = now
        self._watched: dict[str, int] = {}
        """Nodes of which we know more than Slurm, and how often it was asked since."""
        self._seen: dict[str, tuple[str, str]] = {}

    def watch(self, node: str) -> None:
        self._watched[node] = 0

    def look(self) -> Done:
        """All nodes in one call; changes are told."""
        guests = self._replacements.guests(running=True)
        names = tuple(dict.fromkeys([*self._request.settings.node_names, *guests, *self._watched]))
        told: list[api.AnyEvent] = []
        try:
            views = self._slurm.nodes(names, fresh_s=WATCH_PAUSES_S[0] / 2)
        except SlurmError as error:
            _log.info("nodes: %s", error)
        else:
            for name, view in views.items():
                seen = (state_of(view), view.reason)
                if self._seen.get(name) != seen:
                    self._seen[name] = seen
                    told.append(api.SlurmSees(node=name, state=seen[0], reason=seen[1]))
        for name in list(self._watched):
            self._watched[name] += 1
            known = name in self._seen and self._seen[name][0].partition("+")[0] not in ("allocated", "mixed")
            if known or self._watched[name] >= len(WATCH_PAUSES_S):
                del self._watched[name]
        pause_s = min((WATCH_PAUSES_S[looks] for looks in self._watched.values()), default=LOOK_EVERY_S)
        return Done(told, [("nodes", pause_s, self.look)])

    def ladder(self, action: api.DrainNode) -> Callable[[], Done]:
        """All rungs for one node, each a piece of work of its own; nothing happens before the first is asked for."""
        rungs = self._climb(action)
        return lambda: self._next_rung(action, rungs)

    def _climb(self, action: api.DrainNode) -> Iterator[drain.Step]:
        guests = self._replacements.guests()
        yield from drain.climb(
            self._slurm,
            action.node,
            action.reason,
            job_id=guests.get(action.node) or self._main.job_id,
            allowed_nodes={*self._request.settings.node_names, *guests},
            batch_host=self._main.batch_node,
            spool=folder_of(self._main.spool),
            exclusions=self._exclusions,
            now=self._now(),
            exclude_s=EXCLUSION_S[action.grounds],
            measure=action.measure,
            most_drained=self._main.most_drained,
        )

    def _next_rung(self, action: api.DrainNode, rungs: Iterator[drain.Step]) -> Done:
        step = next(rungs, None)
        if step is None:
            return Done()
        told = api.DrainStep(drain=action.drain, node=action.node, step=step.step, outcome=step.outcome, text=step.text)
        return Done([told], [(("drain", action.drain), 0.0, lambda: self._next_rung(action, rungs))])


def state_of(view: NodeView) -> str:
    """A node's state with the flags that count, as `down+not_responding`."""
    return "+".join([view.state, *sorted(view.flags & _TELLING)])
