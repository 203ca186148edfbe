"""An agent's workers: their start, their reports, and their end.

Starts and ends workers on the supervisor's orders, reports their exits at once, and gives a new leader an inventory of
the workers. Only `start` and `end` wait. Owned by `resihp.wrapper.agent.process`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from resihp.errors import ProtocolError
from resihp.process import ending, kill_descendants, state_letter
from resihp.protocol import messages as m
from resihp.protocol.forwarding import label_of, order_in
from resihp.protocol.framing import decode, encode
from resihp.worker.requests import Ended, Fork, Forked, NotForked
from resihp.wrapper.agent.exit_clues import ExitReports
from resihp.wrapper.agent.idleness import Idleness
from resihp.wrapper.agent.logs.script_output import ScriptOutput
from resihp.wrapper.agent.rendezvous import Relay
from resihp.wrapper.agent.sockets import ForkServerLink, WorkerPipe
from resihp.wrapper.agent.worker_environment import arguments_of, environment_of
from resihp.wrapper.agent.worker_history import MAX_STEPS, REPORTED_STEPS, Worker, size_of
from resihp.wrapper.config import container
from resihp.wrapper.config.run_spec import RunRequest
from resihp.wrapper.launch.ports import KeptPort

REAP_S = 2.0
KILL_TIMEOUT_S = 10.0
"""How long killed workers may take to end before others are started in their place: a driver may have to free gigabytes
of memory."""
POLL_S = 0.01

MEETING_MESSAGES = (m.Attend.__name__, m.Publish.__name__)

_progress = msgspec.msgpack.Decoder(m.Progress)
_script_progress = msgspec.msgpack.Decoder(m.ScriptProgress)
_meetings: msgspec.msgpack.Decoder[m.MeetingMessage] = msgspec.msgpack.Decoder(m.MeetingMessage)


class Workers:
    """All workers of this node. `send` sends a message to the leader. `on_unusable` is called when no worker can be
    started on this node any more.

    `shared`: socket to the fork server that virtual nodes share (`resihp.wrapper.launch.preloading`); None if this node
    has its own.
    """

    def __init__(
        self,
        request: RunRequest,
        node: str,
        logs: Path,
        send: Callable[[m.AgentMessage], None],
        on_unusable: Callable[[], None],
        shared: socket.socket | None = None,
    ) -> None:
        self._request = request
        self._node = node
        self._logs = logs
        self._send = send
        self._on_unusable = on_unusable
        self._workers: dict[int, Worker] = {}
        self._exits: list[tuple[int, int]] = []
        self._rendezvous = Relay(send, self._hand_to)
        self.idleness = Idleness()
        self._output = ScriptOutput(send, request.progress_pattern)
        self._exit_reports = ExitReports(send, self._output.last_look)
        self._newest_epoch, self._ended_round = 0, -1
        self._place = KeptPort()
        self._is_first = self._declared = self._met = False
        """`_is_first`: rank 0 is on this node, so that ranks of a script with its own process groups rendezvous here.
        `_declared`: a worker has declared a model. `_met`: without a declared model, ranks have met by themselves or
        tried to."""
        self._ending = asyncio.Lock()
        self._idle = asyncio.Event()
        self._idle.set()
        self.network: Mapping[str, str] = {}
        """Network variables of workers, used unless the user or the supervisor sets them."""
        self.processors: Mapping[int, tuple[int, ...]] = {}
        """For each device, the CPUs on which its worker runs; a device that is missing has no CPUs of its own."""
        self.obstacle = ""
        """Reason why no worker can be started on this node; empty if workers can be started."""
        self.epoch = 0
        """Epoch of the last `Go`."""
        self._forks = ForkServerLink(
            request.program,
            (logs if shared is None else request.of_job.logs) / f"{node}.forkserver.log",
            self._forked,
            self._fork_server_ended,
            container.with_folders(request.container, [logs] if request.succession else []),
            shared,
            job=request.job,
            node=node,
        )

    async def start(self) -> None:
        try:
            await self._forks.start()
        except OSError as error:
            self._send(m.SpawnFailed(reason=f"{self._request.program.interpreter}: {error.strerror}"))

    # --- orders -----------------------------------------------------------------------------------------------

    def spawn(self, order: m.Spawn) -> None:
        if self.obstacle:
            self._send(m.SpawnFailed(reason=self.obstacle))
            return
        nodes = tuple(node for node, ranks in order.nodes for _ in range(ranks))
        for start in order.workers:
            self._spawn(msgspec.structs.replace(start, nodes=nodes), order.environment)

    def order(self, to: m.ToWorkers) -> None:
        """Forward an order to its workers. Raises ProtocolError for an invalid order."""
        body = order_in(to)
        label = label_of(body)
        if label.type == m.Go.__name__:
            self.epoch = label.epoch
            self._rendezvous.open(m.MeetingId(epoch=label.epoch))
        elif label.type == m.Probe.__name__:
            self._rendezvous.open(m.MeetingId(probe=label.probe))
        self._newest_epoch = max(self._newest_epoch, label.announced_epoch)
        for rank in to.ranks:
            worker = self._workers.get(rank)
            if worker is not None:
                worker.record.note_order(label)
                worker.pipe.send(body)

    def published(self, order: m.Published) -> None:
        """Deliver messages of a meeting to the workers of this node that joined the meeting."""
        self._rendezvous.published(order)

    def _hand_to(self, rank: int, order: m.Published) -> None:
        worker = self._workers.get(rank)
        if worker is not None:
            worker.pipe.send(encode(order))

    def hang_up(self, rank: int, reason: str) -> None:
        """Disconnect a worker that has sent an undecodable message."""
        worker = self._workers.get(rank)
        if worker is not None:
            worker.pipe.hang_up(reason)

    def signal(self, rank: int, number: int) -> None:
        worker = self._workers.get(rank)
        if worker is not None and worker.pid:
            self._signal(worker, number)

    def _signal(self, worker: Worker, number: int) -> None:
        """Send a signal to a worker. Workers in training ignore SIGTERM, which any process may send (`client.deaf`); so
        for SIGTERM they first get the order to halt."""
        if number == signal.SIGTERM:
            worker.pipe.send(encode(m.Halt(reason="the job ends", at_once=True)))
        self._forks.deliver(worker.pid, number)

    # --- reports ----------------------------------------------------------------------------------------------

    @property
    def meeting_port(self) -> int:
        """Port at which ranks of a script with its own process groups may rendezvous, if rank 0 is on this node."""
        return self._place.port

    def _have_met(self) -> bool:
        """Return whether ranks have met by themselves. Called for each heartbeat, but checked only on the node of rank
        0, because the check takes long with many sockets."""
        if self._is_first and not (self._declared or self._met):
            self._met = self._place.is_used()
        return self._met

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the workers that have started, by rank."""
        return {rank: worker.pid for rank, worker in self._workers.items() if worker.pid}

    def beat(self) -> m.Beat:
        self._output.look()
        now = time.monotonic()
        return m.Beat(
            met=self._have_met(),
            workers=tuple(
                m.WorkerBeat(
                    rank=rank,
                    age_s=now - worker.beat_at,
                    state=state_letter(worker.pid),
                    progress=worker.progress,
                    idle_s=None if self._declared else self.idleness.idle_s(worker.pid),
                    script=worker.new_totals(),
                )
                for rank, worker in self._workers.items()
                if worker.pid
            ),
        )

    def committed(self, iteration: int) -> None:
        """Note that the leader has committed all iterations up to `iteration`."""
        for worker in self._workers.values():
            worker.record.committed(iteration)

    def inventory(self) -> m.Inventory:
        """Return the state of all workers for a new leader, and forget the meetings that the previous leader opened."""
        self._rendezvous.begin_anew()
        full = max(self._workers, key=lambda rank: self._workers[rank].record.steps_kept, default=None)
        return m.Inventory(
            workers=tuple(
                self._running(rank, worker, MAX_STEPS if rank == full else REPORTED_STEPS)
                for rank, worker in self._workers.items()
            ),
            ended=tuple(self._exits),
            epoch=self._newest_epoch,
        )

    def _running(self, rank: int, worker: Worker, max_steps: int) -> m.RunningWorker:
        running = m.RunningWorker(rank=rank, device=worker.start.device, pid=worker.pid)
        try:
            return msgspec.structs.replace(
                running, steps=worker.record.steps(max_steps), said=worker.record.still_true()
            )
        except ProtocolError as error:
            self.hang_up(rank, str(error))
            return running

    # --- start and exit ---------------------------------------------------------------------------------------

    def _spawn(self, start: m.Start, environment: dict[str, str]) -> None:
        ours, theirs = socket.socketpair()
        rank = start.rank
        self._is_first = self._is_first or rank == 0
        log = self._logs / f"{self._node}.rank{rank}.log"
        pipe = WorkerPipe(ours, lambda body: self._receive(rank, body))
        self._workers[rank] = Worker(start, pipe, beat_at=time.monotonic(), log_begin=size_of(log))
        self._output.follow(start, log, self._workers[rank].log_begin)
        self._idle.clear()
        pipe.send(encode(start))
        inherited = container.of_workers(self._request.container, os.environ)
        self._forks.fork(
            Fork(
                rank=rank,
                job=self._request.job,
                kind=self._request.program.kind,
                argv=arguments_of(start, self._request),
                cwd=self._request.cwd,
                environment=environment_of(start, self._request, inherited, environment, self.network),
                log=str(log),
                processors=self.processors.get(start.device, ()),
                heading=f"resihp: restart {start.round}" if start.round else "",
            ),
            theirs,
        )

    def _receive(self, rank: int, body: bytes) -> None:
        """Handle a message of a worker. Raises ProtocolError if the message is invalid."""
        worker = self._workers[rank]
        label = label_of(body)
        if label.type == m.Progress.__name__:
            worker.progress = decode(_progress, body)
            worker.beat_at = time.monotonic()
        elif label.type in MEETING_MESSAGES:
            self._rendezvous.receive(rank, decode(_meetings, body))
        elif label.type == m.ScriptProgress.__name__:
            report = decode(_script_progress, body)
            worker.totals, self._met = report.totals, not self._declared
            self._output.called(worker.start, report.figures)
        else:
            if label.type == m.Declare.__name__ and not self._declared:
                self._declared = True
                self._place.close()
                self._output.close()
            worker.record.add_report(label, body)
            self._send(m.FromWorker(rank=rank, body=body))

    def _forked(self, report: Forked | NotForked | Ended) -> None:
        match report:
            case Forked() if report.rank in self._workers:
                worker = self._workers[report.rank]
                worker.pid = report.pid
                worker.beat_at = time.monotonic()
                self._send(m.Spawned(rank=report.rank, device=worker.start.device, pid=report.pid))
            case NotForked() if report.rank in self._workers:
                self._forget(report.rank)
                self._send(m.SpawnFailed(reason=report.reason, rank=report.rank))
            case Ended() if report.rank in self._workers and self._workers[report.rank].pid in (0, report.pid):
                self._ended(report.rank, report.pid, report.status)

    def _ended(self, rank: int, pid: int, status: int) -> None:
        print(f"rank {rank}: process {pid} {ending(status)}", flush=True)
        log_begin = self._workers[rank].log_begin
        self._workers[rank].pipe.drain()
        self.idleness.forget(pid)
        self._forget(rank)
        self._exits.append((rank, status))
        if rank == 0 and status and not self._have_met() and not self._declared:
            self._place.watch()  # other ranks may wait for it there
        log = self._logs / f"{self._node}.rank{rank}.log"
        self._exit_reports.begin(m.Exited(rank=rank, pid=pid, status=status), log, log_begin)

    def _forget(self, rank: int) -> None:
        self._workers.pop(rank).pipe.close()
        self._rendezvous.leave(rank)
        if not self._workers:
            self._idle.set()

    def _fork_server_ended(self, reason: str) -> None:
        """Report that the fork server has ended. Its children die with it, and their exit statuses are unknown; the
        node becomes unusable."""
        print(reason, flush=True)
        if not any(worker.pid for worker in self._workers.values()):
            self._send(m.SpawnFailed(reason=reason))
        for rank, worker in list(self._workers.items()):
            if worker.pid:
                self._ended(rank, worker.pid, -signal.SIGKILL)
            else:
                self._forget(rank)
        self._on_unusable()

    # --- the end ----------------------------------------------------------------------------------------------

    async def end_round(self, number: int, grace_s: float) -> None:
        """End all workers and all processes that they have started, then report this, so that others are started in
        their place. Workers get SIGTERM first, and SIGKILL after `grace_s` seconds. No report if a process is left."""
        async with self._ending:
            if number > self._ended_round:
                if not await self._end_all(grace_s):
                    return
                self._place.close()
                self._place, self._is_first = KeptPort(), False
                self._exits.clear()  # another process will have the rank, maybe on another node
                self._ended_round = number
        self._send(m.RoundEnded(round=number, meeting_port=self._place.port))

    async def end_alone(self, reason: str) -> None:
        """End all workers of a script, because no supervisor watches them. Their exits are reported to the next one."""
        if self._workers and not self._declared:
            print(f"workers are ended: {reason}", flush=True)
            async with self._ending:
                await self._end_all(grace_s=0.0)

    async def _end_all(self, grace_s: float) -> bool:
        """End all workers and what they have started; return False if one cannot be ended."""
        self._forks.forget_waiting()
        if self._forks.is_ready:
            await self._until_forked(REAP_S)
        for rank in [rank for rank, worker in self._workers.items() if not worker.pid]:
            self._forget(rank)
        self._signal_all(signal.SIGTERM)
        await self._until_idle(grace_s)
        if not self._idle.is_set():
            self._signal_all(signal.SIGKILL)
            await self._until_idle(KILL_TIMEOUT_S)
        await self._exit_reports.finish(REAP_S)
        return self._idle.is_set() and await self._forks.kill_orphans()

    async def _until_forked(self, timeout_s: float) -> None:
        """Wait for the fork server's answers to the requests that it has received."""
        until = time.monotonic() + timeout_s
        while not all(worker.pid for worker in self._workers.values()) and time.monotonic() < until:
            await asyncio.sleep(POLL_S)

    async def end(self, grace_s: float, spare: int | None = None) -> None:
        """Wait for the workers for up to `grace_s` seconds, then kill the remaining workers and all processes that they
        started.

        A negative `grace_s`: send SIGTERM first, then wait for its absolute value. `spare`: process id that is not
        killed, nor are its children; None for none.
        """
        for rank in [rank for rank, worker in self._workers.items() if not worker.pid]:
            self._forget(rank)  # not forked yet, as far as known; if it is, it ends with the fork server
        if grace_s < 0:
            self._signal_all(signal.SIGTERM)
        await self._until_idle(abs(grace_s))
        if not self._idle.is_set():
            self._signal_all(signal.SIGKILL)
            await self._until_idle(REAP_S)
        await self._exit_reports.finish(REAP_S)
        self._forks.close()
        await self._forks.gone(REAP_S)
        self._place.close()
        await asyncio.to_thread(kill_descendants, spare, REAP_S)

    def _signal_all(self, number: int) -> None:
        for worker in self._workers.values():
            if worker.pid:
                self._signal(worker, number)

    async def _until_idle(self, timeout_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
