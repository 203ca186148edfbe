"""The job's nodes: reports Slurm's view of them when it changes, and takes the steps of the drain ladder for a node
with a verdict.

The controller decides when the ladder is used for a node; `resihp.slurm.drains.drain` defines the steps. If the site
has a health check of its own, it is asked first: a node that only died again is not drained if the check passes there.
Evidence against a node's hardware stands, whatever the check answers. Called by `resihp.wrapper.slurm_tasks.desk`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator

import msgspec

from resihp.controller import interface as api
from resihp.slurm.client import NodeView
from resihp.slurm.drains import drain
from resihp.slurm.drains.exclusions import EXCLUSION_S, Exclusions
from resihp.slurm.drains.spool import folder_of
from resihp.slurm.errors import SlurmError
from resihp.slurm.rate_limited import Polite
from resihp.wrapper.config.run_spec import RunRequest
from resihp.wrapper.site_check import Answer
from resihp.wrapper.slurm_tasks.agenda import Done
from resihp.wrapper.slurm_tasks.node_checks import NodeChecks
from resihp.wrapper.slurm_tasks.replacements import Replacements

LOOK_EVERY_S = {"stay": 900.0, "vacate": 180.0}
"""Time between two queries for all nodes while no change is known, by `[slurm] on_drain`. A job that stays on a drained
node only reports it."""
WATCH_PAUSES_S = (5.0, 10.0, 20.0, 40.0, *(60.0,) * 10)
"""Pauses between queries for lost nodes, until Slurm no longer regards them as in use by a job. This takes up to
SlurmdTimeout after they died, usually 300 s."""
CHECK_POLL_S = 0.5
"""Pause between two looks for the answer of the site's check."""

_RELEVANT_FLAGS = frozenset({"drain", "fail", "not_responding"})
"""Flags of a node that matter to a job; other flags are ignored."""

_log = logging.getLogger("slurm")


