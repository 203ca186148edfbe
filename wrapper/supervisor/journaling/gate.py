"""Carries out the controller's actions in order, and only while a quorum of agents follows this leader and has every
decision.

An action also waits until all earlier journal entries are on the leader's own disk. Decides nothing:
`resihp.record.quorum` defines a quorum, `replication` tracks the agents' copies, and `writer` tracks the disk. Owned by
`resihp.wrapper.supervisor.shell`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from resihp.controller import interface as api
from resihp.record.journal import AnyEntry, Record
from resihp.record.quorum import DECISIONS
from resihp.wrapper.supervisor.agents.links import AgentLinks
from resihp.wrapper.supervisor.journaling.replication import Replication
from resihp.wrapper.supervisor.journaling.writer import JournalWriter

QUORUM_TIMEOUT_S = 10.0
"""How long a decision may wait for a quorum before this supervisor assumes that it no longer leads."""


class DecisionGate:
    def __init__(
        self,
        links: AgentLinks,
        journal: JournalWriter,
        replication: Replication | None,
        carry_out: Callable[[api.AnyAction], None],
        clock: Callable[[], float],
    ) -> None:
        """`carry_out` performs one action, which may add further actions. `replication`: None without succession.
        `clock` counts only the time in which the supervisor could receive messages of agents."""
        self._links = links
        self._journal = journal
        self._replication = replication
        self._carry_out = carry_out
        self._clock = clock
        self._actions: deque[api.AnyAction] = deque()
        self._working_off = False
        self._leads = True
        self._claim: AnyEntry | None = None
        self._held_since: float | None = None
        """Time since when the claim to lead, or a decision, has been waiting for a quorum; None if neither waits."""

    def claim(self, entry: AnyEntry) -> None:
        """Claim to lead. The claim is logged and acted on only once a quorum of agents follows this supervisor
        (`joined`)."""
        self._claim, self._held_since = entry, self._clock()

    def add(self, actions: Sequence[api.AnyAction]) -> None:
        """Queue actions behind earlier ones. Each is carried out once a quorum has the decisions before it, if possible
        now."""
        self._actions += actions
        self._work_off()

    def give_up(self) -> None:
        """Drop all pending actions because another supervisor leads or may lead. Later actions are no longer
        delayed."""
        self._actions.clear()
        self._held_since = self._claim = None
        self._replication, self._leads = None, False

    @property
    def overdue(self) -> bool:
        """Whether a decision or the claim has waited too long for a quorum. The claim may wait longer while no agent
        has joined, because a quorum is impossible until then."""
        waits = self._claim is not None and self._replication is not None and self._replication.needs_no_votes
        return self._held_since is not None and not waits and self._clock() - self._held_since > QUORUM_TIMEOUT_S

    def on_disk(self) -> None:
        """Continue with the queued actions after more of the journal has reached the disk."""
        self._work_off()

    # --- copies of the journal ---------------------------------------------------------------------------------

    def flush(self) -> None:
        """Send new journal records to the agents; to be called a few times a second."""
        if self._replication is not None:
            self._replication.flush()

    def appended(self, record: Record) -> None:
        if self._replication is not None:
            self._replication.appended(record, isinstance(record.entry, DECISIONS))

    def joined(self, node: str, log: int) -> AnyEntry | None:
        """Note that an agent follows this leader; `log` is the last record of its copy. Returns the claim to lead once
        a quorum follows: the claim is now valid and must be logged."""
        if self._replication is None:
            return None
        self._replication.joined(node, log)
        if self._claim is None or not self._replication.accepted:
            return None
        claim, self._claim, self._held_since = self._claim, None, self._clock()
        return claim

    def left(self, node: str) -> None:
        if self._replication is not None:
            self._replication.left(node)

    def acknowledged(self, node: str, number: int) -> None:
        if self._replication is None:
            return
        self._replication.acknowledged(node, number)
        if self._held_since is not None:
            if not self._actions and self._may_act:
                self._held_since = None
            self._work_off()

    # --- the gate ---------------------------------------------------------------------------------------------

    def _work_off(self) -> None:
        if self._working_off:
            return
        self._working_off = True
        try:
            while self._actions:
                if not self._is_written:
                    return
                if not isinstance(self._actions[0], api.Log | api.Say | api.Reply):
                    self.flush()  # an order must not reach an agent before the record of its decision
                if not self._may_act:
                    self.flush()
                    self._held_since = self._held_since or self._clock()
                    return
                self._held_since = None
                if not self._links.lead.settled:  # from now on, agents with copies ahead of this journal follow, too
                    self._links.lead = msgspec.structs.replace(self._links.lead, settled=True)
                self._carry_out(self._actions.popleft())
        finally:
            self._working_off = False

    @property
    def _is_written(self) -> bool:
        """Whether all entries that were logged before the next action are on disk. Always true for a deposed leader,
        which no longer logs."""
        return isinstance(self._actions[0], api.Log) or self._journal.written >= self._journal.seq or not self._leads

    @property
    def _may_act(self) -> bool:
        """Whether a quorum of agents is connected and has all decisions. Before the first plan no quorum is needed,
        because no other leader can be elected."""
        if self._replication is None:
            return True
        if self._claim is not None or not self._replication.settled:  # cheaper to check than the quorum
            return False
        membership = self._replication.membership
        return not membership.electable or membership.quorum(self._links.connected(membership.electors))
