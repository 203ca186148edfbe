"""The rules by which agents elect the one that starts a successor when nobody leads, without clock, socket or process.

An agent that keeps a copy of the journal, and has not heard from a leader for a while, asks the others whether they
would follow a supervisor of the next term on its node. An agent refuses if it still hears a leader, has promised itself
to that term, or has more of the journal than the candidate. With a quorum (`resihp.record.quorum`) the candidate starts
a supervisor. A vote is not binding: it only avoids useless starts of supervisors. The binding step is the promise that
each agent makes to the supervisor itself, which leads once a quorum has made it (`wrapper.agent.supervisor_link`). Used
by `wrapper.agent.peers`.

Every agent with a copy may stand, whether or not it has a vote in the last plan of its copy: a voter of the plan before
may be the only one that knows the last plan to be in effect, and then no other candidate can get its vote. Nodes that
were lost take no part, because the supervisor would refuse their agents.

The order of candidates is drawn anew for each term, the same on all nodes (`turn`), so that nodes that die together,
such as those of a rack, are not all at its beginning. A candidate asks others in the same order, so that the agent that
would stand next pledges its vote instead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from resihp.protocol import messages as m
from resihp.record.quorum import Membership

LEADERLESS_WAIT_S = 5.0
"""How long an agent without a leader waits before it looks for a successor; also after the announcement of one."""
STAGGER_S = 0.3
"""Additional wait of each voter over the one before it in turn, so that only one stands at a time. The last of
`state.MAX_VOTERS` stands long before any agent gives up the job (`supervisor_link.MAX_LEADERLESS_S`)."""
LEADER_PRESENT_S = 2.0
"""A voter that heard from a leader within this time takes it to be present."""
ANSWER_TIMEOUT_S = 1.0
"""How long a candidate waits for answers."""
RETRY_S = 1.0
"""How long after it had no quorum a candidate asks again."""
PLEDGE_S = 3.0
"""How long a voter pledges its vote to one candidate, and a candidate to itself while it asks."""


@dataclass(frozen=True)
class Standing:
    """An agent's knowledge when it judges a candidate or stands as one.

    `heard_at`: when it last heard from a leader; None if it never has.
    """

    now: float
    promised: int
    membership: Membership
    heard_at: float | None


def turn(node: str, term: int) -> bytes:
    """Return the sort key by which agents take turns to stand for a term."""
    return hashlib.blake2b(f"{term} {node}".encode(), digest_size=8).digest()


def accepts(lead: m.Lead, promised: int, log: int) -> bool:
    """Return whether an agent may switch to this leader, given its promise and its copy of the journal.

    A leader with fewer records may still have a quorum of other agents (`settled`): then this agent's further records
    were never decided.
    """
    return lead.term > promised and (lead.settled or lead.log >= log)


class Election:
    """One agent's part in an election. Times are those of `Standing.now`."""

    def __init__(self, node: str, incarnation: str = "") -> None:
        self._node = node
        self._incarnation = incarnation
        self._newest_term = 0
        """The newest term of any leader or candidate that this agent knows of."""
        self._pledged_to = ""
        self._pledged_until = float("-inf")
        self._again_at = float("-inf")

    def term_to_stand_for(self, here: Standing) -> int | None:
        """Return the term for which this agent should ask the others now; None if it should not."""
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
        """Release this agent's pledge to itself, because no quorum would follow it."""
        if self._pledged_to == self._node:
            self._pledged_until = now

    def judge(self, request: m.AskVote, here: Standing) -> m.Vote:
        """Decide whether this agent would follow the candidate."""
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
        """Return whether the answers to `term` are a quorum; `here` is the agent's standing when they are counted."""
        granted = {self._node}
        for vote in votes:
            self._newest_term = max(self._newest_term, vote.term)
            if vote.granted and here.membership.incarnation(vote.node) in ("", vote.incarnation):
                granted.add(vote.node)
        granted &= here.membership.joined  # the supervisor will accept no agent of a lost node
        yielded = here.now < self._pledged_until and self._pledged_to != self._node
        return not yielded and here.promised < term and here.membership.quorum(granted)

    def wait_for(self, node: str, now: float) -> None:
        """Wait for a supervisor that is being started on that node."""
        self._pledged_to, self._pledged_until = node, now + LEADERLESS_WAIT_S
