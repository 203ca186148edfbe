"""What the supervisor has Slurm do and asks it: carried out in the background, one thing at a time, answers as events.

Decides when Slurm is asked again, and what its views mean in the controller's words; what is wanted, and what follows
from an answer, is decided there. A healthy job asks for its time limit, which may be changed, and for its nodes every
few minutes. No answer is told as "unknown" or asked for again later, with growing pauses; it is never taken for an
answer. Nothing in here ever ends the job: trouble is logged. Owned by `wrapper.supervisor.shell`.

Why a job is being signalled (22.05.8, measured by squeue while TERM arrived):

===========================  ============  ===========  ==================================================
cause                        state         reason       what else
===========================  ============  ===========  ==================================================
scancel                      completing    None         time left; then cancelled
time limit                   completing    TimeLimit    TimeLeft INVALID; running until a moment before
preemption, during grace     running       None         PreemptTime; steps are signalled, the batch script not
preemption, after grace      completing    None         PreemptTime; with REQUEUE as well, until it runs again
scancel --signal=TERM        running       None         nothing: anybody may have sent it
===========================  ============  ===========  ==================================================
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import re
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from resihp.controller import interface as api
from slurm import replacement
from slurm.client import JobRequest, JobView, NodeView, commented
from slurm.commands import CommandLine
from slurm.drains import drain
from slurm.drains.exclusions import FOR_S, Exclusions
from slurm.drains.spool import folder_of
from slurm.errors import SlurmError, SlurmRefusedError, SlurmUnavailableError
from slurm.rate_limited import Polite
from slurm.replacement import ReplacementJob
from wrapper.config.run_spec import RunRequest
from wrapper.slurm_tasks.job_comment import JobComment

LOOK_FIRST_S = 60.0
LOOK_EVERY_S = 180.0
"""At the nodes, all in one call, while nothing is known to have changed."""
LIMIT_EVERY_S = 360.0
"""At what is left of the job's time."""
LIMIT_MOVED_S = 30.0
"""Limits are counted in minutes: what is less is no change."""
WATCH_PAUSES_S = (5.0, 10.0, 20.0, 40.0, *(60.0,) * 10)
"""Between looks at nodes that are lost, until Slurm does not count them to any job: up to SlurmdTimeout, 300 s usually,
after they died."""
REQUEST_PAUSES_S = (*(5.0,) * 12, 15.0)
"""Between looks at requests that wait for a node, the last one again and again."""
RUNNING_PAUSES_S = (5.0, 15.0, 60.0, 180.0)
"""The same for those that run: what their agents tell comes sooner."""
RETRY_PAUSES_S = (5.0, 15.0, 30.0, 60.0, 120.0, 300.0)
"""After no answer, where one is needed."""
MOST_SUBMISSIONS = 4
ENDLESS_S, ENDLESS_WAIT_S = 30 * 86400.0, 7 * 86400.0
"""Of a request for a job without a time limit: since 24.11 Slurm takes no deadline for what may never end."""
WHY_AGAIN_S = 1.0
"""Slurm's view may be older than its signal."""
CLOSE_S = 20.0
"""For cancelling what is open when the job has ended."""
COMMENT_EVERY_S = 600.0
COMMENT_AGAIN_S = 60.0
"""After a node was lost, since the last one; of the end Slurm is told at once."""
LAST_COMMENT_S = 6.0
"""How long the end of the job waits for that."""

WAITING = ("pending", "configuring", "requeued", "requeue_fed", "requeue_hold", "special_exit", "resv_del_hold")
"""States in which no agent can be there; of `configuring` the nodes are known, and only begin to boot."""

_TELLING = frozenset({"drain", "fail", "not_responding"})
"""Flags of a node that mean something to a job; others come and go."""

_log = logging.getLogger("slurm")

Submit = Callable[[ReplacementJob, Mapping[str, str]], str]
"""Submits a replacement job and returns its id; see `slurm.replacement.submit`."""


@dataclass
class Done:
    """What came of some work: what to tell, and what to do next, in how many seconds."""

    events: list[api.AnyEvent] = field(default_factory=list)
    then: list[tuple[Hashable, float, Work]] = field(default_factory=list)


