"""The supervisor's shell: connects `resihp.controller` to sockets, clock, signals, journal and ledger.

Run by `resihp.wrapper.supervisor.process`, once for each job. The controller makes all decisions about the job; the
shell carries out its actions in order. Each `Log` is on disk before the next action, and with succession a quorum of
agents also has each decision (`resihp.wrapper.supervisor.journaling.gate`). A leader whose disk fails, or that no
quorum follows, steps back: it closes its connections and leaves the job to a successor. A crash of the shell ends the
job with a message, exit code 70, and the traceback in `<job>/logs/supervisor.log`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, assert_never

import msgspec

from resihp.controller import interface as api
from resihp.errors import ProtocolError, ResihpError
from resihp.protocol import messages as m
from resihp.protocol.channels import SecureChannel
from resihp.protocol.framing import Envelope
from resihp.protocol.serving import Refusals, serve
from resihp.record.journal import AnyEntry, JobEnded, PlanDecided, Record, WorkerEnded
from resihp.record.journal_file import Journal
from resihp.record.quorum import Membership
from resihp.wrapper import early_signals
from resihp.wrapper.config.run_spec import RunRequest
from resihp.wrapper.exit_codes import INTERNAL_ERROR, LEADER_DEPOSED, REQUEUE_REQUESTED
from resihp.wrapper.job_files.dead_jobs import copy_journal
from resihp.wrapper.job_folder import SupervisorFile, note_end, write_private
from resihp.wrapper.launch.launcher import Launcher
from resihp.wrapper.launch.ports import listen
from resihp.wrapper.sinks.fanout import LedgerLike
from resihp.wrapper.supervisor.agents.departure import Departure
from resihp.wrapper.supervisor.agents.links import AgentLinks
from resihp.wrapper.supervisor.agents.starts import WorkerStarts
from resihp.wrapper.supervisor.attention import LOOK_EVERY_S, Attention, StoppedJob
from resihp.wrapper.supervisor.checkpoints.files import CheckpointFiles
from resihp.wrapper.supervisor.collaborators import (
    ControllerLike,
    NodeHistory,
    NoPlanAhead,
    NoSlurm,
    SlurmDeskLike,
    ThinkerLike,
    ViewLike,
)
from resihp.wrapper.supervisor.journaling.gate import QUORUM_TIMEOUT_S, DecisionGate
from resihp.wrapper.supervisor.journaling.replication import Replication
from resihp.wrapper.supervisor.journaling.writer import JournalWriter
from resihp.wrapper.supervisor.operators import Operators

if TYPE_CHECKING:
    from resihp.db.telemetry import report_rows

SAME_SIGNAL_S = 0.25
"""Two signals within this time count as one, because `timeout` sends a signal both to its child and to the child's
process group."""
GUARDIAN_GONE_S = 1.0
"""Delay before acting on the guardian's death, which the kernel reports by SIGHUP
(`resihp.wrapper.supervisor.process`): the cause of its death may be about to kill this process, too."""
BEAT_S = 1.0
MAX_DISK_STALL_S = 5.0
"""With succession: how long journal writes may fail or stall before this supervisor steps back for a successor."""
DISK_GIVE_UP_S = 600.0
"""Without succession: how long journal writes may fail or stall before the job is ended."""
ROUND_GRACE_S = 3.0
"""How long the processes of a script that is started again have after SIGTERM, before they are killed. Most have lost a
peer and can save nothing."""
CLOSE_S = 5.0

_log = logging.getLogger("supervisor")


class Supervisor:
    """The supervisor of one job, from the first agent to the exit code. `run` may be called only once."""

    def __init__(
        self,
        request: RunRequest,
        *,
        controller: ControllerLike,
        launcher: Launcher,
        journal: Journal,
        ledger: LedgerLike,
        view: ViewLike,
        slurm: Callable[[Callable[[api.AnyEvent], None]], SlurmDeskLike] | None = None,
        memory: NodeHistory | None = None,
        thinker: Callable[[Callable[[api.AnyEvent], None]], ThinkerLike] | None = None,
        listener: socket.socket | None = None,
        lead: m.Lead | None = None,
        membership: Membership | None = None,
    ) -> None:
        """`slurm` makes the Slurm desk, and `thinker` the process that plans ahead; both receive the callback for their
        events. After a take-over, `lead` is set, and `membership` reflects the journal of the previous leaders.
        `memory` reads the speeds of nodes in earlier jobs. Without a `listener` one is opened. Agents keep copies of
        the journal if the request asks for succession."""
        membership = membership or Membership()
        self._slurm: SlurmDeskLike = slurm(self._event) if slurm else NoSlurm()
        self._thinker: ThinkerLike = thinker(self._event) if thinker else NoPlanAhead()
        self._took_over = lead is not None
        self._listener = listener
        self._request = request
        self._settings = settings = request.settings
        self._job = request.of_job
        self._controller, self._launcher = controller, launcher
        self._journal = JournalWriter(journal, self._on_disk)
        self._unwritten: deque[Record] = deque()
        self._ledger, self._view = ledger, view
        self._memory = memory
        self._attention, self._stopped_job = Attention(), StoppedJob(request, self._slurm.ask_anew)
        self._links = AgentLinks(
            launcher,
            self._event,
            self._start,
            reconnect_s=settings.reconnect_s,
            clock=self._attention.seconds,
            lead=lead or m.Lead(term=1, node=settings.batch_node, log=0),
            joined=self._agent_joined,
            acknowledged=self._acknowledged,
            deposed=self._deposed,
            roster=request.succession,
            incarnations=membership.incarnations,
        )
        copies = Replication(self._journal, membership, self._links.post, self._links.enlist)
        kept = copies if request.succession else None
        self._gate = DecisionGate(self._links, self._journal, kept, self._do, self._attention.seconds)
        fault_ids = itertools.count(len(settings.faults) + (lead.term * 1000 if lead else 1))
        self._operators = Operators(fault_ids, self._event, self._ending)
        self._checkpoints = CheckpointFiles(request, self._start, self._note, self._checkpoint_lost, self._event)
        self._is_deposed = self._disk_reported = self._job_ended = self._end_decided = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._telemetry: list[report_rows.Report] = []
        self._starts = WorkerStarts(request, launcher)
        self._end: asyncio.Future[api.End] = asyncio.get_running_loop().create_future()
        self._departure = Departure(launcher, self._links, self._gate.flush, self._checkpoints.under_way)
        self._interrupts, self._interrupted_at = 0, -math.inf

    async def run(self, started: AnyEntry) -> int:
        """Supervise the job to its end and return the exit code. `started` is this supervisor's first journal entry."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, loop.call_later, GUARDIAN_GONE_S, self._signalled, signal.SIGTERM)
        if self._request.succession and self._took_over:
            self._gate.claim(started)
        else:
            self.log(started)
        listener = self._listener or listen(self._launcher.host, self._request.ports)
        port = listener.getsockname()[1]
        receives = Envelope[m.AgentMessage] | m.OperatorRequest
        server = await serve(listener, self._job.key, receives, self._connected, Refusals(_log.warning))
        address = SupervisorFile(host=self._launcher.host, port=port, pid=os.getpid())
        write_private(self._job.supervisor_file, msgspec.json.encode(address))
        self._recall(self._request.settings.node_names)
        self._start(self._slurm.run())
        self._start(self._tick())
        self._start(self._beat())
        early_signals.hand_over(self._signalled)
        if not self._took_over:
            self._start(self._launcher.start(port, self._links.agent_ended))
        end = await self._end
        await self._wind_down(end)
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        return LEADER_DEPOSED if self._is_deposed else end.exit_code

    def log(self, entry: AnyEntry) -> None:
        """Append an entry to the journal and show it to the user. The ledger receives the entry once it is on disk. A
        deposed leader logs nothing."""
        if self._is_deposed:
            return
        self._job_ended = self._job_ended or isinstance(entry, JobEnded)
        record = self._journal.append(entry, time.time())
        self._gate.appended(record)
        self._unwritten.append(record)
        self._view.entry(record)

    def _on_disk(self) -> None:
        while self._unwritten and self._unwritten[0].seq <= self._journal.written:
            self._ledger.submit(self._unwritten.popleft())
        if self._disk_reported:
            self._disk_reported = False
            self._view.say("notice", f"journal {self._journal.path}: writable again")
        self._acting(self._gate.on_disk)

    def _note(self, entry: AnyEntry) -> None:
        """Log the outcome of an action, and update the controller's record."""
        self.log(entry)
        self._controller.journaled(entry)

    def _checkpoint_lost(self, reason: str) -> None:
        self._view.say("warning", reason)
        self._event(api.CheckpointLost(reason=reason))

    # --- events in, actions out -------------------------------------------------------------------------------

    def _event(self, event: api.AnyEvent) -> None:
        """Hand one event to the controller and carry out the resulting actions. An exception in either ends the job."""
        try:
            self._look(event)
            if self._end.done():
                return  # the controller has ended the job, or is broken
            began = time.perf_counter()
            actions = self._controller.handle(event, self._attention.seconds())
            took_s = time.perf_counter() - began
            self._end_decided = self._end_decided or any(isinstance(action, api.End) for action in actions)
            self._gate.add(actions)
            for action in actions:
                if isinstance(action, api.Log) and isinstance(action.entry, PlanDecided):
                    self._event(api.PlanningTook(epoch=action.entry.plan.epoch, seconds=took_s))
        except Exception:  # noqa: BLE001 - logged with its traceback, and the job ends
            _log.exception("while handling %r", event)
            self._crash(f"internal error while handling {type(event).__name__}")

    def _agent_joined(self, join: m.Join) -> None:
        self._stopped_job.joined(join)
        if join.lease:
            self._recall((join.node,))
        if self._took_over:
            self._launcher.adopt(join.node, join.pid, self._links.agent_ended)
        if (claim := self._gate.joined(join.node, join.log)) is not None:
            self.log(claim)

    def _acknowledged(self, node: str, number: int) -> None:
        self._acting(partial(self._gate.acknowledged, node, number))

    def _acting(self, step: Callable[[], None]) -> None:
        """Run `step`, which carries out delayed actions. An exception in it ends the job."""
        try:
            step()
        except Exception:  # noqa: BLE001 - logged with its traceback, and the job ends
            _log.exception("while carrying out actions that were held back")
            self._crash("internal error while acting on a decision")

    def _deposed(self, reason: str) -> None:
        """Step back because another supervisor leads or may lead: drop all pending actions."""
        if not self._end.done():
            _log.warning("steps back as leader: %s", reason)
            self._gate.give_up()
            self._is_deposed = True
            self._event(api.QuorumLost(reason=reason))
            if not self._end.done():  # the controller had already ended the job, but no quorum confirmed it
                self._end.set_result(api.End(exit_code=REQUEUE_REQUESTED, reason=reason, workers_leave=False))

    def _recall(self, nodes: Sequence[str]) -> None:
        if self._memory is not None:
            self._memory.recall(nodes, lambda usual: self._event(api.NodesRemembered(usual=dict(usual))))

    def _look(self, event: api.AnyEvent) -> None:
        """Handle events that the controller does not record: telemetry, and exits of workers after the controller has
        ended the job."""
        match event:
            case api.WorkerSaid(rank=rank, message=m.Stepped() as stepped):
                self._view.report(rank, stepped)
                self._telemetry.append(
                    (stepped.outcome.iteration, stepped.epoch, rank, stepped.seconds, stepped.compute_s)
                )
            case api.WorkerSaid(message=m.Declare() as declare):
                self._checkpoints.fingerprint = declare.fingerprint
            case api.AgentJoined(inventory=m.Inventory() as inventory):
                for worker in inventory.workers:
                    for message in worker.said:
                        if isinstance(message, m.Declare):
                            self._checkpoints.fingerprint = message.fingerprint
            case api.AgentBeat():
                self._stopped_job.heard()
                self._view.beats(event.node, event.beat)
            case api.WorkerExited() if self._end.done():
                self.log(WorkerEnded(rank=event.rank, exit=event.status, epoch=self._links.epoch))
            case api.WorkerExited() if self._end_decided:  # but the end still waits for a quorum
                ended = WorkerEnded(rank=event.rank, exit=event.status, epoch=self._links.epoch)
                self._gate.add([api.Log(entry=ended)])  # after what the controller has decided

    def _do(self, action: api.AnyAction) -> None:
        match action:
            case api.Log():
                self.log(action.entry)
            case api.StartWorkers():
                place = self._links.meeting_place(next(iter(action.nodes), ""))
                self._links.spawn(action.node, self._starts.spawn(action, place))
            case api.EndProcesses():
                self._links.post(action.node, m.EndRound(round=action.round, grace_s=ROUND_GRACE_S))
            case api.LookAtWorkers():
                self._links.post(action.node, m.InspectWorkers(asks_nccl=action.asks_nccl))
            case api.Order():
                self._links.order(action.ranks, action.order)
            case api.SignalWorker():
                self._links.signal(action.rank, action.signal)
            case api.SignalNode():
                self._links.signal_node(action.node, action.signal)
            case api.CutConnection():
                self._links.cut(action.node)
            case api.DropNode():
                self._links.drop(action.node, in_order=action.in_order)
                self._gate.left(action.node)
            case (
                api.DrainNode()
                | api.ReleaseNode()
                | api.AskReplacement()
                | api.CancelReplacement()
                | api.WatchReplacements()
                | api.WatchNode()
                | api.AskWhy()
                | api.AskTimeLeft()
            ):
                self._slurm.carry_out(action)
            case api.Reply():
                self._operators.reply(action.request, action.ok, action.text)
            case api.Think():
                self._thinker.ask(action)
            case api.TellScores():
                self._ledger.scores(action.iteration, action.scores)
            case api.CommitCheckpoint() | api.FindCheckpoints():
                self._checkpoints.begin(action)
            case api.Say():
                self._view.say(action.level, action.text)
            case api.End():
                if not self._end.done():
                    self._end.set_result(action)
            case _:
                assert_never(action)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if stopped_s := self._attention.look(are_agents_stopped=self._stopped_job.look(self._view.say)):
                _log.warning("event loop was stopped for %.1f s; nothing is judged while it catches up", stopped_s)
                self._links.were_stopped()
            if self._attention.may_judge:
                self._event(api.Tick())
            self._gate.flush()
            self._links.acknowledge()
            self._view.tick()
            self._flush_telemetry()
            if self._gate.overdue:
                self._deposed(f"no quorum of agents has acknowledged a decision for {QUORUM_TIMEOUT_S:g} s")
            self._judge_disk()

    def _judge_disk(self) -> None:
        """Step back, or end the job, if the journal has been unwritable for too long: without a journal no decision can
        be made."""
        behind_s = self._journal.behind_s
        if behind_s <= MAX_DISK_STALL_S or self._end.done():
            return
        why = self._journal.trouble or "the disk does not answer"
        text = f"journal {self._journal.path}: cannot be written for {behind_s:.0f} s: {why}"
        if self._request.succession:
            self._deposed(text)
        elif behind_s > DISK_GIVE_UP_S:
            self._crash(f"{text}; no recovery could be decided any more")
        elif not self._disk_reported:
            self._disk_reported = True
            hint = "training continues, but no recovery can be decided until the journal is writable; free disk space"
            self._view.say("error", f"{text}; {hint}")

    async def _beat(self) -> None:
        while True:
            self._links.beat()
            await asyncio.sleep(BEAT_S)

    def _flush_telemetry(self) -> None:
        if self._telemetry:
            rows, self._telemetry = self._telemetry, []
            self._ledger.telemetry(rows)

    def _signalled(self, number: signal.Signals) -> None:
        """Hand a signal to the controller. End the job at once on an operator's second signal, or on a signal while the
        job winds down. In Slurm, SIGTERM is not sent by an operator."""
        if number == signal.SIGINT or (number == signal.SIGTERM and not self._settings.slurm):
            now, before = time.monotonic(), self._interrupted_at
            self._interrupted_at = now
            if now - before < SAME_SIGNAL_S:
                return
            self._interrupts += 1
            if self._interrupts > 1 or self._end.done():
                self._departure.hurry()
                if not self._end.done():
                    self._event(api.Signalled(signal=int(number)))
                if not self._end.done():  # the controller's end still waits for a quorum, or for the disk
                    reason = f"received {number.name} twice: ended at once"
                    self._end.set_result(api.End(exit_code=128 + number, reason=reason, workers_leave=False))
                return
        self._event(api.Signalled(signal=int(number)))

    # --- connections ------------------------------------------------------------------------------------------

    async def _connected(self, channel: SecureChannel[Any]) -> None:
        first = await channel.recv()
        match first:
            case None:
                return
            case Envelope(message=m.Join() as join):
                await self._links.converse(channel, first, join)
            case m.Inject() | m.AskStanding() | m.AskStop() | m.AskCheckpoint():
                await self._operators.serve(channel, first)
            case _:
                raise ProtocolError(f"{type(first).__name__} without a Join before it")

    def _ending(self) -> str | None:
        return f"job {self._job.name} is ending" if self._end.done() else None

    # --- the end ----------------------------------------------------------------------------------------------

    async def _wind_down(self, end: api.End) -> None:
        """Release the agents, wait, kill remaining processes, and make everything durable.

        A deposed supervisor only closes its connections: agents and workers belong to its successor.
        """
        await self._thinker.close()
        if self._is_deposed:
            self._links.abandon()
        else:
            await self._departure.complete(end)
            if not self._job_ended:
                state: Literal["completed", "failed", "cancelled"] = "failed" if end.exit_code else "completed"
                if end.exit_code in (130, 143):
                    state = "cancelled"
                self.log(JobEnded(exit_code=end.exit_code, state=state, reason=end.reason))
        self._flush_telemetry()
        if not await asyncio.to_thread(self._journal.close, CLOSE_S):
            why = self._journal.trouble or "the disk does not answer"
            _log.warning("journal %s: %s; its last records are missing", self._journal.path, why)
        if not self._is_deposed:  # else all this is left to the successor
            for record in self._unwritten:
                self._ledger.submit(record)
            with self._in_spite_of("requests to Slurm"):
                await self._slurm.close()
            with self._in_spite_of("exit code"):
                write_private(self._job.exit_code_file, f"{end.exit_code}\n".encode())
        with self._in_spite_of("ledger"):
            await asyncio.to_thread(self._ledger.close)
        if not self._is_deposed:
            with self._in_spite_of("copy of the journal"):
                copy_journal(self._job)
            note_end(self._job, end.exit_code)
        self._view.close()

    @contextmanager
    def _in_spite_of(self, task_name: str) -> Iterator[None]:
        """Log and report a failure of one step of the job's end, so that the remaining steps are still done."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - logged with its traceback, and reported
            _log.exception("at the end: %s", task_name)
            self._view.say("error", f"at the end: {task_name}: {error}")

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, ResihpError):
            self._crash(str(error))
        else:
            _log.error("in %s", task, exc_info=error)
            self._crash("internal error")

    def _crash(self, problem: str) -> None:
        """End the job because of an internal error or an unwritable journal. Does nothing if the job has ended."""
        if self._end.done():
            return
        log = self._job.logs / "supervisor.log"
        text = f"{problem}; see {log}" if problem.startswith("internal error") else problem
        self._view.say("error", f"supervisor: {text}")
        self._end.set_result(api.End(exit_code=INTERNAL_ERROR, reason=f"supervisor: {text}", workers_leave=False))
