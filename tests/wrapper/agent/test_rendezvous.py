"""What an agent gathers of its workers' words to each other, and hands out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from resihp.protocol import messages as m
from resihp.protocol.rendezvous import MAX_MEETING_BYTES
from resihp.wrapper.agent.rendezvous import Relay

EPOCH = m.MeetingId(epoch=2)


class Scene:
    def __init__(self) -> None:
        self.up: list[m.AgentMessage] = []
        self.down: list[tuple[int, m.Published]] = []
        self.relay = Relay(self.up.append, lambda rank, order: self.down.append((rank, order)))
        self.relay.open(EPOCH)

    def attend(self, rank: int, *groups: str) -> None:
        self.relay.receive(rank, m.Attend(meeting=EPOCH, groups=groups))

    def say(self, rank: int, group: str, key: str = "0") -> None:
        self.relay.receive(rank, m.Publish(meeting=EPOCH, said=(m.Said(group, key, b"x"),)))

    async def turn(self) -> tuple[list[m.AgentMessage], list[tuple[int, m.Published]]]:
        """What has gone up and down in this turn of the loop."""
        await asyncio.sleep(0)
        up, down = list(self.up), list(self.down)
        self.up.clear()
        self.down.clear()
        return up, down


def play(scene: Callable[[Scene], object]) -> None:
    async def main() -> None:
        await scene(Scene())  # type: ignore[misc]

    asyncio.run(main())


def published(*said: tuple[str, str]) -> m.Published:
    return m.Published(meeting=EPOCH, said=tuple(m.Said(group, key, b"x") for group, key in said))


def test_what_workers_say_in_one_turn_goes_up_in_one_message_and_what_they_attend_only_once() -> None:
    async def scene(it: Scene) -> None:
        it.attend(0, "world", "tensor/0")
        it.attend(1, "world", "tensor/0", "data/1")
        it.say(0, "world", "0")
        it.say(1, "world", "1")
        up, down = await it.turn()
        said = (m.Said("world", "0", b"x"), m.Said("world", "1", b"x"))
        assert up == [
            m.Attend(meeting=EPOCH, groups=("world", "tensor/0", "data/1")),
            m.Publish(meeting=EPOCH, said=said),
        ]
        assert down == [(1, published(("world", "0"))), (0, published(("world", "1")))], "each hears the other"

    play(scene)


def test_what_comes_to_the_node_once_goes_to_all_who_attend() -> None:
    async def scene(it: Scene) -> None:
        it.attend(0, "world")
        it.attend(1, "world")
        it.attend(2, "data/1")
        await it.turn()
        it.relay.published(published(("world", "7")))
        it.relay.published(published(("world", "7")))  # a second time, as after it was asked for what was said before
        assert (await it.turn())[1] == [(0, published(("world", "7"))), (1, published(("world", "7")))]
        it.attend(3, "world")
        assert await it.turn() == ([], [(3, published(("world", "7")))]), "the supervisor is not asked again"

    play(scene)


def test_with_a_new_leader_meetings_begin_anew_when_it_orders_them() -> None:
    async def scene(it: Scene) -> None:
        it.attend(0, "world")
        it.say(0, "world")
        it.relay.begin_anew()
        assert await it.turn() == ([], []), "it has never heard of them"
        it.attend(1, "world")
        assert await it.turn() == ([], [])
        it.relay.open(EPOCH)
        it.attend(1, "world")
        assert (await it.turn())[0] == [m.Attend(meeting=EPOCH, groups=("world",))]

    play(scene)


def test_who_has_ended_hears_nothing_and_too_much_hurts_nobody_else() -> None:
    async def scene(it: Scene) -> None:
        it.attend(0, "world")
        it.attend(1, "world")
        it.relay.leave(0)
        await it.turn()
        most = tuple(m.Said("world", str(n), bytes(1 << 20)) for n in range(MAX_MEETING_BYTES >> 20))
        it.relay.receive(1, m.Publish(meeting=EPOCH, said=most))
        assert await it.turn() == ([], [])
        it.relay.receive(1, m.Publish(meeting=m.MeetingId(epoch=1), said=most[:1]))
        assert (await it.turn())[1] == []

    play(scene)
