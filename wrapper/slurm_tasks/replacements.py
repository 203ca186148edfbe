"""Replacements of lost nodes, each a Slurm job of one node: submitted, observed while it waits and runs, and cancelled.

The controller decides whether a replacement is requested, and what happens when it joins. Called by
`resihp.wrapper.slurm_tasks.desk`; `resihp.slurm.replacement` submits the jobs.
"""

from __future__ import annotations

import logging
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from resihp.controller import interface as api
from resihp.slurm import replacement
from resihp.slurm.client import JobRequest, JobView, Reservation
from resihp.slurm.errors import SlurmError, SlurmRefusedError, SlurmUnavailableError
from resihp.slurm.rate_limited import Polite
from resihp.slurm.replacement import ReplacementJob
from resihp.wrapper.config.run_spec import RunRequest
from resihp.wrapper.slurm_tasks.agenda import Done, pause_of
from resihp.wrapper.slurm_tasks.exclusion_lists import to_avoid
from resihp.wrapper.slurm_tasks.own_job import RETRY_PAUSES_S, meaning_of

REQUEST_PAUSES_S = (*(5.0,) * 12, *(15.0,) * 16, 60.0)
"""Pauses between queries for requests that wait for a node; the last pause repeats. A new node joins by itself."""
RUNNING_PAUSES_S = (5.0, 15.0, 60.0, 180.0)
"""Pauses between queries for running replacements; their agents report sooner than Slurm. The last pause repeats."""
RESERVATION_MARGIN_S = 120.0
"""Seconds between the time limit of a replacement and a reservation of its node. Slurm counts limits in minutes, and
the replacement starts some seconds after it was requested."""
MAX_SUBMISSIONS = 4
ENDLESS_S, ENDLESS_WAIT_S = 30 * 86400.0, 7 * 86400.0
"""Time limit, and longest wait, of a request by a job without a time limit: since 24.11, Slurm accepts no deadline for
a job without a limit."""

WAITING_STATES = ("pending", "configuring", "requeued", "requeue_fed", "requeue_hold", "special_exit", "resv_del_hold")
"""States in which no agent can be running; in `configuring`, the nodes are known but still booting."""

SUSPENDED_STATES = ("suspended", "stopped")

_log = logging.getLogger("slurm")

Submit = Callable[[ReplacementJob, Mapping[str, str]], str]
"""Submits a replacement job and returns its id (`resihp.slurm.replacement.submit`)."""


@dataclass
class PendingReplacement:
    """Slurm's view of one replacement. `node`: the node that Slurm gave it, None until then."""

    number: int
    exclude: tuple[str, ...]
    slurm_job: str | None = None
    node: str | None = None
    state: Literal["asked", "pending", "running", "over"] = "asked"
    looks: int = 0
    """Number of queries since its state changed."""
    reasons: set[str] = field(default_factory=set)
    """Reasons for waiting that were already reported."""
    cancelled: bool = False
    suspended: bool = False


