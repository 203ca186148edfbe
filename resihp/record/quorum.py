"""Who may lead a job, and what counts as decided: read off the journal, by whoever holds a copy of it.

The plan in effect says whose agents vote: those of its nodes, standby ones included, and of a large plan's some (at
most `fold.MOST_VOTERS`, so that what a decision costs does not grow with the job). A leader needs a quorum of them:
more than half, or exactly half with the one on the node of the leader that decided the plan. From the moment when
another plan is decided until it is in effect, it needs a quorum of that plan's voters as well (joint consensus, as in
Raft): so every quorum shares an agent with every one before it that may still count, whatever a copy of the journal
lacks. An agent promises itself to one leader of a term; so no term has two leaders, and a new one finds every decision
that took effect (architecture.md, "Who may lead"). An agent that was started again has forgotten its promises and its
copy: it counts for nobody (`incarnation`). Used by the supervisor shell, by agents that look for a successor, and by
the controller that takes over.
"""

from __future__ import annotations

from collections.abc import Set

from resihp.record import fold
from resihp.record.journal import (
    DrainDecided,
    JobEnded,
    LeaderChosen,
    PlanDecided,
    PlanInEffect,
    Record,
    ReplacementAsked,
    WorkersOrdered,
    term_of,
)
from resihp.record.state import JobRecord

DECISIONS = (LeaderChosen, WorkersOrdered, PlanDecided, PlanInEffect, DrainDecided, ReplacementAsked, JobEnded)
"""Entries that count only once a quorum of agents has acknowledged them: what follows them waits for that."""


def is_quorum(voters: Set[str], agreeing: Set[str], incumbent: str) -> bool:
    """Whether these agents may decide for all: more than half of the voters, or half with the incumbent's own."""
    votes = len(voters & agreeing)
    return 2 * votes > len(voters) or (2 * votes == len(voters) and incumbent in voters & agreeing)


class Membership:
    """What a journal says of its leaders and voters, record by record. A rewound journal is read again from the start.

    `log`: number of the last record, `term` its leader's. All else is read off `record`, which they add up to.
    """

    def __init__(self) -> None:
        self.term = 0
        self.log = 0
        self.record = JobRecord()

    def apply(self, record: Record) -> None:
        self.log, self.term = record.seq, max(self.term, term_of(record.seq))
        fold.apply(self.record, record.entry)

    @property
    def leader(self) -> str:
        """Node of the latest leader."""
        return self.record.leader

    @property
    def incumbent(self) -> str:
        """Node whose agent decides between equal halves, empty if there is none."""
        return self.record.incumbent

    @property
    def voters(self) -> frozenset[str]:
        """Of the plan in effect; before there is one, of those that have joined."""
        return self.record.voters

    @property
    def electors(self) -> frozenset[str]:
        """All whose agents have a say now: they keep copies of the journal."""
        return frozenset().union(*(voters for voters, _ in self.electorates))

    @property
    def committed(self) -> int:
        """The last committed iteration."""
        return self.record.committed

    @property
    def joined(self) -> set[str]:
        """Nodes that have joined and were not lost."""
        return {name for name, node in self.record.nodes.items() if node.alive}

    def incarnation(self, node: str) -> str:
        """Of the agent that may speak for the node; empty where any may.

        A node that was lost is a voter until a plan without it is in effect, and its agent may have promised much.
        """
        known = self.record.nodes.get(node)
        return known.incarnation if known is not None else ""

    @property
    def incarnations(self) -> dict[str, str]:
        """By node, of all agents that have ever joined."""
        return {node: self.incarnation(node) for node in self.record.nodes}

    @property
    def electable(self) -> bool:
        """Whether agents may choose a leader: once a plan is in effect; who has joined may change at any time."""
        return self.record.plan is not None

    @property
    def electorates(self) -> tuple[tuple[frozenset[str], str], ...]:
        """(voters, incumbent), of each of which a quorum is needed now."""
        present = (self.voters, self.incumbent)
        if self.record.proposed is None:
            return (present,)
        decided = (self.record.proposed.voters, self.record.proposed.leader)
        return (present, decided) if self.electable else (decided,)

    def quorum(self, agreeing: Set[str]) -> bool:
        """Whether the agents of these nodes may decide for all. Before anybody has joined, there is nobody to ask."""
        return all(is_quorum(voters, agreeing, incumbent) for voters, incumbent in self.electorates if voters)
