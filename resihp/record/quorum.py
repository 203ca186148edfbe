"""Determine the agents that may choose a leader, and the entries that count as decided, from any copy of the journal.

The agents on the nodes of the plan in effect vote, including those on standby nodes. In a large plan at most
`state.MAX_VOTERS` agents vote, so that the cost of a decision does not grow with the job. A leader needs a quorum: more
than half of the voters, or exactly half if they include the agent on the node of the leader that decided the plan. From
the decision on another plan until that plan is in effect, a quorum of the other plan's voters is needed as well (joint
consensus, as in Raft). So every quorum shares an agent with every earlier quorum that may still count, even if some
copy of the journal lacks entries. An agent promises itself to one leader per term, so no term has two leaders, and a
new leader finds every decision that took effect (architecture.md, "Who may lead"). A restarted agent has forgotten its
promises and its copy, so it has no vote (`incarnation`). Makes no connection and no decision of its own. Used by the
supervisor shell, by agents that choose a successor, and by the controller of a new supervisor.
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
    RestartDecided,
    RollbackDecided,
    WorkersOrdered,
    term_of,
)
from resihp.record.state import JobRecord

DECISIONS = (
    *(LeaderChosen, WorkersOrdered, RestartDecided, RollbackDecided, PlanDecided, PlanInEffect, DrainDecided),
    *(ReplacementAsked, JobEnded),
)
"""Kinds of entries that count only once a quorum of agents has acknowledged them. The actions that follow from them
wait until then."""


def is_quorum(voters: Set[str], agreeing: Set[str], incumbent: str) -> bool:
    """Return whether the agents on the nodes `agreeing` form a quorum: more than half of the voters, or exactly half if
    they include the incumbent's agent."""
    votes = len(voters & agreeing)
    return 2 * votes > len(voters) or (2 * votes == len(voters) and incumbent in voters & agreeing)


class Membership:
    """Leaders and voters of a job, updated with each record of its journal. After records have been cut from the
    journal, a new instance has to read it from the start.

    `log`: number of the last record. `term`: term of the last record. Everything else is derived from `record`, the
    fold of the entries.
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
        """Node of the latest leader; empty if it runs on none of the job's nodes."""
        return self.record.leader

    @property
    def incumbent(self) -> str:
        """Node of the agent that decides between two equal halves of the voters; empty if there is none."""
        return self.record.incumbent

    @property
    def voters(self) -> frozenset[str]:
        """Nodes with agents that are voters of the plan in effect. Before the first plan, voters among the nodes that
        have joined."""
        return self.record.voters

    @property
    def electors(self) -> frozenset[str]:
        """Nodes with agents that have a vote now, under the plan in effect or the proposed plan. These agents keep
        copies of the journal."""
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
        """Return the incarnation of the agent that may vote for a node; empty if any agent of the node may.

        A lost node remains a voter until a plan without it is in effect, because its agent may have made promises.
        """
        known_node = self.record.nodes.get(node)
        return known_node.incarnation if known_node is not None else ""

    @property
    def incarnations(self) -> dict[str, str]:
        """Incarnations of all agents that have ever joined, by node."""
        return {node: self.incarnation(node) for node in self.record.nodes}

    @property
    def electable(self) -> bool:
        """Whether agents may choose a leader. They may once a plan is in effect; before that, more nodes may join at
        any time."""
        return self.record.plan is not None

    @property
    def electorates(self) -> tuple[tuple[frozenset[str], str], ...]:
        """(voters, incumbent) of each plan of which a quorum is needed now: the plan in effect, the proposed plan, or
        both."""
        present = (self.voters, self.incumbent)
        if self.record.proposed is None:
            return (present,)
        decided = (self.record.proposed.voters, self.record.proposed.leader)
        return (present, decided) if self.electable else (decided,)

    def quorum(self, agreeing: Set[str]) -> bool:
        """Return whether the agents on the nodes `agreeing` form every quorum that is needed now. True before any node
        has joined, because there is no voter yet."""
        return all(is_quorum(voters, agreeing, incumbent) for voters, incumbent in self.electorates if voters)