Work = Callable[[], Done]
"""Runs in the desk's thread; may wait for Slurm."""


@dataclass
class Request:
    """One replacement, as far as Slurm knows of it."""

    number: int
    exclude: tuple[str, ...]
    slurm_job: str | None = None
    node: str | None = None
    state: Literal["asked", "pending", "running", "over"] = "asked"
    looks: int = 0
    """Since its state changed."""
    reasons: set[str] = field(default_factory=set)
    """Why it waits, as far as that was told."""
    cancelled: bool = False


class SlurmDesk:
    """See the module. `event` hands an event to the controller; it is called in the event loop."""

    def __init__(
        self,
        request: RunRequest,
        event: Callable[[api.AnyEvent], None],
        slurm: Polite | None = None,
        *,
        end_time: float | None = None,
        submit: Submit = lambda wanted, environment: replacement.submit(wanted, environment=environment),
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
        comment: JobComment | None = None,
    ) -> None:
        """`clock` is monotonic; `now` tells UTC in seconds since 1970, as does `end_time`: when the job's time is up,
        where that was said at its start; else Slurm is asked. `comment`: what to tell Slurm of the job."""
        assert request.slurm is not None
        self._request = request
        self._main = request.slurm
        self._event = event
        self._slurm = slurm or Polite(CommandLine())
        self._submit = submit
        self._clock = clock
        self._now = now
        job = request.of_job
        self._exclusions = Exclusions(job.folder.parent.parent, self._main.cluster)
        self._folder = job.folder / "replacements"
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="slurm")
        self._agenda: dict[Hashable, tuple[float, int, Work]] = {}
        """(when, in which order) by what it is about: the same thing is not done twice at a time."""
        self._order = itertools.count()
        self._wake = asyncio.Event()
        self._turn = asyncio.Lock()
        self._doing: asyncio.Future[None] | None = None
        self._watched: dict[str, int] = {}
        """Nodes of which we know more than Slurm, and how often it was asked since."""
        self._seen: dict[str, tuple[str, str]] = {}
        self._requests: dict[int, Request] = {}
        self._ends_at: float | None = None
        """On our clock, as last told; infinite without a limit."""
        self._limit_seen_at = float("-inf")
        self._plan("earlier", 0.0, self._find_earlier)
        self._plan("time", 0.0, self._time_left if end_time is None else lambda: self._time_said(end_time))
        self._plan("nodes", LOOK_FIRST_S, self._look_at_nodes)
        self._comment = comment if self._main.comment else None
        self._theirs: str | None = None
        """What the job's comment says, as it was last seen; None if it never was."""
        self._commented_at = float("-inf")
        self._last_said = False
        if self._comment is not None:
            self._comment.changed = self._comment_soon
            self._plan("comment", 0.0, self._say)

    # --- for the shell ----------------------------------------------------------------------------------------

    def carry_out(
        self,
        action: api.DrainNode
        | api.ReleaseNode
        | api.AskReplacement
        | api.CancelReplacement
        | api.WatchNode
        | api.AskWhy
        | api.AskTimeLeft,
    ) -> None:
        """Do it in the background; the answer comes as an event."""
        match action:
            case api.DrainNode():
                rungs = self._climb(action)
                self._plan(("drain", action.drain), 0.0, lambda: self._next_rung(action, rungs))
            case api.ReleaseNode():
                self._plan(("release", action.node), 0.0, lambda: self._release(action))
            case api.AskReplacement():
                self._requests[action.replacement] = Request(action.replacement, action.exclude)
                self._plan(("ask", action.replacement), 0.0, lambda: self._ask(action.replacement, 1))
            case api.CancelReplacement():
                asked = self._requests.setdefault(action.replacement, Request(action.replacement, ()))
                asked.cancelled = True
                self._plan(("cancel", action.replacement), 0.0, lambda: self._cancel(action.replacement, 0))
            case api.WatchNode():
                self._watched[action.node] = 0
                self._plan("nodes", WATCH_PAUSES_S[0], self._look_at_nodes)
            case api.AskWhy():
                self._plan("why", float("-inf"), lambda: self._why(again=True))
            case api.AskTimeLeft():
                self._plan("time", float("-inf"), lambda: self._time_left(fresh_s=0.0))

    async def run(self) -> None:
        """Whatever is due, when it is due, until cancelled."""
        while True:
            self._wake.clear()
            pause_s = await self.turn()
            try:
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def turn(self) -> float:
        """Do all that is due; returns in how many seconds something will be."""
        async with self._turn:
            while (work := self._due()) is not None:
                self._doing = asyncio.ensure_future(self._do(work))
                await asyncio.shield(self._doing)  # whoever cancels us does not lose what follows from it
        return max(0.0, min((at for at, _, _ in self._agenda.values()), default=LOOK_EVERY_S) - self._clock())

    async def _do(self, work: Work) -> None:
        try:
            done = await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except Exception:  # noqa: BLE001 - logged with its traceback; the job goes on without it
            _log.exception("while dealing with Slurm")
            return
        for key, pause_s, then in done.then:
            self._plan(key, pause_s, then)
        for event in done.events:
            self._event(event)

    async def close(self) -> None:
        """The job has ended: drain what is still to be drained, and cancel all requests, joined or not."""
        for key in [key for key in self._agenda if not (isinstance(key, tuple) and key[0] == "drain")]:
            del self._agenda[key]
        self._plan("close", 0.0, self._cancel_all)
        try:
            async with asyncio.timeout(CLOSE_S):
                await self.turn()
        except TimeoutError:
            _log.warning("Slurm gave no answer in time%s", self._left_over())
        if self._comment is not None and not self._last_said:
            self._plan("comment", 0.0, self._say)
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_COMMENT_S):
                    await self.turn()
        self._agenda.clear()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _left_over(self) -> str:
        """How the user finds and ends the requests that may still be open."""
        left = [request for request in self._all() if request.state != "over"]
        known = " ".join(request.slurm_job for request in left if request.slurm_job)
        unknown = ",".join(self._name_of(request.number) for request in left if not request.slurm_job)
        ended = f"; to end what it may have left: scancel {known}" if known else ""
        return ended + (f"; squeue --me --name={unknown} lists what may have been submitted" if unknown else "")

    def _name_of(self, number: int) -> str:
        return f"resihp-{self._request.job}-r{number}"

    def _plan(self, key: Hashable, pause_s: float, work: Work) -> None:
        """Do it then, or sooner if it is planned for sooner."""
        at = self._clock() + pause_s
        planned = self._agenda.get(key)
        if planned is None or at < planned[0]:
            self._agenda[key] = (at, next(self._order), work)
            self._wake.set()

    def _due(self) -> Work | None:
        now = self._clock()
        key = min(self._agenda, key=lambda key: self._agenda[key][:2], default=None)
        if key is None or self._agenda[key][0] > now:
            return None
        return self._agenda.pop(key)[2]

    # --- the job ----------------------------------------------------------------------------------------------

    def _time_said(self, end_time: float) -> Done:
        """What Slurm told us when the job began: nobody need be asked yet."""
        return Done(self._tell_time_left(end_time - self._now()), [("time", LIMIT_EVERY_S, self._time_left)])

    def _time_left(self, tries: int = 0, fresh_s: float | None = None) -> Done:
        """Now and then, for an administrator may change it; and again while Slurm does not answer."""
        known_s = self._clock() - self._limit_seen_at
        if fresh_s is None and known_s < LIMIT_EVERY_S:
            return Done(then=[("time", LIMIT_EVERY_S - known_s, self._time_left)])  # another question told it
        try:
            view = self._slurm.job(self._main.job_id, fresh_s=fresh_s, urgent=fresh_s == 0.0)
        except SlurmError as error:
            _log.info("time left: %s", error)
            view = None
        if view is not None:
            return Done(self._tell_time_left(view.seconds_left), [("time", LIMIT_EVERY_S, self._time_left)])
        return Done(then=[("time", _pause(RETRY_PAUSES_S, tries), lambda: self._time_left(tries + 1))])

    def _tell_time_left(self, seconds: float | None) -> list[api.AnyEvent]:
        """When it is first known, and when it has changed."""
        self._limit_seen_at = self._clock()
        ends_at = math.inf if seconds is None else self._clock() + seconds
        if self._ends_at is not None and (ends_at == self._ends_at or abs(ends_at - self._ends_at) < LIMIT_MOVED_S):
            return []
        self._ends_at = ends_at
        return [api.TimeLeft(seconds=seconds)]

    def _comment_soon(self) -> None:
        """Called in the event loop: a node was lost, or the job has ended."""
        assert self._comment is not None
        again_s = 0.0 if self._comment.ended else self._commented_at + COMMENT_AGAIN_S - self._clock()
        self._plan("comment", max(0.0, again_s), self._say)

    def _say(self) -> Done:
        """Write how far the job is behind what its comment says; once a refusal is known, no more of it."""
        assert self._comment is not None
        if self._last_said:
            return Done()
        told: list[api.AnyEvent] = []
        self._last_said = self._comment.ended
        self._commented_at = self._clock()
        try:
            if self._theirs is None or not self._last_said:  # the end waits for no question
                view = self._slurm.job(self._main.job_id)
                self._theirs = None if view is None else view.comment
                told += [] if view is None else self._tell_time_left(view.seconds_left)
            if self._theirs is not None:
                self._slurm.comment(self._main.job_id, commented(self._theirs, self._comment.text(self._now())))
        except SlurmRefusedError as error:
            _log.warning("comment: %s", error)
            self._last_said = True
            return Done(told)
        except SlurmError as error:
            _log.warning("comment: %s", error)
        return Done(told, [("comment", COMMENT_EVERY_S, self._say)])

    def _why(self, *, again: bool) -> Done:
        try:
            view = self._slurm.job(self._main.job_id, fresh_s=0.0, urgent=True)
        except SlurmError as error:
            _log.warning("why the job is signalled: %s", error)
            view = None
        meaning = meaning_of(view)
        if meaning == "unknown" and again:
            return Done(then=[("why", WHY_AGAIN_S, lambda: self._why(again=False))])
        return Done([api.StopMeaning(meaning=meaning)])

    def _release(self, action: api.ReleaseNode) -> Done:
        """Keep what the controller wants kept and Slurm still counts; a node that it has taken back needs no release.

        One more node than is known to be there would have Slurm refuse the whole.
        """
        outcome: Literal["done", "refused", "unknown"] = "done"
        text = ""
        try:
            view = self._slurm.job(self._main.job_id, fresh_s=0.0)
            if view is None or view.state != "running":
                outcome, text = "refused", f"job {self._main.job_id} is {view.state if view else 'not known'} for Slurm"
            elif action.node not in view.nodes:
                text = "Slurm had taken it back already"
            else:
                self._slurm.keep_nodes(self._main.job_id, [node for node in action.keep if node in view.nodes])
        except SlurmRefusedError as error:
            outcome, text = "refused", str(error)
        except SlurmError as error:
            outcome, text = "unknown", str(error)
        return Done([api.ReleaseAnswered(node=action.node, outcome=outcome, text=text)])

    # --- nodes ------------------------------------------------------------------------------------------------

    def _look_at_nodes(self) -> Done:
        """All nodes in one call; changes are told."""
        guests = [request.node for request in self._all() if request.node and request.state == "running"]
        names = tuple(dict.fromkeys([*self._request.node_names, *guests, *self._watched]))
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
        return Done(told, [("nodes", pause_s, self._look_at_nodes)])

    def _climb(self, action: api.DrainNode) -> Iterator[drain.Step]:
        """Nothing happens before the first rung is asked for."""
        guests = {request.node: request.slurm_job for request in self._all() if request.node}
        yield from drain.climb(
            self._slurm,
            action.node,
            action.reason,
            job_id=guests.get(action.node) or self._main.job_id,
            allowed_nodes={*self._request.node_names, *guests},
            batch_host=self._main.batch_node,
            spool=folder_of(self._main.spool),
            exclusions=self._exclusions,
            now=self._now(),
            exclude_s=FOR_S[action.grounds],
            measure=action.measure,
            most_drained=self._main.most_drained,
        )

    def _next_rung(self, action: api.DrainNode, rungs: Iterator[drain.Step]) -> Done:
        step = next(rungs, None)
        if step is None:
            return Done()
        told = api.DrainStep(drain=action.drain, node=action.node, step=step.step, outcome=step.outcome, text=step.text)
        return Done([told], [(("drain", action.drain), 0.0, lambda: self._next_rung(action, rungs))])

    # --- replacements -----------------------------------------------------------------------------------------

    def _ask(self, number: int, tries: int) -> Done:
        request = self._requests[number]
        if request.cancelled:
            return Done()
        try:
            wanted = self._wanted(request)
        except SlurmError as error:
            # Another node than the job's could be of no use, or harm: nothing is asked for until this is known.
            if tries == 1:
                _log.warning("replacement %d: not asked for before Slurm tells what the job has: %s", number, error)
            pause_s = _pause(RETRY_PAUSES_S, tries)
            return Done(then=[(("ask", number), pause_s, lambda: self._ask(number, tries + 1))])
        return self._submitted(request, wanted, 1)

    def _submitted(self, request: Request, wanted: ReplacementJob, tries: int) -> Done:
        number = request.number
        if request.cancelled:
            return Done()
        try:
            request.slurm_job = self._submit(wanted, os.environ)
        except SlurmRefusedError as error:
            return self._refused(request, str(error))
        except SlurmError as error:
            _log.warning("replacement %d: %s", number, error)
            if tries >= MOST_SUBMISSIONS:
                return self._refused(request, str(error))
            again = ("ask", number), _pause(RETRY_PAUSES_S, tries), lambda: self._submitted(request, wanted, tries + 1)
            return Done(then=[again])
        request.state = "pending"
        look = ("requests", REQUEST_PAUSES_S[0], self._look_at_requests)
        return Done([self._news(request, "pending", "")], [look])

    def _wanted(self, request: Request) -> ReplacementJob:
        """One node like those of the main job, for what is left of its time. Raises SlurmError."""
        main, run = self._main, self._request
        seconds, wait_s = self._seconds_left()
        command = (
            sys.executable,
            "-P",
            "-m",
            "wrapper.agent.process",
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

    def _asked(self) -> JobRequest:
        """What the main job asked for, and what its user has said otherwise since. Raises SlurmError."""
        main = self._main
        said = {
            "partition": main.partition,
            "account": main.account,
            "qos": main.qos,
            "constraint": main.constraint,
            "reservation": main.reservation,
        }
        asked = self._slurm.request(main.job_id)
        return msgspec.structs.replace(asked, **{name: value for name, value in said.items() if value})

    def _excluded(self, known: tuple[str, ...]) -> tuple[str, ...]:
        """What else our jobs stay away from on this cluster."""
        try:
            return tuple(name for name in self._exclusions.to_avoid(self._slurm, self._now()) if name not in known)
        except SlurmError as error:
            _log.info("excluded nodes: %s", error)
            return ()

    def _seconds_left(self) -> tuple[float, float]:
        """Of the main job, and how long a node in place of a lost one is of use to it. Raises SlurmError."""
        view = self._slurm.job(self._main.job_id)
        if view is None:
            raise SlurmUnavailableError(f"job {self._main.job_id}: Slurm does not know it")
        if view.seconds_left is None:
            return ENDLESS_S, ENDLESS_WAIT_S
        return view.seconds_left, view.seconds_left - self._main.replacement_min_left_s

    def _all(self) -> tuple[Request, ...]:
        """The event loop may add one meanwhile."""
        return tuple(self._requests.values())

    def _find_earlier(self) -> Done:
        """Requests of a supervisor before this one: their nodes may be here, and are looked at like any other."""
        for number, job in replacement.all_submitted(self._folder).items():
            self._requests.setdefault(number, Request(number, (), slurm_job=job, state="pending"))
        return Done(then=[("requests", 0.0, self._look_at_requests)] if self._requests else [])

    def _refused(self, request: Request, text: str) -> Done:
        request.state = "over"
        return Done([self._news(request, "refused", text)])

    def _news(
        self, request: Request, state: Literal["pending", "running", "refused", "ended"], text: str
    ) -> api.ReplacementNews:
        return api.ReplacementNews(
            replacement=request.number, state=state, slurm_job=request.slurm_job, node=request.node, text=text
        )

    def _look_at_requests(self) -> Done:
        """All open requests in one call; changes are told."""
        open_ones = [r for r in self._all() if r.state in ("pending", "running") and not r.cancelled]
        if not open_ones:
            return Done()
        told: list[api.AnyEvent] = []
        main = self._main.job_id  # in the same call
        try:
            views = self._slurm.jobs([*(request.slurm_job or "" for request in open_ones), main], fresh_s=1.0)
        except SlurmError as error:
            _log.info("replacements: %s", error)
        else:
            if main in views:
                told += self._tell_time_left(views[main].seconds_left)
            for request in open_ones:
                told += self._compare(request, views.get(request.slurm_job or ""))
        pauses = []
        for request in open_ones:
            if request.state != "over":
                request.looks += 1
                known = RUNNING_PAUSES_S if request.state == "running" else REQUEST_PAUSES_S
                pauses.append(_pause(known, request.looks - 1))
        return Done(told, [("requests", min(pauses), self._look_at_requests)] if pauses else [])

    def _compare(self, request: Request, view: JobView | None) -> list[api.AnyEvent]:
        if view is None or not view.active:
            request.state = "over"
            text = "Slurm does not know the job any more" if view is None else f"the job is {view.state}"
            return [self._news(request, "ended", text)]
        state: Literal["pending", "running"] = "pending"
        if view.state not in WAITING and view.nodes:
            state, request.node = "running", view.nodes[0]
        reason = reason_of(view)
        if state == request.state and (state != "pending" or not reason or reason in request.reasons):
            return []
        if state != request.state:
            request.state, request.looks = state, 0
        if state == "pending":
            request.reasons.add(reason)
        return [self._news(request, state, view.why)]

    def _cancel(self, number: int, tries: int) -> Done:
        request = self._requests[number]
        request.state = "over"
        job = request.slurm_job or replacement.submitted(replacement.folder_of(self._folder, number))
        if job is None:
            return Done()  # never submitted, as far as anybody knows; an agent of it would be refused
        try:
            self._slurm.cancel(job)
        except SlurmUnavailableError as error:
            _log.warning("replacement %d: %s", number, error)
            pause_s = _pause(RETRY_PAUSES_S, tries)
            return Done(then=[(("cancel", number), pause_s, lambda: self._cancel(number, tries + 1))])
        except SlurmError as error:
            _log.warning("replacement %d: %s", number, error)
        return Done()

    def _cancel_all(self) -> Done:
        """Those that are known to have been submitted by any supervisor of this job, and not cancelled by this one."""
        over = {request.slurm_job for request in self._all() if request.state == "over"}
        known = {request.slurm_job for request in self._all()} | {*replacement.all_submitted(self._folder).values()}
        for job in sorted(job for job in known - over if job is not None):
            try:
                self._slurm.cancel(job)
            except SlurmError as error:
                _log.warning("replacement job %s: may be left: %s; scancel %s", job, error, job)
        return Done()


def reason_of(view: JobView) -> str:
    """The word for why a job waits, such as `ReqNodeNotAvail`: names of nodes behind it come and go."""
    return re.split(r"[^A-Za-z]", view.why.lstrip("("), maxsplit=1)[0]


def meaning_of(view: JobView | None) -> Literal["time-limit", "cancelled", "preempted", "unknown"]:
    """Why a job is being signalled, from Slurm's view of it while it is."""
    if view is None:
        return "unknown"
    if view.preempted or view.state == "preempted":
        return "preempted"
    over = view.seconds_left is not None and view.seconds_left <= 0
    if view.state == "timeout" or view.why == "TimeLimit" or over:
        return "time-limit"
    return "cancelled" if view.state in ("completing", "cancelled") else "unknown"


def state_of(view: NodeView) -> str:
    """A node's state with the flags that count, as `down+not_responding`."""
    return "+".join([view.state, *sorted(view.flags & _TELLING)])


def _pause(pauses_s: tuple[float, ...], tries: int) -> float:
    return pauses_s[min(tries, len(pauses_s) - 1)]
