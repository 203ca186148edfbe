"""The agent's connection to the leader: which supervisor the agent follows, and when it last received a message from
it.

A broken connection is replaced without loss of messages (`resihp.protocol.resumable`). A supervisor first states the
term that it leads. The agent promises itself to one leader for each term, and never to a lower term afterwards. It
accepts a later term if the supervisor has at least the records of the agent's own copy of the journal, or if a quorum
has accepted the supervisor. With a quorum, another supervisor of the same term is accepted, too. Unacknowledged
messages to the previous leader are then dropped, and the new leader receives an inventory of the node
(`messages.Inventory`).

Decides nothing else; `resihp.wrapper.agent.succession.election` decides which agent may start a supervisor when there
is no leader. Owned by `resihp.wrapper.agent.process`.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from random import Random
from typing import Protocol

import msgspec

from resihp.errors import ProtocolError
from resihp.protocol import messages as m
from resihp.protocol.channels import NoAnswerError, SecureChannel
from resihp.protocol.framing import Envelope
from resihp.protocol.resumable import Conversation
from resihp.wrapper.agent.succession.election import accepts

RETRY_S = 3.0
"""Time limit of one attempt to connect. Without succession, also how long to try when no process listens at the
address."""
GUARDIAN_WAIT_S = 30.0
"""Without succession: how long to wait while the guardian keeps the socket open to start another supervisor."""
FIRST_PAUSE_S, PAUSE_GROWTH, MAX_PAUSE_S = 0.2, 1.5, 3.0
"""Longest pause after the second failed attempt, growth factor of the pause for each further attempt, and limit of the
pause."""
MAX_SILENCE_S = 3.0
"""With succession: a leader that sends nothing for this long counts as gone, whatever the state of its connection."""
MAX_LEADERLESS_S = 60.0
"""With succession: how long an agent tries to reach a leader before it ends its workers and itself."""
MAX_REFUSED_S = 15.0
"""With succession: how long an agent that was refused waits for another leader, which may have a quorum."""
WATCH_EVERY_S = 0.25
STALL_S = 1.0
"""If a wake-up of the event loop is late by more than this, the agent itself was stopped or starved, and the leader was
not silent."""

Address = tuple[str, int]


class Follower(Protocol):
    """The methods of the agent that its link to the leader uses."""

    @property
    def log(self) -> int:
        """Number of the last record in the agent's copy of the journal; 0 if it keeps none."""

    async def introduce(self, own_host: str) -> m.Join:
        """Return the agent's description; `own_host` is the agent's address on the connection. The link then sets
        `term` and `log`."""

    def inventory(self) -> m.Inventory: ...

    def obey(self, order: m.AgentOrder) -> None:
        """Carry out an order. Raises ProtocolError for journal records that do not fit the agent's copy."""

    def dismiss(self, grace_s: float) -> None:
        """End the agent: the supervisor no longer needs it, or cannot be reached. `grace_s` as in `Release`."""


class BackOff:
    """Pauses between attempts to connect: none at first, then longer and longer.

    All agents of a job lose their leader at the same moment. Each waits for random times, so that they do not all
    reconnect at once, again and again, to a supervisor that has just started.
    """

    def __init__(self, dice: Random | None = None) -> None:
        self._dice = dice or Random()
        self._attempts = 0

    def pause_s(self) -> float:
        """Return the seconds to pause after a further failed attempt."""
        self._attempts += 1
        if self._attempts == 1:
            return 0.0
        most_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * PAUSE_GROWTH ** (self._attempts - 2))
        return self._dice.uniform(most_s / 2, most_s)

    def begin_anew(self) -> None:
        """Reset the pauses after an attempt that succeeded."""
        self._attempts = 0


