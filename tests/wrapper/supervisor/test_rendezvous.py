"""What agents tell the supervisor of their workers' addresses, and whom it tells."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from resihp.protocol import messages as m
from resihp.protocol.rendezvous import BATCH_BYTES, MAX_MEETING_BYTES
from resihp.wrapper.supervisor.agents.rendezvous import Exchange

EPOCH = m.MeetingId(epoch=2)


class Scene:
    def __init__(self) -> None:
        self.posted: list[tuple[str, m.Published]] = []
        self.exchange = Exchange(lambda node, order: self.posted.append((node, order)))
        self.exchange.open(EPOCH)

    def attend(self, node: str, *groups: str) -> None:
        self.exchange.receive(node, m.Attend(meeting=EPOCH, groups=groups))

    def say(self, node: str, group: str, key: str, value: bytes = b"x", meeting: m.MeetingId = EPOCH) -> None:
        self.exchange.receive(node, m.Publish(meeting=meeting, said=(m.Said(group, key, value),)))

    async def turn(self) -> list[tuple[str, tuple[str, ...]]]:
        """Whom it told of which keys in this turn of the loop."""
        await asyncio.sleep(0)
        posted, self.posted[:] = list(self.posted), []
        return [(node, tuple(f"{each.group}/{each.key}" for each in order.said)) for node, order in posted]


def play(scene: Callable[[Scene], Awaitable[None]]) -> None:
    async def main() -> None:
        await scene(Scene())

    asyncio.run(main())


def test_a_node_hears_once_a_turn_what_its_workers_attend() -> None:
    async def scene(it: Scene) -> None:
        it.attend("n1", "world", "data/0")
        it.say("n1", "world", "0")
        it.attend("n2", "world")
        it.say("n2", "world", "1")
        it.say("n3", "data/0", "5")
        it.say("n3", "data/1", "6")
        assert await it.turn() == [("n2", ("world/0",)), ("n1", ("world/1", "data/0/5"))]
        assert await it.turn() == []

    play(scene)


def test_what_is_said_in_an_older_epoch_or_by_who_was_never_asked_is_heard_by_nobody() -> None:
    async def scene(it: Scene) -> None:
        it.attend("n1", "world")
        it.exchange.open(m.MeetingId(epoch=3))
        it.say("n2", "world", "1")
        it.say("n2", "world", "1", meeting=m.MeetingId(epoch=9))
        assert await it.turn() == []
        it.exchange.receive("n1", m.Attend(meeting=m.MeetingId(epoch=3), groups=("world",)))
        assert await it.turn() == []

    play(scene)


def test_who_was_left_out_is_told_nothing() -> None:
    async def scene(it: Scene) -> None:
        it.attend("n1", "world")
        it.exchange.leave("n1")
        it.say("n2", "world", "1")
        assert await it.turn() == []

    play(scene)


def test_large_addresses_go_in_messages_that_fit_and_too_much_is_refused_with_the_nodes_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scene(it: Scene) -> None:
        it.attend("n1", "world")
        for n in range(3):
            it.say("n2", "world", str(n), bytes(BATCH_BYTES // 2))
        assert [len(keys) for _, keys in await it.turn()] == [1, 1, 1]
        for n in range(3, (MAX_MEETING_BYTES // BATCH_BYTES) * 2 + 1):
            it.say("n2", "world", str(n), bytes(BATCH_BYTES // 2))
        assert "node n2: rendezvous of epoch 2: more than" in caplog.text

    play(scene)
