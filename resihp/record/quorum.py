"""Who may lead a job, and what counts as decided: read off the journal, by whoever holds a copy of it.

A leader needs a quorum of the agents of the plan in effect (standby ones included): more than half of them, or exactly
half with the one on the node of the leader that decided the plan. From the moment when another plan is decided until it
is in effect, it needs a quorum of that plan's agents as well (joint consensus, as in Raft): so every quorum shares an
agent with every one before it that may still count, whatever a copy of the journal lacks. An agent promises itself to
one leader of a term; so no term has two leaders, and a new one finds every decision that took effect (architecture.md,
"Who may lead"). Used by the supervisor shell, by agents that look for a successor, and by the controller that takes
over.
"""

from __future__ import annotations

from collections.abc import Set

from resihp.parallelism.plan import Plan
from resihp.record.journal import (
    DrainDecided,
    IterationCommitted,
    JobEnded,
    JobStarted,
    LeaderChosen,
    NodeJoined,
    NodeLost,
    PlanDecided,
    PlanInEffect,
    PlanRefused,
    Record,
    ReplacementAsked,
    WorkerStarted,
    term_of,
)

DECISIONS = (LeaderChosen, PlanDecided, PlanInEffect, DrainDecided, ReplacementAsked, JobEnded)
"""Entries that count only once a quorum of agents has acknowledged them: what follows them waits for that."""


def is_quorum(voters: Set[str], agreeing: Set[str], incumbent: str) -> bool:
    """Whether these agents may decide for all: more than half of the voters, or half with the incumbent's own."""
    votes = len(voters & agreeing)
    return 2 * votes > len(voters) or (2 * votes == len(voters) and incumbent in voters & agreeing)


class Membership:
    """What a journal says of its leaders and voters, record by record. A rewound journal is read again from the start.

    `log`: number of the last record. `committed`: the last committed iteration. `joined`: nodes that have joined and
    were not lost. `voters` and `incumbent`: nodes of the plan in effect, and the one whose agent decides between equal
    halves: where the leader was that decided the plan, empty if it was on none of them. Before there is a plan, all
    that have joined.
    """

    def __init__(self) -> None:
        self.term = 0
        self.log = 0
        self.leader = ""
        """Node of the latest leader."""
        self.incumbent = ""
        self.voters: frozenset[str] = frozenset()
        self.committed = 0
        self.joined: set[str] = set()
        self.electable = False
        """Whether agents may choose a leader: once a plan is in effect; who has joined may change at any time."""
        self._node_of: dict[int, str] = {}
        self._decided: tuple[Plan, str] | None = None
        """The plan that was decided and is not in effect, and the node of its leader."""

    @property
    def electorates(self) -> tuple[tuple[frozenset[str], str], ...]:
        """(voters, incumbent), of each of which a quorum is needed now."""
        if self._decided is None:
            return ((self.voters, self.incumbent),)
        plan, leader = self._decided
        decided = (self._nodes_of(plan), leader)
        return ((self.voters, self.incumbent), decided) if self.electable else (decided,)

    def quorum(self, agreeing: Set[str]) -> bool:
        """Whether the agents of these nodes may decide for all. Before anybody has joined, there is nobody to ask."""
        return all(is_quorum(voters, agreeing, incumbent) for voters, incumbent in self.electorates if voters)

    def apply(self, record: Record) -> None:
        entry = record.entry
        self.log, self.term = record.seq, max(self.term, term_of(record.seq))
        match entry:
            case JobStarted():
                self.leader = self.incumbent = entry.leader
            case LeaderChosen():
                self.leader = entry.node
            case NodeJoined():
                self.joined.add(entry.node)
            case NodeLost():
                self.joined.discard(entry.node)
            case WorkerStarted():
                self._node_of[entry.rank] = entry.node
            case IterationCommitted():
                self.committed = max(self.committed, entry.outcome.iteration)
            case PlanDecided():
                self._decided = (entry.plan, self.leader)
            case PlanRefused() if self._decided is not None and self._decided[0].epoch == entry.epoch:
                self._decided = None
            case PlanInEffect() if self._decided is not None and self._decided[0].epoch == entry.epoch:
                plan, self.incumbent = self._decided
                self.voters, self.electable, self._decided = self._nodes_of(plan), True, None
            case _:
                pass
        if not self.electable:
            self.voters = frozenset(self.joined)

    def _nodes_of(self, plan: Plan) -> frozenset[str]:
        return frozenset(self._node_of[rank] for rank in plan.layout.ranks)
