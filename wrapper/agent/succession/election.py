"""Which agent starts a successor when nobody leads: the rules, without clock, socket or process.

An agent that keeps a copy of the journal, and has heard nothing of a leader for a while, asks the others whether they
would follow a supervisor of the next term on its node. Who still hears a leader, has promised itself to that term, or
knows more of the journal than the candidate, would not. With a quorum (`resihp.record.quorum`) the candidate starts a
supervisor. A vote binds nobody: it keeps agents from starting supervisors in vain. What binds is the promise that each
agent makes to the supervisor itself, which leads once a quorum has made it (`wrapper.agent.supervisor_link`). Used by
`wrapper.agent.peers`.

Whoever keeps a copy may stand, whether or not it has a vote in the plan that its copy ends with: one of the plan before
may be the only one that knows the next to be in effect, and then no other can have its vote. A node that was lost has
no part in it, for the supervisor would refuse its agent.

Whose turn it is first is drawn anew for each term, alike by all (`turn`): nodes that die together, as those of a rack,
are not the first ones in a row. A candidate asks others in the same order, so that who would stand next gives its word
instead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from resihp.protocol import messages as m
from resihp.record.quorum import Membership

LEADER_PATIENCE_S = 5.0
"""How long an agent without a leader waits before it looks for a successor; after it has heard of one, too."""
STAGGER_S = 0.3
"""How much longer each voter waits than the one whose turn is before it, so that one stands alone. The last of
`fold.MAX_VOTERS` stands long before anybody gives the job up (`supervisor_link.ORPHAN_S`)."""
QUIET_S = 2.0
"""A leader that was heard of so recently is there, as far as a voter is concerned."""
ASK_S = 1.0
"""How long a candidate waits for answers."""
AGAIN_S = 1.0
"""How long after it had no quorum a candidate asks again."""
PLEDGE_S = 3.0
"""How long a voter gives no other candidate its word, nor a candidate itself while it asks."""


@dataclass(frozen=True)
class Standing:
    """What an agent knows when it judges a candidate or stands as one.

    `heard_at`: when it last heard of a leader; None if it never has.
    """

    now: float
    promised: int
    membership: Membership
    heard_at: float | None


def turn(node: str, term: int) -> bytes:
    """Sorts agents by whose turn it is to stand for a term."""
    return hashlib.blake2b(f"{term} {node}".encode(), digest_size=8).digest()


def accepts(lead: m.Lead, promised: int, log: int) -> bool:
    """Whether an agent may leave a leader for this one: what it has promised binds it, and what it knows, too.

    A leader that knows less may still have a quorum of others (`settled`): then what this agent has beyond it was never
    decided.
    """
    return lead.term > promised and (lead.settled or lead.log >= log)


class Election:
    """One agent's part in choosing. Times are those of `Standing.now`."""

    def __init__(self, node: str, incarnation: str = "") -> None:
        self._node = node
        self._incarnation = incarnation
        self._seen = 0
        """The newest term that anybody was heard of."""
        self._pledged_to = ""
        self._pledged_until = float("-inf")
        self._again_at = float("-inf")

    def term_to_stand_for(self, here: Standing) -> int | None:
        """The term for which this agent should ask the others now; None if it should not."""
        membership = here.membership
        if not membership.electable or self._node not in membership.joined or here.heard_at is None:
            return None
        waits_until = max(here.heard_at + LEADER_PATIENCE_S, self._again_at, self._pledged_until)
        if here.now < waits_until:
            return None
        term = max(here.promised, self._seen) + 1
        own = turn(self._node, term)
        later_s = STAGGER_S * sum(turn(node, term) < own for node in membership.voters)
        if here.now < here.heard_at + LEADER_PATIENCE_S + later_s:
            return None
        self._again_at = here.now + AGAIN_S + later_s
        self._pledged_to, self._pledged_until = self._node, here.now + PLEDGE_S
        return term

    def give_up(self, now: float) -> None:
        """No quorum would follow: this agent's word is free again."""
        if self._pledged_to == self._node:
            self._pledged_until = now

    def judge(self, asked: m.AskVote, here: Standing) -> m.Vote:
        """Whether this agent would follow the candidate."""
        self._seen = max(self._seen, asked.term - 1)
        reason = ""
        if here.heard_at is not None and here.now - here.heard_at < QUIET_S:
            reason = f"heard a leader {here.now - here.heard_at:.1f} s ago"
        elif asked.term <= here.promised:
            reason = f"has promised itself to term {here.promised}"
        elif asked.log < here.membership.log:
            reason = f"has record {here.membership.log} of the journal, the candidate ends with {asked.log}"
        elif here.now < self._pledged_until and self._pledged_to != asked.node:
            reason = f"has given its word to the agent of node {self._pledged_to}"
        else:
            self._pledged_to, self._pledged_until = asked.node, here.now + PLEDGE_S
        return m.Vote(
            node=self._node, granted=not reason, term=here.promised, reason=reason, incarnation=self._incarnation
        )

    def chosen(self, term: int, votes: Iterable[m.Vote], here: Standing) -> bool:
        """Whether the answers to `term` are a quorum; `here` is how things stand now that they are counted."""
        granted = {self._node}
        for vote in votes:
            self._seen = max(self._seen, vote.term)
            if vote.granted and here.membership.incarnation(vote.node) in ("", vote.incarnation):
                granted.add(vote.node)
        granted &= here.membership.joined  # the supervisor will take no agent of a node that was lost
        yielded = here.now < self._pledged_until and self._pledged_to != self._node
        return not yielded and here.promised < term and here.membership.quorum(granted)

    def wait_for(self, node: str, now: float) -> None:
        """A supervisor is being started on that node: give it time."""
        self._pledged_to, self._pledged_until = node, now + LEADER_PATIENCE_S
