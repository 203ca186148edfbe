"""The job itself as Slurm sees it: how long it may run, which reservations begin on its nodes meanwhile, why it is
signalled, which nodes it gives back.

A missing answer never counts as an answer. Called by `resihp.wrapper.slurm_tasks.desk`.

How to tell why a job is being signalled (22.05.8, measured by squeue while SIGTERM arrived):

===========================  ============  ===========  ==================================================
cause                        state         reason       other signs
===========================  ============  ===========  ==================================================
scancel                      completing    None         time left; then cancelled
time limit                   completing    TimeLimit    TimeLeft INVALID; running until a moment before
preemption, during grace     running       None         PreemptTime; steps are signalled, the batch script not
preemption, after grace      completing    None         PreemptTime; with REQUEUE as well, until it runs again
scancel --signal=TERM        running       None         nothing: anybody may have sent it
===========================  ============  ===========  ==================================================
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection
from typing import Literal

from resihp.controller import interface as api
from resihp.slurm.client import JobView, Reservation
from resihp.slurm.errors import SlurmError, SlurmRefusedError
from resihp.slurm.rate_limited import Polite
from resihp.wrapper.slurm_tasks.agenda import Done, pause_of

LIMIT_EVERY_S = 360.0
"""Time between two queries for the job's time limit."""
RESERVATIONS_EVERY_S = 600.0
"""Time between two queries for reservations; a job that ends sooner asks for none."""
MIN_LIMIT_CHANGE_S = 30.0
"""Smallest change of a time limit, or of the beginning of a reservation, that is reported: limits are counted in
minutes."""
RETRY_PAUSES_S = (5.0, 15.0, 30.0, 60.0, 120.0, 300.0)
"""Pauses before a query is repeated because there was no answer."""
WHY_RETRY_S = 1.0
"""Pause before a second query for the reason why the job is signalled: Slurm may signal the job before its view shows
the reason."""

_log = logging.getLogger("slurm")


