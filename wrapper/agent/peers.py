"""An agent among its peers: it answers candidates, stands as one when it is time, and starts a successor.

The rules are `wrapper.agent.succession.election`'s. Agents ask each other over authenticated connections of one
question and one answer each. A supervisor that a quorum would follow is started here as a child
(`wrapper.agent.succession.successor`), on a socket
bound to this node's own address; all peers are told where it listens until they have noted it. Owned by
`wrapper.agent.process`.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path

from resihp.errors import ProtocolError, UsageError
from resihp.process import most_open_files
from resihp.protocol import messages as m
from resihp.protocol.framing import SecureChannel
from resihp.protocol.serving import Refusals, serve
from wrapper.agent.succession.election import AGAIN_S, ASK_S, Election, Standing, turn
from wrapper.agent.succession.journal_copy import Replica
from wrapper.agent.succession.successor import Successor
from wrapper.agent.supervisor_link import LeaderLink
from wrapper.launch.ports import Ports, listen

LOOK_EVERY_S = 0.1
ASKED_AT_ONCE = 256
"""Peers; fewer where a quarter of the descriptors is less."""


MOST_TOLD = 16


class Peers:
    """One agent's view of the others. `run` looks for a successor whenever that is due."""

    def __init__(
        self,
        node: str,
        run_file: Path,
        key: bytes,
        replica: Replica,
        link: LeaderLink,
        ports: Ports | None = None,
        incarnation: str = "",
    ) -> None:
        """`ports`: the range to listen in (`wrapper.launch.ports`). `incarnation`: as in `messages.Join`."""
        self._node = node
        self._ports = ports
        self._run_file = run_file
        self._key = key
        self._replica = replica
        self._link = link
        self._election = Election(node, incarnation)
        self._roster: tuple[m.Peer, ...] = ()
        self._host = ""
        self._server: asyncio.Server | None = None
        self._port = 0
        self._retired = False
        self._may_lead = True
        """False once a supervisor could not begin here: the agents are to choose another node."""
        self._asking = asyncio.Semaphore(min(ASKED_AT_ONCE, most_open_files() // 4))
        self.successor: Successor | None = None
        """The supervisor that runs on this node as our child."""

    async def listen(self, host: str) -> int:
        """Listen to peers on this address of the node's, from the first call on; returns the port."""
        if self._server is None:
            listener = listen(host, self._ports)
            self._host, self._port = host, listener.getsockname()[1]
            self._server = await serve(listener, self._key, m.PeerMessage, self._answer, Refusals(_say))
        return self._port

    def roster(self, news: m.Roster) -> None:
        """Who else there is, or what has changed; kept in an order that is equal on all nodes."""
        known = {} if news.whole else {peer.node: peer for peer in self._roster if peer.node not in news.left}
        known |= {peer.node: peer for peer in news.peers}
        self._roster = tuple(sorted(known.values(), key=lambda peer: (len(peer.node), peer.node)))

    async def run(self) -> None:
        """Stand as a candidate whenever it is time; once retired, return when no successor runs here."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if self._retired:
                return
            if self._link.connected or not (self._may_lead and self._replica.whole):
                continue
            term = self._election.term_to_stand_for(self._standing())
            if term is not None and await self._stand(term):
                await self._succeed(term)

    def retire(self) -> None:
        """Start no more successors."""
        self._retired = True

    def close(self) -> None:
        """Answer no more."""
        if self._server is not None:
            self._server.close()

    # --- as a candidate ---------------------------------------------------------------------------------------

    async def _stand(self, term: int) -> bool:
        """Ask one after the other, many at once, until a quorum would follow; whether it would."""
        asked = m.AskVote(node=self._node, term=term, log=self._replica.log)
        answers: asyncio.Queue[m.PeerMessage | None] = asyncio.Queue()

        async def ask(peer: m.Peer) -> None:
            answers.put_nowait(await self._ask(peer, asked))

        electors = self._replica.membership.electors
        others = sorted(
            (peer for peer in self._others() if peer.node in electors), key=lambda peer: turn(peer.node, term)
        )
        asking = [asyncio.create_task(ask(peer)) for peer in others]
        votes: list[m.Vote] = []
        chosen = self._election.chosen(term, votes, self._standing())
        try:
            for _ in asking:
                if chosen:
                    break
                if isinstance(vote := await answers.get(), m.Vote):
                    votes.append(vote)
                    chosen = self._election.chosen(term, votes, self._standing())
        finally:
            for task in asking:
                task.cancel()
        granted = _some(sorted([self._node, *(vote.node for vote in votes if vote.granted)]), ", ")
        if chosen:
            _say(f"succession: term {term}: chosen by the agents of {granted}")
        else:
            self._election.give_up(time.monotonic())
            against = _some([f"{vote.node} {vote.reason}" for vote in votes if not vote.granted], "; ")
            _say(f"succession: term {term}: no quorum: {granted} agree; {against or 'nobody else answered'}")
        return chosen

    async def _succeed(self, term: int) -> None:
        """Start a supervisor, tell everybody where, and watch over it to its end."""
        try:
            listener = listen(self._host, self._ports)
        except UsageError as error:
            _say(f"succession: {error}")
            return
        with listener:
            address = self._host, listener.getsockname()[1]
            self._election.wait_for(self._node, time.monotonic())
            self.successor = Successor(self._run_file, self._node, self._replica.path, listener, term)
            telling = asyncio.create_task(self._tell(self._others(), term, *address))
            self._link.point_to(term, address)
            try:
                self._may_lead = await self.successor.run()
            finally:
                telling.cancel()
                self.successor = None

    async def _tell(self, peers: list[m.Peer], term: int, host: str, port: int) -> None:
        """Say it again to those who do not answer: they may be back later, and would never find it."""
        told = m.Successor(node=self._node, term=term, host=host, port=port)
        while peers:
            answers = await asyncio.gather(*(self._ask(peer, told) for peer in peers))
            peers = [peer for peer, answer in zip(peers, answers, strict=True) if not isinstance(answer, m.Noted)]
            await asyncio.sleep(AGAIN_S)

    def _others(self) -> list[m.Peer]:
        return [peer for peer in self._roster if peer.node != self._node]

    async def _ask(self, peer: m.Peer, question: m.AskVote | m.Successor) -> m.PeerMessage | None:
        """The answer; None if there is none in time."""
        async with self._asking:
            channel: SecureChannel[m.PeerMessage] | None = None
            try:
                async with asyncio.timeout(ASK_S):
                    channel = await SecureChannel.connect(
                        peer.host, peer.port, self._key, m.PeerMessage, timeout_s=ASK_S
                    )
                    channel.post(question)
                    return await channel.recv()
            except (OSError, TimeoutError, ProtocolError):
                return None
            finally:
                if channel is not None:
                    channel.abort()

    # --- as a voter -------------------------------------------------------------------------------------------

    async def _answer(self, channel: SecureChannel[m.PeerMessage]) -> None:
        question = await channel.recv()
        answer: m.Vote | m.Noted
        match question:
            case m.AskVote():
                answer = self._election.judge(question, self._standing())
            case m.Successor():
                self._election.wait_for(question.node, time.monotonic())
                self._link.point_to(question.term, (question.host, question.port))
                answer = m.Noted()
            case None:
                return
            case _:
                raise ProtocolError(f"{type(question).__name__} is no question")
        with suppress(ConnectionError):
            channel.post(answer)

    def _standing(self) -> Standing:
        return Standing(
            now=time.monotonic(),
            promised=self._link.promised,
            membership=self._replica.membership,
            heard_at=self._link.heard_at if self._link.welcome else None,
        )


def _some(texts: list[str], between: str) -> str:
    """All of a small job, some of a large one's."""
    more = [f"{len(texts) - MOST_TOLD} more"] if len(texts) > MOST_TOLD else []
    return between.join([*texts[:MOST_TOLD], *more])


def _say(text: str) -> None:
    print(text, flush=True)
