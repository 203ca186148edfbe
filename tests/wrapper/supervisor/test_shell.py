"""The supervisor's shell: what it does of what the controller asks for, as long as a quorum of agents follows it.

Agents and sockets are real ends of real connections; controller, launcher, ledger and view are pretended.
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from resihp.controller import interface as api
from resihp.protocol import messages as m
from resihp.protocol.channels import SecureChannel
from resihp.protocol.framing import Envelope
from resihp.protocol.resumable import Conversation
from resihp.record import journal_file
from resihp.record.journal import (
    AnyEntry,
    DrainDecided,
    JobEnded,
    LeaderChosen,
    Record,
    Suspected,
    WorkerEnded,
    first_seq,
)
from resihp.record.journal_file import Journal, read
from resihp.record.journal_format import encode
from resihp.wrapper.config.run_spec import RunRequest
from resihp.wrapper.exit_codes import LEADER_DEPOSED
from resihp.wrapper.job_folder import Job, SupervisorFile, create_local_job
from resihp.wrapper.supervisor import attention, shell
from resihp.wrapper.supervisor.agents import departure
from resihp.wrapper.supervisor.shell import Supervisor
from tests.wrapper.agent.test_election import beginning
from tests.wrapper.run_requests import run_request
from tests.wrapper.supervisor.journaling.test_replication import membership_of

NODES = ("n1", "n2", "n3")
DRAIN = api.Log(entry=DrainDecided(drain=1, node="n1", failure=1, reason=""))
ENDED = api.Log(entry=JobEnded(exit_code=5, state="failed", reason="too few"))
OTHER = Suspected(rank=0, node="n1", evidence="")
"""Any entry that is no decision."""
END = api.End(exit_code=5, reason="too few", workers_leave=True)


class Scripted:
    """A controller that says what it is given to say, and remembers what it heard and when."""

    def __init__(self) -> None:
        self.answers: list[api.AnyAction] = []
        self.heard: list[tuple[float, api.AnyEvent]] = []

    def handle(self, event: api.AnyEvent, now: float) -> list[api.AnyAction]:
        self.heard.append((now, event))
        if isinstance(event, api.QuorumLost):
            return [api.Log(entry=JobEnded(exit_code=75, state="failed", reason="")), END]
        answers, self.answers = self.answers, []
        return answers

    def of(self, kind: type) -> list[Any]:
        return [event for _, event in self.heard if isinstance(event, kind)]


class PretendedLauncher:
    host = "127.0.0.1"
    nodes = NODES

    def __init__(self) -> None:
        self.worker_environment: dict[str, str] = {}
        self.killed: list[str] = []
        self.adopted: list[str] = []

    async def start(self, port: int, ended: Any) -> None: ...

    def adopt(self, node: str, pid: int, ended: Any) -> None:
        self.adopted.append(node)

    def kill(self, node: str) -> None:
        self.killed.append(node)

    async def wait(self, timeout_s: float) -> bool:
        return True


class Remembering:
    """Ledger and view in one."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.said: list[str] = []

    def submit(self, record: Record) -> None:
        self.records.append(record)

    def say(self, level: str, text: str) -> None:
        self.said.append(text)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: None


class PretendedAgent:
    """Follows whoever leads on that port; `deaf`: hears, and acknowledges nothing."""

    def __init__(self, node: str, log: int, *, term: int = 1) -> None:
        self.node = node
        self.log = log
        self.term = term
        self.deaf = False
        self.heard: list[Any] = []
        self.lead: m.Lead | None = None
        self.channel: SecureChannel[Any] | None = None
        self.task: asyncio.Task[None] | None = None

    async def join(self, port: int, key: bytes) -> None:
        """Until the supervisor has its inventory."""
        self.channel = await SecureChannel.connect("127.0.0.1", port, key, Envelope[m.AgentOrder])
        join = m.Join(
            node=self.node,
            host="h",
            pid=int(self.node[1:]),
            devices=1,
            epoch=0,
            term=self.term,
            log=self.log,
            incarnation=f"{self.node}/0",
        )
        self.channel.post(Envelope(message=join))
        first = await self.channel.recv()
        if first is None:
            return  # turned away
        assert isinstance(first.message, m.Lead)
        self.lead = first.message
        conversation: Conversation[Any] = Conversation()
        conversation.post(m.Inventory())
        conversation.connect(self.channel.post)
        conversation.take(first)
        self.task = asyncio.create_task(self._hear(self.channel, conversation))

    async def _hear(self, channel: SecureChannel[Any], conversation: Conversation[Any]) -> None:
        with suppress(ConnectionError):
            while (envelope := await channel.recv()) is not None:
                if (order := conversation.take(envelope)) is not None:
                    self.heard.append(order)
                if isinstance(order, m.Release):
                    channel.close()
                elif not self.deaf:
                    conversation.acknowledge()

    def leave(self) -> None:
        assert self.channel is not None
        self.channel.abort()


