"""The journal's copies: records go to every agent that votes, and a decision counts once a quorum of them has it.

Owned by `wrapper.supervisor.shell`, which holds back what follows a decision until `settled`. What an agent has is
known from what it has acknowledged, and from the number with which its copy ended when it joined. An agent that comes
late, or votes from some plan on, gets all that it lacks, in pieces that its connection can take, and goes on keeping
its copy when it votes no more. Records go out together (`flush`), encoded once for all who lack the same, once they are
on the leader's own disk: no copy has what a supervisor that is started again there would lack. Decides nothing;
`resihp.record.quorum` says what a quorum is.
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
MOST_UNDER_WAY_BYTES = 4 << 20
PIECES_KEPT = 8

Encoded = tuple[int, bytes]
"""A record's number, and the record as encoded."""


class JournalSource(Protocol):
    """`wrapper.supervisor.journaling.writer.JournalWriter`, as used here."""

    @property
    def written(self) -> int: ...
    def common(self, log: int) -> int: ...
    def recent(self, seq: int, most_bytes: int) -> list[Encoded] | None: ...
    def fetch(self, seq: int, most_bytes: int, give: Callable[[list[Encoded]], None]) -> None: ...


@dataclass
class _Copy:
    """One agent's copy. `has`: number of the last record that it is known to hold; `sent`: of the last that is on its
    way, or there."""

    has: int
    sent: int
    under_way: deque[tuple[int, int, int]] = field(default_factory=deque)
    """(number of the message, number of its last record, bytes) sent and not acknowledged."""
    bytes_under_way: int = 0
    fetching: bool = False


class _Piece:
    """Some records in a row, as one message: encoded once for all who lack them, deflated where they are several."""

    def __init__(self, after: int, records: list[Encoded], flushed: int) -> None:
        """`flushed`: what was to go out when it was made; it may end before that."""
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
    """All copies of one journal. `post(node, message)` returns the message's number, 0 if nobody is there; `message` is
    an encoded `Replicate`."""

    def __init__(
        self,
        journal: JournalSource,
        membership: Membership,
        post: Callable[[str, msgspec.Raw], int],
        enlist: Callable[[str], None],
    ) -> None:
        """`membership` has read the journal so far; from here on it follows what is `appended`.

        `enlist(node)` tells that its agent is to keep a copy from now on.
        """
        self.membership = membership
        self._enlist = enlist
        self._following: dict[str, int] = {}
        """Agents that follow us, and the number with which their copies ended when they joined."""
        self._journal = journal
        self._post = post
        self._copies: dict[str, _Copy] = {}
        self._owed: deque[tuple[int, tuple[tuple[frozenset[str], str], ...]]] = deque()
        """(number, electorates) of decisions that no quorum is known to have; the first one is waited for."""
        self._lacking = 0
        """So many agents at least have yet to acknowledge something before the first of them is settled: with thousands
        of them, not every acknowledgement is worth counting all."""
        self._flushed = journal.written
        self._pieces: dict[int, _Piece] = {}
        """What went out last, by the number before it: many lack the same."""

    def appended(self, record: Record, decision: bool) -> None:
        """A record was added to the journal: it goes out with the next `flush`.

        A decision needs a quorum of those who vote before it and after it.
        """
        electorates = self.membership.electorates if decision else ()
        self.membership.apply(record)
        if decision:
            self._owed.append((record.seq, electorates + self.membership.electorates))
            self._lacking = 0 if len(self._owed) == 1 else self._lacking
        for node in (self._keepers - self._copies.keys()) & self._following.keys():
            self._begin(node)

    def flush(self) -> None:
        """Send what came to disk since the last time, to all who have all before it."""
        if self._flushed == self._journal.written:
            return
        self._flushed = self._journal.written
        for node, copy in self._copies.items():
            self._send(node, copy)

    def joined(self, node: str, log: int) -> None:
        """An agent accepts us; its copy ends with number `log`, and is right as far as ours goes."""
        self._following[node] = log
        if node in self._copies or node in self._keepers:
            self._begin(node)

    def _begin(self, node: str) -> None:
        self._enlist(node)
        log = self._following[node]
        has = self._journal.common(log)
        copy = self._copies[node] = _Copy(has=has, sent=has)
        self._lacking = 0
        if log > has and has == self._flushed:  # what it has beyond ours was never decided
            self._post(node, _encoded(has, []))
        self._send(node, copy)

    def left(self, node: str) -> None:
        self._following.pop(node, None)
        self._copies.pop(node, None)

    def acknowledged(self, node: str, number: int) -> None:
        """The agent has all messages up to this number."""
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
        """Whose agents have a say now, or in what no quorum is known to have."""
        owed = (voters for _, electorates in self._owed for voters, _ in electorates)
        return self.membership.electors.union(*owed)

    @property
    def asks_nobody(self) -> bool:
        """Whether no agent has ever joined, or those that had were lost: whoever comes first is enough."""
        return self.membership.quorum(frozenset())

    @property
    def accepted(self) -> bool:
        """Whether a quorum of agents has joined us."""
        return self.membership.quorum(self._copies.keys())

    @property
    def settled(self) -> bool:
        """Whether every decision so far is known to a quorum."""
        while self._owed and self._lacking <= 0:
            seq, electorates = self._owed[0]
            having = {node for node, copy in self._copies.items() if copy.has >= seq}
            without = [v for v, incumbent in electorates if v and not is_quorum(v, having, incumbent)]
            if without:
                self._lacking = max(max(1, (len(voters) + 1) // 2 - len(voters & having)) for voters in without)
                return False
            self._owed.popleft()
        return not self._owed

    def _send(self, node: str, copy: _Copy) -> None:
        while copy.sent < self._flushed and copy.bytes_under_way < MOST_UNDER_WAY_BYTES and not copy.fetching:
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
        """Whether somebody is there to send it to."""
        number = self._post(node, piece.message())
        copy.sent = piece.last
        if number:
            copy.under_way.append((number, piece.last, piece.size))
            copy.bytes_under_way += piece.size
        return number > 0

    def _keep(self, piece: _Piece) -> _Piece:
        self._pieces.pop(piece.after, None)
        self._pieces[piece.after] = piece
        if len(self._pieces) > PIECES_KEPT:
            del self._pieces[next(iter(self._pieces))]
        return piece
