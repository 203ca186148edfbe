"""The agent: one per node. Starts workers, passes messages on, tells at once who ended.

`python -P -m wrapper.agent --run FILE --node N --supervisor HOST:PORT`, started by a launcher. It decides nothing but
this: when the supervisor cannot be reached for `RETRY_S`, or reads so little that no more can be kept for it
(`wrapper.conversation`), it ends its workers and itself, so that nothing of a job outlives both. A connection that
breaks is made again, and nothing is lost with it. Its log is `<job>/logs/<node>.agent.log`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil

from resihp.errors import ProtocolError, ResihpError
from resihp.forkserver import ONE_THREAD, Ended, Fork, Forked, NotForked
from resihp.process import adopt_orphans, ending, state_letter
from resihp.protocol import messages as m
from resihp.protocol.framing import Envelope, SecureChannel
from wrapper.agent_workers import ForkServerLink, Worker, WorkerPipe
from wrapper.conversation import Conversation
from wrapper.request import RunRequest, load

BEAT_S = 1.0
RETRY_S = 3.0
"""How long a lost supervisor is looked for."""
RETRY_EVERY_S = 0.1
TERM_GRACE_S = 1.0
REAP_S = 2.0
LAST_WORDS_S = 1.0
"""How long the supervisor may take to acknowledge what an agent that ends has told it."""


class Agent:
    """One node's agent. `run` returns when there is nothing left to do."""

    def __init__(self, request: RunRequest, node: str, host: str, port: int) -> None:
        self._request = request
        self._node = node
        self._address = (host, port)
        self._key = request.of_job.key
        self._workers: dict[int, Worker] = {}
        self._channel: SecureChannel[Envelope[m.AgentOrder]] | None = None
        self._conversation: Conversation[m.AgentOrder] = Conversation()
        self._settled = asyncio.Event()
        """Set while the supervisor has acknowledged all that it was told."""
        self._welcome = False
        """The supervisor has answered to a `Join`: it takes us for this node's agent."""
        self._answered = False
        """The supervisor has answered on the present connection."""
        self._epoch = 0
        self._release: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        """Resolved with the seconds of grace once it is time to go; negative: end workers with TERM first."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._forks = ForkServerLink(
            request.program, request.of_job.logs / f"{node}.forkserver.log", self._forked, self._fork_server_ended
        )

    async def run(self) -> None:
        adopt_orphans()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._go, -TERM_GRACE_S)
        loop.add_signal_handler(signal.SIGINT, lambda: None)  # Ctrl-C is the supervisor's to act on
        try:
            await self._forks.start()
        except OSError as error:
            self._tell(m.SpawnFailed(reason=f"{self._request.program.interpreter}: {error.strerror}"))
        conversing = asyncio.create_task(self._converse())
        tasks = [conversing, asyncio.create_task(self._beat())]
        reasons_to_go: list[asyncio.Future[Any]] = [*tasks, self._release]
        await asyncio.wait(reasons_to_go, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()  # a bug in one of them ends the agent with its traceback
        await self._end_workers(self._release.result() if self._release.done() else -TERM_GRACE_S)
        if not conversing.done():
            await self._say_last_words(conversing)
        for task in tasks:
            task.cancel()

    # --- the supervisor ---------------------------------------------------------------------------------------

    async def _converse(self) -> None:
        """Stay in touch; return when the supervisor is lost for good."""
        deadline = time.monotonic() + RETRY_S
        while True:
            self._answered = False
            trouble = "it broke the connection off"
            try:
                channel: SecureChannel[Envelope[m.AgentOrder]] = await SecureChannel.connect(
                    *self._address, self._key, Envelope[m.AgentOrder], timeout_s=RETRY_S
                )
            except (OSError, TimeoutError, ProtocolError) as error:
                trouble = str(error)
            else:
                try:
                    await self._listen(channel)
                except ProtocolError as error:
                    trouble = str(error)
                self._channel = None
                self._conversation.disconnect()
                channel.abort()
            if self._answered:
                print(f"supervisor: {trouble}; connecting again", flush=True)
                deadline = time.monotonic() + RETRY_S
                continue
            if time.monotonic() > deadline:
                print(f"supervisor not reached for {RETRY_S:g} s: {trouble}", flush=True)
                return
            await asyncio.sleep(RETRY_EVERY_S)

    async def _listen(self, channel: SecureChannel[Envelope[m.AgentOrder]]) -> None:
        """One connection, to its end. Raises ProtocolError."""
        self._channel = channel
        join = m.Join(
            node=self._node,
            host=socket.gethostname(),
            pid=os.getpid(),
            devices=self._request.gpus_per_node,
            epoch=max(1, self._epoch) if self._welcome else 0,
        )
        self._conversation.connect(channel.post, join)
        while (envelope := await channel.recv()) is not None:
            if envelope.number == 0 and isinstance(envelope.message, m.Release):
                print("supervisor: refuses this agent", flush=True)
                self._settled.set()  # nothing that is still to be told will be heard
                self._go(envelope.message.grace_s)
                return
            order = self._conversation.take(envelope)
            self._answered = self._welcome = True
            if self._conversation.acknowledged == self._conversation.sent:
                self._settled.set()
            if order is not None:
                self._obey(order)

    def _tell(self, message: m.AgentMessage) -> None:
        if isinstance(message, m.Beat):
            self._conversation.mention(message)
            return
        self._settled.clear()
        self._conversation.post(message)
        if self._conversation.overdue:
            print("supervisor: does not read", flush=True)
            self._go(-TERM_GRACE_S)

    async def _say_last_words(self, conversing: asyncio.Task[None]) -> None:
        """Wait until the supervisor has all that it was told, also over a new connection; then close."""
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                await self._settled.wait()
                conversing.cancel()  # it would connect again
                if self._channel is not None:
                    self._channel.close()
                    await self._channel.flushed()
        except TimeoutError:
            print("the supervisor does not read", flush=True)

    def _obey(self, order: m.AgentOrder) -> None:
        match order:
            case m.Spawn():
                for start in order.workers:
                    self._spawn(start, order.environment)
            case m.ToWorkers():
                if isinstance(order.order, m.Go):
                    self._epoch = order.order.epoch
                for rank in order.ranks:
                    if rank in self._workers:
                        self._workers[rank].pipe.send(order.order)
            case m.Signal():
                worker = self._workers.get(order.rank)
                if worker is not None and worker.pid:
                    self._forks.deliver(worker.pid, order.signal)
            case m.KillNode():
                os.killpg(0, order.signal)
            case m.Release():
                self._go(order.grace_s)

    def _go(self, grace_s: float) -> None:
        if not self._release.done():
            self._release.set_result(grace_s)

    # --- workers ----------------------------------------------------------------------------------------------

    def _spawn(self, start: m.Start, environment: dict[str, str]) -> None:
        ours, theirs = socket.socketpair()
        rank = start.rank
        worker = Worker(start, WorkerPipe(ours, lambda message: self._said(rank, message)), beat_at=time.monotonic())
        self._workers[rank] = worker
        self._idle.clear()
        worker.pipe.send(start)
        self._forks.fork(
            Fork(
                rank=rank,
                kind=self._request.program.kind,
                argv=self._request.program.argv,
                cwd=self._request.cwd,
                environment=self._environment_of(start, environment),
                log=str(self._request.of_job.logs / f"{self._node}.rank{rank}.log"),
            ),
            theirs,
        )

    def _environment_of(self, start: m.Start, added: dict[str, str]) -> dict[str, str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MASTER_")}
        environment.setdefault("OMP_NUM_THREADS", ONE_THREAD["OMP_NUM_THREADS"])
        if self._request.python_path:
            environment["PYTHONPATH"] = self._request.python_path
        return environment | {
            **added,
            "RANK": str(start.rank),
            "WORLD_SIZE": str(start.world_size),
            "LOCAL_RANK": str(start.device),
        }

    def _said(self, rank: int, message: m.WorkerMessage) -> None:
        worker = self._workers[rank]
        if isinstance(message, m.Progress):
            worker.progress = message
            worker.beat_at = time.monotonic()
        else:
            self._tell(m.FromWorker(rank=rank, message=message))

    def _forked(self, report: Forked | NotForked | Ended) -> None:
        match report:
            case Forked() if report.rank in self._workers:
                worker = self._workers[report.rank]
                worker.pid = report.pid
                worker.beat_at = time.monotonic()
                self._tell(m.Spawned(rank=report.rank, device=worker.start.device, pid=report.pid))
            case NotForked() if report.rank in self._workers:
                self._forget(report.rank)
                self._tell(m.SpawnFailed(reason=report.reason, rank=report.rank))
            case Ended() if report.rank in self._workers:
                self._ended(report.rank, report.pid, report.status)

    def _ended(self, rank: int, pid: int, status: int) -> None:
        print(f"rank {rank}: process {pid} {ending(status)}", flush=True)
        self._workers[rank].pipe.drain()
        self._forget(rank)
        self._tell(m.Exited(rank=rank, pid=pid, status=status))

    def _forget(self, rank: int) -> None:
        self._workers.pop(rank).pipe.close()
        if not self._workers:
            self._idle.set()

    def _fork_server_ended(self, reason: str) -> None:
        """Its children die with it, and nobody can tell how: the node is of no more use."""
        print(reason, flush=True)
        if not any(worker.pid for worker in self._workers.values()):
            self._tell(m.SpawnFailed(reason=reason))
        for rank, worker in list(self._workers.items()):
            if worker.pid:
                self._ended(rank, worker.pid, -signal.SIGKILL)
            else:
                self._forget(rank)
        self._go(0.0)

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            now = time.monotonic()
            beats = tuple(
                m.WorkerBeat(
                    rank=rank,
                    age_s=now - worker.beat_at,
                    state=state_letter(worker.pid),
                    progress=worker.progress,
                )
                for rank, worker in self._workers.items()
                if worker.pid
            )
            self._tell(m.Beat(workers=beats))
            due = max(due + BEAT_S, loop.time())
            await asyncio.sleep(due - loop.time())

    async def _end_workers(self, grace_s: float) -> None:
        """Wait for the workers up to the grace, end what is left, and everything that they started."""
        for rank in [rank for rank, worker in self._workers.items() if not worker.pid]:
            self._forget(rank)  # not forked yet; if it is by now, it ends with the fork server
        if grace_s < 0:
            self._signal_all(signal.SIGTERM)
        await self._until_idle(abs(grace_s))
        if not self._idle.is_set():
            self._signal_all(signal.SIGKILL)
            await self._until_idle(REAP_S)
        self._forks.close()
        left = psutil.Process().children(recursive=True)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        await asyncio.to_thread(psutil.wait_procs, left, REAP_S)

    def _signal_all(self, number: int) -> None:
        for worker in self._workers.values():
            if worker.pid:
                self._forks.deliver(worker.pid, number)

    async def _until_idle(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return


async def _run(request: RunRequest, node: str, address: str) -> None:
    host, _, port = address.rpartition(":")
    await Agent(request, node, host, int(port)).run()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="wrapper.agent")
    parser.add_argument("--run", required=True, type=Path, help="the job's run.json")
    parser.add_argument("--node", required=True)
    parser.add_argument("--supervisor", required=True, help="host:port")
    options = parser.parse_args(arguments)
    try:
        asyncio.run(_run(load(options.run), options.node, options.supervisor))
    except (ResihpError, msgspec.MsgspecError) as error:
        print(f"agent {options.node}: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
