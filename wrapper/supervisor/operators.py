"""Operators who ask something of a running job over the supervisor's socket: `resihp stop`, `resihp checkpoint now`,
`resihp inject`, `resihp why-not`.

Refuses what cannot be asked at all; what becomes of the rest is the controller's to decide, and its answer goes back
to whoever asked. Owned by `wrapper.supervisor.shell`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, get_args

from resihp.controller import interface as api
from resihp.faults import LINK_MS, LINKS_NEED_TIMES, Fault, Kind
from resihp.protocol import messages as m
from resihp.protocol.framing import SecureChannel


class Operators:
    """All that are connected, by the number of what they asked last."""

    def __init__(
        self, fault_ids: Iterator[int], tell: Callable[[api.AnyEvent], None], ending: Callable[[], str | None]
    ) -> None:
        """`tell` hands the controller an event; `ending` says that the job is, where nothing can be asked any more."""
        self._fault_ids = fault_ids
        self._tell = tell
        self._ending = ending
        self._asking: dict[int, SecureChannel[Any]] = {}
        self._numbers = itertools.count(1)

    async def serve(self, channel: SecureChannel[Any], first: m.OperatorRequest) -> None:
        """Until it has no more to ask. `first` has been received."""
        asked: object = first
        while isinstance(asked, m.Inject | m.AskStanding | m.AskStop | m.AskCheckpoint):
            number = next(self._numbers)
            self._asking[number] = channel
            obstacle = self._ending() or (_obstacle(asked) if isinstance(asked, m.Inject) else None)
            if obstacle is not None:
                self.reply(number, False, obstacle)
            elif isinstance(asked, m.AskStanding):
                self._tell(api.StandingAsked(request=number, rank=asked.rank))
            elif isinstance(asked, m.AskStop):
                self._tell(api.StopAsked(request=number, at_once=asked.at_once))
            elif isinstance(asked, m.AskCheckpoint):
                self._tell(api.CheckpointAsked(request=number))
            else:
                fault = Fault(
                    id=next(self._fault_ids),
                    kind=asked.kind,  # type: ignore[arg-type]
                    rank=asked.rank,
                    node=asked.node,
                    link=asked.link,
                    speed=asked.speed,
                )
                self._tell(api.InjectAsked(request=number, fault=fault))
            asked = await channel.recv()

    def reply(self, number: int, ok: bool, text: str) -> None:
        channel = self._asking.pop(number, None)
        if channel is not None:
            with suppress(ConnectionError):  # an operator who has left needs no answer
                channel.post(m.OperatorReply(ok=ok, text=text))


def _obstacle(asked: m.Inject) -> str | None:
    if asked.kind not in get_args(Kind):
        return f"unknown kind {asked.kind!r}, one of {', '.join(get_args(Kind))}"
    if [asked.rank, asked.node, asked.link].count(None) != 2:
        return "the target is one of --rank R and --node N, or of slow --link N-M"
    if asked.kind == "disconnect" and asked.node is None:
        return "disconnect happens to a node, not to a rank"
    if asked.link is not None and asked.kind != "slow":
        return f"{asked.kind} happens to a rank or a node, not to a link"
    if asked.link is not None and LINK_MS not in os.environ:
        return LINKS_NEED_TIMES
    if asked.kind == "slow" and not (asked.speed and 0.01 <= asked.speed <= 1.0):
        return "slow needs a speed: --speed 0.5 is half as fast, --speed 1 healthy"
    return None
