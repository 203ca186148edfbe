"""Agents that look for a successor, over real connections; the supervisor that they start is pretended."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from resihp.protocol import messages as m
from resihp.protocol.serving import serve
from resihp.record.journal import LeaderChosen, Record, first_seq
from resihp.record.journal_format import encode
from resihp.wrapper.agent import peers as peers_module
from resihp.wrapper.agent.peers import Peers
from resihp.wrapper.agent.succession.journal_copy import Replica
from resihp.wrapper.agent.supervisor_link import Address
from tests.wrapper.agent.test_election import beginning

KEY = os.urandom(32)
NODES = ("n1", "n2", "n3")


class Link:
    """`LeaderLink`, as used by peers: it has lost its leader long ago."""

    welcome = True
    connected = False
    promised = 1

    def __init__(self) -> None:
        self.leader: Address = ("127.0.0.1", 1)
        self.heard_at = time.monotonic() - 100.0
        self.hints: list[tuple[int, Address]] = []

    def point_to(self, term: int, address: Address) -> None:
        self.hints.append((term, address))


class PretendedSuccessor:
    """Lives until it is told to end."""

    started: list[PretendedSuccessor]

    def __init__(self, run_file: Path, node: str, copy: Path, listener: socket.socket, term: int) -> None:
        self.node, self.copy, self.term = node, copy, term
        self.address: Address = listener.getsockname()
        self.end = asyncio.Event()
        self.could_begin = True
        self.killed = False
        self.started.append(self)

    def kill(self) -> None:
        self.killed = True
        self.end.set()

    async def run(self) -> bool:
        await self.end.wait()
        return self.could_begin


class Town:
    """Three agents that know each other and have the same journal; `links` and `peers` by node."""

    def __init__(self, folder: Path) -> None:
        self.links = {node: Link() for node in NODES}
        self.replicas = {node: Replica(folder / f"{node}.copy") for node in NODES}
        self.peers: dict[str, Peers] = {}
        for node in NODES:
            self.give(node, beginning(3))
            link: Any = self.links[node]
            self.peers[node] = Peers(node, folder / "run.json", KEY, self.replicas[node], link, incarnation=f"{node}/0")
        self.tasks: list[asyncio.Task[None]] = []

    def give(self, node: str, records: list[Record]) -> None:
        replica = self.replicas[node]
        replica.apply(m.Replicate(after=replica.log, records=tuple(encode(record) for record in records)))

    async def open(self) -> None:
        ports = {node: await peers.listen("127.0.0.1") for node, peers in self.peers.items()}
        roster = m.Roster(peers=tuple(m.Peer(node=node, host="127.0.0.1", port=ports[node]) for node in NODES))
        for peers in self.peers.values():
            peers.roster(roster)

    def look(self, *nodes: str) -> None:
        """From here on these look for a successor."""
        self.tasks += [asyncio.create_task(self.peers[node].run()) for node in nodes]

    async def close(self) -> None:
        for successor in PretendedSuccessor.started:
            successor.end.set()
        for peers in self.peers.values():
            peers.retire()
            peers.close()
        await asyncio.gather(*self.tasks)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Town], Awaitable[None]]], None]:
    PretendedSuccessor.started = []
    monkeypatch.setattr(peers_module, "Successor", PretendedSuccessor)

    def run(scene: Callable[[Town], Awaitable[None]]) -> None:
        async def main() -> None:
            town = Town(tmp_path)
            await town.open()
            try:
                await scene(town)
            finally:
                await town.close()

        asyncio.run(main())

    return run


Play = Callable[[Callable[[Town], Awaitable[None]]], None]


def test_a_quorum_chooses_and_everybody_is_told_where(play: Play) -> None:
    async def scene(town: Town) -> None:
        town.look("n2")
        await until(lambda: all(link.hints for link in town.links.values()))
        [successor] = PretendedSuccessor.started
        assert (successor.node, successor.term, successor.copy) == ("n2", 2, town.replicas["n2"].path)
        assert {hint for link in town.links.values() for hint in link.hints} == {(2, successor.address)}

    play(scene)


def test_one_of_several_candidates_is_chosen(play: Play) -> None:
    async def scene(town: Town) -> None:
        town.look(*NODES)
        await until(lambda: all(link.hints for link in town.links.values()))
        assert len(PretendedSuccessor.started) == 1

    play(scene)


def test_who_hears_a_leader_keeps_the_others_from_choosing(play: Play, capsys: pytest.CaptureFixture[str]) -> None:
    async def scene(town: Town) -> None:
        for node in ("n1", "n3"):
            town.links[node].heard_at = time.monotonic()
        town.look("n2")
        said = ""
        while "no quorum" not in said:
            await asyncio.sleep(0.01)
            said += capsys.readouterr().out
        assert "n1 heard a leader" in said
        assert PretendedSuccessor.started == []

    play(scene)


def test_candidate_that_knows_less_gives_way_to_one_that_knows_all(play: Play) -> None:
    async def scene(town: Town) -> None:
        more = beginning(4)[-1]
        for node in ("n2", "n3"):
            town.give(node, [Record(99, 0.0, more.entry)])
        town.look("n1", "n3")
        await until(lambda: PretendedSuccessor.started)
        assert PretendedSuccessor.started[0].node == "n3"

    play(scene)


def test_peer_that_was_away_is_told_when_it_is_back(play: Play) -> None:
    async def scene(town: Town) -> None:
        town.peers["n3"].close()
        town.look("n1")
        await until(lambda: town.links["n2"].hints)
        assert town.links["n3"].hints == []
        again = Peers("n3", Path(), KEY, town.replicas["n3"], town.links["n3"])  # type: ignore[arg-type]
        again._port, port = 0, town.peers["n3"]._port
        with socket.create_server(("127.0.0.1", port)) as listener:
            again._server = await serve(listener, KEY, m.PeerMessage, again._answer, lambda *_: None)
            await until(lambda: town.links["n3"].hints)
            again.close()

    play(scene)


def test_where_a_successor_could_not_begin_no_other_is_started(play: Play) -> None:
    """The first in turn would be chosen again and again, and nobody else ever."""

    async def scene(town: Town) -> None:
        town.look("n1", "n2")
        await until(lambda: PretendedSuccessor.started)
        (first,) = PretendedSuccessor.started
        first.could_begin = False
        first.end.set()
        await until(lambda: len(PretendedSuccessor.started) > 1)
        assert PretendedSuccessor.started[1].node != first.node

    play(scene)


def leads(node: str) -> Record:
    chosen = LeaderChosen(term=2, node=node, host="h", how="elected", after=beginning(3)[-1].seq)
    return Record(first_seq(2), 0.0, chosen)


def test_successor_that_starts_so_late_that_another_one_leads_is_ended(play: Play) -> None:
    """It kept the agents that had promised themselves to it from the leader, which gave them up."""

    async def scene(town: Town) -> None:
        town.look("n1")
        await until(lambda: PretendedSuccessor.started)
        (successor,) = PretendedSuccessor.started
        link = town.links["n1"]
        link.promised, link.leader = 2, ("127.0.0.1", 9)
        await asyncio.sleep(0.3)
        assert not successor.killed, "the other one may not have a quorum either"
        town.give("n1", [leads("n2")])
        await until(lambda: successor.killed)

    play(scene)


def test_successor_that_leads_is_not_ended(play: Play) -> None:
    async def scene(town: Town) -> None:
        town.look("n1")
        await until(lambda: PretendedSuccessor.started)
        (successor,) = PretendedSuccessor.started
        town.links["n1"].promised, town.links["n1"].leader = 2, successor.address
        town.give("n1", [leads("n1")])
        await asyncio.sleep(0.3)
        assert not successor.killed

    play(scene)


def test_next_one_is_looked_for_when_the_successor_has_ended(play: Play) -> None:
    async def scene(town: Town) -> None:
        town.look("n1")
        await until(lambda: PretendedSuccessor.started)
        assert town.peers["n1"].successor is PretendedSuccessor.started[0]
        PretendedSuccessor.started[0].end.set()
        await until(lambda: town.peers["n1"].successor is None)
        for peers in town.peers.values():
            peers._election.wait_for("", 0.0)  # they have waited
        await until(lambda: len(PretendedSuccessor.started) == 2)
        assert PretendedSuccessor.started[1].term == 2

    play(scene)


def test_strangers_at_every_port_do_not_keep_a_quorum_from_choosing(play: Play) -> None:
    async def scene(town: Town) -> None:
        sitting = []
        for peers in town.peers.values():
            for i in range(200):
                _, writer = await asyncio.open_connection(
                    "127.0.0.1", peers._port, local_addr=(f"127.0.0.{9 + i % 2}", 0)
                )
                writer.write(os.urandom(8) if i % 10 == 0 else b"")
                sitting.append(writer)
        town.look("n2")
        await until(lambda: all(link.hints for link in town.links.values()))
        assert [each.node for each in PretendedSuccessor.started] == ["n2"]
        for writer in sitting:
            writer.transport.abort()

    play(scene)


def test_a_large_job_is_asked_a_few_at_a_time_and_no_more_than_a_quorum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each question costs a descriptor, and an answer may take as long as it takes."""
    monkeypatch.setattr(peers_module, "MAX_CONCURRENT_QUESTIONS", 5)
    names = [f"n{i + 1}" for i in range(101)]
    replica = Replica(tmp_path / "n1.copy")
    records = [Record(record.seq, 0.0, record.entry) for record in beginning(101, names)]
    replica.apply(m.Replicate(after=0, records=tuple(encode(record) for record in records)))
    candidate, *others = sorted(replica.membership.voters)
    at_once, most_at_once, asked = 0, 0, 0

    async def answer(channel: Any) -> None:
        nonlocal at_once, most_at_once, asked
        question = await channel.recv()
        at_once, asked = at_once + 1, asked + 1
        most_at_once, node = max(most_at_once, at_once), others[asked]
        for _ in range(5):
            await asyncio.sleep(0)
        at_once -= 1
        assert isinstance(question, m.AskVote)
        channel.post(m.Vote(node=node, granted=True, term=1, incarnation=f"{node}/0"))

    async def main() -> bool:
        listener = socket.create_server(("127.0.0.1", 0))
        server = await serve(listener, KEY, m.PeerMessage, answer, lambda *_: None)
        link: Any = Link()
        peers = Peers(candidate, Path(), KEY, replica, link)
        host, port = listener.getsockname()
        peers.roster(m.Roster(peers=tuple(m.Peer(node=node, host=host, port=port) for node in names)))
        term = peers._election.term_to_stand_for(peers._standing())
        assert term is not None
        chosen = await peers._stand(term)
        server.close()
        return chosen

    assert asyncio.run(main())
    assert most_at_once <= 5
    assert 31 <= asked <= 41, "of 62 that vote, and 100 that there are"
