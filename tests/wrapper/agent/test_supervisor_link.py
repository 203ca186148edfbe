"""How long an agent looks for a leader, and where: the link alone, with short times and a pretended agent."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from resihp.protocol import messages as m
from resihp.protocol.framing import Envelope
from resihp.protocol.serving import serve
from resihp.wrapper.agent import supervisor_link
from resihp.wrapper.agent.supervisor_link import Address, LeaderLink
from tests.wrapper.agent.test_agent import PretendedSupervisor

KEY = os.urandom(32)


class Follower:
    """An agent without workers."""

    log = 0

    def __init__(self) -> None:
        self.dismissed: list[float] = []
        self.orders: list[m.AgentOrder] = []

    async def introduce(self, own_host: str) -> m.Join:
        assert own_host == "127.0.0.1"
        return m.Join(node="n1", host="h", pid=1, devices=1, epoch=0)

    def inventory(self) -> m.Inventory:
        return m.Inventory(epoch=7)

    def obey(self, order: m.AgentOrder) -> None:
        self.orders.append(order)

    def dismiss(self, grace_s: float) -> None:
        self.dismissed.append(grace_s)


class Scene:
    """A link, and supervisors that it may find."""

    def __init__(self) -> None:
        self.follower = Follower()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.home: Address = self.listener.getsockname()
        self.servers: list[asyncio.Server] = []

    def link(self, *, succession: bool) -> LeaderLink:
        return LeaderLink(self.home, KEY, self.follower, succession=succession)

    async def supervisor(self, lead: m.Lead, listener: socket.socket | None = None) -> PretendedSupervisor:
        supervisor = PretendedSupervisor(lead)
        self.servers.append(
            await serve(listener or self.listener, KEY, Envelope[m.AgentMessage], supervisor.converse, lambda *_: None)
        )
        return supervisor


def play(scene: Callable[[Scene], Awaitable[None]]) -> None:
    async def main() -> None:
        made = Scene()
        try:
            async with asyncio.timeout(20):
                await scene(made)
        finally:
            for server in made.servers:
                server.close()
            made.listener.close()

    asyncio.run(main())


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RETRY_S": 0.2, "MAX_LEADERLESS_S": 1.0, "MAX_REFUSED_S": 0.5}.items():
        monkeypatch.setattr(supervisor_link, name, value)
    monkeypatch.setattr(supervisor_link, "FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(supervisor_link, "MAX_PAUSE_S", 0.1)


async def lives_for(link: LeaderLink) -> float:
    begun = time.monotonic()
    await link.run()
    return time.monotonic() - begun


@pytest.mark.parametrize(("succession", "least", "most"), [(False, 0.2, 0.9), (True, 1.0, 5.0)])
def test_supervisor_that_is_nowhere_is_looked_for_and_given_up(succession: bool, least: float, most: float) -> None:
    async def scene(made: Scene) -> None:
        made.listener.close()
        assert least <= await lives_for(made.link(succession=succession)) < most

    play(scene)


def test_address_that_the_guardian_keeps_open_is_waited_at() -> None:
    async def scene(made: Scene) -> None:
        link = made.link(succession=False)
        running = asyncio.create_task(link.run())
        await asyncio.sleep(0.6)
        assert not running.done(), "three times as long as a supervisor that is nowhere"
        supervisor = await made.supervisor(m.Lead(term=2, node="n1", log=0))
        await supervisor.until(lambda: supervisor.of(m.Inventory))
        running.cancel()

    play(scene)


def test_refusal_ends_an_agent_at_once_unless_another_may_lead() -> None:
    async def scene(made: Scene) -> None:
        supervisor = await made.supervisor(m.Lead(term=1, node="n1", log=0))
        supervisor.refusing = True
        assert await lives_for(made.link(succession=False)) < 0.4
        assert made.follower.dismissed == [0.0]
        link = made.link(succession=True)
        assert 0.5 <= await lives_for(link) < 1.0, "less than without any leader"
        assert made.follower.dismissed == [0.0], "its return is what ends the agent"

    play(scene)


def test_successor_is_found_where_a_peer_says_it_is() -> None:
    async def scene(made: Scene) -> None:
        elsewhere = socket.create_server(("127.0.0.1", 0))
        first = await made.supervisor(m.Lead(term=1, node="n1", log=0))
        second = await made.supervisor(m.Lead(term=2, node="n2", log=0), elsewhere)
        link = made.link(succession=True)
        running = asyncio.create_task(link.run())
        await first.until(lambda: first.of(m.Inventory))
        link.point_to(2, elsewhere.getsockname())
        await asyncio.sleep(0.1)
        assert second.joins == [], "a leader that is there is not left"
        made.servers[0].close()
        first.cut()
        await second.until(lambda: second.of(m.Inventory))
        assert (link.promised, second.of(m.Inventory)) == (2, [m.Inventory(epoch=7)])
        running.cancel()

    play(scene)


def test_of_two_supervisors_of_one_term_the_one_with_a_quorum_is_followed() -> None:
    """One of them started so slowly that another node was elected; its agents were given up by the leader."""

    async def scene(made: Scene) -> None:
        elsewhere = socket.create_server(("127.0.0.1", 0))
        first = await made.supervisor(m.Lead(term=2, node="n3", log=0))
        second = await made.supervisor(m.Lead(term=2, node="n2", log=0), elsewhere)
        link = made.link(succession=True)
        running = asyncio.create_task(link.run())
        await first.until(lambda: first.of(m.Inventory))
        link.point_to(2, elsewhere.getsockname())
        made.servers[0].close()
        first.cut()
        await second.until(lambda: second.joins)
        assert second.of(m.Inventory) == [], "not without a quorum: the agent has promised itself to the other one"
        second.give_way_to(m.Lead(term=2, node="n2", log=0, settled=True))
        await second.until(lambda: second.of(m.Inventory))
        assert (link.promised, link.leader) == (2, elsewhere.getsockname())
        assert {join.term for join in second.joins} == {1}, "a conversation that begins anew"
        running.cancel()

    play(scene)


def test_supervisor_of_a_term_before_is_left() -> None:
    async def scene(made: Scene) -> None:
        supervisor = await made.supervisor(m.Lead(term=3, node="n1", log=0))
        link = made.link(succession=True)
        running = asyncio.create_task(link.run())
        await supervisor.until(lambda: supervisor.of(m.Inventory))
        supervisor.give_way_to(m.Lead(term=2, node="n1", log=99, settled=True))
        await supervisor.until(lambda: len(supervisor.joins) > 3)
        assert len(supervisor.of(m.Inventory)) == 1
        assert not link.connected
        await running

    play(scene)


def test_what_no_inventory_tells_is_told_again_to_the_next_leader() -> None:
    async def scene(made: Scene) -> None:
        link = made.link(succession=True)
        link.send(m.SpawnFailed(reason="no interpreter"))
        link.send(m.Signalled(signal=15))
        link.send(m.Exited(rank=0, pid=1, status=0))
        supervisor = await made.supervisor(m.Lead(term=1, node="n1", log=0))
        running = asyncio.create_task(link.run())
        await supervisor.until(lambda: supervisor.of(m.Signalled))
        told: list[Any] = [m.Inventory(epoch=7), m.SpawnFailed(reason="no interpreter"), m.Signalled(signal=15)]
        assert supervisor.said == told
        await link.settled.wait()
        supervisor.give_way_to(m.Lead(term=2, node="n1", log=0))
        link.send(m.Signalled(signal=10))
        await supervisor.until(lambda: len(supervisor.of(m.Inventory)) == 2)
        await supervisor.until(lambda: supervisor.of(m.Signalled)[-1] == m.Signalled(signal=10))
        assert supervisor.said == [*told, m.Inventory(epoch=7), m.Signalled(signal=10)], (
            "only what was not acknowledged"
        )
        running.cancel()

    play(scene)


def test_leader_that_is_away_while_too_much_piles_up_is_told_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(made: Scene) -> None:
        link = made.link(succession=True)
        supervisor = await made.supervisor(m.Lead(term=1, node="n1", log=0))
        running = asyncio.create_task(link.run())
        await supervisor.until(lambda: supervisor.of(m.Inventory))
        supervisor.cut()
        for _ in range(12):
            link.send(m.SpawnFailed(reason="x" * (3 << 20), rank=0))
        await supervisor.until(lambda: len(supervisor.of(m.Inventory)) == 2)
        assert [join.term for join in supervisor.joins] == [0, 0]
        assert made.follower.dismissed == []
        running.cancel()

    play(scene)
