"""Replication of the journal to agents: sends records to every voting agent; a decision counts once a quorum has it.

Owned by `resihp.wrapper.supervisor.shell`, which delays the actions that follow from a decision until `settled`. The
content of an agent's copy is known from the agent's acknowledgements, and from the number of the copy's last record
when the agent joined. An agent that joins late, or that becomes a voter with a later plan, receives all missing
records, in pieces that fit its connection, and keeps its copy up to date even after it no longer votes. Records are
sent in batches (`flush`), encoded once for all agents that lack the same records, and only after they are on the
leader's own disk: so no copy is ever ahead of the journal that a restarted supervisor reads there. Decides nothing;
`resihp.record.quorum` defines a quorum.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import msgspec

from resihp.protocol.forwarding import replicate
from resihp.record.journal import Record
from resihp.record.quorum import Membership, is_quorum

PIECE_BYTES = 1 << 20
MAX_IN_FLIGHT_BYTES = 4 << 20
MAX_CACHED_PIECES = 8

Encoded = tuple[int, bytes]
"""(number of a record, the encoded record)."""


class JournalSource(Protocol):
    """The methods of `resihp.wrapper.supervisor.journaling.writer.JournalWriter` that replication uses."""

    @property
    def written(self) -> int: ...
    def common(self, log: int) -> int: ...
    def recent(self, seq: int, most_bytes: int) -> list[Encoded] | None: ...
    def fetch(self, seq: int, most_bytes: int, give: Callable[[list[Encoded]], None]) -> None: ...


@dataclass
class _Copy:
    """State of one agent's copy of the journal. `has`: number of the last record that the agent has acknowledged;
    `sent`: number of the last record that was sent to it."""

    has: int
    sent: int
    under_way: deque[tuple[int, int, int]] = field(default_factory=deque)
    """(number of the message, number of its last record, size in bytes) of messages that are not acknowledged yet."""
    bytes_under_way: int = 0
    fetching: bool = False


class _Piece:
    """Consecutive records as one message: encoded once for all agents that lack these records, and compressed from the
    second use on."""

    def __init__(self, after: int, records: list[Encoded], flushed: int) -> None:
        """`flushed`: number of the last record that was due when the piece was made; a piece of limited size may end
        before it."""
        self.after, self.flushed = after, flushed
        self.last = records[-1][0]
        self.size = sum(len(body) for _, body in records)
        self._bodies = [body for _, body in records]
        self._message: msgspec.Raw | None = None
        self._is_deflated = False

    def message(self) -> msgspec.Raw:
        if self._message is None or not self._is_deflated:
            self._is_deflated = self._message is not None
            self._message = _encoded(self.after, self._bodies, smaller=self._is_deflated)
        return self._message


def _encoded(after: int, bodies: list[bytes], *, smaller: bool = False) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(replicate(after, bodies, smaller=smaller)))


class Replication:
    """All agents' copies of one journal. `post(node, message)` sends an encoded `Replicate` and returns the message's
    number; 0 if the node has no agent."""

    def __init__(
        self,
        journal: JournalSource,
        membership: Membership,
        post: Callable[[str, msgspec.Raw], int],
        enlist: Callable[[str], None],
    ) -> None:
        """`membership` reflects the journal so far; from here on it is updated with the records that are `appended`.

        `enlist(node)` is called for each agent that is to keep a copy from now on.
        """
        self.membership = membership
        self._enlist = enlist
        self._following: dict[str, int] = {}
        """Nodes whose agents follow this leader, and the number of the last record in each agent's copy when it
        joined."""
        self._journal = journal
        self._post = post
        self._copies: dict[str, _Copy] = {}
        self._owed: deque[tuple[int, tuple[tuple[frozenset[str], str], ...]]] = deque()
        """(record number, electorates) of decisions that no quorum is known to have, oldest first."""
        self._lacking = 0
        """Lower bound on the number of acknowledgements that the oldest decision in `_owed` still needs. With thousands
        of agents it would be too expensive to count all acknowledgements whenever one arrives."""
        self._flushed = journal.written
        self._pieces: dict[int, _Piece] = {}
        """The most recently sent pieces, by the number of the record before each: many agents lack the same records."""

    def appended(self, record: Record, decision: bool) -> None:
        """Note a record that was added to the journal; it is sent with the next `flush`.

        A decision needs a quorum of the agents that vote before it, and a quorum of those that vote after it.
        """
        electorates = self.membership.electorates if decision else ()
        self.membership.apply(record)
        if decision:
            self._owed.append((record.seq, electorates + self.membership.electorates))
            self._lacking = 0 if len(self._owed) == 1 else self._lacking
        for node in (self._keepers - self._copies.keys()) & self._following.keys():
            self._begin(node)

    def flush(self) -> None:
        """Send the records that have reached the disk since the last call to all agents that have the earlier
        records."""
        if self._flushed == self._journal.written:
            return
        self._flushed = self._journal.written
        for node, copy in self._copies.items():
            self._send(node, copy)

    def joined(self, node: str, log: int) -> None:
        """Note that an agent follows this leader. Its copy ends with record `log`, and agrees with the leader's journal
        as far as both go."""
        self._following[node] = log
        if node in self._copies or node in self._keepers:
            self._begin(node)

    def _begin(self, node: str) -> None:
        self._enlist(node)
        log = self._following[node]
        has = self._journal.common(log)
        copy = self._copies[node] = _Copy(has=has, sent=has)
        self._lacking = 0
        if log > has and has == self._flushed:  # the copy's further records were never decided
            self._post(node, _encoded(has, []))
        self._send(node, copy)

    def left(self, node: str) -> None:
        self._following.pop(node, None)
        self._copies.pop(node, None)

    def acknowledged(self, node: str, number: int) -> None:
        """Note that the agent has received all messages up to this number."""
        copy = self._copies.get(node)
        if copy is None:
            return
        before = copy.has
        while copy.under_way and copy.under_way[0][0] <= number:
            _, copy.has, size = copy.under_way.popleft()
            copy.bytes_under_way -= size
        self._lacking -= copy.has > before
        self._send(node, copy)

    @property
    def _keepers(self) -> frozenset[str]:
        """Nodes whose agents vote now, or voted on decisions that no quorum is known to have."""
        owed = (voters for _, electorates in self._owed for voters, _ in electorates)
        return self.membership.electors.union(*owed)

    @property
    def needs_no_votes(self) -> bool:
        """Whether no agent has ever joined, or all agents were lost: then the first agent to join is a quorum."""
        return self.membership.quorum(frozenset())

    @property
    def accepted(self) -> bool:
        """Whether a quorum of agents follows this leader."""
        return self.membership.quorum(self._copies.keys())

    @property
    def settled(self) -> bool:
        """Whether a quorum has every decision so far."""
        while self._owed and self._lacking <= 0:
            seq, electorates = self._owed[0]
            holders = {node for node, copy in self._copies.items() if copy.has >= seq}
            missing_electorates = [v for v, incumbent in electorates if v and not is_quorum(v, holders, incumbent)]
            if missing_electorates:
                self._lacking = max(
                    max(1, (len(voters) + 1) // 2 - len(voters & holders)) for voters in missing_electorates
                )
                return False
            self._owed.popleft()
        return not self._owed

    def _send(self, node: str, copy: _Copy) -> None:
        while copy.sent < self._flushed and copy.bytes_under_way < MAX_IN_FLIGHT_BYTES and not copy.fetching:
            piece = self._pieces.get(copy.sent)
            if piece is None or piece.flushed < self._flushed:
                records = self._journal.recent(copy.sent, PIECE_BYTES)
                if records is None:
                    copy.fetching = True
                    self._journal.fetch(copy.sent, PIECE_BYTES, partial(self._fetched, node, copy))
                    return
                piece = self._keep(_Piece(copy.sent, records, self._flushed))
            if not self._sent(node, copy, piece):
                return

    def _fetched(self, node: str, copy: _Copy, records: list[Encoded]) -> None:
        copy.fetching = False
        if not records or self._copies.get(node) is not copy:
            return
        if self._sent(node, copy, self._keep(_Piece(copy.sent, records, self._flushed))):
            self._send(node, copy)

    def _sent(self, node: str, copy: _Copy, piece: _Piece) -> bool:
        """Send a piece to the node's agent; return False if the node has no agent."""
        number = self._post(node, piece.message())
        copy.sent = piece.last
        if number:
            copy.under_way.append((number, piece.last, piece.size))
            copy.bytes_under_way += piece.size
        return number > 0

    def _keep(self, piece: _Piece) -> _Piece:
        self._pieces.pop(piece.after, None)
        self._pieces[piece.after] = piece
        if len(self._pieces) > MAX_CACHED_PIECES:
            del self._pieces[next(iter(self._pieces))]
        return piece
