"""Connections that break: who may come back, who is lost, who is refused. Channels are pretended, processes absent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec
import pytest

from resihp.controller import interface as api
from resihp.errors import ProtocolError
from resihp.protocol import messages as m
from resihp.protocol.framing import Envelope
from wrapper.agent_links import AgentLinks
from wrapper.conversation import Conversation

RECONNECT_S = 0.2


class PretendedLauncher:
    nodes = ("n1", "n2")
    host = "127.0.0.1"

    def __init__(self) -> None:
        self.killed: list[str] = []

    def kill(self, node: str) -> None:
        self.killed.append(node)


def through_a_socket(envelope: Envelope[Any], receives: Any) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(envelope), type=receives)


class PretendedChannel:
    """What the agent says is put into `inbox`; None closes. `posted`: what the links sent."""

    def __init__(self) -> None:
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()
        self.posted: list[Envelope[Any]] = []
        self.aborted = False

    async def recv(self) -> Any:
        return await self.inbox.get()

    def post(self, envelope: Envelope[Any]) -> None:
        if self.aborted:
            raise ConnectionResetError
        self.posted.append(through_a_socket(envelope, Envelope[m.AgentOrder]))

    def abort(self) -> None:
        self.aborted = True
        self.inbox.put_nowait(None)

    def orders(self) -> list[Any]:
        return [envelope.message for envelope in self.posted if envelope.message is not None]


class PretendedAgent:
    """An agent's side of the conversation, through any number of connections."""

    def __init__(self, node: str = "n1", pid: int = 10) -> None:
        self.node = node
        self.pid = pid
        self.conversation: Conversation[Any] = Conversation()
        self.epoch = 0
        self.heard: list[Any] = []
        self.channel = PretendedChannel()

    def join(self) -> m.Join:
        return m.Join(node=self.node, host="h", pid=self.pid, devices=2, epoch=self.epoch)

    def connected(self, channel: PretendedChannel) -> None:
        self.channel = channel
        self.conversation.connect(
            lambda envelope: channel.inbox.put_nowait(through_a_socket(envelope, Envelope[m.AgentMessage]))
        )
        channel.inbox.get_nowait()  # the Join, which has come already
        self.read()

    def read(self) -> None:
        """Take in what has come."""
        self.epoch = max(1, self.epoch)
        for envelope in self.channel.posted:
            order = self.conversation.take(envelope)
            if order is not None:
                self.heard.append(order)
            if isinstance(order, m.ToWorkers) and isinstance(order.order, m.Go):
                self.epoch = order.order.epoch
        self.channel.posted.clear()

    def say(self, message: Any) -> None:
        self.conversation.post(message)