class Scene:
    """A supervisor of term 2, whose journal says that n1, n2 and n3 train, and agents that may follow it."""

    def __init__(self, job: Job, *, succession: bool = True) -> None:
        self.job = job
        self.controller = Scripted()
        self.launcher = PretendedLauncher()
        self.told = Remembering()
        journal = Journal(job.journal_file, sync=False)
        first = beginning(3)
        for record in first:
            journal.copy(encode(record))
        launcher: Any = self.launcher
        told: Any = self.told
        self.supervisor = Supervisor(
            request_of(job, succession=succession),
            controller=self.controller,
            launcher=launcher,
            journal=journal,
            ledger=told,
            view=told,
            lead=m.Lead(term=2, node="n1", log=first[-1].seq),
            membership=membership_of(first),
        )
        chosen = LeaderChosen(term=2, node="n1", host="h", how="restarted", after=first[-1].seq)
        self.running = asyncio.create_task(self.supervisor.run(chosen))
        self.agents = {node: PretendedAgent(node, first[-1].seq) for node in NODES}

    async def reach(self, node: str) -> None:
        """The agent of that node comes, whatever it is told."""
        await self.until(self.job.supervisor_file.exists)
        address = msgspec.json.decode(self.job.supervisor_file.read_bytes(), type=SupervisorFile)
        await self.agents[node].join(address.port, self.job.key)

    async def follow(self, *nodes: str) -> None:
        for node in nodes or NODES:
            await self.reach(node)
            await self.until(partial(self.has_joined, node))

    def has_joined(self, node: str) -> bool:
        return any(event.node == node for event in self.controller.of(api.AgentJoined))

    def answer(self, *actions: api.AnyAction) -> None:
        """The controller says this now."""
        self.controller.answers = list(actions)
        self.supervisor._event(api.NodesRemembered(usual={}))

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.005)

    async def turns(self) -> None:
        """Long enough for messages to go to all agents and back."""
        heard = len(self.controller.of(api.Tick))
        await self.until(lambda: len(self.controller.of(api.Tick)) > heard + 2)

    def released(self) -> list[str]:
        """Nodes whose agents were told to end."""
        return [node for node, agent in self.agents.items() if m.Release in [type(order) for order in agent.heard]]

    def heard(self, node: str, kind: type) -> int:
        return [type(order) for order in self.agents[node].heard].count(kind)

    @property
    def entries(self) -> list[AnyEntry]:
        """What was written since the beginning."""
        return [record.entry for record in read(self.job.journal_file)[len(beginning(3)) :]]

    @property
    def exit_code(self) -> str:
        return self.job.exit_code_file.read_text() if self.job.exit_code_file.exists() else ""


def request_of(job: Job, *, succession: bool = True) -> RunRequest:
    return run_request(job.name, job.folder, nodes=3, succession=succession)


