"""A real agent and its workers, under a supervisor that is only a socket: newcomers, refusals, cuts, new leaders."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest

from resihp.errors import ProtocolError
from resihp.process import MOST_OPEN_FILES
from resihp.protocol import framing
from resihp.protocol import messages as m
from resihp.protocol.channels import SecureChannel
from resihp.protocol.forwarding import label_of, report_of
from resihp.protocol.framing import Envelope
from resihp.protocol.resumable import Conversation
from resihp.protocol.serving import serve
from resihp.record.journal import IterationCommitted, Record
from resihp.record.journal_format import encode
from resihp.settings import SCRIPT_ALONE_S
from resihp.wrapper.agent.process import Agent
from resihp.wrapper.config.run_spec import Program
from resihp.wrapper.job_folder import Job, create_local_job
from resihp.wrapper.launch.launcher import NO_SUPERVISOR_STATUS, own_environment
from tests.wrapper.run_requests import run_request

SCRIPT = """
import os, socket, sys
from resihp.process import AGENT_FD
from resihp.protocol import messages as m
from resihp.protocol.channels import LocalChannel
agent = LocalChannel(socket.socket(fileno=int(os.environ[AGENT_FD])))
start = agent.recv(m.WorkerOrder)
print(*(os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")), start.joins, start.nodes, flush=True)
order = agent.recv(m.WorkerOrder)
agent.send(m.Finished(iteration=len(getattr(order, "reason", ""))))
sys.exit(start.rank)
"""


TALKER = """
import os, socket, sys
from resihp.process import AGENT_FD
from resihp.protocol import messages as m
from resihp.protocol.channels import LocalChannel
agent = LocalChannel(socket.socket(fileno=int(os.environ[AGENT_FD])))
start = agent.recv(m.WorkerOrder)
figures = dict.fromkeys(("clip", "learning_rate", "gradient_norm", "loss"), 1.0)
figures |= dict.fromkeys(("tokens", "sum_squared_lengths", "samples"), 1)
for iteration in (1, 2, 3):
    outcome = m.StepOutcome(iteration=iteration, skip=False, samples_digest="0", **figures)
    agent.send(m.Stepped(epoch=1, outcome=outcome, seconds=1.0, compute_s=1.0))
agent.send(m.FaultDue(fault=7))
agent.send(m.Stuck(epoch=1, error="gone"))
while not isinstance(order := agent.recv(m.WorkerOrder), m.Halt):
    if isinstance(order, m.Park):
        agent.send(m.Parked(epoch=order.epoch, stepped=3, outcome=None, ready=False))
sys.exit(start.rank)
"""

SLEEPER = "import time\ntime.sleep(3600)\n"

FIRST = m.Lead(term=1, node="n1", log=0)


def outcome(iteration: int) -> m.StepOutcome:
    return m.StepOutcome(
        iteration=iteration,
        clip=1.0,
        skip=False,
        learning_rate=0.1,
        gradient_norm=1.0,
        loss=1.0,
        tokens=1,
        sum_squared_lengths=1,
        samples=1,
        samples_digest="0" * 16,
    )


class PretendedSupervisor:
    """Takes the agent's connection, as often as it comes, and remembers what it said."""

    def __init__(self, lead: m.Lead = FIRST) -> None:
        self.lead = lead
        self.conversation: Conversation[Any] = Conversation()
        self.channel: SecureChannel[Any] | None = None
        self.joins: list[m.Join] = []
        self.beats: list[m.Beat] = []
        self.said: list[Any] = []
        self.news = asyncio.Condition()
        self.refusing = False
        self.silent = False

    async def converse(self, channel: SecureChannel[Any]) -> None:
        first = await channel.recv()
        assert first is not None
        self.joins.append(first.message)
        async with self.news:
            self.news.notify_all()
        if self.refusing:
            channel.post(Envelope(message=m.Release(grace_s=0.0)))
            return
        self.channel = channel
        if first.message.term < self.lead.term:  # it does not follow us yet
            if self.conversation.received:
                self.conversation = Conversation()
            first = Envelope(message=first.message)
        self.conversation.connect(channel.post, self.lead)
        envelope: Envelope[Any] | None = first
        while envelope is not None:
            message = self.conversation.take(envelope)
            self.conversation.acknowledge()
            if isinstance(message, m.Beat):
                self.beats.append(message)
            if isinstance(message, m.Beat) and not self.silent:
                self.conversation.mention(m.Alive())
            elif message is not None and not isinstance(message, m.Beat | m.Join):
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

    def give_way_to(self, lead: m.Lead) -> None:
        """Another supervisor leads from here on, at the same address."""
        self.lead = lead
        self.cut()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(20), self.news:
            await self.news.wait_for(condition)

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.said if isinstance(message, kind)]

    def reports(self) -> list[Any]:
        """What the workers have said."""
        return [report_of(said.body) for said in self.of(m.FromWorker)]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setenv("RESIHP_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RESIHP_LOCAL", str(tmp_path / "local"))
    return create_local_job()


def run_file_of(job: Job, script: str, **changed: Any) -> Path:
    path = job.folder.parents[2] / "train.py"
    path.write_text(script)
    fields: dict[str, Any] = {
        "program": Program(kind="script", argv=(str(path),), interpreter=sys.executable, preload="json"),
        "command": ("python", str(path)),
        "cwd": str(job.folder),
    }
    return run_request(job.name, job.folder, gpus=2, **(fields | changed)).save()


async def start_agent(job: Job, run_file: Path, *arguments: str, **environment: str) -> asyncio.subprocess.Process:
    command = [sys.executable, "-P", "-m", "resihp.wrapper.agent.process", "--run", str(run_file), *arguments]
    with (job.logs / "n1.agent.log").open("wb") as log:
        return await asyncio.create_subprocess_exec(
            *command, stdout=log, stderr=log, env=own_environment() | environment, process_group=0
        )


@asynccontextmanager
async def agent_of(job: Job, script: str = SCRIPT, **changed: Any) -> AsyncIterator[PretendedSupervisor]:
    """One agent, n1; it must end by itself once it is released. `changed`: of the run; `environment`: of the agent."""
    environment = {"SLURMD_NODENAME": "n1", **changed.pop("environment", {})}
    run_file = run_file_of(job, script, **changed)
    supervisor = PretendedSupervisor()
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    refused: list[str] = []
    server = await serve(
        listener, job.key, Envelope[m.AgentMessage], supervisor.converse, lambda peer, reason: refused.append(reason)
    )
    process = await start_agent(job, run_file, "--supervisor", address, **environment)
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


def spawn(rank: int, nodes: int, *, joins: bool = False, round: int = 0) -> m.Spawn:
    start = m.Start(
        rank=rank,
        node="n1",
        device=1,
        world_size=nodes,
        faults=(),
        checkpoint_folder="",
        checkpoint_every=0,
        resume=False,
        joins=joins,
        round=round,
    )
    return m.Spawn(workers=(start,), environment={}, nodes=(("n1", nodes),))


def halt(*ranks: int, reason: str = "x") -> m.ToWorkers:
    return to_workers(m.Halt(reason=reason), *ranks)


def to_workers(order: m.WorkerOrder, *ranks: int) -> m.ToWorkers:
    return m.ToWorkers(ranks=ranks, body=framing.encode(order))


def play(job: Job, scene: Callable[[PretendedSupervisor], Awaitable[None]], *arguments: Any, **changed: Any) -> None:
    async def main() -> None:
        async with agent_of(job, *arguments, **changed) as supervisor:
            await scene(supervisor)

    asyncio.run(main())


def test_agents_import_nothing_that_only_other_processes_need() -> None:
    """Thousands of them start at the same moment, from one shared file system."""
    heavy = {"numpy", "pydantic", "scipy", "sqlalchemy", "torch", "typer"}
    code = "import sys, resihp.wrapper.agent.process; print(*sys.modules)"
    imported = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True).stdout
    assert heavy.isdisjoint(imported.split())


