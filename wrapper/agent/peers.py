"""An agent among its peers: answers candidates, becomes a candidate when its turn comes, and starts a successor if
elected.

The rules are in `resihp.wrapper.agent.succession.election`. Agents ask each other over authenticated connections, with
one question and one answer for each connection. An elected agent starts a supervisor as its child process
(`resihp.wrapper.agent.succession.successor`), on a socket bound to this node's own address, and repeats the address to
all peers until each has acknowledged it. Owned by `resihp.wrapper.agent.process`.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path

from resihp.errors import ProtocolError, UsageError
from resihp.process import most_open_files
from resihp.protocol import messages as m
from resihp.protocol.channels import SecureChannel
from resihp.protocol.serving import Refusals, serve
from resihp.wrapper.agent.succession.election import ANSWER_TIMEOUT_S, RETRY_S, Election, Standing, turn
from resihp.wrapper.agent.succession.journal_copy import Replica
from resihp.wrapper.agent.succession.successor import Successor
from resihp.wrapper.agent.supervisor_link import LeaderLink
from resihp.wrapper.launch.ports import Ports, listen

LOOK_EVERY_S = 0.1
MAX_CONCURRENT_QUESTIONS = 256
"""Limit on the peers that are asked at once. A quarter of the permitted file descriptors is a further limit."""


MAX_LISTED = 16


class Peers:
    """One agent's view of the other agents. `run` elects and starts a successor when there is no leader."""

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
        """`ports`: the range of ports to listen in (`resihp.wrapper.launch.ports`). `incarnation`: as in
        `messages.Join`."""
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
        """False once a supervisor could not start on this node: the agents then have to elect another node."""
        self._asking = asyncio.Semaphore(min(MAX_CONCURRENT_QUESTIONS, most_open_files() // 4))
        self.successor: Successor | None = None
        """The supervisor that runs on this node as a child process of this agent; None if there is none."""

    async def listen(self, host: str) -> int:
        """Listen for peers on this address of the node, if not listening yet; return the port."""
        if self._server is None:
            listener = listen(host, self._ports)
            self._host, self._port = host, listener.getsockname()[1]
            self._server = await serve(listener, self._key, m.PeerMessage, self._answer, Refusals(_say))
        return self._port

    def roster(self, news: m.Roster) -> None:
        """Update the list of agents. It has the same order on all nodes."""
        peers = {} if news.whole else {peer.node: peer for peer in self._roster if peer.node not in news.left}
        peers |= {peer.node: peer for peer in news.peers}
        self._roster = tuple(sorted(peers.values(), key=lambda peer: (len(peer.node), peer.node)))

    async def run(self) -> None:
        """Become a candidate whenever it is this agent's turn. After `retire`, return once no successor runs on this
        node."""
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
        """Stop answering peers."""
        if self._server is not None:
            self._server.close()

    # --- as a candidate ---------------------------------------------------------------------------------------

    async def _stand(self, term: int) -> bool:
        """Ask the other agents for their votes, many at once, until a quorum agrees. Return whether a quorum agrees."""
        question = m.AskVote(node=self._node, term=term, log=self._replica.log)
        answers: asyncio.Queue[m.PeerMessage | None] = asyncio.Queue()

        async def ask(peer: m.Peer) -> None:
            answers.put_nowait(await self._ask(peer, question))

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
            _say(f"succession: term {term}: elected by the agents of {granted}")
        else:
            self._election.give_up(time.monotonic())
            against = _some([f"{vote.node} {vote.reason}" for vote in votes if not vote.granted], "; ")
            _say(f"succession: term {term}: no quorum: {granted} agree; {against or 'no other agent answered'}")
        return chosen

    async def _succeed(self, term: int) -> None:
        """Start a supervisor, send its address to all peers, and watch it until it exits."""
        try:
            listener = listen(self._host, self._ports)
        except UsageError as error:
            _say(f"succession: {error}")
            return
        with listener:
            address = self._host, listener.getsockname()[1]
            self._election.wait_for(self._node, time.monotonic())
            self.successor = Successor(self._run_file, self._node, self._replica.path, listener, term)
            announcing = asyncio.create_task(self._announce(self._others(), term, *address))
            watching = asyncio.create_task(self._end_needless(self.successor, term, address))
            self._link.point_to(term, address)
            try:
                self._may_lead = await self.successor.run()
            finally:
                announcing.cancel()
                watching.cancel()
                self.successor = None

    async def _end_needless(self, successor: Successor, term: int, address: tuple[str, int]) -> None:
        """End a supervisor that started so slowly that another one leads its term or a later one, as the journal says.
        It has decided nothing, but would keep agents from the leader. A supervisor that this agent has followed ends by
        itself."""
        while min(self._link.promised, self._replica.membership.term) < term:
            await asyncio.sleep(LOOK_EVERY_S)
        if self._link.leader != address:
            _say(f"succession: another supervisor leads term {self._link.promised}; the one of this node is ended")
            successor.kill()

    async def _announce(self, peers: list[m.Peer], term: int, host: str, port: int) -> None:
        """Announce a new supervisor, and repeat the announcement to peers that do not answer: they may reconnect later,
        and could not find the leader otherwise."""
        announcement = m.Successor(node=self._node, term=term, host=host, port=port)
        while peers:
            answers = await asyncio.gather(*(self._ask(peer, announcement) for peer in peers))
            peers = [peer for peer, answer in zip(peers, answers, strict=True) if not isinstance(answer, m.Noted)]
            await asyncio.sleep(RETRY_S)

    def _others(self) -> list[m.Peer]:
        return [peer for peer in self._roster if peer.node != self._node]

    async def _ask(self, peer: m.Peer, question: m.AskVote | m.Successor) -> m.PeerMessage | None:
        """Return the peer's answer; None if none arrives in time."""
        async with self._asking:
            channel: SecureChannel[m.PeerMessage] | None = None
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    channel = await SecureChannel.connect(
                        peer.host, peer.port, self._key, m.PeerMessage, timeout_s=ANSWER_TIMEOUT_S
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
                raise ProtocolError(f"{type(question).__name__} is not a question")
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
    """Join all texts of a small job, or the first texts of a large job and the number of the others."""
    more = [f"{len(texts) - MAX_LISTED} more"] if len(texts) > MAX_LISTED else []
    return between.join([*texts[:MAX_LISTED], *more])


def _say(text: str) -> None:
    print(text, flush=True)
