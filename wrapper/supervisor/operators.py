"""Requests of operators to a running job over the supervisor's socket: `resihp stop`, `resihp checkpoint now`, `resihp
inject`, `resihp why-not`.

Rejects invalid requests. The controller decides about all other requests, and its answer is sent to the operator. Owned
by `resihp.wrapper.supervisor.shell`.
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
from resihp.protocol.channels import SecureChannel


class Operators:
    """Requests of operators that wait for an answer, with their connections."""

    def __init__(
        self, fault_ids: Iterator[int], handle: Callable[[api.AnyEvent], None], ending: Callable[[], str | None]
    ) -> None:
        """`handle` hands an event to the controller. `ending` returns the reason to refuse all requests if the job is
        ending, else None."""
        self._fault_ids = fault_ids
        self._handle = handle
        self._ending = ending
        self._asking: dict[int, SecureChannel[Any]] = {}
        self._numbers = itertools.count(1)

    async def serve(self, channel: SecureChannel[Any], first: m.OperatorRequest) -> None:
        """Answer the requests of one connection until it is closed. `first` is the request that was already
        received."""
        request: object = first
        while isinstance(request, m.Inject | m.AskStanding | m.AskStop | m.AskCheckpoint):
            number = next(self._numbers)
            self._asking[number] = channel
            obstacle = self._ending() or (_obstacle(request) if isinstance(request, m.Inject) else None)
            if obstacle is not None:
                self.reply(number, False, obstacle)
            elif isinstance(request, m.AskStanding):
                self._handle(api.StandingAsked(request=number, rank=request.rank))
            elif isinstance(request, m.AskStop):
                self._handle(api.StopAsked(request=number, at_once=request.at_once))
            elif isinstance(request, m.AskCheckpoint):
                self._handle(api.CheckpointAsked(request=number))
            else:
                fault = Fault(
                    id=next(self._fault_ids),
                    kind=request.kind,  # type: ignore[arg-type]
                    rank=request.rank,
                    node=request.node,
                    link=request.link,
                    speed=request.speed,
                )
                self._handle(api.InjectAsked(request=number, fault=fault))
            request = await channel.recv()

    def reply(self, number: int, ok: bool, text: str) -> None:
        channel = self._asking.pop(number, None)
        if channel is not None:
            with suppress(ConnectionError):  # an operator who has disconnected needs no answer
                channel.post(m.OperatorReply(ok=ok, text=text))


def _obstacle(request: m.Inject) -> str | None:
    if request.kind not in get_args(Kind):
        return f"unknown kind {request.kind!r}, one of {', '.join(get_args(Kind))}"
    if [request.rank, request.node, request.link].count(None) != 2:
        return "give one target: --rank R or --node N, or for slow also --link N-M"
    if request.kind == "disconnect" and request.node is None:
        return "disconnect happens to a node, not to a rank"
    if request.link is not None and request.kind != "slow":
        return f"{request.kind} happens to a rank or a node, not to a link"
    if request.link is not None and LINK_MS not in os.environ:
        return LINKS_NEED_TIMES
    if request.kind == "slow" and not (request.speed and 0.01 <= request.speed <= 1.0):
        return "slow needs a speed: --speed 0.5 is half as fast, --speed 1 healthy"
    return None