@pytest.mark.parametrize(("rank", "looks"), [(0, True), (1, False)])
def test_whether_ranks_have_met_is_looked_for_where_rank_0_is(job: Job, rank: int, looks: bool) -> None:
    async def scene(supervisor: PretendedSupervisor) -> None:
        supervisor.order(spawn(rank, 1))
        await supervisor.until(lambda: supervisor.of(m.Spawned))
        with socket.create_server(("127.0.0.1", supervisor.joins[0].meeting_port)):
            before = len(supervisor.beats)
            await supervisor.until(lambda: len(supervisor.beats) >= before + 2)
        assert supervisor.beats[-1].met == looks
        supervisor.order(halt(rank))
        await supervisor.until(lambda: supervisor.of(m.Exited))

    play(job, scene)


CALLER = """
import time
import resihp
for i in range(1, 4):
    with resihp.section("forward"):
        time.sleep(0.001)
    resihp.iteration(i, loss=2.0)
    time.sleep(0.6)
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_totals_of_a_script_come_with_heartbeats_and_single_iterations_of_two_ranks(job: Job, rank: int) -> None:
    async def scene(supervisor: PretendedSupervisor) -> None:
        supervisor.order(spawn(rank, 3))
        await supervisor.until(lambda: supervisor.of(m.Exited))
        totals = [worker.script for beat in supervisor.beats for worker in beat.workers]
        assert [own for own in totals if own] == sorted((own for own in totals if own), key=lambda own: own.iteration)
        heard = next(own for own in totals if own)
        assert heard.own_s >= 0.001 * heard.iterations
        assert [name for name, _, _ in heard.sections] == ["forward"]
        assert any(beat.met for beat in supervisor.beats), "it declares no model"
        assert not supervisor.of(m.FromWorker)
        reports = supervisor.of(m.Printed)
        assert [f.iteration for report in reports for f in report.figures] == ([1, 2, 3] if rank == 0 else [])
        assert all(report.called for report in reports)

    play(job, scene, CALLER)


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


def test_an_agent_tells_what_it_is_on_may_open_many_files_and_its_workers_what_they_could(job: Job) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def scene(supervisor: PretendedSupervisor) -> None:
        supervisor.order(spawn(0, 1))
        await supervisor.until(lambda: supervisor.of(m.Spawned))
        agent, worker = psutil.Process(supervisor.joins[0].pid), psutil.Process(supervisor.of(m.Spawned)[0].pid)
        assert agent.rlimit(psutil.RLIMIT_NOFILE) == (min(hard, MOST_OPEN_FILES), hard)
        assert worker.rlimit(psutil.RLIMIT_NOFILE) == (600, hard)
        assert (machine := supervisor.joins[0].machine) is not None
        assert machine.kernel == os.uname().release
        supervisor.order(halt(0))
        await supervisor.until(lambda: supervisor.of(m.Exited))

    resource.setrlimit(resource.RLIMIT_NOFILE, (600, hard))
    try:
        play(job, scene)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_worker_that_cannot_be_started_is_refused_by_name(job: Job) -> None:
    (job.logs / "n1.rank7.log").mkdir()

    async def scene(supervisor: PretendedSupervisor) -> None:
        supervisor.order(spawn(7, 8, joins=True))
        await supervisor.until(lambda: supervisor.of(m.SpawnFailed))
        [refusal] = supervisor.of(m.SpawnFailed)
        assert refusal.rank == 7
        assert "Is a directory" in refusal.reason

    play(job, scene)


def test_a_repeated_order_to_end_a_round_leaves_the_next_round_alone(job: Job) -> None:
    """A new supervisor repeats the order while the answer to the first order is on its way to it."""

    async def scene(supervisor: PretendedSupervisor) -> None:
        supervisor.order(spawn(0, 1))
        await supervisor.until(lambda: supervisor.of(m.Spawned))
        supervisor.order(m.EndRound(round=0, grace_s=3.0))
        await supervisor.until(lambda: supervisor.of(m.RoundEnded))
        supervisor.order(m.EndRound(round=0, grace_s=3.0))
        supervisor.order(spawn(0, 1, round=1))
        await supervisor.until(lambda: len(supervisor.of(m.Spawned)) == 2)
        await supervisor.until(lambda: len(supervisor.of(m.RoundEnded)) == 2)
        assert [exited.pid for exited in supervisor.of(m.Exited)] == [supervisor.of(m.Spawned)[0].pid]
        assert [answer.round for answer in supervisor.of(m.RoundEnded)] == [0, 0]
        supervisor.order(m.Signal(rank=0, signal=signal.SIGKILL))
        await supervisor.until(lambda: len(supervisor.of(m.Exited)) == 2)

    play(job, scene, SLEEPER)


def test_a_round_has_not_ended_before_a_process_that_was_forked_late(job: Job) -> None:
    """The fork server did not answer for a while, because its node was out of memory."""

    async def scene(supervisor: PretendedSupervisor) -> None:
        supervisor.order(spawn(0, 2))
        await supervisor.until(lambda: supervisor.of(m.Spawned))
        server = psutil.Process(supervisor.of(m.Spawned)[0].pid).parent()
        assert server is not None
        server.suspend()
        supervisor.order(spawn(1, 2))
        supervisor.order(m.EndRound(round=0, grace_s=0.1))
        await asyncio.sleep(3.0)  # longer than the agent waits for the answer
        server.resume()
        await supervisor.until(lambda: supervisor.of(m.RoundEnded))
        assert not server.children()

    play(job, scene, SLEEPER)


def test_what_is_said_while_nobody_is_connected_arrives_once(job: Job) -> None:
    async def scene(supervisor: PretendedSupervisor) -> None:
        supervisor.order(spawn(0, 1))
        await supervisor.until(lambda: supervisor.of(m.Spawned))
        for n in range(1, 11):
            supervisor.cut()
            supervisor.order(spawn(n, n + 1, joins=True))
            supervisor.order(halt(n - 1, reason="y" * n))
            await supervisor.until(lambda n=n: len(supervisor.of(m.Exited)) == n)
        supervisor.order(to_workers(m.Go(epoch=3, **GO), 10))
        await supervisor.until(lambda: supervisor.conversation.acknowledged == supervisor.conversation.sent)
        supervisor.cut()
        supervisor.order(halt(10))
        await supervisor.until(lambda: len(supervisor.of(m.Exited)) == 11)
        assert [said.rank for said in supervisor.of(m.Exited)] == list(range(11))
        finished = [report.iteration for report in supervisor.reports()]
        assert finished == [*range(1, 11), 0], "the last one took its Go for the order to halt"
        epochs = [join.epoch for join in supervisor.joins]
        assert (epochs[0], epochs[1], epochs[-1]) == (0, 1, 3)
        assert [join.term for join in supervisor.joins] == [0, *[1] * (len(epochs) - 1)]
        assert supervisor.of(m.Inventory) == [m.Inventory()], "the same leader needs to be told once"

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


# --- what is passed on --------------------------------------------------------------------------------------------


ECHO = """
import os, socket, sys
from resihp.process import AGENT_FD
from resihp.protocol import messages as m
from resihp.protocol.framing import LocalFrames, local_frame
agent = socket.socket(fileno=int(os.environ[AGENT_FD]))
frames = LocalFrames()
while chunk := agent.recv(1 << 16):
    for body in frames.feed(chunk):
        if b"Start" not in body:
            agent.sendall(local_frame(body))
