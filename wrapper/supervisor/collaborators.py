"""Interfaces of the objects that `resihp.wrapper.supervisor.process` passes to the shell; tests pass other
implementations."""

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
    """The part of `resihp.wrapper.sinks.terminal.LiveView` that the shell uses."""

    def entry(self, record: Record) -> None: ...
    def say(self, level: Literal["progress", "notice", "warning", "error"], text: str) -> None: ...
    def report(self, rank: int, stepped: m.Stepped) -> None: ...
    def beats(self, node: str, beat: m.Beat) -> None: ...
    def output(self, lines: Sequence[str], left_out: int = 0) -> None: ...
    def tick(self) -> None: ...
    def close(self) -> None: ...


class SlurmDeskLike(Protocol):
    """The part of `resihp.wrapper.slurm_tasks.desk.SlurmDesk` that the shell uses."""

    def carry_out(
        self,
        action: api.DrainNode
        | api.ReleaseNode
        | api.AskReplacement
        | api.CancelReplacement
        | api.WatchReplacements
        | api.WatchNode
        | api.AskWhy
        | api.AskTimeLeft,
    ) -> None:
        """Carry out an action in the background; its result is reported as an event."""

    def ask_anew(self) -> None:
        """Report again what is reported in seconds from now, because the controller's clock stood still."""

    async def run(self) -> None:
        """Poll Slurm regularly, until cancelled."""

    async def close(self) -> None:
        """Cancel open requests for replacements, because the job has ended."""


class NoSlurm:
    """Replaces the Slurm desk in a job without Slurm, which gets no requests."""

    def carry_out(self, action: api.AnyAction) -> None:
        raise AssertionError(f"{type(action).__name__} without Slurm")

    def ask_anew(self) -> None:
        pass

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        pass


class ThinkerLike(Protocol):
    """The part of `resihp.wrapper.supervisor.thinking.thinker.Thinker` that the shell uses."""

    def ask(self, question: api.Think) -> None: ...
    async def close(self) -> None: ...


class NoPlanAhead:
    """Replaces the planning process in a job that does not plan ahead: questions get no answer."""

    def ask(self, question: api.Think) -> None:
        pass

    async def close(self) -> None:
        pass


class NodeHistory(Protocol):
    """The part of `resihp.wrapper.supervisor.node_history.NodeMemory` that the shell uses."""

    def recall(self, nodes: Sequence[str], report: Callable[[Mapping[Place, m.Speed]], None]) -> None: ...
