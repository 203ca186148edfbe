"""The rules by which agents elect the agent that starts a successor when there is no leader; without clock, socket or
process.

An agent that keeps a copy of the journal, and has received nothing from a leader for a while, becomes a candidate: it
asks the other agents whether they would follow a supervisor of the next term on its node. An agent refuses if it still
receives messages of a leader, if it has promised itself to that term, or if it has more of the journal than the
candidate. With a quorum (`resihp.record.quorum`) the candidate starts a supervisor. A vote is not binding; it only
avoids useless starts of supervisors. The binding step is the promise that each agent makes to the supervisor itself,
which leads once a quorum has made the promise (`resihp.wrapper.agent.supervisor_link`). Used by
`resihp.wrapper.agent.peers`.

Every agent with a copy may be a candidate, even without a vote under the last plan in its copy: perhaps only a voter of
the previous plan knows that the last plan is in effect, and then no other candidate can get its vote. Agents of lost
nodes take no part, because the supervisor would refuse them.

The order of candidates is drawn anew for each term, and is the same on all nodes (`turn`), so that nodes that die
together, such as those of a rack, are not all at its beginning. A candidate asks the other agents in this order, so
that the agent that would be the next candidate pledges its vote instead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from resihp.protocol import messages as m
from resihp.record.quorum import Membership

LEADERLESS_WAIT_S = 5.0
"""How long an agent without a leader waits before it becomes a candidate; also how long it waits after a successor was
announced."""
STAGGER_S = 0.3
"""Additional wait for each position in the order of candidates, so that only one agent is a candidate at a time. The
last of `state.MAX_VOTERS` voters has its turn long before any agent gives up the job
(`supervisor_link.MAX_LEADERLESS_S`)."""
LEADER_PRESENT_S = 2.0
"""A voter that received a message from a leader within this time refuses all candidates."""
ANSWER_TIMEOUT_S = 1.0
"""How long a candidate waits for each answer."""
RETRY_S = 1.0
"""How long a candidate that got no quorum waits before it asks again."""
PLEDGE_S = 3.0
"""How long a voter pledges its vote to one candidate, and a candidate to itself while it asks."""


@dataclass(frozen=True)
class Standing:
    """An agent's state when it judges a candidate, or when it may become one.

    `promised`: newest term that the agent has promised itself to. `heard_at`: time of the last message from a leader;
    None if there never was one.
    """

    now: float
    promised: int
    membership: Membership
    heard_at: float | None


def turn(node: str, term: int) -> bytes:
    """Return the sort key that orders the nodes as candidates for a term."""
    return hashlib.blake2b(f"{term} {node}".encode(), digest_size=8).digest()


def accepts(lead: m.Lead, promised: int, log: int) -> bool:
    """Return whether an agent may switch to this leader. `promised`: newest term that it has promised itself to; `log`:
    last record of its copy of the journal.

    A leader with fewer records than the agent may still have a quorum of other agents (`settled`). The agent's
    additional records were then never decided. Two candidates may start supervisors for the same term, if one of them
    starts so slowly that the pledges to it expire. The one with a quorum leads; the agents that have promised
    themselves to the other one may then follow it, because their promise cannot become part of a quorum any more.
    """
    if lead.term == promised:
        return lead.settled
    return lead.term > promised and (lead.settled or lead.log >= log)


class Election:
    """One agent's part in elections. All times are on the clock of `Standing.now`."""

    def __init__(self, node: str, incarnation: str = "") -> None:
        self._node = node
        self._incarnation = incarnation
        self._newest_term = 0
        """The newest term that any known leader or candidate has had."""
        self._pledged_to = ""
        self._pledged_until = float("-inf")
        self._again_at = float("-inf")

    def term_to_stand_for(self, here: Standing) -> int | None:
        """Return the term for which this agent should ask for votes now; None if it should not be a candidate now."""
        membership = here.membership
        if not membership.electable or self._node not in membership.joined or here.heard_at is None:
            return None
        waits_until = max(here.heard_at + LEADERLESS_WAIT_S, self._again_at, self._pledged_until)
        if here.now < waits_until:
            return None
        term = max(here.promised, self._newest_term) + 1
        own = turn(self._node, term)
        later_s = STAGGER_S * sum(turn(node, term) < own for node in membership.voters)
        if here.now < here.heard_at + LEADERLESS_WAIT_S + later_s:
            return None
        self._again_at = here.now + RETRY_S + later_s
        self._pledged_to, self._pledged_until = self._node, here.now + PLEDGE_S
        return term

    def give_up(self, now: float) -> None:
        """Release this agent's pledge to itself after an election without a quorum."""
        if self._pledged_to == self._node:
            self._pledged_until = now

    def judge(self, request: m.AskVote, here: Standing) -> m.Vote:
        """Decide whether this agent would follow the candidate, and pledge its vote if so."""
        self._newest_term = max(self._newest_term, request.term - 1)
        reason = ""
        if here.heard_at is not None and here.now - here.heard_at < LEADER_PRESENT_S:
            reason = f"heard a leader {here.now - here.heard_at:.1f} s ago"
        elif request.term <= here.promised:
            reason = f"has promised itself to term {here.promised}"
        elif request.log < here.membership.log:
            reason = f"has record {here.membership.log} of the journal, the candidate only {request.log}"
        elif here.now < self._pledged_until and self._pledged_to != request.node:
            reason = f"has pledged its vote to the agent of node {self._pledged_to}"
        else:
            self._pledged_to, self._pledged_until = request.node, here.now + PLEDGE_S
        return m.Vote(
            node=self._node, granted=not reason, term=here.promised, reason=reason, incarnation=self._incarnation
        )

    def chosen(self, term: int, votes: Iterable[m.Vote], here: Standing) -> bool:
        """Return whether the votes for `term` are a quorum. `here` is the agent's state when they are counted."""
        granted = {self._node}
        for vote in votes:
            self._newest_term = max(self._newest_term, vote.term)
            if vote.granted and here.membership.incarnation(vote.node) in ("", vote.incarnation):
                granted.add(vote.node)
        granted &= here.membership.joined  # the supervisor will accept no agent of a lost node
        yielded = here.now < self._pledged_until and self._pledged_to != self._node
        return not yielded and here.promised < term and here.membership.quorum(granted)

    def wait_for(self, node: str, now: float) -> None:
        """Pledge this agent's vote to the supervisor that is being started on `node`, for `LEADERLESS_WAIT_S`."""
        self._pledged_to, self._pledged_until = node, now + LEADERLESS_WAIT_S