sys.exit(7)
"""
"""Says again what it is told, and ends when its agent hangs up."""


def test_reports_and_orders_are_passed_on_byte_for_byte(job: Job) -> None:
    """Whoever decodes and encodes again would lose the field that only the sender knows."""
    bodies = [
        msgspec.msgpack.encode({"type": "Finished", "iteration": iteration, "nobody knows": "x" * 100_000})
        for iteration in range(3)
    ]

    async def scene(supervisor: PretendedSupervisor) -> None:
        supervisor.order(spawn(0, 1))
        await supervisor.until(lambda: supervisor.of(m.Spawned))
        for body in bodies:
            supervisor.order(m.ToWorkers(ranks=(0,), body=body))
        await supervisor.until(lambda: len(supervisor.of(m.FromWorker)) == len(bodies))
        assert [each.body for each in supervisor.of(m.FromWorker)] == bodies
        supervisor.order(m.HangUp(rank=0, reason="cannot be read"))
        await supervisor.until(lambda: supervisor.of(m.Exited))
        assert [each.status for each in supervisor.of(m.Exited)] == [7]

    play(job, scene, ECHO)
    assert "worker socket closed: cannot be read" in (job.logs / "n1.agent.log").read_text()


def test_a_worker_whose_frames_are_no_messages_is_hung_up_on_by_its_agent(job: Job) -> None:
    fine = framing.encode(m.Finished(iteration=1))
    broken = msgspec.msgpack.encode({"type": "Finished", "iteration": 2, "epoch": "no number"})
    with pytest.raises(ProtocolError, match="malformed"):
        label_of(broken)

    async def scene(supervisor: PretendedSupervisor) -> None:
        supervisor.order(spawn(0, 1))
        await supervisor.until(lambda: supervisor.of(m.Exited))
        assert [each.body for each in supervisor.of(m.FromWorker)] == [fine]
        assert [each.status for each in supervisor.of(m.Exited)] == [7]

    talks = ECHO.replace("frames =", f"agent.sendall(b''.join(map(local_frame, {[fine, broken, fine]})))\nframes =")
    play(job, scene, talks)
    assert "worker socket closed: malformed message" in (job.logs / "n1.agent.log").read_text()


def test_a_report_that_cannot_be_read_is_not_told_to_another_leader(job: Job) -> None:
    async def scene(supervisor: PretendedSupervisor) -> None:
        supervisor.order(spawn(0, 1))
        await supervisor.until(lambda: supervisor.of(m.Spawned))
        no_report = msgspec.msgpack.encode({"type": "Stuck", "epoch": 1, "error": 7})
        supervisor.order(m.ToWorkers(ranks=(0,), body=no_report))
        await supervisor.until(lambda: supervisor.of(m.FromWorker))
        supervisor.give_way_to(m.Lead(term=2, node="n2", log=0))
        await supervisor.until(lambda: supervisor.of(m.Exited))
        [worker] = supervisor.of(m.Inventory)[1].workers
        assert (worker.rank, worker.steps, worker.said) == (0, (), ())
        assert [each.status for each in supervisor.of(m.Exited)] == [7]

    play(job, scene, ECHO, succession=True)


# --- another leader -----------------------------------------------------------------------------------------------


def record(seq: int, iteration: int) -> bytes:
    entry = IterationCommitted(epoch=1, outcome=outcome(iteration), seconds=1.0, predicted_seconds=None)
    return encode(Record(seq, 0.0, entry))


def test_another_leader_is_told_what_runs_here_and_what_has_ended(job: Job) -> None:
    async def scene(supervisor: PretendedSupervisor) -> None:
        supervisor.order(spawn(0, 2))
        supervisor.order(spawn(1, 2))
        await supervisor.until(lambda: len(supervisor.of(m.FromWorker)) == 10)
        supervisor.order(halt(1))
        supervisor.order(m.Replicate(after=0, records=(record(1, 1),)))
        await supervisor.until(lambda: supervisor.of(m.Exited))
        os.kill(supervisor.joins[0].pid, signal.SIGUSR1)
        supervisor.give_way_to(m.Lead(term=2, node="n2", log=1))
        await supervisor.until(lambda: len(supervisor.of(m.Inventory)) == 2)
        inventory = supervisor.of(m.Inventory)[1]
        [worker] = inventory.workers
        assert (worker.rank, worker.device) == (0, 1)
        assert worker.pid == supervisor.of(m.Spawned)[0].pid
        assert [step.outcome.iteration for step in worker.steps] == [1, 2, 3]
        assert worker.said == (m.FaultDue(fault=7), m.Stuck(epoch=1, error="gone"))
        assert (inventory.ended, inventory.epoch) == (((1, 1),), 0)
        await supervisor.until(lambda: supervisor.of(m.Signalled))
        supervisor.order(to_workers(m.Park(epoch=5, reason=""), 0))
        await supervisor.until(lambda: type(supervisor.reports()[-1]) is m.Parked)
        supervisor.give_way_to(m.Lead(term=3, node="n3", log=1))
        await supervisor.until(lambda: len(supervisor.of(m.Inventory)) == 3)
        inventory = supervisor.of(m.Inventory)[2]
        assert [type(said) for said in inventory.workers[0].said] == [m.Parked]
        assert inventory.epoch == 5
        assert [(join.term, join.log) for join in supervisor.joins] == [(0, 0), (1, 1), (2, 1)]
        supervisor.order(halt(0))
        await supervisor.until(lambda: len(supervisor.of(m.Exited)) == 2)

    play(job, scene, TALKER, succession=True)


def test_a_leader_that_knows_less_waits_until_it_has_a_quorum(job: Job) -> None:
    async def scene(supervisor: PretendedSupervisor) -> None:
        supervisor.order(m.Replicate(after=0, records=(record(1, 1), record(2, 2))))
        await supervisor.until(lambda: supervisor.conversation.acknowledged == supervisor.conversation.sent == 1)
        supervisor.give_way_to(m.Lead(term=2, node="n2", log=1))
        await supervisor.until(lambda: len(supervisor.joins) > 3)
        assert len(supervisor.of(m.Inventory)) == 1
        assert {(join.term, join.log) for join in supervisor.joins[1:]} == {(1, 2)}
        supervisor.lead = m.Lead(term=2, node="n2", log=1, settled=True)
        await supervisor.until(lambda: len(supervisor.of(m.Inventory)) == 2)
        supervisor.order(m.Replicate(after=1, records=()))
        await supervisor.until(lambda: supervisor.conversation.acknowledged == supervisor.conversation.sent == 1)
        supervisor.cut()
        await supervisor.until(lambda: supervisor.joins[-1].log == 1)

    play(job, scene, succession=True)


def test_records_that_do_not_follow_make_the_agent_begin_anew_with_the_same_leader(job: Job) -> None:
    async def scene(supervisor: PretendedSupervisor) -> None:
        supervisor.order(m.Replicate(after=0, records=(record(1, 1), record(4, 2))))
        supervisor.order(m.Replicate(after=3, records=(record(5, 3),)))
        await supervisor.until(lambda: len(supervisor.of(m.Inventory)) == 2)
        assert (supervisor.joins[-1].term, supervisor.joins[-1].log) == (0, 1)
        supervisor.order(m.Replicate(after=1, records=(record(5, 3),)))
        await supervisor.until(lambda: supervisor.conversation.acknowledged == supervisor.conversation.sent == 1)

    play(job, scene, succession=True)


def test_a_leader_that_is_silent_is_left_and_found_again(job: Job) -> None:
    async def scene(supervisor: PretendedSupervisor) -> None:
        await supervisor.until(lambda: supervisor.of(m.Inventory))
        supervisor.silent = True
        await supervisor.until(lambda: len(supervisor.joins) == 2)
        supervisor.silent = False

    play(job, scene, succession=True)
    assert "silent for 3 s" in (job.logs / "n1.agent.log").read_text()


# --- the node -----------------------------------------------------------------------------------------------------


def test_signals_from_outside_are_reported_and_end_nothing(job: Job) -> None:
    async def scene(supervisor: PretendedSupervisor) -> None:
        await supervisor.until(lambda: supervisor.of(m.Inventory))
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGCONT):
            os.kill(supervisor.joins[0].pid, number)
            await supervisor.until(lambda number=number: m.Signalled(signal=int(number)) in supervisor.said)
        os.kill(supervisor.joins[0].pid, signal.SIGINT)
        supervisor.order(spawn(0, 1))
        await supervisor.until(lambda: supervisor.of(m.Spawned))
        supervisor.order(halt(0))
        await supervisor.until(lambda: supervisor.of(m.Exited))

    play(job, scene)


def test_agent_that_nobody_ever_answers_says_where_it_looked_and_exits_with_a_status_of_its_own(job: Job) -> None:
    """As where loopback is down: it exited with status 0, as after a job that is done."""
    run_file = run_file_of(job, SCRIPT)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

    async def main() -> int:
        agent = await start_agent(job, run_file, "--node", "n1", "--supervisor", f"127.0.0.1:{port}")
        async with asyncio.timeout(20):
            return await agent.wait()

    assert asyncio.run(main()) == NO_SUPERVISOR_STATUS
    assert f"agent n1: no supervisor at 127.0.0.1:{port} for 3 s" in (job.logs / "n1.agent.log").read_text()


def test_agent_that_nobody_answers_ends_when_it_is_told_to(job: Job) -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            run_file = run_file_of(job, SCRIPT, succession=True)
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            agent = await start_agent(job, run_file, "--node", "n1", "--supervisor", address)
            async with asyncio.timeout(10):
                connection, _ = await asyncio.get_running_loop().sock_accept(listener)  # its handlers are there before
                agent.send_signal(signal.SIGTERM)
                assert await agent.wait() == 0
            connection.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("--run", "/nowhere/run.json", "--node", "n1"), 3, "agent n1: /nowhere/run.json: not a run"),
        (("--node", "-"), 1, "SLURMD_NODENAME is not set"),
    ],
)
def test_agent_that_cannot_begin_says_why_in_one_line(
    job: Job, arguments: tuple[str, ...], status: int, said: str
) -> None:
    async def main() -> None:
        run_file = run_file_of(job, SCRIPT)
        agent = await start_agent(job, run_file, *arguments, "--supervisor", "127.0.0.1:1", SLURMD_NODENAME="")
        assert await agent.wait() == status

    asyncio.run(main())
    [line] = (job.logs / "n1.agent.log").read_text().splitlines()
    assert said in line


def test_folder_that_hangs_does_not_hold_up_workers_that_print(job: Job) -> None:
    os.mkfifo(job.logs / "n1.rank0.log")  # whoever opens it hangs
    program = Program(kind="command", argv=("/bin/sh", "-c", "seq 1 200000"), interpreter=sys.executable, preload="")

    async def scene(supervisor: PretendedSupervisor) -> None:
        supervisor.order(spawn(0, 1))
        await supervisor.until(lambda: supervisor.of(m.Exited))

    play(job, scene, program=program, succession=True)
    assert (job.logs / "n1.rank0.log").is_fifo()
    log = job.journal_file.parent / "logs" / "n1.rank0.log"
    assert log.read_text().endswith("\n200000\n")


def test_workers_use_the_interface_on_which_the_supervisor_was_reached(job: Job) -> None:
    command = ("/bin/sh", "-c", "echo $GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME $CUDA_VISIBLE_DEVICES")

    async def scene(supervisor: PretendedSupervisor) -> None:
        supervisor.order(spawn(0, 1))
        await supervisor.until(lambda: supervisor.of(m.Exited))

    environment = {"SLURM_JOB_ID": "1", "NCCL_SOCKET_IFNAME": "ib0", "CUDA_VISIBLE_DEVICES": "3,5"}
    program = Program(kind="command", argv=command, interpreter=sys.executable, preload="")
    play(job, scene, environment=environment, program=program)
    assert (job.logs / "n1.rank0.log").read_text() == "lo ib0 3,5\n"


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({}, "lo =lo"),
        ({"NCCL_SOCKET_IFNAME": "ib0"}, "lo ib0"),
        ({"GLOO_SOCKET_IFNAME": "eth7"}, "eth7 =lo"),
    ],
)
def test_workers_use_the_configured_interface_unless_the_user_has_set_another(
    job: Job, environment: dict[str, str], told: str
) -> None:
    async def scene(supervisor: PretendedSupervisor) -> None:
        supervisor.order(spawn(0, 1))
        await supervisor.until(lambda: supervisor.of(m.Exited))

    command = ("/bin/sh", "-c", "echo $GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME")
    program = Program(kind="command", argv=command, interpreter=sys.executable, preload="")
    play(job, scene, environment={"SLURM_JOB_ID": "1", **environment}, program=program, interface="l")
    assert (job.logs / "n1.rank0.log").read_text() == f"{told}\n"


def test_a_node_without_the_configured_interface_says_what_it_has(job: Job) -> None:
    async def scene(supervisor: PretendedSupervisor) -> None:
        supervisor.order(spawn(0, 1))
        await supervisor.until(lambda: supervisor.of(m.SpawnFailed))
        (failed,) = supervisor.of(m.SpawnFailed)
        assert failed.rank is None
        assert "[network] interface: no interface ib9 is up with an address; available:" in failed.reason
        assert "lo (127.0.0.1)" in failed.reason

    play(job, scene, environment={"SLURM_JOB_ID": "1"}, interface="ib9")


GO: dict[str, Any] = {"next_iteration": 1, "finish": None}


DEAF = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(1000)
"""