class Scene:
    """Links with their events in a list."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.launcher = PretendedLauncher()
        self.tasks: set[asyncio.Task[None]] = set()
        launcher: Any = self.launcher
        self.links = AgentLinks(launcher, self.events.append, self.start, reconnect_s=RECONNECT_S)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        return task

    async def join(self, node: str = "n1", epoch: int = 0, pid: int = 10, received: int = 0) -> PretendedChannel:
        """Connect somebody; raises what the connection is refused with."""
        channel: Any = PretendedChannel()
        join = m.Join(node=node, host="h", pid=pid, devices=2, epoch=epoch)
        task = self.start(self.links.converse(channel, Envelope(acknowledged=received, message=join), join))
        await asyncio.sleep(0)
        if task.done():
            self.tasks.discard(task)
            assert channel.orders() == [m.Release(grace_s=0.0)]
            task.result()
        return channel  # type: ignore[no-any-return]

    async def connect(self, agent: PretendedAgent) -> None:
        """Connect an agent, as it does it itself: told what it has received."""
        channel = await self.join(agent.node, agent.epoch, agent.pid, agent.conversation.received)
        agent.connected(channel)

    async def settle(self) -> None:
        """Until all that was started has come to its end, and what that started."""
        while pending := [task for task in self.tasks if not task.done()]:
            await asyncio.wait(pending)

    def lost(self) -> list[str]:
        return [event.node for event in self.events if isinstance(event, api.AgentLost)]


def play(scene: Callable[[Scene], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(10):
            await scene(Scene())

    asyncio.run(main())


def spawn(rank: int) -> m.Spawn:
    start = m.Start(
        rank=rank,
        node="n1",
        device=rank,
        world_size=1,
        nodes=("n1",),
        faults=(),
        checkpoint_folder="",
        checkpoint_every=0,
        resume=False,
    )
    return m.Spawn(workers=(start,), environment={})


def go(epoch: int) -> m.Go:
    return m.Go(epoch=epoch, store_host="", store_port=0, next_iteration=1, finish=None)


def test_agent_that_comes_back_in_time_is_not_lost() -> None:
    async def scene(it: Scene) -> None:
        agent = PretendedAgent()
        await it.connect(agent)
        it.links.spawn("n1", spawn(0))
        it.links.order((0,), go(4))
        agent.read()
        agent.channel.abort()
        await asyncio.sleep(RECONNECT_S / 4)
        await it.connect(agent)
        await asyncio.sleep(2 * RECONNECT_S)
        assert it.lost() == []
        assert [type(event) for event in it.events] == [api.AgentJoined]
        it.links.signal_node("n1", 9)
        agent.read()
        assert agent.heard[-1] == m.KillNode(signal=9)
        agent.channel.abort()
        await it.settle()
        assert it.lost() == ["n1"]

    play(scene)


def test_nothing_is_lost_when_the_connection_is_cut() -> None:
    async def scene(it: Scene) -> None:
        agent = PretendedAgent()
        await it.connect(agent)
        it.links.spawn("n1", spawn(0))
        agent.read()
        agent.say(m.Spawned(rank=0, device=0, pid=77))
        await asyncio.sleep(0)
        it.links.order((0,), go(1))
        it.links.cut("n1")  # with the Go in flight
        agent.say(m.FromWorker(rank=0, message=m.Confirm(epoch=2, digest="")))
        it.links.order((0,), go(2))
        await asyncio.sleep(0)
        await it.connect(agent)
        await asyncio.sleep(0)
        agent.read()
        assert [order.order.epoch for order in agent.heard[1:]] == [1, 2]
        assert agent.epoch == 2
        told = [type(event) for event in it.events]
        assert told == [api.AgentJoined, api.WorkerSpawned, api.WorkerSaid]
        await asyncio.sleep(2 * RECONNECT_S)
        assert it.lost() == []
        agent.channel.abort()
        await it.settle()

    play(scene)


def test_break_during_the_answer_to_the_first_join_is_survived() -> None:
    async def scene(it: Scene) -> None:
        channel = await it.join()
        it.links.spawn("n1", spawn(0))
        channel.abort()
        await asyncio.sleep(0)
        second = await it.join()  # it has heard nothing, so it joins as it did before
        assert second.orders() == [spawn(0)]
        assert [type(event) for event in it.events] == [api.AgentJoined]
        second.abort()
        await it.settle()

    play(scene)


def test_agent_may_be_back_before_the_break_is_noticed() -> None:
    async def scene(it: Scene) -> None:
        agent = PretendedAgent()
        await it.connect(agent)
        it.links.spawn("n1", spawn(0))
        agent.read()
        stale = agent.channel
        agent.conversation.disconnect()
        agent.say(m.Spawned(rank=0, device=0, pid=77))
        connecting = it.start(it.connect(agent))
        asyncio.get_running_loop().call_soon(stale.inbox.put_nowait, Envelope(number=1, message=m.Beat(workers=())))
        await connecting
        assert stale.aborted
        await asyncio.sleep(2 * RECONNECT_S)
        assert it.lost() == []
        told = [type(event) for event in it.events]
        assert told == [api.AgentJoined, api.WorkerSpawned], "the old connection is not read any more"
        agent.channel.abort()
        await it.settle()

    play(scene)


def test_two_short_breaks_are_not_one_long_one() -> None:
    async def scene(it: Scene) -> None:
        agent = PretendedAgent()
        await it.connect(agent)
        agent.channel.abort()
        await asyncio.sleep(0.7 * RECONNECT_S)
        await it.connect(agent)
        agent.channel.abort()
        await asyncio.sleep(0.7 * RECONNECT_S)
        assert it.lost() == []
        await it.connect(agent)
        agent.channel.abort()
        await it.settle()

    play(scene)


def test_agent_that_acknowledges_nothing_for_too_long_is_lost() -> None:
    async def scene(it: Scene) -> None:
        agent = PretendedAgent()
        await it.connect(agent)
        it.links.spawn("n1", spawn(0))
        large = m.Halt(reason="x" * (1 << 20))
        for _ in range(40):
            it.links.order((0,), large)
            assert it.lost() == [], "not told while the controller's actions are carried out"
        await it.settle()
        assert it.lost() == ["n1"]
        assert agent.channel.aborted

    play(scene)


def test_exits_are_acknowledged_at_once_and_the_rest_on_demand() -> None:
    async def scene(it: Scene) -> None:
        agent = PretendedAgent()
        await it.connect(agent)
        it.links.spawn("n1", spawn(0))
        agent.read()
        agent.say(m.Spawned(rank=0, device=0, pid=77))
        await asyncio.sleep(0)
        agent.read()
        assert agent.conversation.acknowledged == 0
        it.links.acknowledge()
        agent.read()
        assert agent.conversation.acknowledged == 1
        agent.say(m.Exited(rank=0, pid=77, status=0))
        await asyncio.sleep(0)
        agent.read()
        assert agent.conversation.acknowledged == 2
        agent.channel.abort()
        await it.settle()

    play(scene)


def test_agent_that_stays_away_is_lost_and_then_refused() -> None:
    async def scene(it: Scene) -> None:
        channel = await it.join()
        channel.inbox.put_nowait(None)
        await it.settle()
        assert it.lost() == ["n1"]
        with pytest.raises(ProtocolError, match="was left out"):
            await it.join(epoch=1)

    play(scene)


@pytest.mark.parametrize(
    ("node", "epoch", "pid", "received", "reason"),
    [
        ("n1", 3, 10, 2, "is of epoch 3, where 4 is due after what it has received"),
        ("n1", 0, 10, 2, "is of epoch 0, where 4 is due"),
        ("n1", 4, 10, 1, "is of epoch 4, where 1 is due"),
        ("n1", 4, 10, 3, "has received 3 messages of 2, not all others are still there"),
        ("n1", 4, 11, 2, "process 11 where 10 is expected"),
        ("n2", 4, 12, 0, "is of epoch 4, where 0 is due"),
        ("n3", 0, 12, 0, "not a node of this job"),
    ],
)
def test_stale_and_strange_agents_are_refused(node: str, epoch: int, pid: int, received: int, reason: str) -> None:
    async def scene(it: Scene) -> None:
        channel = await it.join()
        it.links.spawn("n1", spawn(0))
        it.links.order((0,), go(4))
        with pytest.raises(ProtocolError, match=reason):
            await it.join(node, epoch, pid, received)
        assert it.lost() == []
        assert not channel.aborted, "strangers do no harm to the one that is there"
        channel.abort()
        await it.settle()

    play(scene)


def test_agent_without_workers_in_the_plan_may_come_back_all_the_same() -> None:
    async def scene(it: Scene) -> None:
        first, other = PretendedAgent(), PretendedAgent("n2", 20)
        await it.connect(first)
        await it.connect(other)
        it.links.spawn("n1", spawn(0))
        it.links.order((0,), go(7))
        other.channel.abort()
        await asyncio.sleep(0)
        await it.connect(other)
        assert other.epoch == 1
        first.channel.abort()
        other.channel.abort()
        await it.settle()

    play(scene)


def test_dropped_node_is_ended_and_never_heard_again() -> None:
    async def scene(it: Scene) -> None:
        channel = await it.join()
        it.links.spawn("n1", m.Spawn(workers=(), environment={}))
        it.links.drop("n1")
        channel.inbox.put_nowait(Envelope(message=m.Beat(workers=())))
        await it.settle()
        assert it.launcher.killed == ["n1"]
        assert [type(event) for event in it.events] == [api.AgentJoined]
        it.links.agent_ended("n1", -9)
        await it.settle()
        assert it.lost() == []

    play(scene)


def test_agents_exit_is_told_after_what_it_had_sent() -> None:
    async def scene(it: Scene) -> None:
        channel = await it.join()
        it.links.agent_ended("n1", -9)
        channel.inbox.put_nowait(Envelope(number=1, message=m.SpawnFailed(reason="disk full")))
        channel.inbox.put_nowait(None)
        await it.settle()
        assert [type(event) for event in it.events] == [api.AgentJoined, api.SpawnRefused, api.AgentLost]
        assert it.events[-1].reason == "its agent was killed by SIGKILL"

    play(scene)


def test_refusal_to_start_one_worker_names_it() -> None:
    async def scene(it: Scene) -> None:
        channel = await it.join()
        it.links.spawn("n1", spawn(0))
        channel.inbox.put_nowait(Envelope(number=1, message=m.SpawnFailed(reason="no memory", rank=0)))
        channel.inbox.put_nowait(None)
        await it.settle()
        assert it.events[1] == api.SpawnRefused(node="n1", reason="no memory", rank=0)

    play(scene)


def test_agent_that_speaks_for_anothers_rank_is_dropped() -> None:
    async def scene(it: Scene) -> None:
        channel = await it.join()
        channel.inbox.put_nowait(Envelope(number=1, message=m.Exited(rank=5, pid=1, status=0)))
        await it.settle()
        errors = [task.exception() for task in it.tasks if task.exception()]
        assert len(errors) == 1
        assert "rank 5, which is not its own" in str(errors[0])
        assert not any(isinstance(event, api.WorkerExited) for event in it.events)

    play(scene)
