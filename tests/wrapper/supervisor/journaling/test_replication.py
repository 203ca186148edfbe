"""Copies of the journal: what agents are sent, in what order, and when a decision counts. Posts are pretended."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Set
from pathlib import Path
from random import Random

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from resihp.protocol import messages as m
from resihp.protocol.forwarding import records_in
from resihp.record import state
from resihp.record.journal import (
    AnyEntry,
    DrainDecided,
    JobStarted,
    LeaderChosen,
    NodeJoined,
    PlanInEffect,
    PlanRefused,
    PlanWithdrawn,
    Record,
    Suspected,
    first_seq,
)
from resihp.record.journal_file import Journal, read
from resihp.record.quorum import DECISIONS, Membership, is_quorum
from resihp.wrapper.supervisor.journaling import replication
from resihp.wrapper.supervisor.journaling.replication import Replication
from tests.wrapper.agent.test_election import NODES, beginning, plan_of

DRAIN = DrainDecided(drain=1, node="n1", failure=1, reason="")
OTHER = Suspected(rank=0, node="n1", evidence="")
"""Any entry that is no decision."""


def membership_of(records: Iterable[Record]) -> Membership:
    membership = Membership()
    for record in records:
        membership.apply(record)
    return membership


def needed(records: list[Record], at: int) -> list[tuple[frozenset[str], str]]:
    """Electorates of which a quorum must have record `at` before it counts."""
    before, after = membership_of(records[:at]), membership_of(records[: at + 1])
    return [(voters, incumbent) for voters, incumbent in before.electorates + after.electorates if voters]


class Agents:
    """The other ends: each takes in what was posted to it in order, as `resihp.wrapper.agent.succession.journal_copy`
    does."""

    def __init__(self, copies: dict[str, list[Record]]) -> None:
        self.copies = copies
        self.posted: dict[str, list[m.Replicate]] = {node: [] for node in copies}
        self.taken = dict.fromkeys(copies, 0)
        self.gone: set[str] = set()

    def post(self, node: str, message: msgspec.Raw) -> int:
        if node in self.gone:
            return 0
        self.posted[node].append(msgspec.msgpack.decode(message, type=m.Replicate))
        return len(self.posted[node])

    def log(self, node: str) -> int:
        return self.copies[node][-1].seq if self.copies[node] else 0

    def take(self, node: str) -> bool:
        """Take in one message; False if none is there."""
        if self.taken[node] == len(self.posted[node]):
            return False
        message = self.posted[node][self.taken[node]]
        self.taken[node] += 1
        copy = [record for record in self.copies[node] if record.seq <= message.after]
        assert (copy[-1].seq if copy else 0) == message.after, "it does not follow"
        copy += [msgspec.msgpack.decode(body, type=Record) for body in records_in(message)]
        self.copies[node] = copy
        return True


class Source:
    """A journal of which nothing up to number `forgotten` is in memory. What is fetched comes at once."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.forgotten = -1
        self.fetched = 0

    @property
    def written(self) -> int:
        return self.journal.seq

    def common(self, log: int) -> int:
        return self.journal.common(log)

    def recent(self, seq: int, most_bytes: int) -> list[tuple[int, bytes]] | None:
        return None if seq < self.forgotten else self.journal.after(seq, most_bytes)

    def fetch(self, seq: int, most_bytes: int, give: Callable[[list[tuple[int, bytes]]], None]) -> None:
        self.fetched += 1
        give(self.journal.after(seq, most_bytes))


class Scene:
    """A leader of term 2 that took over a journal, or of term 1 with its own, and agents with copies of their own."""

    def __init__(self, folder: Path, records: list[Record], copies: dict[str, list[Record]] | None = None) -> None:
        self.journal = Journal(folder / "journal", sync=False)
        for record in records:
            self.journal.copy(msgspec.msgpack.encode(record))
        self.agents = Agents(copies or {node: [] for node in NODES})
        self.source = Source(self.journal)
        self.enlisted: list[str] = []
        self.replication = Replication(self.source, membership_of(records), self.agents.post, self.enlisted.append)

    def append(self, entry: AnyEntry, *, flush: bool = True) -> int:
        record = self.journal.append(entry, 0.0)
        self.replication.appended(record, isinstance(entry, DECISIONS))
        if flush:
            self.replication.flush()
        return record.seq

    def join(self, *nodes: str) -> None:
        for node in nodes:
            self.replication.joined(node, self.agents.log(node))

    def acknowledge(self, *nodes: str) -> None:
        """These agents take in all that comes, and say so."""
        for node in nodes:
            while True:
                self.replication.acknowledged(node, self.agents.taken[node])
                if not self.agents.take(node):
                    break

    @property
    def records(self) -> list[Record]:
        return read(self.journal.path)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    """Term 1, three nodes with a plan in effect, nobody connected, copies empty."""
    it = Scene(tmp_path, beginning(3))
    yield it
    it.journal.close()