def test_the_processes_of_a_round_are_ended_and_their_ranks_name_others(job: Job) -> None:
    async def scene(supervisor: PretendedSupervisor) -> None:
        supervisor.order(spawn(0, 2))
        supervisor.order(spawn(1, 2))
        await supervisor.until(lambda: len(supervisor.of(m.Spawned)) == 2)
        await supervisor.until(lambda: all((job.logs / f"n1.rank{rank}.log").read_text() for rank in (0, 1)))
        supervisor.order(m.EndRound(round=0, grace_s=0.2))
        supervisor.order(m.EndRound(round=0, grace_s=0.2))
        await supervisor.until(lambda: supervisor.of(m.RoundEnded))
        assert {(said.rank, said.status) for said in supervisor.of(m.Exited)} == {(0, -9), (1, -9)}
        (ended,) = supervisor.of(m.RoundEnded)
        assert ended.meeting_port not in (0, supervisor.joins[0].meeting_port)
        supervisor.order(spawn(1, 2, round=1))
        await supervisor.until(lambda: len(supervisor.of(m.Spawned)) == 3)
        supervisor.order(m.EndRound(round=1, grace_s=0.2))
        await supervisor.until(lambda: len(supervisor.of(m.RoundEnded)) == 2)

    play(job, scene, DEAF)


@pytest.mark.parametrize(
    ("heard_s", "stopped_s", "ends"),
    [(SCRIPT_ALONE_S + 1, 1e9, True), (SCRIPT_ALONE_S - 1, 1e9, False), (SCRIPT_ALONE_S + 1, 2.0, False)],
)
def test_the_workers_of_a_script_end_without_a_supervisor(heard_s: float, stopped_s: float, ends: bool) -> None:
    """The supervisor may have started others in their place. An agent that was stopped itself has missed nothing."""
    reasons: list[str] = []

    async def end_alone(reason: str) -> None:
        reasons.append(reason)

    async def main() -> None:
        agent: Any = Agent.__new__(Agent)
        now = time.monotonic()
        agent._link, agent._workers = SimpleNamespace(heard_at=now - heard_s), SimpleNamespace(end_alone=end_alone)
        agent._fence, agent._stalled_until = None, now - stopped_s
        agent._fence_script()
        await asyncio.sleep(0)

    asyncio.run(main())
    assert reasons == (["no message of a supervisor for 26 s"] if ends else [])
