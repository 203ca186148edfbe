"""Carries out the supervisor's requests to Slurm in the background, one at a time. Answers become events for the
controller.

Decides when to query Slurm again, and translates Slurm's views for the controller, which decides everything else. For a
healthy job, it queries Slurm every few minutes for the job's time limit, which may be changed, and for its nodes, less
often if the user has many jobs. A missing answer is reported as "unknown", or the query is repeated with
growing pauses; a missing answer never counts as an answer. Nothing here ever ends the job: problems are logged. Owned
by `resihp.wrapper.supervisor.shell`.

Each kind of work is a module: `own_job`, `nodes`, `replacements`, `comment_writer`; `agenda` orders the work, and
stretches its pauses.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from resihp.controller import interface as api
from resihp.slurm import replacement
from resihp.slurm.commands import CommandLine
from resihp.slurm.drains.exclusions import Exclusions
from resihp.slurm.rate_limited import Polite
from resihp.slurm.survey import CommandSurvey
from resihp.wrapper.config.run_spec import RunRequest
from resihp.wrapper.slurm_tasks.agenda import Agenda, Done, Pace, Work
from resihp.wrapper.slurm_tasks.comment_writer import CommentWriter
from resihp.wrapper.slurm_tasks.job_comment import JobComment
from resihp.wrapper.slurm_tasks.node_checks import Ask, NodeChecks, in_step
from resihp.wrapper.slurm_tasks.nodes import CHECK_POLL_S, WATCH_PAUSES_S, Nodes
from resihp.wrapper.slurm_tasks.own_job import RESERVATIONS_EVERY_S, OwnJob
from resihp.wrapper.slurm_tasks.replacements import Replacements, Submit

FIRST_LOOK_S = 60.0
ROUTINE_WORK = frozenset({"comment", "nodes", "reservations", "time"})
"""Keys of work that each job repeats, and whose pauses grow with the number of the user's jobs. Requests for nodes are
not among it: the controller waits only seconds for what became of a replacement's Slurm job."""
IDLE_S = 180.0
"""Pause while no work is planned; planned work ends the pause."""
CLOSE_TIMEOUT_S = 20.0
"""Time limit of cancelling open requests after the job has ended."""
LAST_CHECK_TIMEOUT_S = 10.0
"""How long the end of the job waits for the site's health check of a node that is to be drained."""
LAST_COMMENT_TIMEOUT_S = 6.0
"""How long the end of the job waits until its last comment is written."""

_log = logging.getLogger("slurm")


