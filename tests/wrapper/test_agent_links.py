"""Connections that break: who may come back, who is lost, who is refused. Channels are pretended, processes absent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from resihp.controller import interface as api
from resihp.errors import ProtocolError
from resihp.protocol import messages as m
from wrapper.agent_links import AgentLinks

RECONNECT_S = 0.2


class PretendedLauncher:
    nodes = ("n1", "n2")
    host = "127.0.0.1"

    def __init__(self) -> None:
        self.killed: list[str] = []

    def kill(self, node: str) -> None:
        self.killed.append(node)


class PretendedChannel:
    """What the agent says is put into `inbox`; None closes."""

    def __init__(self) -> None:
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()
        self.posted: list[Any] = []

    async def recv(self) -> Any:
        return await self.inbox.get()

    def post(self, message: Any) -> None:
        self.posted.append(message)

    def abort(self) -> None:
        self.inbox.put_nowait(None)


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

    async def join(self, node: str = "n1", epoch: int = 0, pid: int = 10) -> PretendedChannel:
        """Connect an agent; raises what its connection is refused with."""
        channel: Any = PretendedChannel()
        join = m.Join(node=node, host="h", pid=pid, devices=2, epoch=epoch)
        task = self.start(self.links.converse(channel, join))
        await asyncio.sleep(0)
        if task.done():
            self.tasks.discard(task)
            assert channel.posted == [m.Release(grace_s=0.0)]
            task.result()
        return channel  # type: ignore[no-any-return]

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


def go(epoch: int) -> m.Go:
    return m.Go(epoch=epoch, store_host="", store_port=0, next_iteration=1, finish=None)


def test_agent_that_comes_back_in_time_is_not_lost() -> None:
    async def scene(it: Scene) -> None:
        first = await it.join()
        it.links.order((), go(4))
        first.inbox.put_nowait(None)
        await asyncio.sleep(RECONNECT_S / 4)
        second = await it.join(epoch=4)
        await asyncio.sleep(2 * RECONNECT_S)
        assert it.lost() == []
        assert [type(event) for event in it.events] == [api.AgentJoined]
        it.links.signal_node("n1", 9)
        assert second.posted == [m.KillNode(signal=9)]
        second.inbox.put_nowait(None)
        await it.settle()
        assert it.lost() == ["n1"]

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
    ("node", "epoch", "pid", "reason"),
    [
        ("n1", 3, 10, "is of epoch 3, the job is at 4"),
        ("n1", 0, 10, "is of epoch 0"),
        ("n1", 4, 11, "process 11 where 10 is expected"),
        ("n2", 4, 12, "is of epoch 4, the job is at 0"),
        ("n3", 0, 12, "not a node of this job"),
    ],
)
def test_stale_and_strange_agents_are_refused(node: str, epoch: int, pid: int, reason: str) -> None:
    async def scene(it: Scene) -> None:
        channel = await it.join()
        it.links.order((), go(4))
        with pytest.raises(ProtocolError, match=reason):
            await it.join(node, epoch, pid)
        assert it.lost() == []
        channel.abort()
        await it.settle()

    play(scene)


def test_dropped_node_is_ended_and_never_heard_again() -> None:
    async def scene(it: Scene) -> None:
        channel = await it.join()
        it.links.spawn("n1", m.Spawn(workers=(), environment={}))
        it.links.drop("n1")
        channel.inbox.put_nowait(m.Beat(workers=()))
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
        channel.inbox.put_nowait(m.SpawnFailed(reason="disk full"))
        channel.inbox.put_nowait(None)
        await it.settle()
        assert [type(event) for event in it.events] == [api.AgentJoined, api.SpawnRefused, api.AgentLost]
        assert it.events[-1].reason == "its agent was killed by SIGKILL"

    play(scene)


def test_agent_that_speaks_for_anothers_rank_is_dropped() -> None:
    async def scene(it: Scene) -> None:
        channel = await it.join()
        channel.inbox.put_nowait(m.Exited(rank=5, pid=1, status=0))
        await it.settle()
        errors = [task.exception() for task in it.tasks if task.exception()]
        assert len(errors) == 1
        assert "rank 5, which is not its own" in str(errors[0])
        assert not any(isinstance(event, api.WorkerExited) for event in it.events)

    play(scene)