@pytest.fixture
def job(fresh_home: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setattr(shell, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(shell, "BEAT_S", 0.1)
    monkeypatch.setattr(departure, "LEAVE_GRACE_S", 0.5)
    monkeypatch.setattr(departure, "AGENT_EXIT_S", 0.1)
    return create_local_job()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "QUORUM_TIMEOUT_S", 0.5)


def play(job: Job, scene: Callable[[Scene], Awaitable[None]], *, succession: bool = True) -> Scene:
    made: list[Scene] = []

    async def main() -> None:
        async with asyncio.timeout(30):
            made.append(Scene(job, succession=succession))
            await scene(made[0])
            if not made[0].running.done():
                made[0].answer(END)
                await made[0].running

    asyncio.run(main())
    return made[0]


# --- the lead -----------------------------------------------------------------------------------------------------


def test_that_it_leads_is_written_once_a_quorum_follows(job: Job) -> None:
    async def scene(it: Scene) -> None:
        await it.follow("n1")
        it.answer(api.Say(level="notice", text="hello"))
        await it.turns()
        assert it.entries == []
        assert it.told.said == []
        await it.follow("n2")
        await it.until(lambda: it.told.said == ["hello"])
        (record,) = read(job.journal_file)[-1:]
        assert (record.seq, type(record.entry)) == (first_seq(2), LeaderChosen)
        assert it.launcher.adopted == ["n1", "n2"]
        await it.follow("n3")
        assert [agent.lead.settled for agent in it.agents.values() if agent.lead] == [False, False, True]

    play(job, scene)


@pytest.mark.usefixtures("impatient")
def test_without_a_quorum_from_the_start_it_gives_up(job: Job) -> None:
    async def scene(it: Scene) -> None:
        await it.follow("n3")
        assert await it.running == LEADER_DEPOSED

    it = play(job, scene)
    assert it.entries == []
    assert it.exit_code == ""
    assert not it.released(), "whoever followed it may still find a successor, and trains on until then"


def test_an_agent_of_a_later_term_ends_the_lead(job: Job) -> None:
    async def scene(it: Scene) -> None:
        await it.follow("n1", "n2")
        await it.until(lambda: it.entries)
        it.agents["n3"].term = 3
        await it.reach("n3")
        assert await it.running == LEADER_DEPOSED

    it = play(job, scene)
    assert [type(entry) for entry in it.entries] == [LeaderChosen], "what a deposed leader has to say is not written"
    assert len(it.told.records) == 1
    assert it.exit_code == ""
    assert it.launcher.killed == []
    assert not job.journal_copy.exists()


# --- its disk -----------------------------------------------------------------------------------------------------


class Disk:
    """What the journal is written to: it may stall, or refuse."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.works = threading.Event()
        self.works.set()
        self.error: int | None = None
        self._write = os.pwrite
        monkeypatch.setattr(journal_file.os, "pwrite", self.write)

    def write(self, descriptor: int, content: bytes, at: int) -> int:
        assert self.works.wait(20.0)
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))
        return self._write(descriptor, content, at)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    made = Disk(monkeypatch)
    yield made
    made.works.set()


def test_while_the_disk_stalls_agents_hear_of_the_leader_and_nothing_is_done(job: Job, disk: Disk) -> None:
    async def scene(it: Scene) -> None:
        await it.follow()
        await it.until(lambda: it.entries)
        disk.works.clear()
        it.answer(api.Log(entry=OTHER), api.Say(level="notice", text="done"))
        before = it.heard("n1", m.Alive)
        await it.until(lambda: it.heard("n1", m.Alive) >= before + 5)
        assert it.told.said == []
        assert len(it.told.records) == 1, "what may be lost is not in the ledger"
        disk.works.set()
        await it.until(lambda: it.told.said == ["done"])
        assert len(it.told.records) == 2

    it = play(job, scene)
    assert it.entries[1] == OTHER


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.ENOTCONN, None])
def test_a_leader_that_cannot_write_steps_back_and_leaves_the_job_alone(
    job: Job, disk: Disk, monkeypatch: pytest.MonkeyPatch, error: int | None
) -> None:
    monkeypatch.setattr(shell, "MAX_DISK_STALL_S", 0.3)
    monkeypatch.setattr(shell, "CLOSE_S", 0.2)

    async def scene(it: Scene) -> None:
        await it.follow()
        await it.until(lambda: it.entries)
        disk.error = error
        if error is None:
            disk.works.clear()
        it.answer(api.Log(entry=OTHER), api.Say(level="notice", text="done"))
        assert await it.running == LEADER_DEPOSED

    it = play(job, scene)
    assert it.entries == it.entries[:1]
    assert "done" not in it.told.said
    assert it.released() == []
    assert it.launcher.killed == []
    assert it.exit_code == "", "it is its successor's to say"


def test_without_succession_a_full_disk_only_holds_back_decisions(
    job: Job, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shell, "MAX_DISK_STALL_S", 0.3)

    async def scene(it: Scene) -> None:
        await it.follow()
        await it.until(lambda: it.entries)
        disk.error = errno.ENOSPC
        it.answer(api.Log(entry=OTHER), api.Say(level="notice", text="done"))
        await it.until(lambda: it.told.said)
        assert "No space left on device; training continues, but no recovery can be decided until" in it.told.said[0]
        await it.turns()
        assert len(it.told.said) == 1, "told once, and nothing done"
        disk.error = None
        await it.until(lambda: [text.rpartition(": ")[2] for text in it.told.said[1:]] == ["writable again", "done"])

    it = play(job, scene, succession=False)
    assert it.entries[1] == OTHER


def test_what_fails_at_the_end_keeps_nothing_else_from_being_done(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(job: Job) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(shell, "copy_journal", refuse)

    async def scene(it: Scene) -> None:
        await it.follow()

    it = play(job, scene)
    assert it.exit_code == "5\n"
    assert it.told.said[-1].startswith("at the end: copy of the journal: ")


# --- decisions ----------------------------------------------------------------------------------------------------


def test_what_follows_a_decision_waits_until_a_quorum_knows_of_it(job: Job) -> None:
    async def scene(it: Scene) -> None:
        await it.follow()
        it.answer(api.Say(level="notice", text="leads"))
        await it.until(lambda: it.told.said == ["leads"])
        it.agents["n1"].deaf = it.agents["n2"].deaf = True
        it.answer(api.Say(level="notice", text="before"), DRAIN, api.Say(level="notice", text="after"))
        await it.until(lambda: DRAIN.entry in it.entries and it.told.said[1:] == ["before"])
        await it.turns()
        assert it.told.said[1:] == ["before"], "on disk alone"
        it.answer(api.Say(level="notice", text="later"))
        await it.turns()
        assert it.told.said[1:] == ["before"]
        it.agents["n2"].deaf = False
        it.supervisor._links.beat()  # something to ride on
        await it.until(lambda: it.told.said[1:] == ["before", "after", "later"])

    play(job, scene)


@pytest.mark.usefixtures("impatient")
def test_the_end_is_a_decision_and_nobody_else_s_job_is_ended(job: Job) -> None:
    """The others may follow another leader already, which would find the exit code and see its job ended."""

    async def scene(it: Scene) -> None:
        await it.follow()
        await it.turns()
        for agent in it.agents.values():
            agent.deaf = True
        it.answer(ENDED, END)
        assert await it.running == LEADER_DEPOSED

    it = play(job, scene)
    assert it.exit_code == ""
    assert it.launcher.killed == []


def test_a_worker_that_ends_while_the_end_waits_for_a_quorum_is_on_record(job: Job) -> None:
    """The controller has said its last word by then, and no agent tells it again."""

    async def scene(it: Scene) -> None:
        await it.follow()
        await it.turns()
        it.agents["n1"].deaf = it.agents["n2"].deaf = True
        it.answer(ENDED, END)
        it.supervisor._event(api.WorkerExited(rank=2, status=-9))
        await it.turns()
        assert not it.running.done()
        it.agents["n2"].deaf = False
        it.supervisor._links.beat()  # something to ride on
        assert await it.running == 5

    end, worker = play(job, scene).entries[-2:]
    assert end == ENDED.entry
    assert isinstance(worker, WorkerEnded)
    assert (worker.rank, worker.exit) == (2, -9)


def test_the_end_that_a_quorum_knows_of(job: Job) -> None:
    async def scene(it: Scene) -> None:
        await it.follow()
        it.answer(ENDED, END)
        assert await it.running == 5

    it = play(job, scene)
    assert it.exit_code == "5\n"
    assert it.launcher.killed == list(NODES)
    assert job.journal_copy.read_bytes() == job.journal_file.read_bytes()


@pytest.mark.usefixtures("impatient")
def test_a_leader_that_most_have_left_does_nothing_more(job: Job) -> None:
    """It would find nodes lost, and end what runs there: but they are well, with somebody else."""

    async def scene(it: Scene) -> None:
        await it.follow()
        await it.turns()
        it.agents["n2"].leave()
        it.agents["n3"].leave()
        await it.until(lambda: it.supervisor._links.connected(["n1", "n2"]) == {"n1"})
        it.answer(api.DropNode(node="n2"), ENDED, END)
        assert await it.running == LEADER_DEPOSED

    it = play(job, scene)
    assert it.launcher.killed == []
    assert [type(entry) for entry in it.entries] == [LeaderChosen]


def test_agents_that_are_back_in_time_are_acted_on(job: Job) -> None:
    async def scene(it: Scene) -> None:
        await it.follow()
        await it.turns()
        it.agents["n3"].leave()
        await it.until(lambda: it.supervisor._links.connected(["n1", "n2"]) == {"n1", "n2"})
        it.answer(api.Say(level="notice", text="two of three"))
        assert it.told.said == ["two of three"]

    play(job, scene)


def test_the_nodes_of_thousands_of_ranks_are_told_once_to_each_agent(job: Job) -> None:
    names = tuple(f"n{n}" for n in range(2048) for _ in range(8))

    async def scene(it: Scene) -> None:
        await it.follow()
        it.answer(api.StartWorkers(node="n1", workers=tuple((rank, rank) for rank in range(8)), nodes=names))
        await it.until(lambda: it.heard("n1", m.Spawn))
        (spawn,) = [order for order in it.agents["n1"].heard if isinstance(order, m.Spawn)]
        assert tuple(node for node, ranks in spawn.nodes for _ in range(ranks)) == names
        assert {start.world_size for start in spawn.workers} == {len(names)}
        assert len(msgspec.msgpack.encode(spawn)) < 40_000

    play(job, scene)


# --- time ---------------------------------------------------------------------------------------------------------


def test_a_supervisor_that_was_stopped_listens_before_it_judges(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """What agents have said meanwhile is on its way: their silence was its own."""
    monkeypatch.setattr(attention, "STALL_S", 0.2)
    monkeypatch.setattr(attention, "LISTEN_S", 0.3)

    async def scene(it: Scene) -> None:
        await it.follow()
        await it.turns()
        before = len(it.controller.of(api.Tick))
        time.sleep(0.5)  # nothing runs meanwhile
        woke_at = time.monotonic()
        await it.until(lambda: len(it.controller.of(api.Tick)) > before)
        assert time.monotonic() - woke_at >= 0.3

    play(job, scene)
