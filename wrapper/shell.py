"""The supervisor's shell: sockets, clock, signals, journal and ledger around `resihp.controller`.

Run by `wrapper.supervisor`, one for a job. What happens to the job is decided in
the controller; here its actions are carried out in order, each `Log` on disk before what follows it. A crash in here
ends the job with a message, exit code 1, and the traceback in `<job>/logs/supervisor.log`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import socket
import time
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Protocol, assert_never, get_args

import msgspec

from resihp.controller import interface as api
from resihp.errors import CheckpointError, ProtocolError, ResihpError
from resihp.faults import Fault, Kind
from resihp.journal import AnyEntry, CheckpointCommitted, JobEnded, Journal, Record, WorkerEnded
from resihp.protocol import messages as m
from resihp.protocol.framing import Envelope, SecureChannel, serve
from wrapper.agent_links import AgentLinks
from wrapper.jobs import SupervisorFile, copy_journal, write_private
from wrapper.launcher import Launcher
from wrapper.request import RunRequest

TICK_S = 0.25
LEAVE_GRACE_S = 60.0
"""After training is done: how long scripts may take to end by themselves."""
TERM_GRACE_S = 3.0
AGENT_EXIT_S = 3.0
GUARDIAN_GONE_S = 1.0
"""The kernel sends SIGHUP when the guardian dies (`wrapper.supervisor`); whoever killed it may be about to kill us."""
REFUSALS_TOLD_PER_MINUTE = 10

_log = logging.getLogger("supervisor")


class ControllerLike(Protocol):
    def handle(self, event: api.AnyEvent, now: float) -> list[api.AnyAction]: ...


class LedgerLike(Protocol):
    """`db.writer.Ledger`, as used here."""

    def submit(self, record: Record) -> None: ...
    def telemetry(self, rows: list[dict[str, Any]]) -> None: ...
    def close(self) -> object: ...


class ViewLike(Protocol):
    """`wrapper.live.LiveView`, as used here."""

    def entry(self, record: Record) -> None: ...
    def say(self, level: Literal["progress", "notice", "warning", "error"], text: str) -> None: ...
    def report(self, rank: int, stepped: m.Stepped) -> None: ...
    def beats(self, node: str, beat: m.Beat) -> None: ...
    def tick(self) -> None: ...
    def close(self) -> None: ...


class StoreLike(Protocol):
    """`wrapper.store_process.StoreProcess`, as used here."""

    async def run(self, ready: Any) -> None: ...


class Supervisor:
    """One job, from the first agent to the exit code. `run` may be called once."""

    def __init__(
        self,
        request: RunRequest,
        *,
        controller: ControllerLike,
        launcher: Launcher,
        store: StoreLike,
        journal: Journal,
        ledger: LedgerLike,
        view: ViewLike,
    ) -> None:
        self._request = request
        self._job = request.of_job
        self._controller = controller
        self._launcher = launcher
        self._store = store
        self._journal = journal
        self._ledger = ledger
        self._view = view
        self._links = AgentLinks(launcher, self._event, self._start, reconnect_s=request.settings.reconnect_s)
        self._operators: dict[int, SecureChannel[Any]] = {}
        self._requests = itertools.count(1)
        self._fault_ids = itertools.count(len(request.faults) + 1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._checkpoints: set[asyncio.Task[None]] = set()
        self._telemetry: list[dict[str, Any]] = []
        self._fingerprint = ""
        self._job_ended = False
        self._end: asyncio.Future[api.End] = asyncio.get_running_loop().create_future()
        self._hurry = asyncio.Event()
        self._interrupts = 0
        self._refusals: list[float] = []

    async def run(self, started: AnyEntry) -> int:
        """Supervise to the end; `started` is the journal's first entry. Returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            loop.add_signal_handler(number, self._signalled, number)
        loop.add_signal_handler(signal.SIGHUP, loop.call_later, GUARDIAN_GONE_S, self._signalled, signal.SIGTERM)
        self.log(started)
        listener = socket.create_server((self._launcher.host, 0), backlog=1024)
        port = listener.getsockname()[1]
        receives = Envelope[m.AgentMessage] | m.OperatorRequest
        server = await serve(listener, self._job.key, receives, self._connected, self._refused)
        address = SupervisorFile(host=self._launcher.host, port=port, pid=os.getpid())
        write_private(self._job.supervisor_file, msgspec.json.encode(address))
        self._start(self._keep_store())
        self._start(self._tick())
        self._start(self._launcher.start(port, self._links.agent_ended))
        end = await self._end
        await self._wind_down(end)
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        return end.exit_code

    def log(self, entry: AnyEntry) -> None:
        """Write ahead, then tell the ledger and the user."""
        self._job_ended = self._job_ended or isinstance(entry, JobEnded)
        record = self._journal.append(entry, time.time())
        self._ledger.submit(record)
        self._view.entry(record)

    # --- events in, actions out -------------------------------------------------------------------------------

    def _event(self, event: api.AnyEvent) -> None:
        """Hand one event to the controller and do what it answers. A crash on the way ends the job."""
        try:
            self._look(event)
            for action in self._controller.handle(event, time.monotonic()):
                self._do(action)
        except Exception:  # noqa: BLE001 - logged with its traceback, and the job ends
            _log.exception("while handling %r", event)
            self._crash(f"internal error while handling {type(event).__name__}")

    def _look(self, event: api.AnyEvent) -> None:
        """Telemetry, which the controller does not record, and what it no longer does once it has ended the job."""
        match event:
            case api.WorkerSaid(rank=rank, message=m.Stepped() as stepped):
                self._view.report(rank, stepped)
                self._telemetry.append(
                    {
                        "iteration": stepped.outcome.iteration,
                        "epoch": stepped.epoch,
                        "rank": rank,
                        "seconds": stepped.seconds,
                        "compute_seconds": stepped.compute_s,
                    }
                )
            case api.WorkerSaid(message=m.Declare() as declare):
                self._fingerprint = declare.fingerprint
            case api.AgentBeat():
                self._view.beats(event.node, event.beat)
            case api.WorkerExited() if self._end.done():
                self.log(WorkerEnded(rank=event.rank, exit=event.status, epoch=self._links.epoch))

    def _do(self, action: api.AnyAction) -> None:
        match action:
            case api.Log():
                self.log(action.entry)
            case api.StartWorkers():
                self._links.spawn(action.node, self._spawn(action))
            case api.Order():
                self._links.order(action.ranks, action.order)
            case api.SignalWorker():
                self._links.signal(action.rank, action.signal)
            case api.SignalNode():
                self._links.signal_node(action.node, action.signal)
            case api.CutConnection():
                self._links.cut(action.node)
            case api.DropNode():
                self._links.drop(action.node)
            case api.Reply():
                self._reply(action.request, action.ok, action.text)
            case api.CommitCheckpoint():
                task = self._start(self._commit(action))
                self._checkpoints.add(task)
                task.add_done_callback(self._checkpoints.discard)
            case api.Say():
                self._view.say(action.level, action.text)
            case api.End():
                if not self._end.done():
                    self._end.set_result(action)
            case _:
                assert_never(action)

    def _spawn(self, action: api.StartWorkers) -> m.Spawn:
        request = self._request
        return m.Spawn(
            workers=tuple(
                m.Start(
                    rank=rank,
                    node=action.node,
                    device=device,
                    world_size=len(action.nodes),
                    nodes=action.nodes,
                    faults=request.faults,
                    checkpoint_folder=request.checkpoint_folder,
                    checkpoint_every=request.checkpoint_every,
                    resume=request.resume,
                    memory_bytes=request.memory_bytes,
                    joins=action.joins,
                )
                for rank, device in action.workers
            ),
            environment=dict(self._launcher.worker_environment),
        )

    async def _commit(self, action: api.CommitCheckpoint) -> None:
        from resihp.checkpoints import write_manifest

        folder = Path(self._request.checkpoint_folder, action.folder)
        keep = self._request.checkpoint_keep
        try:
            await asyncio.to_thread(write_manifest, folder, action.iteration, action.parts, self._fingerprint, keep)
        except (CheckpointError, OSError) as error:
            self._view.say("warning", f"checkpoint of iteration {action.iteration}: not committed: {error}")
            return
        size = sum(part_bytes for _, part_bytes in action.parts)
        self.log(
            CheckpointCommitted(iteration=action.iteration, folder=str(folder), bytes=size, seconds=action.seconds)
        )

    async def _keep_store(self) -> None:
        try:
            await self._store.run(lambda host, port: self._event(api.StoreReady(host=host, port=port)))
        except ResihpError as error:
            if self._request.program.kind != "command":
                raise
            self._view.say("notice", f"{error}; a plain command may do without")  # its interpreter may lack torch

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._event(api.Tick())
            self._links.acknowledge()
            self._view.tick()
            self._flush_telemetry()

    def _flush_telemetry(self) -> None:
        if self._telemetry:
            rows, self._telemetry = self._telemetry, []
            self._ledger.telemetry(rows)

    def _signalled(self, number: signal.Signals) -> None:
        """The first Ctrl-C is the controller's to answer; the second, or one while the job winds down, ends at once."""
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1 or self._end.done():
                self._hurry.set()
                if not self._end.done():
                    self._end.set_result(api.End(exit_code=130, reason="interrupted twice", workers_leave=False))
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
            case m.Inject():
                await self._serve_operator(channel, first)
            case _:
                raise ProtocolError(f"{type(first).__name__} without a Join before it")

    async def _serve_operator(self, channel: SecureChannel[Any], first: m.Inject) -> None:
        asked: object = first
        while isinstance(asked, m.Inject):
            number = next(self._requests)
            self._operators[number] = channel
            obstacle = _obstacle(asked)
            if self._end.done():
                obstacle = f"job {self._job.name} is ending"
            if obstacle is not None:
                self._reply(number, False, obstacle)
            else:
                fault = Fault(id=next(self._fault_ids), kind=asked.kind, rank=asked.rank, node=asked.node)  # type: ignore[arg-type]
                self._event(api.InjectAsked(request=number, fault=fault))
            asked = await channel.recv()

    def _reply(self, number: int, ok: bool, text: str) -> None:
        channel = self._operators.pop(number, None)
        if channel is not None:
            with suppress(ConnectionError):  # an operator who has left needs no answer
                channel.post(m.OperatorReply(ok=ok, text=text))

    def _refused(self, peer: str, reason: str) -> None:
        """Tell of refused connections, but not without end."""
        now = time.monotonic()
        self._refusals = [at for at in self._refusals if now - at < 60.0]
        self._refusals.append(now)
        if len(self._refusals) < REFUSALS_TOLD_PER_MINUTE:
            _log.warning("connection from %s refused: %s", peer, reason)
        elif len(self._refusals) == REFUSALS_TOLD_PER_MINUTE:
            _log.warning("connection from %s refused: %s; more are not told for a minute", peer, reason)

    # --- the end ----------------------------------------------------------------------------------------------

    async def _wind_down(self, end: api.End) -> None:
        """Release the agents, wait, kill what is left, and make everything durable."""
        if not end.workers_leave:
            for rank in self._links.live_ranks:
                self._links.signal(rank, signal.SIGTERM)
        grace_s = LEAVE_GRACE_S if end.workers_leave else TERM_GRACE_S
        self._links.release(grace_s)
        await self._unless_hurried(self._launcher.wait(grace_s + AGENT_EXIT_S))
        for node in self._launcher.nodes:
            self._launcher.kill(node)
        await self._launcher.wait(AGENT_EXIT_S)
        if self._checkpoints:
            await self._unless_hurried(asyncio.gather(*self._checkpoints))
        if not self._job_ended:
            state: Literal["completed", "failed", "cancelled"] = "failed" if end.exit_code else "completed"
            if end.exit_code in (130, 143):
                state = "cancelled"
            self.log(JobEnded(exit_code=end.exit_code, state=state, reason=end.reason))
        self._flush_telemetry()
        write_private(self._job.exit_code_file, f"{end.exit_code}\n".encode())
        await asyncio.to_thread(self._ledger.close)
        self._journal.close()
        copy_journal(self._job)
        self._view.close()

    async def _unless_hurried(self, waiting: Coroutine[Any, Any, Any] | asyncio.Future[Any]) -> None:
        hurried = asyncio.create_task(self._hurry.wait())
        waited = asyncio.ensure_future(waiting)
        await asyncio.wait([hurried, waited], return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        waited.cancel()

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

    def _crash(self, what: str) -> None:
        """Something in here is broken: end the job, once."""
        if self._end.done():
            return
        log = self._job.logs / "supervisor.log"
        text = f"{what}; see {log}" if what.startswith("internal error") else what
        self._view.say("error", f"supervisor: {text}")
        self._end.set_result(api.End(exit_code=1, reason=f"supervisor: {text}", workers_leave=False))


def _obstacle(asked: m.Inject) -> str | None:
    if asked.kind not in get_args(Kind):
        return f"unknown kind {asked.kind!r}, one of {', '.join(get_args(Kind))}"
    if (asked.rank is None) == (asked.node is None):
        return "the target is one of --rank R and --node N"
    if asked.kind == "disconnect" and asked.node is None:
        return "disconnect happens to a node, not to a rank"
    return None