# --- what is sent -------------------------------------------------------------------------------------------------


def test_everything_is_sent_in_order_to_all_that_have_joined(scene: Scene) -> None:
    scene.join("n1")
    scene.append(OTHER)
    scene.join("n2")
    scene.append(DRAIN)
    scene.acknowledge("n1", "n2", "n3")
    assert scene.agents.copies["n1"] == scene.agents.copies["n2"] == scene.records
    assert len(scene.agents.posted["n1"]) == 3, "what is there in one message, what comes in one each"
    assert scene.agents.copies["n3"] == []


def test_what_comes_together_goes_out_together_and_is_encoded_once(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 2,048 nodes each record on its own would be 63 messages."""
    voters = NODES[:3]
    scene.join(*voters)
    scene.acknowledge(*voters)
    before = {node: len(scene.agents.posted[node]) for node in voters}
    encoded: list[object] = []
    encode = msgspec.msgpack.encode
    monkeypatch.setattr(replication.msgspec.msgpack, "encode", lambda what: encoded.append(what) or encode(what))
    for _ in range(50):
        scene.append(OTHER, flush=False)
    scene.replication.flush()
    monkeypatch.undo()
    assert {node: len(scene.agents.posted[node]) - before[node] for node in voters} == dict.fromkeys(voters, 1)
    assert [type(each) for each in encoded].count(m.Replicate) <= 2, "as it is, and deflated for all others"
    scene.acknowledge(*voters)
    assert all(scene.agents.copies[node] == scene.records for node in voters)


def test_agents_that_have_everything_cost_no_look_into_the_file(tmp_path: Path) -> None:
    """A take-over once read the whole journal for each agent: after weeks it took longer than agents wait."""
    first = beginning(3)
    scene = Scene(tmp_path, first, dict.fromkeys(NODES, first))
    scene.source.forgotten = first[-1].seq
    scene.join(*NODES)
    assert scene.source.fetched == 0
    assert not any(scene.agents.posted.values())


def test_of_thousands_of_acknowledgements_few_are_worth_counting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []

    def is_quorum_counted(voters: Set[str], agreeing: Set[str], incumbent: str) -> bool:
        counted.append(len(voters))
        return is_quorum(voters, agreeing, incumbent)

    nodes = [f"n{number}" for number in range(1, 1001)]
    records = [
        Record(1, 0.0, JobStarted(**{**msgspec.structs.asdict(beginning(1)[0].entry), "nodes": len(nodes)})),
        *(Record(2 + at, 0.0, NodeJoined(node=node, host="h", devices=1)) for at, node in enumerate(nodes)),
    ]
    scene = Scene(tmp_path, records, {node: records for node in nodes})
    scene.join(*nodes)
    scene.append(DRAIN)
    monkeypatch.setattr(replication, "is_quorum", is_quorum_counted)
    settled_after = 0
    for number, node in enumerate(nodes, start=1):
        scene.acknowledge(node)
        if scene.replication.settled:
            settled_after = settled_after or number
    assert settled_after == 32, "of the 63 that vote"
    assert len(counted) < 10


def test_what_is_in_memory_no_more_is_fetched_in_pieces(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replication, "PIECE_BYTES", 300)
    for _ in range(50):
        scene.append(OTHER)
    scene.source.forgotten = scene.journal.seq - 10
    scene.join("n1")
    scene.acknowledge("n1")
    assert scene.agents.copies["n1"] == scene.records
    assert 3 < scene.source.fetched < 50


def test_a_late_copy_gets_what_it_lacks_and_loses_what_nobody_decided(tmp_path: Path) -> None:
    first = beginning(4)
    beyond = [*first, *(Record(len(first) + n, 0.0, OTHER) for n in range(1, 4))]
    copies = {"n1": first[:3], "n2": first, "n3": beyond, "n4": []}
    scene = Scene(tmp_path, first, copies)
    scene.join("n3")
    assert scene.agents.posted["n3"] == [m.Replicate(after=len(first), records=())]
    assert scene.append(LeaderChosen(term=2, node="n2", host="h", how="elected", after=len(first))) == first_seq(2)
    scene.join("n1", "n2", "n4")
    assert [len(records_in(message)) for message in scene.agents.posted["n1"]] == [len(first) - 3 + 1]
    assert [len(records_in(message)) for message in scene.agents.posted["n2"]] == [1]
    scene.append(OTHER)
    scene.acknowledge(*copies)
    for copy in scene.agents.copies.values():
        assert copy == scene.records


def test_a_copy_that_ends_between_two_of_our_records_is_cut_to_the_one_before(tmp_path: Path) -> None:
    """The tail of a term that we know nothing of, though we have records of later numbers."""
    first = beginning(3)
    tail = [*first, Record(len(first) + 1, 0.0, OTHER), Record(len(first) + 2, 0.0, DRAIN)]
    scene = Scene(tmp_path, first, {"n1": tail})
    scene.append(LeaderChosen(term=2, node="n2", host="h", how="elected", after=len(first)))
    scene.join("n1")
    assert [message.after for message in scene.agents.posted["n1"]] == [len(first)]
    scene.acknowledge("n1")
    assert scene.agents.copies["n1"] == scene.records


def test_much_goes_in_pieces_and_never_more_than_a_connection_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replication, "PIECE_BYTES", 2000)
    monkeypatch.setattr(replication, "MAX_IN_FLIGHT_BYTES", 5000)
    scene = Scene(tmp_path, beginning(3))
    for _ in range(200):
        scene.append(Suspected(rank=0, node="n1", evidence="x" * 100))
    scene.join("n1", "n2")
    for n in range(20):
        scene.append(Suspected(rank=0, node="n1", evidence=f"{n}" * 50))
        scene.acknowledge("n2")
    assert scene.agents.copies["n2"] == scene.records
    under_way = scene.agents.posted["n1"]
    sizes = [sum(map(len, records_in(message))) for message in under_way]
    assert sum(sizes) < 5000 + 2000 + 200
    assert max(sizes) < 2000 + 200
    assert len(sizes) > 2
    assert scene.agents.copies["n1"] == []
    scene.acknowledge("n1")
    assert scene.agents.copies["n1"] == scene.records
    assert max(sum(map(len, records_in(message))) for message in scene.agents.posted["n1"]) < 2000 + 200


def test_a_record_larger_than_a_piece_goes_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replication, "PIECE_BYTES", 100)
    scene = Scene(tmp_path, beginning(1))
    scene.append(Suspected(rank=0, node="n1", evidence="x" * 1000))
    scene.append(OTHER)
    scene.join("n1")
    assert [len(records_in(message)) for message in scene.agents.posted["n1"]][-2:] == [1, 1]


# --- what counts --------------------------------------------------------------------------------------------------


def test_a_decision_waits_for_more_than_half_of_the_agents(scene: Scene) -> None:
    scene.join("n1", "n2", "n3")
    scene.acknowledge("n1", "n2", "n3")
    assert scene.replication.settled
    scene.append(OTHER)
    assert scene.replication.settled, "it decides nothing"
    scene.append(DRAIN)
    assert not scene.replication.settled
    scene.acknowledge("n2")
    assert not scene.replication.settled
    scene.acknowledge("n3")
    assert scene.replication.settled, "n1 need not know"


@pytest.mark.parametrize(
    ("having", "counts"), [(("n1", "n4"), True), (("n2", "n3"), False), (("n2", "n3", "n4"), True)]
)
def test_half_counts_with_the_incumbent_only(tmp_path: Path, having: tuple[str, ...], counts: bool) -> None:
    scene = Scene(tmp_path, beginning(4))
    scene.join("n1", "n2", "n3", "n4")
    scene.append(DRAIN)
    scene.acknowledge(*having)
    assert scene.replication.settled == counts


def test_a_quorum_has_followed_once_it_has_joined(tmp_path: Path) -> None:
    scene = Scene(tmp_path, beginning(4))
    joined: list[str] = []
    for node, accepted in (("n9", False), ("n2", False), ("n3", False), ("n4", True)):
        if node in scene.agents.copies:
            scene.join(node)
            joined.append(node)
        assert scene.replication.accepted == accepted, joined
    scene.replication.left("n3")
    assert not scene.replication.accepted
    scene.join("n1")
    assert scene.replication.accepted, "half, with the incumbent"


def test_what_an_agent_had_when_it_joined_counts(tmp_path: Path) -> None:
    """It comes back to the same leader with what it was sent before."""
    records = beginning(3)
    scene = Scene(tmp_path, records)
    scene.append(DRAIN)
    assert not scene.replication.settled
    scene.agents.copies = {node: scene.records for node in ("n1", "n2")}
    scene.join("n1", "n2")
    assert scene.replication.settled


def test_an_agent_that_was_left_out_counts_no_longer(scene: Scene) -> None:
    scene.join("n1", "n2", "n3")
    scene.append(DRAIN)
    scene.acknowledge("n1")
    scene.agents.gone.add("n1")
    scene.replication.left("n1")
    scene.acknowledge("n2")
    assert not scene.replication.settled
    scene.append(OTHER)
    assert len(scene.agents.posted["n1"]) == 2, "nothing more is sent there"
    scene.acknowledge("n3")
    assert scene.replication.settled


def test_a_change_of_voters_needs_both_until_it_is_in_effect(tmp_path: Path) -> None:
    """From n1, n2, n3 to n3, n4, n5."""
    records = beginning(5)
    records = [*records[:-2], Record(len(records) - 1, 0.0, plan_of(1, (0, 1, 2))), records[-1]]
    scene = Scene(tmp_path, records)
    everybody = NODES[:5]
    scene.join(*everybody)
    scene.acknowledge(*everybody)

    scene.append(plan_of(2, (2, 3, 4)))
    scene.acknowledge("n3", "n4", "n5")
    assert not scene.replication.settled, "only n3 of those before"
    scene.acknowledge("n1")
    assert scene.replication.settled

    scene.append(PlanInEffect(epoch=2))
    scene.acknowledge("n1", "n2", "n4")
    assert not scene.replication.settled, "only n4 of those after"
    scene.acknowledge("n5")
    assert scene.replication.settled

    scene.append(plan_of(3, (0, 1, 2)))
    scene.acknowledge(*everybody)
    scene.append(PlanInEffect(epoch=3))
    scene.acknowledge("n1", "n2")
    assert not scene.replication.settled, "none of those before"
    scene.acknowledge("n4", "n5")
    assert scene.replication.settled

    scene.append(DRAIN)
    scene.acknowledge("n3", "n4", "n5")
    assert not scene.replication.settled, "only n3 votes again"
    scene.acknowledge("n1")
    assert scene.replication.settled


@pytest.mark.parametrize(
    "given_up",
    [PlanRefused(epoch=2, rank=None, reason=""), PlanWithdrawn(epoch=2, reason="")],
    ids=lambda e: type(e).__name__,
)
def test_a_plan_that_is_given_up_leaves_the_voters_as_they_were(tmp_path: Path, given_up: AnyEntry) -> None:
    scene = Scene(tmp_path, beginning(3))
    scene.join("n1", "n2", "n3")
    scene.append(plan_of(2, (0,)))
    scene.acknowledge("n1")
    assert not scene.replication.settled, "n1 alone is not most of those before"
    scene.append(given_up)
    scene.append(DRAIN)
    scene.acknowledge("n2")
    assert not scene.replication.settled, "n1 lacks the drain"
    scene.acknowledge("n3")
    assert scene.replication.settled


def test_before_anybody_has_joined_there_is_nobody_to_ask(tmp_path: Path) -> None:
    scene = Scene(tmp_path, beginning(3)[:1])
    assert scene.replication.accepted
    scene.append(DRAIN)
    assert scene.replication.settled


# --- at random ----------------------------------------------------------------------------------------------------


MOVES = {
    **dict.fromkeys(("take", "acknowledge"), 10),
    **dict.fromkeys(("join", "plan", "effect", "drain", "other"), 2),
    **dict.fromkeys(("leave", "refuse", "withdraw"), 0.3),
}


@settings(max_examples=200)
@given(
    dice=st.randoms(use_true_random=True),
    moves=st.integers(0, 80),
    term=st.sampled_from([1, 2]),
    most=st.sampled_from([2, 3, 63]),
)
def test_a_decision_never_counts_before_a_quorum_has_it(dice: Random, moves: int, term: int, most: int) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setattr(state, "MAX_VOTERS", most)
        first = beginning(5)
        beyond = [*first, *(Record(len(first) + n, 0.0, OTHER if n % 2 else DRAIN) for n in range(1, 4))]
        copies = {node: beyond[: dice.randint(0, len(beyond if term == 2 else first))] for node in NODES[:5]}
        scene = Scene(Path(folder), first, copies)
        if term == 2:
            scene.append(LeaderChosen(term=2, node="n3", host="h", how="elected", after=len(first)))
        there: set[str] = set()
        epoch = 1
        for move in dice.choices(list(MOVES), list(MOVES.values()), k=moves):
            epoch += move == "plan"
            some = [node for node in NODES[:5] if dice.random() < 0.4]
            for node in some:
                if move == "join" and node not in there | scene.agents.gone:
                    there.add(node)
                    scene.join(node)
                elif move == "leave" and node in there and len(there) > 3:
                    there.remove(node)
                    scene.agents.gone.add(node)
                    scene.replication.left(node)
                elif move == "take":
                    scene.agents.take(node)
                elif move == "acknowledge" and node in there:
                    scene.replication.acknowledged(node, scene.agents.taken[node])
            ranks = tuple(dice.sample(range(5), dice.randint(1, 5)))
            entries: dict[str, AnyEntry] = {
                "plan": plan_of(epoch, ranks),
                "effect": PlanInEffect(epoch=epoch),
                "refuse": PlanRefused(epoch=epoch, rank=None, reason=""),
                "withdraw": PlanWithdrawn(epoch=epoch, reason=""),
                "drain": DRAIN,
                "other": OTHER,
            }
            if move in entries:
                scene.append(entries[move])
            see(scene, there)
        rest = [node for node in NODES[:5] if node not in scene.agents.gone]
        scene.join(*(node for node in rest if node not in there))
        scene.acknowledge(*rest)
        see(scene, set(rest))
        for node in rest:
            assert scene.agents.copies[node] == scene.records or node not in scene.enlisted
        if not scene.agents.gone:
            assert scene.replication.settled
        scene.journal.close()


def see(scene: Scene, connected: set[str]) -> None:
    """What counts is known to those who have to know."""
    records = scene.records
    for node in connected:
        copy = scene.agents.copies[node]
        if scene.agents.taken[node]:
            assert copy == records[: len(copy)], "a copy is the beginning of the journal"
    if not scene.replication.settled:
        return
    ours = [at for at, record in enumerate(records) if isinstance(record.entry, DECISIONS) and at >= len(beginning(5))]
    for at in ours:
        having = {node for node in connected if records[at] in scene.agents.copies[node]}
        holders = having | {node for node in scene.agents.gone if records[at] in scene.agents.copies[node]}
        for voters, incumbent in needed(records, at):
            assert is_quorum(voters, holders, incumbent), f"{records[at]} is known to {sorted(having)}"


# --- large jobs ---------------------------------------------------------------------------------------------------


def test_those_who_do_not_vote_get_no_copies_until_they_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "MAX_VOTERS", 2)
    records = beginning(4)
    voters = membership_of(records).voters
    assert len(voters) == 2
    scene = Scene(tmp_path, records, {node: [] for node in NODES[:4]})
    scene.join(*NODES[:4])
    seq = scene.append(DrainDecided(drain=1, node="n1", failure=1, reason=""))
    assert set(scene.enlisted) == voters
    assert {node for node in NODES[:4] if scene.agents.posted[node]} == voters
    scene.acknowledge(*sorted(voters))
    assert scene.replication.settled
    others = [node for node in NODES[:4] if node not in voters]
    scene.append(plan_of(2, tuple(NODES.index(node) for node in others)))
    scene.acknowledge(*sorted(voters))
    assert not scene.replication.settled, "those who vote from this plan on have to have it, too"
    assert set(scene.enlisted) == set(NODES[:4])
    scene.acknowledge(*others)
    assert scene.replication.settled
    assert {node: scene.agents.copies[node][0].seq for node in others} == dict.fromkeys(others, 1)
    assert seq in {record.seq for record in scene.agents.copies[others[0]]}
    before = {node: len(scene.agents.posted[node]) for node in voters}
    scene.append(PlanInEffect(epoch=2))
    assert all(len(scene.agents.posted[node]) > before[node] for node in voters), "they hear that they vote no more"