class Replacements:
    """All replacement requests of the job, including those of earlier supervisors."""

    def __init__(
        self,
        request: RunRequest,
        slurm: Polite,
        submit: Submit,
        now: Callable[[], float],
    ) -> None:
        """`now` returns UTC in seconds since 1970."""
        assert request.slurm is not None
        self._request = request
        self._main = request.slurm
        self._slurm = slurm
        self._submit = submit
        self._now = now
        self._folder = request.of_job.folder / "replacements"
        self._requests: dict[int, PendingReplacement] = {}

    # --- for the desk -----------------------------------------------------------------------------------------

    def wanted(self, number: int, exclude: tuple[str, ...]) -> None:
        self._requests[number] = PendingReplacement(number, exclude)

    def unwanted(self, number: int) -> None:
        self._requests.setdefault(number, PendingReplacement(number, ())).cancelled = True

    def guests(self, *, running: bool = False) -> dict[str, str | None]:
        """Return the nodes that came as replacements, with the ids of their Slurm jobs. `running`: only those that are
        running."""
        return {
            request.node: request.slurm_job
            for request in self._all()
            if request.node and (request.state == "running" or not running)
        }

    def find_earlier(self) -> Done:
        """Find requests of an earlier supervisor: their nodes may be in the job, and are observed like all others."""
        for number, job in replacement.all_submitted(self._folder).items():
            self._requests.setdefault(number, PendingReplacement(number, (), slurm_job=job, state="pending"))
        return Done(then=[("requests", 0.0, self.look)] if self._requests else [])

    def left_over(self) -> str:
        """Return a text with commands by which the user can find and end requests that may still be open."""
        open_requests = [request for request in self._all() if request.state != "over"]
        known_jobs = " ".join(request.slurm_job for request in open_requests if request.slurm_job)
        unknown_names = ",".join(self._name_of(request.number) for request in open_requests if not request.slurm_job)
        ended = f"; to end what it may have left: scancel {known_jobs}" if known_jobs else ""
        return ended + (
            f"; squeue --me --name={unknown_names} lists what may have been submitted" if unknown_names else ""
        )

    def cancel_all(self) -> Done:
        """Cancel all requests that any supervisor of this job has submitted, except those that are over."""
        over = {request.slurm_job for request in self._all() if request.state == "over"}
        known_jobs = {request.slurm_job for request in self._all()} | {
            *replacement.all_submitted(self._folder).values()
        }
        for job in sorted(job for job in known_jobs - over if job is not None):
            try:
                self._slurm.cancel(job)
            except SlurmError as error:
                _log.warning(
                    "replacement job %s: could not be cancelled: %s; to cancel it: scancel %s", job, error, job
                )
        return Done()

    # --- one request ------------------------------------------------------------------------------------------

    def ask(self, number: int, tries: int) -> Done:
        request = self._requests[number]
        if request.cancelled:
            return Done()
        try:
            wanted = self._wanted(request)
        except SlurmError as error:
            # A node unlike the job's could be useless, or harmful: nothing is requested until the job's own request is
            # known.
            if tries == 1:
                _log.warning(
                    "replacement %d: not requested until Slurm reports the job's own request: %s", number, error
                )
            pause_s = pause_of(RETRY_PAUSES_S, tries)
            return Done(then=[(("ask", number), pause_s, lambda: self.ask(number, tries + 1))])
        free_s, reserved_s, reservation = self._reserved(wanted)
        if free_s < wanted.seconds:
            least_left_s = self._request.settings.replacement_least_left_s
            if free_s >= least_left_s:
                wait_s = min(wanted.wait_s, free_s - least_left_s)
                wanted = msgspec.structs.replace(wanted, seconds=free_s, wait_s=wait_s)
            elif reserved_s + least_left_s > wanted.seconds:
                when = f"in {max(free_s, 0.0) / 60:.0f} min"
                text = f"reservation {reservation} begins {when}, and no node of the partition is free after it"
                return self._refused(request, text)
        return self._submitted(request, wanted, 1)

    def _submitted(self, request: PendingReplacement, wanted: ReplacementJob, tries: int) -> Done:
        number = request.number
        if request.cancelled:
            return Done()
        try:
            request.slurm_job = self._submit(wanted, os.environ)
        except SlurmRefusedError as error:
            return self._refused(request, str(error))
        except SlurmError as error:
            _log.warning("replacement %d: %s", number, error)
            if tries >= MAX_SUBMISSIONS:
                return self._refused(request, str(error))
            again = (
                ("ask", number),
                pause_of(RETRY_PAUSES_S, tries),
                lambda: self._submitted(request, wanted, tries + 1),
            )
            return Done(then=[again])
        request.state = "pending"
        look = ("requests", REQUEST_PAUSES_S[0], self.look)
        return Done([self._news(request, "pending", "")], [look])

    def cancel(self, number: int, tries: int) -> Done:
        request = self._requests[number]
        request.state = "over"
        job = request.slurm_job or replacement.submitted(replacement.folder_of(self._folder, number))
        if job is None:
            return Done()  # never submitted, as far as known; an agent of it would be refused
        try:
            self._slurm.cancel(job)
        except SlurmUnavailableError as error:
            _log.warning("replacement %d: %s", number, error)
            pause_s = pause_of(RETRY_PAUSES_S, tries)
            return Done(then=[(("cancel", number), pause_s, lambda: self.cancel(number, tries + 1))])
        except SlurmError as error:
            _log.warning("replacement %d: %s", number, error)
        return Done()

    def _wanted(self, request: PendingReplacement) -> ReplacementJob:
        """Return a request for one node like the main job's nodes, for the job's remaining time. Raises SlurmError."""
        main, run = self._main, self._request
        seconds, wait_s = self._seconds_left()
        command = (
            sys.executable,
            "-P",
            "-m",
            "resihp.wrapper.agent.process",
            "--run",
            str(run.of_job.run_file),
            "--node",
            "-",
        )
        return ReplacementJob(
            folder=str(replacement.folder_of(self._folder, request.number)),
            name=self._name_of(request.number),
            comment=f"replacement {request.number} of a node of job {main.job_id}",
            command=(*command, "--lease", str(request.number)),
            exclude=(*request.exclude, *self._excluded(request.exclude)),
            seconds=seconds,
            wait_s=wait_s,
            asked=self._asked(),
            gpus=main.gpus,
            cpus=main.cpus,
            extra=main.extra,
        )

    def _reserved(self, wanted: ReplacementJob) -> tuple[float, float, str]:
        """Return for how many seconds some node that Slurm may choose is not reserved, in how many seconds the next
        reservation of some such node is over, and the name of the reservation that ends the first time. Slurm starts no
        job that would overlap a reservation. The first time is infinite if not known."""
        try:
            views = self._slurm.partition_nodes(wanted.asked.partition)
            reserved = self._slurm.reservations()
        except SlurmError as error:
            _log.info("replacement: reservations: %s", error)
            return math.inf, 0.0, ""
        now = self._now()
        next_by_node: dict[str, Reservation] = {}
        for view in sorted(reserved, key=lambda view: view.begins_at, reverse=True):
            if view.ends_at > now and view.name != wanted.asked.reservation:
                next_by_node |= dict.fromkeys(view.nodes, view)
        candidates = [name for name, view in views.items() if view.usable and name not in wanted.exclude]
        if not candidates or not next_by_node.keys() >= set(candidates):
            return math.inf, 0.0, ""
        views_ahead = [next_by_node[name] for name in candidates]
        last = max(views_ahead, key=lambda view: view.begins_at)
        over_s = min(view.ends_at for view in views_ahead) - now
        return last.begins_at - now - RESERVATION_MARGIN_S, over_s, last.name

    def _asked(self) -> JobRequest:
        """Return the main job's request, with the settings that override it. Raises SlurmError."""
        main = self._main
        settings = {
            "partition": main.replacement_partition or main.partition,
            "account": main.account,
            "qos": main.replacement_qos or main.qos,
            "constraint": main.constraint,
            "reservation": main.reservation,
        }
        request = self._slurm.request(main.job_id)
        return msgspec.structs.replace(request, **{name: value for name, value in settings.items() if value})

    def _excluded(self, excluded: tuple[str, ...]) -> tuple[str, ...]:
        """Return further nodes that the user's jobs avoid on this cluster."""
        try:
            names = to_avoid(self._slurm, self._main.cluster, self._now(), self._request.of_job.home)
            return tuple(name for name in names if name not in excluded)
        except SlurmError as error:
            _log.info("excluded nodes: %s", error)
            return ()

    def _seconds_left(self) -> tuple[float, float]:
        """Return the main job's remaining time, and how long a replacement may wait and still be useful, in seconds.
        Raises SlurmError."""
        view = self._slurm.job(self._main.job_id)
        if view is None:
            raise SlurmUnavailableError(f"job {self._main.job_id}: Slurm does not know it")
        if view.seconds_left is None:
            return ENDLESS_S, ENDLESS_WAIT_S
        return view.seconds_left, view.seconds_left - self._request.settings.replacement_least_left_s

    def _refused(self, request: PendingReplacement, text: str) -> Done:
        request.state = "over"
        return Done([self._news(request, "refused", text)])

    def _news(
        self,
        request: PendingReplacement,
        state: Literal["pending", "running", "refused", "ended", "withdrawn"],
        text: str,
        *,
        by_slurm: bool = False,
    ) -> api.ReplacementNews:
        return api.ReplacementNews(
            replacement=request.number,
            state=state,
            slurm_job=request.slurm_job,
            node=request.node,
            text=text,
            by_slurm=by_slurm,
        )

    def _name_of(self, number: int) -> str:
        return f"resihp-{self._request.job}-r{number}"

    def _all(self) -> tuple[PendingReplacement, ...]:
        """Return all requests, as a copy, because the event loop may add one in the meantime."""
        return tuple(self._requests.values())

    # --- looking ----------------------------------------------------------------------------------------------

    def look_often(self) -> Done:
        """Query Slurm now, and soon again: the Slurm job of a request is ending."""
        for request in self._all():
            request.looks = 0
        return self.look()

    def look(self) -> Done:
        """Query Slurm for all open requests; changes become events."""
        open_ones = [r for r in self._all() if r.state in ("pending", "running") and not r.cancelled]
        if not open_ones:
            return Done()
        events: list[api.AnyEvent] = []
        try:
            views = self._slurm.jobs([request.slurm_job or "" for request in open_ones], fresh_s=1.0)
        except SlurmError as error:
            _log.info("replacements: %s", error)
        else:
            for request in open_ones:
                events += self._compare(request, views.get(request.slurm_job or ""))
        pauses = []
        for request in open_ones:
            if request.state != "over":
                request.looks += 1
                pauses_s = RUNNING_PAUSES_S if request.state == "running" else REQUEST_PAUSES_S
                pauses.append(pause_of(pauses_s, request.looks - 1))
        return Done(events, [("requests", min(pauses), self.look)] if pauses else [])

    def _compare(self, request: PendingReplacement, view: JobView | None) -> list[api.AnyEvent]:
        if view is not None and view.state == "completing":
            request.looks = 0  # its end is known soon
            return []
        if view is None or not view.active:
            request.state = "over"
            if view is not None and meaning_of(view) == "cancelled":
                return [self._news(request, "withdrawn", "its Slurm job was cancelled", by_slurm=True)]
            text = "Slurm does not know the job any more" if view is None else f"the job is {view.state}"
            by_slurm = view is not None and meaning_of(view) in ("time-limit", "preempted")
            return [self._news(request, "ended", text, by_slurm=by_slurm)]
        was_suspended, request.suspended = request.suspended, view.state in SUSPENDED_STATES
        if request.suspended != was_suspended:
            text = "its Slurm job is suspended" if request.suspended else ""
            return [self._news(request, "running", text, by_slurm=request.suspended)]
        state: Literal["pending", "running"] = "pending"
        if view.state not in WAITING_STATES and view.nodes:
            state, request.node = "running", view.nodes[0]
        reason = reason_of(view)
        if state == request.state and (state != "pending" or not reason or reason in request.reasons):
            return []
        if state != request.state:
            request.state, request.looks = state, 0
        if state == "pending":
            request.reasons.add(reason)
        return [self._news(request, state, view.why)]


def reason_of(view: JobView) -> str:
    """Return the keyword of the reason why a job waits, such as `ReqNodeNotAvail`, without the names of nodes that
    follow it."""
    return re.split(r"[^A-Za-z]", view.why.lstrip("("), maxsplit=1)[0]
