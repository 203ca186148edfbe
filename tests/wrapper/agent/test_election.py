"""Who leads next: the rules of agents on a virtual clock, and that no network can make two of them lead."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from resihp.parallelism.layout import Layout
from resihp.parallelism.plan import Plan
from resihp.protocol import messages as m
from resihp.record import state
from resihp.record.journal import (
    AnyEntry,
    DrainDecided,
    JobStarted,
    LeaderChosen,
    NodeJoined,
    NodeLost,
    PlanDecided,
    PlanInEffect,
    PlanRefused,
    Record,
    Suspected,
    WorkerStarted,
    first_seq,
    term_of,
)
from resihp.record.quorum import Membership
from resihp.record.state import MAX_VOTERS
from resihp.wrapper.agent.succession.election import (
    LEADER_PRESENT_S,
    LEADERLESS_WAIT_S,
    PLEDGE_S,
    RETRY_S,
    STAGGER_S,
    Election,
    Standing,
    accepts,
    turn,
)
from resihp.wrapper.agent.supervisor_link import MAX_LEADERLESS_S

NODES = ("n1", "n2", "n3", "n4", "n5", "n6", "n7")


def plan_of(epoch: int, ranks: tuple[int, ...]) -> PlanDecided:
    plan = Plan(epoch=epoch, layout=Layout(replicas=(), standby=ranks), assignment=())
    return PlanDecided(plan=plan, next_iteration=1, action="start", finish=None, reason="")


def beginning(nodes: int, names: Sequence[str] = NODES) -> list[Record]:
    """The journal of a job that trains on that many nodes, one rank each, led from n1."""
    started = JobStarted(
        job="j",
        command=(),
        nodes=nodes,
        gpus_per_node=1,
        tp=1,
        pp=1,
        schedule="1f1b",
        host="h",
        user="u",
        restart_count=0,
        version="0",
        configuration={},
        leader="n1",
    )
    entries: list[AnyEntry] = [started]
    for rank, node in enumerate(names[:nodes]):
        entries.append(NodeJoined(node=node, host="h", devices=1, incarnation=f"{node}/0"))
        entries.append(WorkerStarted(rank=rank, node=node, device=0, pid=1, epoch=0))
    entries += [plan_of(1, tuple(range(nodes))), PlanInEffect(epoch=1)]
    return [Record(seq, 0.0, entry) for seq, entry in enumerate(entries, 1)]


def membership_of(records: list[Record]) -> Membership:
    membership = Membership()
    for record in records:
        membership.apply(record)
    return membership


# --- one agent ----------------------------------------------------------------------------------------------------


def standing(now: float, *, nodes: int = 4, heard_at: float | None = 0.0, promised: int = 1) -> Standing:
    return Standing(
        now=now,
        promised=promised,
        membership=membership_of(beginning(nodes)),
        heard_at=heard_at,
    )


def vote(node: str, incarnation: int = 0) -> m.Vote:
    return m.Vote(node=node, granted=True, term=1, incarnation=f"{node}/{incarnation}")


def ask(node: str = "n2", term: int = 2, log: int = 1000) -> m.AskVote:
    return m.AskVote(node=node, term=term, log=log)


def in_turn(term: int, nodes: Iterable[str] = NODES[:4]) -> list[str]:
    return sorted(nodes, key=lambda node: turn(node, term))


def test_the_first_agent_stands_after_five_seconds_and_the_next_ones_later() -> None:
    for position, node in enumerate(in_turn(2)):
        election = Election(node)
        due = LEADERLESS_WAIT_S + position * STAGGER_S
        assert election.term_to_stand_for(standing(due - 0.01)) is None
        assert election.term_to_stand_for(standing(due + 0.01)) == 2


def test_each_term_has_an_order_of_its_own() -> None:
    assert {in_turn(term)[0] for term in range(1, 60)} == set(NODES[:4])


def test_all_voters_of_a_large_job_stand_in_time_and_a_dead_rack_delays_nobody() -> None:
    """Position times stagger would have the last of 2,048 nodes wait for ten minutes, and live for one."""
    nodes = tuple(f"node{i:04d}" for i in range(2048))
    membership = membership_of(beginning(nodes=2048, names=nodes))
    assert len(membership.voters) == MAX_VOTERS
    assert LEADERLESS_WAIT_S + STAGGER_S * MAX_VOTERS < MAX_LEADERLESS_S / 2
    rack = nodes[:600]
    for term in range(2, 40):
        first = next(i for i, node in enumerate(in_turn(term, membership.voters)) if node not in rack)
        assert STAGGER_S * first < 3.0, "although the nodes of the first names are dead"
    outside = next(node for node in nodes if node not in membership.voters)
    assert Election(outside).term_to_stand_for(Standing(100.0, 1, Membership(), 0.0)) is None, "it keeps no copy"


def test_a_candidate_without_a_quorum_asks_again_a_second_later() -> None:
    election = Election("n1")
    later_s = STAGGER_S * in_turn(2).index("n1")
    assert election.term_to_stand_for(standing(10.0)) == 2
    assert not election.chosen(2, [m.Vote(node="n2", granted=False, term=5)], standing(10.1))
    election.give_up(10.1)
    assert election.term_to_stand_for(standing(10.0 + later_s + RETRY_S - 0.1)) is None
    assert election.term_to_stand_for(standing(10.0 + later_s + RETRY_S + 0.1)) == 6, "n2 has promised term 5"


def test_a_candidate_gives_its_word_to_nobody_while_it_asks_and_may_afterwards() -> None:
    log = standing(0).membership.log
    election = Election("n1")
    assert election.term_to_stand_for(standing(10.0)) == 2
    assert not election.judge(ask(log=log), standing(10.0 + PLEDGE_S - 0.1)).granted
    election.give_up(12.9)
    assert election.judge(ask(log=log), standing(12.9)).granted


@pytest.mark.parametrize("voters", [(), ("n2",), ("n2", "n3")])
def test_half_is_enough_for_the_incumbents_agent_only(voters: tuple[str, ...]) -> None:
    votes = [vote(node) for node in voters]
    first, last = Election("n1"), Election("n4")
    assert first.chosen(2, votes, standing(10.0)) == (len(voters) >= 1)
    assert last.chosen(2, votes, standing(10.0)) == (len(voters) >= 2)


def test_a_vote_of_an_agent_that_was_started_again_does_not_count() -> None:
    election = Election("n1")
    assert not election.chosen(2, [vote("n2", 1), m.Vote(node="n3", granted=True, term=1)], standing(10.0))
    assert election.chosen(2, [vote("n2", 1), vote("n3")], standing(10.0))
    assert Election("n3", "n3/1").judge(ask(), standing(10.0)).incarnation == "n3/1"


def after(*entries: AnyEntry, now: float = 10.0) -> Standing:
    """What an agent knows whose copy ends with these, a while after it has heard of a leader."""
    records = beginning(4)
    records += [Record(seq, 0.0, entry) for seq, entry in enumerate(entries, len(records) + 1)]
    return Standing(now=now, promised=1, membership=membership_of(records), heard_at=0.0)


def test_an_agent_of_a_lost_node_has_no_part_in_it_and_its_next_one_cannot_speak_for_it() -> None:
    """Until a plan without the node is in effect it is a voter, and what it promised may have made a leader."""
    lost = after(NodeLost(node="n2", reason="silent", how="silent"))
    assert "n2" in lost.membership.voters
    assert lost.membership.incarnation("n2") == "n2/0"
    assert not Election("n3").chosen(2, [vote("n2", 1), vote("n4")], lost)
    assert not Election("n3").chosen(2, [vote("n2"), vote("n4")], lost), "its supervisor takes in nobody from n2"
    assert Election("n3").chosen(2, [vote("n1"), vote("n4")], lost)
    assert Election("n2").term_to_stand_for(lost) is None


def test_the_only_agent_that_knows_of_a_plan_without_it_may_stand() -> None:
    """All others need a quorum of the plan before, and as it knows more than they it cannot vote for them."""
    without = after(plan_of(2, (0, 1, 3)), PlanInEffect(epoch=2))
    assert "n3" not in without.membership.voters
    first = Election("n3")
    assert first.term_to_stand_for(without) == 2
    assert first.chosen(2, [vote("n2"), vote("n4")], without)
    assert not first.judge(ask(node="n2", log=without.membership.log - 1), without).granted


def test_who_has_not_joined_and_who_never_had_a_leader_does_not_stand() -> None:
    assert Election("n5").term_to_stand_for(standing(100.0)) is None
    assert Election("n1").term_to_stand_for(standing(100.0, heard_at=None)) is None
    before_any_plan = Standing(now=100.0, promised=1, membership=membership_of(beginning(4)[:-1]), heard_at=0.0)
    assert Election("n1").term_to_stand_for(before_any_plan) is None


def test_a_voter_that_hears_a_leader_or_has_promised_or_knows_more_refuses() -> None:
    log = standing(0).membership.log
    voter = Election("n3")
    assert not voter.judge(ask(), standing(LEADER_PRESENT_S - 0.1)).granted
    assert not voter.judge(ask(term=2), standing(10.0, promised=2)).granted
    assert not voter.judge(ask(log=log - 1), standing(10.0)).granted
    assert voter.judge(ask(log=log), standing(10.0)).granted
    assert voter.judge(ask(log=log), standing(10.0)).granted, "an answer may be lost, and asked for again"
    assert not voter.judge(ask(node="n4", log=log), standing(10.5)).granted
    assert Election("n9").judge(ask(log=log), standing(0.0, heard_at=None)).granted


def test_a_candidate_that_gave_its_word_to_another_withdraws() -> None:
    election = Election("n2")
    election.term_to_stand_for(standing(10.0))
    assert not election.judge(ask(node="n1"), standing(10.5)).granted, "it stands itself"
    election.wait_for("n1", 11.0)
    votes = [vote(node) for node in ("n3", "n4")]
    assert not election.chosen(2, votes, standing(11.1))
    assert election.term_to_stand_for(standing(15.0)) is None
    assert election.term_to_stand_for(standing(17.0)) == 2, "the successor has not come"


def test_a_later_leader_is_accepted_if_it_knows_as_much_or_has_a_quorum() -> None:
    assert accepts(m.Lead(term=2, node="n2", log=10), promised=1, log=10)
    assert not accepts(m.Lead(term=2, node="n2", log=9), promised=1, log=10)
    assert accepts(m.Lead(term=2, node="n2", log=9, settled=True), promised=1, log=10)
    assert not accepts(m.Lead(term=2, node="n2", log=99, settled=True), promised=3, log=10)


def test_another_leader_of_the_promised_term_is_accepted_if_it_has_a_quorum() -> None:
    assert not accepts(m.Lead(term=2, node="n2", log=99), promised=2, log=10)
    assert accepts(m.Lead(term=2, node="n2", log=9, settled=True), promised=2, log=10)


# --- all of them --------------------------------------------------------------------------------------------------


class Log:
    """A journal or a copy of one, and what it says of membership."""

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self.records: list[Record] = []
        self.membership = Membership()
        self.extend(records)

    @property
    def last(self) -> int:
        return self.membership.log

    def extend(self, records: Iterable[Record]) -> None:
        for record in records:
            assert record.seq > self.last
            self.records.append(record)
            self.membership.apply(record)

    def rewind(self, after: int) -> None:
        if self.last > after:
            kept = [record for record in self.records if record.seq <= after]
            self.records, self.membership = [], Membership()
            self.extend(kept)


@dataclass(eq=False)
class Leader:
    """A supervisor: what it writes, and what it knows of its agents. It counts once a quorum has accepted its term."""

    node: str
    term: int
    journal: Log
    home: bool
    """Started by the guardian, from its own journal; else by an agent."""
    chosen: bool = False
    alive: bool = True
    accepted: set[str] = field(default_factory=set)
    met: dict[str, str] = field(default_factory=dict)
    """Incarnation of each agent that it has met."""
    has: dict[str, int] = field(default_factory=dict)
    """Number of the last record that each agent has acknowledged."""
    sent: dict[str, int] = field(default_factory=dict)
    """Number of the last record that each agent was sent."""
    keepers: set[str] = field(default_factory=set)
    """Agents that it has seen to have a vote: the others are sent nothing."""
    written: int = 0
    """Number of the last record that is on its disk: no agent is sent what is not."""
    knew: frozenset[str] = frozenset()
    """Nodes that its journal knew of as it began, lost ones too."""
    dropped: set[str] = field(default_factory=set)
    """Nodes that it has left out: it refuses their agents from then on."""

    def __post_init__(self) -> None:
        self.written = self.journal.last
        self.knew = frozenset(self.journal.membership.joined)

    def refuses(self, agent: Follower) -> bool:
        """Whether it takes the agent for another one than the node's, or for one of a node that it has left out."""
        known = self.met.get(agent.node) or self.journal.membership.incarnation(agent.node)
        elsewhere = not self.home and agent.node not in self.knew
        return known not in ("", agent.incarnation) or agent.node in self.dropped or elsewhere

    def on_disk(self) -> list[Record]:
        """What whoever is started again after it finds."""
        return [record for record in self.journal.records if record.seq <= self.written]

    def settled(self) -> bool:
        having = {node for node, seq in self.has.items() if seq >= self.journal.last}
        return self.chosen and self.written == self.journal.last and self.journal.membership.quorum(having)

    def append(self, entry: AnyEntry, at: float) -> None:
        self.journal.extend([Record(max(self.journal.last + 1, first_seq(self.term)), at, entry)])


