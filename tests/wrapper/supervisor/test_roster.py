"""The roster: everybody learns of everybody, and what that costs grows with the agents, not with their square."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from resihp.protocol import messages as m
from resihp.wrapper.agent.peers import Peers
from resihp.wrapper.agent.succession.journal_copy import Replica
from resihp.wrapper.supervisor.agents.roster import Rosters


class Town:
    """Agents that keep what they are told, and how much that was."""

    def __init__(self) -> None:
        self.known: dict[str, dict[str, m.Peer]] = {}
        self.messages = 0
        self.peers_told = 0
        self.rosters = Rosters(self._post)

    def _post(self, node: str, body: msgspec.Raw) -> int:
        news = msgspec.msgpack.decode(body, type=m.Roster)
        self.messages += 1
        self.peers_told += len(news.peers)
        known = {} if news.whole else dict(self.known[node])
        for gone in news.left:
            known.pop(gone, None)
        self.known[node] = known | {peer.node: peer for peer in news.peers}
        return 1


def peer(number: int, port: int = 7000) -> m.Peer:
    return m.Peer(node=f"n{number}", host=f"10.0.0.{number}", port=port)


def test_agents_that_join_together_are_told_once() -> None:
    town = Town()
    for number in range(400):
        town.rosters.joined(peer(number))
        town.rosters.enlist(f"n{number}")
    town.rosters.send_changes()
    assert town.messages == 400
    town.rosters.send_changes()
    assert town.messages == 400, "nothing has changed"
    town.rosters.joined(peer(400))
    town.rosters.enlist("n400")
    town.rosters.send_changes()
    assert town.messages == 801
    assert town.peers_told == 400 * 400 + 400 + 401, "the others are told of the newcomer alone"
    assert {len(known) for known in town.known.values()} == {401}


def test_those_who_choose_no_leader_are_told_of_nobody() -> None:
    town = Town()
    for number in range(400):
        town.rosters.joined(peer(number))
    for number in range(63):
        town.rosters.enlist(f"n{number}")
    town.rosters.send_changes()
    assert town.messages == 63
    assert {len(known) for known in town.known.values()} == {400}, "all of them are told of a successor"
    town.rosters.enlist("n70")
    town.rosters.send_changes()
    assert (len(town.known), len(town.known["n70"])) == (64, 400)
    town.rosters.joined(peer(400))
    town.rosters.send_changes()
    assert {len(known) for known in town.known.values()} == {401}


@pytest.mark.parametrize("seed", range(20))
def test_everybody_knows_who_is_there(seed: int) -> None:
    rng, town = random.Random(seed), Town()
    there: dict[str, m.Peer] = {}
    for _ in range(200):
        match rng.choice(["join", "join", "leave", "tell"]):
            case "join":
                one = peer(rng.randrange(30), rng.randrange(3))
                there[one.node] = one
                town.rosters.joined(one)
                town.rosters.enlist(one.node)
            case "leave":
                gone = f"n{rng.randrange(30)}"
                there.pop(gone, None)
                town.known.pop(gone, None)
                town.rosters.left(gone)
            case _:
                town.rosters.send_changes()
                assert {node: town.known[node] for node in there} == dict.fromkeys(there, there)


def test_an_agent_keeps_what_it_was_told_before(tmp_path: Path) -> None:
    link: Any = None
    peers = Peers("n1", tmp_path / "run.json", bytes(32), Replica(tmp_path / "n1.copy"), link)
    known = lambda: [(each.node, each.port) for each in peers._roster]  # noqa: E731
    peers.roster(m.Roster(peers=(peer(10), peer(1), peer(2)), whole=True))
    assert known() == [("n1", 7000), ("n2", 7000), ("n10", 7000)], "in an order that is the same everywhere"
    peers.roster(m.Roster(peers=(peer(3), peer(2, 8000)), left=("n10",)))
    assert known() == [("n1", 7000), ("n2", 8000), ("n3", 7000)]
    peers.roster(m.Roster(peers=(peer(4),), whole=True))
    assert known() == [("n4", 7000)]