class SlurmDesk:
    """The Slurm desk of one job (see the module). `event` hands an event to the controller, in the event loop."""

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
        ask_node: Ask | None = None,
    ) -> None:
        """`clock` is monotonic; `now` returns UTC in seconds since 1970. `end_time`: the end of the job's time limit,
        in the time of `now`, if it was known at the job's start; None to query Slurm. `comment`: the text of the job's
        comment, None for no comment. `ask_node`: asks the site's health check on a node; None for srun."""
        assert request.slurm is not None
        self._event = event
        self._request = request
        self._own_reservation = request.slurm.reservation
        self._lost: set[str] = set()
        slurm = slurm or Polite(CommandLine())
        exclusions = Exclusions(request.of_job.folder.parent.parent, request.slurm.cluster)
        self._own_job = OwnJob(request.slurm.job_id, slurm, clock, now)
        self._replacements = Replacements(request, slurm, submit, now)
        checks = NodeChecks(ask_node or in_step(request.slurm, CommandSurvey()))
        self._nodes = Nodes(request, slurm, self._replacements, exclusions, checks, now)
        self._pace = Pace(request.slurm.cluster, now)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="slurm")
        self._agenda = Agenda(clock)
        self._turn = asyncio.Lock()
        self._doing: asyncio.Future[None] | None = None
        job = self._own_job
        plan = self._agenda.plan
        plan("earlier", 0.0, self._replacements.find_earlier)
        plan("time", 0.0, job.time_left if end_time is None else lambda: job.set_end_time(end_time))
        plan("nodes", FIRST_LOOK_S, self._nodes.look)
        plan("reservations", FIRST_LOOK_S, self._look_for_reservations)
        plan("pace", 0.0, self._pace.count)
        self._writer: CommentWriter | None = None
        if comment is not None and request.slurm.comment:
            self._writer = writer = CommentWriter(comment, request.slurm.job_id, slurm, job, clock, now)
            comment.changed = lambda: plan("comment", writer.pause_s(), writer.write)
            plan("comment", 0.0, writer.write)

    # --- for the shell ----------------------------------------------------------------------------------------

    def carry_out(
        self,
        action: api.DrainNode
        | api.ReleaseNode
        | api.AskReplacement
        | api.CancelReplacement
        | api.WatchReplacements
        | api.WatchNode
        | api.AskWhy
        | api.AskTimeLeft,
    ) -> None:
        """Carry out an action in the background; its result becomes an event."""
        plan = self._agenda.plan
        match action:
            case api.DrainNode():
                plan(("drain", action.drain), 0.0, self._nodes.ladder(action))
            case api.ReleaseNode():
                plan(("release", action.node), 0.0, lambda: self._own_job.release(action))
            case api.AskReplacement(replacement=number):
                self._replacements.wanted(number, action.exclude)
                plan(("ask", number), 0.0, lambda: self._replacements.ask(number, 1))
            case api.CancelReplacement(replacement=number):
                self._replacements.unwanted(number)
                plan(("cancel", number), 0.0, lambda: self._replacements.cancel(number, 0))
            case api.WatchReplacements():
                plan("requests", float("-inf"), self._replacements.look_often)
            case api.WatchNode():
                self._lost.add(action.node)
                self._nodes.watch(action.node)
                plan("lost nodes", WATCH_PAUSES_S[0], self._nodes.look_for_lost)
            case api.AskWhy():
                plan("why", float("-inf"), lambda: self._own_job.why(again=True))
            case api.AskTimeLeft():
                plan("time", float("-inf"), lambda: self._own_job.time_left(fresh_s=0.0))

    def ask_anew(self) -> None:
        """Query what is reported in seconds from now, because the controller's clock stood still."""
        self._agenda.plan("time", float("-inf"), self._own_job.time_left_anew)
        self._agenda.plan("reservations", float("-inf"), self._look_for_reservations)

    async def run(self) -> None:
        """Do all work when it is due, until cancelled."""
        while True:
            self._agenda.wake.clear()
            pause_s = await self.turn()
            try:
                async with asyncio.timeout(pause_s):
                    await self._agenda.wake.wait()
            except TimeoutError:
                pass

    async def turn(self) -> float:
        """Do all work that is due; return the seconds until further work is due."""
        async with self._turn:
            while (work := self._agenda.due()) is not None:
                self._doing = asyncio.ensure_future(self._do(work))
                await asyncio.shield(self._doing)  # if this task is cancelled, the follow-up work is still planned
        return self._agenda.pause_s(IDLE_S)

    async def _do(self, work: Work) -> None:
        try:
            done = await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except Exception:  # noqa: BLE001 - logged with its traceback; the job goes on without it
            _log.exception("a request to Slurm failed")
            return
        for key, pause_s, then in done.then:
            self._agenda.plan(key, pause_s * self._pace.stretch if key in ROUTINE_WORK else pause_s, then)
        for event in done.events:
            self._event(event)

    def _look_for_reservations(self) -> Done:
        all_names = (*self._request.settings.node_names, *self._replacements.guests(running=True))
        names = [name for name in all_names if name not in self._lost]
        events = self._own_job.reservations(names, self._own_reservation)
        return Done(events, [("reservations", RESERVATIONS_EVERY_S, self._look_for_reservations)])

    async def close(self) -> None:
        """After the job has ended: do the remaining drains, and cancel all replacement requests, whether or not their
        nodes have joined."""
        self._agenda.keep("drain")
        self._agenda.plan("exclude", float("-inf"), self._nodes.exclude_unfinished)
        self._agenda.plan("close", 0.0, self._replacements.cancel_all)
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self.turn()
                await self._await_checks()
        except TimeoutError:
            _log.warning("Slurm gave no answer in time%s", self._replacements.left_over())
        if self._writer is not None and not self._writer.is_finished:
            self._agenda.plan("comment", 0.0, self._writer.write)
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_COMMENT_TIMEOUT_S):
                    await self.turn()
        self._agenda.keep("")
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _await_checks(self) -> None:
        """Do the drains that wait for the site's health check, with or without its answer."""
        try:
            async with asyncio.timeout(LAST_CHECK_TIMEOUT_S):
                while self._nodes.checks.is_pending:
                    await asyncio.sleep(CHECK_POLL_S)
                    await self.turn()
        except TimeoutError:
            self._nodes.checks.give_up()
        if self._nodes.is_unfinished:
            await asyncio.sleep(CHECK_POLL_S)
            await self.turn()