class LeaderLink:
    """One agent's link to the leader. `home`: address of the first supervisor, and of supervisors that its guardian
    restarts."""

    def __init__(self, home: Address, key: bytes, follower: Follower, *, succession: bool) -> None:
        self._home = home
        self._key = key
        self._follower = follower
        self._succession = succession
        self.promised = 0
        """The newest term that this agent has promised itself to; 0 if there is none."""
        self.heard_at = time.monotonic()
        """Time at which the leader last sent any message."""
        self.settled = asyncio.Event()
        """Set while the leader has acknowledged all messages."""
        self.trouble = ""
        """Reason why no supervisor could be reached; empty unless `run` gave up for that reason."""
        self._leader: Address = home
        self._hint: Address | None = None
        self._hinted_term = 0
        self._hinted = asyncio.Event()
        self._refused_at: float | None = None
        self._deserted = False
        """Whether no process listens at the leader's address."""
        self._channel: SecureChannel[Envelope[m.AgentOrder]] | None = None
        self._conversation: Conversation[m.AgentOrder] | None = None
        self._lasting: list[tuple[int, m.Signalled | m.SpawnFailed]] = []
        """(number, message) of messages that an inventory does not include. The number is that in the current
        conversation; 0 for none."""

    @property
    def connected(self) -> bool:
        """Whether the agent is connected to a leader, as far as it knows."""
        return self._channel is not None

    @property
    def leader(self) -> Address:
        """The address of the supervisor that the agent has last promised itself to."""
        return self._leader

    @property
    def welcome(self) -> bool:
        """Whether any supervisor has ever accepted this process as its node's agent."""
        return self.promised > 0

    # --- the leader -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Stay connected to the current leader. Return when there was no leader for too long, or when the agent is
        dismissed."""
        troubles: dict[Address, str] = {}
        back_off = BackOff()
        while True:
            for address in self._addresses():
                answered, news = await self._once(address)
                if self._refused_at is not None and not self._succession:
                    return
                if answered:
                    print(f"supervisor: {news}; connecting again", flush=True)
                elif news != troubles.get(address) and self._succession:
                    print(f"supervisor at {address[0]}:{address[1]}: {news}", flush=True)
                troubles[address] = news
                if answered or self._hinted.is_set():
                    break
            else:
                leaderless_s = self._give_up_after()
                if leaderless_s is not None:
                    print(f"supervisor not reached for {leaderless_s:g} s: {news}", flush=True)
                    self.trouble = f"no supervisor at {self._home[0]}:{self._home[1]} for {leaderless_s:g} s: {news}"
                    return
            if answered and self._conversation is not None:
                back_off.begin_anew()
            await self._rest(back_off.pause_s())

    async def _rest(self, pause_s: float) -> None:
        """Wait for `pause_s` seconds, or until the address of a successor becomes known."""
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._hinted.wait()

    async def watch(self) -> None:
        """Abort the connection to a leader that is silent for too long. Used only with succession: otherwise the agent
        waits for the leader as long as it lives."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            now = time.monotonic()
            if now - last > WATCH_EVERY_S + STALL_S:
                self.heard_at += now - last
            last = now
            if self._channel is not None and now - self.heard_at > MAX_SILENCE_S:
                print(f"supervisor: silent for {MAX_SILENCE_S:g} s", flush=True)
                self._channel.abort()

    def point_to(self, term: int, address: Address) -> None:
        """Note the address of a supervisor that is about to lead `term`."""
        if term > self.promised or (term == self.promised and address != self._leader):
            self._hint, self._hinted_term = address, term
            self._hinted.set()

    def _addresses(self) -> list[Address]:
        self._hinted.clear()
        return list(dict.fromkeys(address for address in (self._hint, self._leader, self._home) if address is not None))

    def _give_up_after(self) -> float | None:
        """Return the seconds without a leader after which the agent gives up, if they have passed; else None."""
        now = time.monotonic()
        if self._refused_at is not None and now - self._refused_at > MAX_REFUSED_S:
            return MAX_REFUSED_S
        patience_s = MAX_LEADERLESS_S if self._succession else RETRY_S if self._deserted else GUARDIAN_WAIT_S
        return patience_s if now - self.heard_at > patience_s else None

    async def _once(self, address: Address) -> tuple[bool, str]:
        """Serve one connection until it closes. Return whether the agent followed that supervisor, and why the
        connection ended."""
        self._kept_open = False
        try:
            channel = await self._connect(address)
        except NoAnswerError as error:
            self._kept_open = True
            return False, str(error)
        except (OSError, TimeoutError, ProtocolError) as error:
            self._deserted = isinstance(error, ConnectionRefusedError)
            return False, str(error) or "no answer"
        news = "it closed the connection"
        try:
            await self._listen(channel, address)
        except ProtocolError as error:
            news = str(error)
        except TimeoutError:
            news = "does not state the term that it leads"
        answered = self._channel is channel
        if answered and not self._succession:
            self.heard_at = time.monotonic()
        self._channel = None
        if self._conversation is not None:
            self._conversation.disconnect()
        channel.abort()
        return answered, news

    async def _connect(self, address: Address) -> SecureChannel[Envelope[m.AgentOrder]]:
        """Connect to a supervisor, unless the address of a successor becomes known meanwhile. Raises OSError,
        TimeoutError, ProtocolError."""
        connecting: asyncio.Task[SecureChannel[Envelope[m.AgentOrder]]] = asyncio.create_task(
            SecureChannel.connect(*address, self._key, Envelope[m.AgentOrder], timeout_s=RETRY_S)
        )
        hinted = asyncio.create_task(self._hinted.wait())
        try:
            await asyncio.wait((connecting, hinted), return_when=asyncio.FIRST_COMPLETED)
            if not connecting.done():
                raise TimeoutError("a successor has another address")
            return connecting.result()
        finally:
            connecting.cancel()
            hinted.cancel()

    async def _listen(self, channel: SecureChannel[Envelope[m.AgentOrder]], address: Address) -> None:
        """Send the agent's `Join`, follow the supervisor if permitted, and receive its messages. Raises ProtocolError,
        TimeoutError."""
        join = await self._follower.introduce(channel.own_host)
        other_of_term = address == self._hint and self._hinted_term == self.promised
        begins_anew = self.promised > 0 and (self._conversation is None or other_of_term)
        join = msgspec.structs.replace(join, term=self.promised - begins_anew, log=self._follower.log)
        if self._conversation is not None:
            self._conversation.connect(channel.post, join)
        else:
            with suppress(ConnectionError):
                channel.post(Envelope(message=join))
        async with asyncio.timeout(MAX_SILENCE_S if self._succession else None):
            envelope = await channel.recv()
        if envelope is None:
            return
        if isinstance(envelope.message, m.Lead):
            self._follow(envelope.message, channel, address)
        elif not isinstance(envelope.message, m.Release):
            raise ProtocolError("sends messages before it has stated the term that it leads")
        while envelope is not None:
            if envelope.number == 0 and isinstance(envelope.message, m.Release):
                self._refuse(envelope.message)
                return
            self.heard_at = time.monotonic()
            assert self._conversation is not None
            order = self._conversation.take(envelope)
            if self._conversation.acknowledged == self._conversation.sent:
                self.settled.set()
            if order is not None:
                self._hand_over(order)
            envelope = await channel.recv()

    def _follow(self, lead: m.Lead, channel: SecureChannel[Envelope[m.AgentOrder]], address: Address) -> None:
        """Follow the current leader, or a leader of a later term that may be accepted. Raises ProtocolError for any
        other supervisor."""
        ours = lead.term == self.promised and address == self._leader
        if not ours and not accepts(lead, self.promised, self._follower.log):
            raise ProtocolError(
                f"leads term {lead.term} from record {lead.log}; "
                f"this agent has promised term {self.promised}, and has record {self._follower.log}"
            )
        self._channel = channel
        self._refused_at = None
        if ours and self._conversation is not None:
            return
        self._forget()
        self.promised, self._leader, self._hint = lead.term, address, None
        print(f"supervisor: leads term {lead.term}{' from ' + lead.node if lead.node else ''}", flush=True)
        conversation = self._conversation = Conversation()
        self.settled.clear()
        conversation.post(self._follower.inventory())
        self._lasting = [(conversation.post(message), message) for _, message in self._lasting]
        conversation.connect(channel.post)

    def _refuse(self, release: m.Release) -> None:
        print("supervisor: refuses this agent", flush=True)
        self._refused_at = self._refused_at or time.monotonic()
        if not self._succession:
            self.settled.set()  # later messages would not be read
            self._follower.dismiss(release.grace_s)

    def _hand_over(self, order: m.AgentOrder) -> None:
        match order:
            case m.Lead() | m.Alive():
                pass
            case m.Replicate():
                try:
                    self._follower.obey(order)
                except ProtocolError:
                    self._forget()  # as if it had not arrived: the leader has to start from the agent's actual copy
                    raise
                if self._conversation is not None:
                    self._conversation.acknowledge()
            case _:
                self._follower.obey(order)

    # --- messages to the leader -------------------------------------------------------------------------------

    def send(self, message: m.AgentMessage) -> None:
        """Send a message now or when the agent is connected again. If the leader changes, the inventory replaces the
        message."""
        conversation = self._conversation
        if isinstance(message, m.Beat):
            if conversation is not None:
                conversation.mention(message)
            return
        number = 0
        if conversation is not None:
            self.settled.clear()
            number = conversation.post(message)
        if isinstance(message, m.Signalled) or (isinstance(message, m.SpawnFailed) and message.rank is None):
            self._lasting.append((number, message))
        if conversation is None or not conversation.overdue:
            return
        print("supervisor: does not read", flush=True)
        if self._succession:
            self._forget()
            if self._channel is not None:
                self._channel.abort()
        else:
            self._follower.dismiss(-1.0)

    async def flush_and_close(self, running: asyncio.Task[None], timeout_s: float) -> None:
        """Wait until the leader has acknowledged all messages, if necessary over a new connection; then close the
        connection. Cancels `running`, the task of `run`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.settled.wait()
                running.cancel()  # else it would connect again
                if self._channel is not None:
                    self._channel.close()
                    await self._channel.flushed()
        except TimeoutError:
            print("the supervisor does not read", flush=True)
        self._channel = None

    def _forget(self) -> None:
        """End the conversation with the leader. Keep the messages of `_lasting` that the leader has not acknowledged.

        All other messages are dropped: the inventory that the next leader receives replaces them.
        """
        old, self._conversation = self._conversation, None
        if old is not None:
            old.disconnect()
            self._lasting = [(0, message) for number, message in self._lasting if not 0 < number <= old.acknowledged]
