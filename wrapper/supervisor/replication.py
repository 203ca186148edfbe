"""The journal's copies: records go to every agent, and a decision counts once a quorum of them has it.

Owned by `wrapper.supervisor.shell`, which holds back what follows a decision until `settled`. What an agent has is
known from what it has acknowledged, and from the number with which its copy ended when it joined. An agent that comes
late gets all that it lacks, in pieces that its connection can take. Decides nothing; `resihp.record.quorum` says what a
quorum is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from resihp.protocol import messages as m
from resihp.record.journal import Journal, Record, encode, read
from resihp.record.quorum import Membership, is_quorum

PIECE_BYTES = 1 << 20
MOST_UNDER_WAY_BYTES = 4 << 20


@dataclass
class _Copy:
    """One agent's copy. `has`: number of the last record that it is known to hold."""

    has: int
    last: int
    """Number of the last record that was sent or waits to be."""
    waiting: deque[tuple[int, int, bytes]] = field(default_factory=deque)
    """(number before it, number, record) not sent yet."""
    under_way: deque[tuple[int, int, int]] = field(default_factory=deque)
    """(number of the message, number of its last record, bytes) sent and not acknowledged."""

    @property
    def bytes_under_way(self) -> int:
        return sum(size for _, _, size in self.under_way)


class Replication:
    """All copies of one journal. `post(node, message)` returns the message's number, 0 if nobody is there."""

    def __init__(self, journal: Journal, membership: Membership, post: Callable[[str, m.Replicate], int]) -> None:
        """`membership` has read the journal so far; from here on it follows what is `appended`."""
        self.membership = membership
        self._journal = journal
        self._post = post
        self._copies: dict[str, _Copy] = {}
        self._owed: deque[tuple[int, tuple[tuple[frozenset[str], str], ...]]] = deque()
        """(number, electorates) of decisions that no quorum is known to have; the first one is waited for."""

    def appended(self, record: Record, decision: bool) -> None:
        """A record has just been written to the journal: send it.

        A decision needs a quorum of those who vote before it and after it.
        """
        before, electorates = self.membership.log, self.membership.electorates
        self.membership.apply(record)
        electorates += self.membership.electorates
        body = self._journal.written
        for node, copy in self._copies.items():
            copy.waiting.append((before, record.seq, body))
            copy.last = record.seq
            self._send(node, copy)
        if decision:
            self._owed.append((record.seq, electorates))

    def joined(self, node: str, log: int) -> None:
        """An agent accepts us; its copy ends with number `log`, and is right as far as ours goes."""
        copy = self._copies[node] = _Copy(has=0, last=0)
        before = 0
        for record in read(self._journal.path):
            if record.seq <= log:
                before = copy.has = record.seq
            else:
                copy.waiting.append((before, record.seq, encode(record)))
                before = record.seq
        copy.last = before
        if not copy.waiting and log > copy.has:  # what it has beyond ours was never decided
            self._post(node, m.Replicate(after=copy.has, records=()))
        self._send(node, copy)

    def left(self, node: str) -> None:
        self._copies.pop(node, None)

    def acknowledged(self, node: str, number: int) -> None:
        """The agent has all messages up to this number."""
        copy = self._copies.get(node)
        if copy is None:
            return
        while copy.under_way and copy.under_way[0][0] <= number:
            copy.has = copy.under_way.popleft()[1]
        self._send(node, copy)

    @property
    def accepted(self) -> bool:
        """Whether a quorum of agents has joined us."""
        return self.membership.quorum(self._copies.keys())

    @property
    def settled(self) -> bool:
        """Whether every decision so far is known to a quorum."""
        while self._owed:
            seq, electorates = self._owed[0]
            having = {node for node, copy in self._copies.items() if copy.has >= seq}
            if not all(is_quorum(voters, having, incumbent) for voters, incumbent in electorates if voters):
                return False
            self._owed.popleft()
        return True

    def _send(self, node: str, copy: _Copy) -> None:
        while copy.waiting and copy.bytes_under_way < MOST_UNDER_WAY_BYTES:
            after, size, records = copy.waiting[0][0], 0, []
            last = after
            while copy.waiting and size < PIECE_BYTES:
                _, last, body = copy.waiting.popleft()
                records.append(body)
                size += len(body)
            number = self._post(node, m.Replicate(after=after, records=tuple(records)))
            if number:
                copy.under_way.append((number, last, size))