@dataclass(eq=False)
class Follower:
    """An agent: its copy, its promise, and whom it follows."""

    node: str
    copy: Log
    promised: int = 1
    leader: Leader | None = None
    alive: bool = True
    lives: int = 0
    booted_s: float = 0.0
    """What its monotonic clock shows at the beginning, which is its node's own matter."""

    @property
    def incarnation(self) -> str:
        return f"{self.node}/{self.lives}"


class Network:
    """Agents and supervisors that meet, miss each other and die at any moment; nothing here waits for anything.

    `play` is what happens to them; `recover` what comes of it once nothing more does.
    """

    def __init__(self, nodes: int, dice: Random) -> None:
        self.dice = dice
        self.nodes = NODES[:nodes]
        self.cut: set[frozenset[str]] = set()
        first = Leader("n1", 1, Log(beginning(nodes)), home=True, chosen=True)
        self.leaders = [first]
        self.tried = 1
        """The newest term that the guardian's supervisors have tried: on disk before anybody hears of it."""
        voters = first.journal.membership.voters
        self.clocks = dict.fromkeys(self.nodes, 0.0)
        """UTC, as each node has it: what is written carries it, and it may jump."""
        self.passed_s = 0.0
        self.agents = [
            Follower(
                node,
                Log(beginning(nodes) if node in voters else ()),
                leader=first,
                booted_s=dice.uniform(0, 1e7),
            )
            for node in self.nodes
        ]
        for agent in self.agents:
            first.accepted.add(agent.node)
            first.has[agent.node] = first.sent[agent.node] = agent.copy.last
        self.chosen: dict[int, Leader] = {1: first}
        self.decided: list[Record] = beginning(nodes)
        self.decided_in = {record.seq: 1 for record in self.decided}
        """The term of the first leader under whom a quorum had the record, which may be of an earlier one."""

    def play(self, steps: int) -> None:
        moves = {
            self.agents_meet_a_supervisor: 40,
            self.records_travel: 40,
            self.a_disk_writes: 60,
            self.a_leader_decides: 12,
            self.network_changes: 4,
            self.somebody_stands: 6,
            self.a_supervisor_is_killed: 3,
            self.a_node_dies: 0.2,
            self.an_agent_is_started_again: 0.5,
            self.a_clock_steps: 2,
        }
        for move in self.dice.choices(list(moves), list(moves.values()), k=steps):
            move()

    def reaches(self, one: str, other: str) -> bool:
        return one == other or frozenset((one, other)) not in self.cut

    def network_changes(self) -> None:
        one = [node for node in self.nodes if self.dice.random() < 0.5]
        self.cut = {frozenset((a, b)) for a in one for b in self.nodes if b not in one and self.dice.random() < 0.9}

    def a_node_dies(self) -> None:
        living = [agent for agent in self.agents if agent.alive and not agent.lives]
        if 2 * len(living) > len(self.agents) + 2:
            dead = self.dice.choice(living)
            dead.alive = False
            for leader in self.leaders:
                leader.alive = leader.alive and leader.node != dead.node

    def a_clock_steps(self) -> None:
        """By minutes or hours, back or forth, on one node or on all."""
        step_s = self.dice.choice([-1, 1]) * self.dice.uniform(60, 6 * 3600)
        for node in self.dice.choice([[self.dice.choice(self.nodes)], self.nodes]):
            self.clocks[node] += step_s

    def an_agent_is_started_again(self) -> None:
        """By hand: what it had promised and copied is forgotten."""
        agent = self.dice.choice(self.agents)
        counting = [each for each in self.agents if each.alive and not each.lives]
        if agent in counting and 2 * len(counting) > len(self.agents) + 2:
            agent.lives, agent.promised, agent.leader, agent.copy = agent.lives + 1, 0, None, Log()

    # --- supervisors ------------------------------------------------------------------------------------------

    def some_agents(self) -> list[Follower]:
        """One, or any number, in any order."""
        return self.dice.sample(self.agents, self.dice.choice([1, 1, self.dice.randint(1, len(self.agents))]))

    def some_leader(self) -> Leader:
        """One of the last few, alive or not."""
        return self.dice.choice(self.leaders[-4:])

    def a_supervisor_is_killed(self) -> None:
        """And started again, by its guardian or its agent."""
        old = self.some_leader()
        if not old.alive:
            return
        old.alive = False
        term = max(self.tried if old.home else old.term, term_of(old.journal.last)) + 1
        self.tried = term if old.home else self.tried
        self.leaders.append(Leader(old.node, term, Log(old.on_disk()), old.home))

    def a_disk_writes(self) -> None:
        """All that waits for it, or a part. Between two of these it stalls, for as long as it likes."""
        leader = self.some_leader()
        waiting = [record.seq for record in leader.journal.records if record.seq > leader.written]
        if waiting:
            leader.written = self.dice.choice([waiting[-1], self.dice.choice(waiting)])

    def agents_meet_a_supervisor(self) -> None:
        leader = self.some_leader()
        for agent in self.some_agents():
            self.meet(agent, leader)

    def meet(self, agent: Follower, leader: Leader) -> None:
        if not (agent.alive and leader.alive and self.reaches(agent.node, leader.node)) or agent.leader is leader:
            return
        if agent.promised > leader.term:
            leader.alive = False  # deposed
            return
        if leader.refuses(agent):
            return
        leader.met[agent.node] = agent.incarnation
        lost_thread = agent.leader is None and leader.term == agent.promised and agent.node in leader.accepted
        lead = m.Lead(term=leader.term, node=leader.node, log=leader.written, settled=leader.settled())
        if not lost_thread and not accepts(lead, agent.promised, agent.copy.last):
            return
        agent.promised, agent.leader = leader.term, leader
        leader.accepted.add(agent.node)
        common = max((record.seq for record in leader.journal.records if record.seq <= agent.copy.last), default=0)
        leader.has[agent.node] = leader.sent[agent.node] = common
        if not leader.chosen and leader.journal.membership.quorum(leader.accepted):
            self.leads(leader)

    def leads(self, leader: Leader) -> None:
        assert self.chosen.setdefault(leader.term, leader) is leader, f"two leaders of term {leader.term}"
        leader.chosen = True
        self.writes(leader, LeaderChosen(term=leader.term, node=leader.node, host="h", how="elected"))
        before = [record for record in self.decided if self.decided_in[record.seq] < leader.term]
        assert leader.journal.records[: len(before)] == before, "the new leader lacks what was decided"

    def writes(self, leader: Leader, entry: AnyEntry) -> None:
        leader.append(entry, self.clocks[leader.node])

    def a_leader_decides(self) -> None:
        leader = self.some_leader()
        if not leader.alive or not leader.settled():
            return
        records = leader.journal.records
        if self.dice.random() < 0.3:  # what is no decision waits for nobody
            self.writes(leader, Suspected(rank=0, node="n1", evidence=""))
        if self.dice.random() < 0.1:
            self.leave_out(leader)
        epoch = next(record.entry.plan.epoch for record in records[::-1] if isinstance(record.entry, PlanDecided))
        settled = {record.entry.epoch for record in records if isinstance(record.entry, PlanInEffect | PlanRefused)}
        what = self.dice.choice(["drain", "plan", "effect", "effect", "refuse"])
        if what == "plan":
            there = [rank for rank, node in enumerate(self.nodes) if node in leader.journal.membership.joined]
            ranks = self.dice.sample(there, self.dice.randint(1, len(there)))
            self.writes(leader, plan_of(epoch + 1, tuple(ranks)))
        elif what == "effect" and epoch not in settled:
            self.writes(leader, PlanInEffect(epoch=epoch))
        elif what == "refuse" and epoch not in settled:
            self.writes(leader, PlanRefused(epoch=epoch, rank=None, reason=""))
        else:
            self.writes(leader, DrainDecided(drain=1, node="n1", failure=1, reason=""))

    def leave_out(self, leader: Leader) -> None:
        """A node that it does not hear: dead, started again, or only slow. No plan without it has been made yet."""
        joined = sorted(leader.journal.membership.joined)
        if 2 * len(joined) > len(self.nodes) + 2:
            node = self.dice.choice(joined)
            self.writes(leader, NodeLost(node=node, reason="silent", how="silent"))
            leader.dropped.add(node)
            leader.has.pop(node, None)
            for agent in self.agents:
                if agent.node == node and agent.leader is leader:
                    agent.leader = None

    def records_travel(self) -> None:
        for agent in self.some_agents():
            self.replicate(agent)

    def replicate(self, agent: Follower) -> None:
        leader = agent.leader
        if leader is None or not (agent.alive and leader.alive and self.reaches(agent.node, leader.node)):
            return
        leader.keepers |= leader.journal.membership.electors
        if agent.node not in leader.keepers:
            return
        after = leader.sent[agent.node]
        agent.copy.rewind(after)
        if agent.copy.last != after:
            agent.leader = None  # what `Replica` refuses
            return
        some = self.dice.choice([1, 1000])
        agent.copy.extend([record for record in leader.on_disk() if record.seq > after][:some])
        leader.sent[agent.node] = agent.copy.last
        if self.dice.random() < 0.8:
            leader.has[agent.node] = agent.copy.last
        self.see_what_is_decided(leader)

    def see_what_is_decided(self, leader: Leader) -> None:
        """What a quorum has while it follows is decided, whether or not the leader knows it already."""
        records = leader.journal.records
        for at in range(len(records), 0, -1):
            if not leader.chosen or records[at - 1].seq < first_seq(leader.term):
                return
            having = {a.node for a in self.agents if a.leader is leader and a.copy.last >= records[at - 1].seq}
            if leader.journal.membership.quorum(having):
                shorter = min(at, len(self.decided))
                assert records[:shorter] == self.decided[:shorter], "two leaders have decided different things"
                self.decided = max(records[:at], self.decided, key=len)
                for record in records[:at]:
                    self.decided_in[record.seq] = min(self.decided_in.get(record.seq, leader.term), leader.term)
                return

    # --- elections --------------------------------------------------------------------------------------------

    def somebody_stands(self) -> None:
        """After a silence; some others have heard a leader just now, and some answers are lost."""
        candidate = self.dice.choice(self.agents)
        if not candidate.alive:
            return
        election = Election(candidate.node, candidate.incarnation)
        here = self.here(candidate, heard_at=0.0)
        term = election.term_to_stand_for(here)
        if term is None:
            return
        asked = m.AskVote(node=candidate.node, term=term, log=candidate.copy.last)
        votes = [
            Election(other.node, other.incarnation).judge(
                asked, self.here(other, heard_at=self.dice.choice([0.0, 0.0, 0.0, 99.0]))
            )
            for other in self.agents
            if other is not candidate and other.alive and self.reaches(other.node, candidate.node)
        ]
        if election.chosen(term, [vote for vote in votes if self.dice.random() < 0.9], here):
            self.leaders.append(Leader(candidate.node, term, Log(candidate.copy.records), home=False))

    # --- and then nothing more happens ------------------------------------------------------------------------

    def living(self) -> list[Follower]:
        """Agents that remember all they promised, and that nobody has left out."""
        lost = {node for log in self.logs() for node in log.membership.record.lost}
        return [agent for agent in self.agents if agent.alive and not agent.lives and agent.node not in lost]

    def logs(self) -> list[Log]:
        """All that may still count, and what has been decided: where few agents vote, no copy of it may be left."""
        journals = [leader.journal for leader in self.leaders if leader.alive]
        return [Log(self.decided), *journals, *(agent.copy for agent in self.agents if agent.alive)]

    def quorum_lives(self) -> bool:
        living = {agent.node for agent in self.living()}
        return all(log.membership.quorum(living) for log in self.logs())

    def recover(self) -> None:
        """Everybody reaches everybody, disks write, and nobody dies: as long as a quorum lives, somebody decides."""
        self.cut = set()
        elections = {agent.node: Election(agent.node, agent.incarnation) for agent in self.agents}
        for _ in range(4 * len(self.nodes)):
            for leader in self.living_leaders():
                leader.written = leader.journal.last
            for agent in self.agents:
                self.finds_a_leader(agent)
            for leader in self.living_leaders():
                if self.decides(leader):
                    return
                leader.alive = False  # no quorum has followed it in time
            for node in sorted(self.nodes, key=lambda node: turn(node, len(self.leaders))):
                if self.stands(node, elections) or self.stands(node, elections):  # the second time, knowing more
                    break
        assert not self.quorum_lives(), "a quorum lives, and nobody leads"

    def living_leaders(self) -> list[Leader]:
        """The newest first: it has told everybody where it is."""
        return [leader for leader in reversed(self.leaders) if leader.alive]

    def finds_a_leader(self, agent: Follower) -> None:
        for leader in self.living_leaders():
            if agent.leader is not None and agent.leader.alive:
                return
            self.meet(agent, leader)

    def decides(self, leader: Leader) -> bool:
        """Whether a quorum follows it and knows all that it writes."""
        for number in range(2):
            leader.written = leader.journal.last
            for agent in self.agents:
                for _ in range(9):
                    if agent.leader is leader:
                        self.replicate(agent)
                if agent.leader is leader and agent.alive and agent.copy.last == leader.sent[agent.node]:
                    leader.has[agent.node] = agent.copy.last
            if not leader.settled():
                return False
            if number == 0:
                self.writes(leader, DrainDecided(drain=1, node="n1", failure=1, reason=""))
        return True

    def stands(self, node: str, elections: dict[str, Election]) -> bool:
        """An agent without a leader asks all others; those that have one refuse. Whether it is chosen."""
        self.passed_s += 10.0
        candidate = next(agent for agent in self.agents if agent.node == node)
        here = self.here(candidate, self.heard_at(candidate))
        term = elections[node].term_to_stand_for(here) if candidate.alive and not candidate.lives else None
        if term is None:
            return False
        asked = m.AskVote(node=node, term=term, log=candidate.copy.last)
        votes = [
            elections[other.node].judge(asked, self.here(other, self.heard_at(other)))
            for other in self.agents
            if other is not candidate and other.alive
        ]
        if elections[node].chosen(term, votes, here):
            self.leaders.append(Leader(node, term, Log(candidate.copy.records), home=False))
            return True
        elections[node].give_up(here.now)
        return False

    def heard_at(self, agent: Follower) -> float:
        return self.passed_s + (99.0 if agent.leader is not None and agent.leader.alive else 0.0)

    def here(self, agent: Follower, heard_at: float) -> Standing:
        own_s = agent.booted_s
        now = own_s + self.passed_s + 100.0
        return Standing(now, agent.promised, agent.copy.membership, own_s + heard_at)


@given(nodes=st.integers(2, 7), most_voters=st.sampled_from([2, 3, 5, MAX_VOTERS]), seed=st.integers(0, 2**32))
@settings(max_examples=600, deadline=None)
def test_no_network_makes_two_lead_or_loses_a_decision_and_no_job_ends_whose_quorum_lives(
    nodes: int, most_voters: int, seed: int
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(state, "MAX_VOTERS", most_voters)
        network = Network(nodes, Random(seed))
        network.play(400)
        network.recover()


def test_the_networks_of_that_test_have_many_leaders_who_decide_much() -> None:
    played = [Network(2 + seed % 6, Random(seed)) for seed in range(60)]
    for network in played:
        network.play(400)
    terms = [len({network.decided_in[record.seq] for record in network.decided}) for network in played]
    assert sum(terms) > 2 * len(played)
    assert sum(not leader.home for network in played for leader in network.chosen.values()) > len(played)
    assert sum(len(network.decided) - len(beginning(len(network.nodes))) for network in played) > 3 * len(played)
    assert sum(network.quorum_lives() for network in played) > len(played) / 2
    stamps = [[record.at for record in network.decided] for network in played]
    assert sum(later < before for each in stamps for before, later in itertools.pairwise(each)) > len(played) / 2