class Nodes:
    def __init__(
        self,
        request: RunRequest,
        slurm: Polite,
        replacements: Replacements,
        exclusions: Exclusions,
        checks: NodeChecks,
        now: Callable[[], float],
    ) -> None:
        """`now` returns UTC in seconds since 1970."""
        assert request.slurm is not None
        self._request = request
        self._main = request.slurm
        self._slurm = slurm
        self._replacements = replacements
        self._exclusions = exclusions
        self.checks = checks
        self._now = now
        self._watched: dict[str, int] = {}
        """Nodes that may be lost without Slurm having noticed, and the number of queries since the loss was known."""
        self._seen: dict[str, tuple[str, str]] = {}
        self._unfinished: dict[int, api.DrainNode] = {}
        """Orders of which not all steps of the ladder have been taken, by the number of the drain."""

    @property
    def is_unfinished(self) -> bool:
        """Whether a ladder has been started and not all of its steps have been taken."""
        return bool(self._unfinished)

    def watch(self, node: str) -> None:
        self._watched[node] = 0

    def look(self) -> Done:
        """Query Slurm for all nodes of the job; changes become events."""
        guests = self._replacements.guests(running=True)
        events = self._changes(dict.fromkeys([*self._request.settings.node_names, *guests]))
        return Done(events, [("nodes", LOOK_EVERY_S[self._request.settings.on_drain], self.look)])

    def look_for_lost(self) -> Done:
        """Query Slurm for the nodes that may be lost, until it has noticed the loss."""
        events = self._changes(self._watched)
        for name in list(self._watched):
            self._watched[name] += 1
            is_updated = name in self._seen and self._seen[name][0].partition("+")[0] not in ("allocated", "mixed")
            if is_updated or self._watched[name] >= len(WATCH_PAUSES_S):
                del self._watched[name]
        pauses_s = [WATCH_PAUSES_S[looks] for looks in self._watched.values()]
        return Done(events, [("lost nodes", min(pauses_s), self.look_for_lost)] if pauses_s else [])

    def _changes(self, names: Iterable[str]) -> list[api.AnyEvent]:
        """Query Slurm for these nodes, and return an event for each change."""
        events: list[api.AnyEvent] = []
        try:
            views = self._slurm.nodes(tuple(names), fresh_s=WATCH_PAUSES_S[0] / 2)
        except SlurmError as error:
            _log.info("nodes: %s", error)
        else:
            for name, view in views.items():
                view_now = (state_of(view), view.reason)
                if self._seen.get(name) != view_now:
                    self._seen[name] = view_now
                    events.append(api.SlurmSees(node=name, state=view_now[0], reason=view_now[1]))
        return events

    def ladder(self, action: api.DrainNode) -> Callable[[], Done]:
        """Return work that takes the steps of the drain ladder for one node. Each step is separate work, and starts
        only when it runs."""
        self._unfinished[action.drain] = action
        if action.measure == "drain" and self._main.health_command and action.node != self._main.batch_node:
            return lambda: self._check_first(action)
        rungs = self._climb(action, action.reason)
        return lambda: self._next_rung(action, rungs)

    def _check_first(self, action: api.DrainNode) -> Done:
        """Start the ladder once the site's check has answered."""
        main = self._main
        job_number = self._replacements.guests().get(action.node) or main.number or main.job_id
        answer = self.checks.answer(action.drain, job_number, action.node)
        if answer is None:
            return Done(then=[(("drain", action.drain), CHECK_POLL_S, lambda: self._check_first(action))])
        return self._next_rung(action, self._climb_after(action, answer))

    def _climb_after(self, action: api.DrainNode, answer: Answer) -> Iterator[drain.Step]:
        """Take the steps that follow from the answer of the site's check."""
        if answer.outcome == "passed" and action.grounds != "hardware":
            text = f"node {action.node}: not drained: the site's health check passes there ({answer.text})"
            yield drain.Step(step="slurm", outcome="refused", text=text)
            yield from self._climb(msgspec.structs.replace(action, measure="exclude"), action.reason)
        elif answer.outcome in ("passed", "failed"):
            yield from self._climb(action, f"{action.reason}, site check {answer.outcome}: {answer.text}")
        else:
            note = f"the site's health check gave no answer: {answer.text}"
            for step in self._climb(action, action.reason):
                yield msgspec.structs.replace(step, text=f"{step.text}; {note}") if note else step
                note = ""

    def _climb(self, action: api.DrainNode, reason: str) -> Iterator[drain.Step]:
        guests = self._replacements.guests()
        yield from drain.climb(
            self._slurm,
            action.node,
            reason,
            job_id=guests.get(action.node) or self._main.job_id,
            allowed_nodes={*self._request.settings.node_names, *guests},
            batch_host=self._main.batch_node,
            spool=folder_of(self._main.spool),
            exclusions=self._exclusions,
            now=self._now(),
            exclude_s=EXCLUSION_S[action.grounds],
            measure=action.measure,
            limits=self._main.limits,
        )

    def exclude_unfinished(self) -> Done:
        """Exclude the nodes of unfinished ladders from the user's jobs now: the job ends, and Slurm may not answer the
        steps before this one in time."""
        main, guests = self._main, self._replacements.guests()
        for action in list(self._unfinished.values()):
            job_id, for_s = guests.get(action.node) or main.job_id, EXCLUSION_S[action.grounds]
            drain.exclude(self._exclusions, action.node, action.reason, job_id, action.measure, self._now(), for_s)
        return Done()

    def _next_rung(self, action: api.DrainNode, rungs: Iterator[drain.Step]) -> Done:
        step = next(rungs, None)
        if step is None:
            self._unfinished.pop(action.drain, None)
            return Done()
        event = api.DrainStep(
            drain=action.drain, node=action.node, step=step.step, outcome=step.outcome, text=step.text
        )
        return Done([event], [(("drain", action.drain), 0.0, lambda: self._next_rung(action, rungs))])


def state_of(view: NodeView) -> str:
    """Return a node's state with its relevant flags, such as `down+not_responding`."""
    return "+".join([view.state, *sorted(view.flags & _RELEVANT_FLAGS)])
