"""A real agent and its workers, under a supervisor that is only a socket: newcomers, refusals, cut connections."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from resihp.protocol import messages as m
from resihp.protocol.framing import Envelope, SecureChannel, serve
from wrapper.conversation import Conversation
from wrapper.jobs import Job, create_local_job
from wrapper.launcher import own_environment
from wrapper.request import Program, RunRequest

SCRIPT = """
import os, socket, sys
from resihp.process import AGENT_FD
from resihp.protocol import messages as m
from resihp.protocol.framing import LocalChannel
agent = LocalChannel(socket.socket(fileno=int(os.environ[AGENT_FD])))
start = agent.recv(m.WorkerOrder)
print(*(os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")), start.joins, start.nodes, flush=True)
order = agent.recv(m.WorkerOrder)
agent.send(m.Finished(iteration=len(getattr(order, "reason", ""))))
sys.exit(start.rank)
"""


class PretendedSupervisor:
    """Takes the agent's connection, as often as it comes, and remembers what it said."""

    def __init__(self) -> None:
        self.conversation: Conversation[Any] = Conversation()
        self.channel: SecureChannel[Any] | None = None
        self.joins: list[m.Join] = []
        self.said: list[Any] = []
        self.news = asyncio.Condition()
        self.refusing = False

    async def converse(self, channel: SecureChannel[Any]) -> None:
        first = await channel.recv()
        assert first is not None
        self.joins.append(first.message)
        if self.refusing:
            channel.post(Envelope(message=m.Release(grace_s=0.0)))
            return
        self.channel = channel
        self.conversation.connect(channel.post)
        envelope: Envelope[Any] | None = first
        while envelope is not None:
            message = self.conversation.take(envelope)
            self.conversation.acknowledge()
            if message is not None and not isinstance(message, m.Beat | m.Join):
                self.said.append(message)
            async with self.news:
                self.news.notify_all()
            envelope = await channel.recv()
        self.conversation.disconnect()

    def order(self, order: Any) -> None:
        self.conversation.post(order)

    def cut(self) -> None:
        assert self.channel is not None
        self.channel.abort()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(20), self.news:
            await self.news.wait_for(condition)

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.said if isinstance(message, kind)]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setenv("RESIHP_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RESIHP_LOCAL", str(tmp_path / "local"))
    (tmp_path / "train.py").write_text(SCRIPT)
    return create_local_job()


@asynccontextmanager
async def agent_of(job: Job) -> AsyncIterator[PretendedSupervisor]:
    """One agent, n1; it must end by itself once it is released."""
    script = str(job.folder.parents[2] / "train.py")
    run_file = RunRequest(
        job=job.name,
        folder=str(job.folder),
        program=Program(kind="script", argv=(script,), interpreter=sys.executable, preload="json"),
        command=("python", script),
        cwd=str(job.folder),
        python_path="",
        nodes=1,
        gpus_per_node=2,
        tp=1,
        pp=1,
        schedule="1f1b",
        faults=(),
        checkpoint_folder="",
        checkpoint_every=0,
        checkpoint_keep=1,
        resume=False,
        ledger_url="sqlite",
        restart_count=0,
        configuration={},
    ).save()
    supervisor = PretendedSupervisor()
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    refused: list[str] = []
    server = await serve(
        listener, job.key, Envelope[m.AgentMessage], supervisor.converse, lambda peer, reason: refused.append(reason)
    )
    command = [sys.executable, "-P", "-m", "wrapper.agent", "--run", str(run_file), "--node", "n1"]
    with (job.logs / "n1.agent.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command, "--supervisor", address, stdout=log, stderr=log, env=own_environment(), process_group=0
        )
    try:
        yield supervisor
        supervisor.order(m.Release(grace_s=5.0))
        async with asyncio.timeout(10):
            assert await process.wait() == 0, (job.logs / "n1.agent.log").read_text()
        assert refused == []
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        server.close()


def spawn(rank: int, nodes: int, *, joins: bool = False) -> m.Spawn:
    start = m.Start(
        rank=rank,
        node="n1",
        device=1,
        world_size=nodes,
        nodes=("n1",) * nodes,
        faults=(),
        checkpoint_folder="",
        checkpoint_every=0,
        resume=False,
        joins=joins,
    )
    return m.Spawn(workers=(start,), environment={})


def halt(*ranks: int, reason: str = "x") -> m.ToWorkers:
    return m.ToWorkers(ranks=ranks, order=m.Halt(reason=reason))


def play(job: Job, scene: Callable[[PretendedSupervisor], Awaitable[None]]) -> None:
    async def main() -> None:
        async with agent_of(job) as supervisor:
            await scene(supervisor)

    asyncio.run(main())


def test_newcomers_get_ranks_of_their_own_and_logs_of_their_own(job: Job) -> None:
    async def scene(supervisor: PretendedSupervisor) -> None:
        supervisor.order(spawn(0, 1))
        await supervisor.until(lambda: supervisor.of(m.Spawned))
        supervisor.order(halt(0))
        await supervisor.until(lambda: supervisor.of(m.Exited))
        supervisor.order(spawn(5, 6, joins=True))
        await supervisor.until(lambda: len(supervisor.of(m.Spawned)) == 2)
        supervisor.order(halt(5))
        await supervisor.until(lambda: len(supervisor.of(m.Exited)) == 2)
        assert [(said.rank, said.device) for said in supervisor.of(m.Spawned)] == [(0, 1), (5, 1)]
        assert [(said.rank, said.status) for said in supervisor.of(m.Exited)] == [(0, 0), (5, 5)]

    play(job, scene)
    assert (job.logs / "n1.rank0.log").read_text() == "0 1 1 False ('n1',)\n"
    assert (job.logs / "n1.rank5.log").read_text() == f"5 6 1 True {('n1',) * 6}\n"


def test_worker_that_cannot_be_started_is_refused_by_name(job: Job) -> None:
    (job.logs / "n1.rank7.log").mkdir()

    async def scene(supervisor: PretendedSupervisor) -> None:
        supervisor.order(spawn(7, 8, joins=True))
        await supervisor.until(lambda: supervisor.of(m.SpawnFailed))
        [refusal] = supervisor.of(m.SpawnFailed)
        assert refusal.rank == 7
        assert "Is a directory" in refusal.reason

    play(job, scene)


def test_what_is_said_while_nobody_is_connected_arrives_once(job: Job) -> None:
    async def scene(supervisor: PretendedSupervisor) -> None:
        supervisor.order(spawn(0, 1))
        await supervisor.until(lambda: supervisor.of(m.Spawned))
        for n in range(1, 11):
            supervisor.cut()
            supervisor.order(spawn(n, n + 1, joins=True))
            supervisor.order(halt(n - 1, reason="y" * n))
            await supervisor.until(lambda n=n: len(supervisor.of(m.Exited)) == n)
        supervisor.order(m.ToWorkers(ranks=(10,), order=m.Go(epoch=3, **GO)))
        await supervisor.until(lambda: supervisor.conversation.acknowledged == supervisor.conversation.sent)
        supervisor.cut()
        supervisor.order(halt(10))
        await supervisor.until(lambda: len(supervisor.of(m.Exited)) == 11)
        assert [said.rank for said in supervisor.of(m.Exited)] == list(range(11))
        finished = [said.message.iteration for said in supervisor.of(m.FromWorker)]
        assert finished == [*range(1, 11), 0], "the last one took its Go for the order to halt"
        epochs = [join.epoch for join in supervisor.joins]
        assert (epochs[0], epochs[1], epochs[-1]) == (0, 1, 3)

    play(job, scene)


def test_agent_that_is_refused_on_its_return_ends_at_once(job: Job) -> None:
    async def scene(supervisor: PretendedSupervisor) -> None:
        supervisor.order(spawn(0, 1))
        await supervisor.until(lambda: supervisor.of(m.Spawned))
        supervisor.refusing = True
        supervisor.cut()

    play(job, scene)
    log = (job.logs / "n1.agent.log").read_text()
    assert "refuses this agent" in log
    assert "not reached" not in log


GO: dict[str, Any] = {"store_host": "", "store_port": 0, "next_iteration": 1, "finish": None}
