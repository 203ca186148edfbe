"""What the shell is given by `wrapper.supervisor.process`, as far as it is used there; tests give others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

from resihp.controller import interface as api
from resihp.detector.probes import Place
from resihp.protocol import messages as m
from resihp.record.journal import AnyEntry, Record


class ControllerLike(Protocol):
    def handle(self, event: api.AnyEvent, now: float) -> list[api.AnyAction]: ...
    def journaled(self, entry: AnyEntry) -> None: ...


class ViewLike(Protocol):
    """`wrapper.sinks.terminal.LiveView`, as used here."""

    def entry(self, record: Record) -> None: ...
    def say(self, level: Literal["progress", "notice", "warning", "error"], text: str) -> None: ...
    def report(self, rank: int, stepped: m.Stepped) -> None: ...
    def beats(self, node: str, beat: m.Beat) -> None: ...
    def output(self, lines: Sequence[str], left_out: int = 0) -> None: ...
    def tick(self) -> None: ...
    def close(self) -> None: ...


class SlurmDeskLike(Protocol):
    """`wrapper.slurm_tasks.desk.SlurmDesk`, as used here."""

    def carry_out(
        self,
        action: api.DrainNode
        | api.ReleaseNode
        | api.AskReplacement
        | api.CancelReplacement
        | api.WatchNode
        | api.AskWhy
        | api.AskTimeLeft,
    ) -> None:
        """Do it in the background; the answer comes as an event."""

    async def run(self) -> None:
        """Whatever has to be looked at from time to time, until cancelled."""

    async def close(self) -> None:
        """The job has ended: cancel open requests for replacements."""


class NoSlurm:
    """The desk of a job without Slurm: nothing is ever asked of it."""

    def carry_out(self, action: api.AnyAction) -> None:
        raise AssertionError(f"{type(action).__name__} without Slurm")

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        pass


class ThinkerLike(Protocol):
    """`wrapper.supervisor.thinking.thinker.Thinker`, as used here."""

    def ask(self, question: api.Think) -> None: ...
    async def close(self) -> None: ...


class NobodyThinks:
    """Of a job whose plans are made when they are needed: questions have no answer."""

    def ask(self, question: api.Think) -> None:
        pass

    async def close(self) -> None:
        pass


class NodeHistory(Protocol):
    """`wrapper.supervisor.node_history.NodeMemory`, as used here."""

    def recall(self, nodes: Sequence[str], tell: Callable[[Mapping[Place, m.Speed]], None]) -> None: ...