class OwnJob:
    def __init__(self, job_id: str, slurm: Polite, clock: Callable[[], float], now: Callable[[], float]) -> None:
        """`clock` is monotonic; `now` returns UTC in seconds since 1970."""
        self._job_id = job_id
        self._slurm = slurm
        self._clock = clock
        self._now = now
        self._ends_at: float | None = None
        """Time of `clock` at which the job's time limit ends, as last reported; infinite without a limit, None before
        the first report."""
        self._limit_seen_at = float("-inf")
        self.reservation: Reservation | None = None
        """The next reservation on a node of the job, as last reported."""

    def set_end_time(self, end_time: float) -> Done:
        """Report the time limit that Slurm put into the environment when the job began; Slurm is queried only later."""
        return Done(self.time_left_events(end_time - self._now()), [("time", LIMIT_EVERY_S, self.time_left)])

    def time_left(self, tries: int = 0, fresh_s: float | None = None) -> Done:
        """Query the time left: at intervals, because an administrator may change the limit, and again if Slurm does not
        answer."""
        known_s = self._clock() - self._limit_seen_at
        if fresh_s is None and known_s < LIMIT_EVERY_S:
            return Done(then=[("time", LIMIT_EVERY_S - known_s, self.time_left)])  # another question had the answer
        try:
            view = self._slurm.job(self._job_id, fresh_s=fresh_s, urgent=fresh_s == 0.0)
        except SlurmError as error:
            _log.info("time left: %s", error)
            view = None
        if view is not None:
            return Done(self.time_left_events(view.seconds_left), [("time", LIMIT_EVERY_S, self.time_left)])
        return Done(then=[("time", pause_of(RETRY_PAUSES_S, tries), lambda: self.time_left(tries + 1))])

    def time_left_anew(self) -> Done:
        """Query the time limit, and report it even if it has not changed; the next query reports a reservation again.
        For a controller whose clock stood still."""
        self._ends_at = self.reservation = None
        return self.time_left(fresh_s=0.0)

    def time_left_events(self, seconds: float | None) -> list[api.AnyEvent]:
        """Return an event if the time left is known for the first time, or if the limit has changed; else none."""
        self._limit_seen_at = self._clock()
        ends_at = math.inf if seconds is None else self._clock() + seconds
        if self._ends_at is not None and (
            ends_at == self._ends_at or abs(ends_at - self._ends_at) < MIN_LIMIT_CHANGE_S
        ):
            return []
        self._ends_at = ends_at
        return [api.TimeLeft(seconds=seconds)]

    def reservations(self, nodes: Collection[str], own: str) -> list[api.AnyEvent]:
        """Query the reservations of the job's `nodes`; return an event if the next one that begins before the job's
        time limit is another than last reported. `own`: the reservation in which the job runs."""
        if self._ends_at is not None and self._ends_at - self._clock() < RESERVATIONS_EVERY_S:
            return []
        try:
            views = self._slurm.reservations()
        except SlurmError as error:
            _log.info("reservations: %s", error)
            return []
        now = self._now()
        ends_at = math.inf if self._ends_at is None else now + self._ends_at - self._clock()
        ahead = [
            view
            for view in views
            if view.name != own and now < view.begins_at < ends_at
            if not set(view.nodes).isdisjoint(nodes)
        ]
        before, self.reservation = self.reservation, min(ahead, key=lambda view: view.begins_at, default=None)
        if self.reservation is None:
            is_cancelled = before is not None and now < before.begins_at
            return [api.ReservationAhead(name="", nodes=(), seconds=None)] if is_cancelled else []
        if before is not None and _is_same(before, self.reservation):
            return []
        reserved_nodes = tuple(node for node in nodes if node in self.reservation.nodes)
        seconds = self.reservation.begins_at - now
        return [api.ReservationAhead(name=self.reservation.name, nodes=reserved_nodes, seconds=seconds)]

    def why(self, *, again: bool) -> Done:
        try:
            view = self._slurm.job(self._job_id, fresh_s=0.0, urgent=True)
        except SlurmError as error:
            _log.warning("why the job is signalled: %s", error)
            view = None
        meaning = meaning_of(view)
        if meaning == "unknown" and again:
            return Done(then=[("why", WHY_RETRY_S, lambda: self.why(again=False))])
        return Done([api.StopMeaning(meaning=meaning)])

    def release(self, action: api.ReleaseNode) -> Done:
        """Give a node back to Slurm, by naming the nodes to keep: those that the controller wants to keep and that
        Slurm still counts as the job's. A node that Slurm has already taken back is not released.

        Slurm would refuse the whole request if it named a node that no longer belongs to the job.
        """
        outcome: Literal["done", "refused", "unknown"] = "done"
        text = ""
        try:
            view = self._slurm.job(self._job_id, fresh_s=0.0)
            if view is None or view.state != "running":
                outcome, text = "refused", f"job {self._job_id} is {view.state if view else 'not known'} for Slurm"
            elif action.node not in view.nodes:
                text = "Slurm had taken it back already"
            else:
                self._slurm.keep_nodes(self._job_id, [node for node in action.keep if node in view.nodes])
        except SlurmRefusedError as error:
            outcome, text = "refused", str(error)
        except SlurmError as error:
            outcome, text = "unknown", str(error)
        return Done([api.ReleaseAnswered(node=action.node, outcome=outcome, text=text)])


def _is_same(before: Reservation, after: Reservation) -> bool:
    """Return whether two views of a reservation do not differ by anything that is reported."""
    moved_s = abs(after.begins_at - before.begins_at)
    return before.name == after.name and before.nodes == after.nodes and moved_s < MIN_LIMIT_CHANGE_S


def meaning_of(view: JobView | None) -> Literal["time-limit", "cancelled", "preempted", "unknown"]:
    """Return why the job is being signalled, from Slurm's view of the job at that time."""
    if view is None:
        return "unknown"
    if view.preempted or view.state == "preempted":
        return "preempted"
    over = view.seconds_left is not None and view.seconds_left <= 0
    if view.state == "timeout" or view.why == "TimeLimit" or over:
        return "time-limit"
    return "cancelled" if view.state in ("completing", "cancelled") else "unknown"
