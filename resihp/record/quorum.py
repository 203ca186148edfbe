"""Which agents may lead a job, and which entries count as decided: derived from any copy of the journal.

The agents on the nodes of the plan in effect vote, standby ones included; of a large plan only some do (at most
`state.MAX_VOTERS`, so that the cost of a decision does not grow with the job). A leader needs a quorum of them: more
than half, or exactly half if that includes the agent on the node of the leader that decided the plan. From the decision
on another plan until it is in effect, a quorum of that plan's voters is needed as well (joint consensus, as in Raft).
So every quorum shares an agent with every earlier one that may still count, whatever a copy of the journal lacks. An
agent promises itself to one leader per term, so no term has two leaders, and a new leader finds every decision that
took effect (architecture.md, "Who may lead"). An agent that was restarted has forgotten its promises and its copy, so
it does not count (`incarnation`). Used by the supervisor shell, by agents that look for a successor, and by the
controller that takes over.
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
"""Entries that count only once a quorum of agents has acknowledged them: their consequences wait for that."""


def is_quorum(voters: Set[str], agreeing: Set[str], incumbent: str) -> bool:
    """Return whether these agents may decide for all: more than half of the voters, or half including the
    incumbent's."""
    votes = len(voters & agreeing)
    return 2 * votes > len(voters) or (2 * votes == len(voters) and incumbent in voters & agreeing)


class Membership:
    """Leaders and voters of a job, updated record by record. A rewound journal is read again from the start.

    `log`: number of the last record, `term` that of its leader. Everything else is derived from `record`, the fold of
    the entries.
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
        """Node whose agent decides between equal halves; empty if there is none."""
        return self.record.incumbent

    @property
    def voters(self) -> frozenset[str]:
        """Voters of the plan in effect; before there is one, voters among the nodes that have joined."""
        return self.record.voters

    @property
    def electors(self) -> frozenset[str]:
        """All nodes whose agents have a vote now; these keep copies of the journal."""
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
        """Return the incarnation of the agent that may speak for the node; empty if any may.

        A node that was lost is a voter until a plan without it is in effect, and its agent may have made promises.
        """
        known_node = self.record.nodes.get(node)
        return known_node.incarnation if known_node is not None else ""

    @property
    def incarnations(self) -> dict[str, str]:
        """Incarnations of all agents that have ever joined, by node."""
        return {node: self.incarnation(node) for node in self.record.nodes}

    @property
    def electable(self) -> bool:
        """Whether agents may choose a leader: only once a plan is in effect, because before that nodes may join at any
        time."""
        return self.record.plan is not None

    @property
    def electorates(self) -> tuple[tuple[frozenset[str], str], ...]:
        """(voters, incumbent) of each electorate of which a quorum is needed now."""
        present = (self.voters, self.incumbent)
        if self.record.proposed is None:
            return (present,)
        decided = (self.record.proposed.voters, self.record.proposed.leader)
        return (present, decided) if self.electable else (decided,)

    def quorum(self, agreeing: Set[str]) -> bool:
        """Return whether the agents of these nodes may decide for all. Before any node has joined, there is nobody to
        ask."""
        return all(is_quorum(voters, agreeing, incumbent) for voters, incumbent in self.electorates if voters)
