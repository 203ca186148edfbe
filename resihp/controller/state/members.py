"""Nodes and worker processes as they are now: their record, and their latest reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from resihp.detector.diagnosis.diagnosis import Diagnosis
from resihp.detector.diagnosis.reports import Report
from resihp.protocol.messages import Clue, Declare, Raised, WorkerBeat
from resihp.record.state import KnownNode, KnownWorker


@dataclass
class Node:
    """A node as it is now: its record, and the time of its last heartbeat."""

    known: KnownNode
    last_beat: float = 0.0

    @property
    def name(self) -> str:
        return self.known.name

    @property
    def host(self) -> str:
        return self.known.host

    @property
    def devices(self) -> int:
        return self.known.devices

    @property
    def hardware(self) -> str:
        return self.known.hardware

    @property
    def alive(self) -> bool:
        return self.known.alive


Follows = Literal["", "never", "perhaps", "surely"]


@dataclass
class Member:
    """One worker process as it is now, from spawn to exit."""

    known: KnownWorker
    spawned_at: float = 0.0
    declared: Declare | None = None
    """Its declaration, once it was found to match what the job trains."""
    raised: Raised | None = None
    finished: bool = False
    unwilling: str = ""
    """Why its script cannot start, as the script reported."""
    follows: Follows = ""
    """Whether it failed because another rank ended, judged by its exception or by its last output; empty if that is not
    known."""
    failed_at: float | None = None
    """Time at which it raised or ended, whichever came first."""
    fenced: str | None = None
    """Reason for which the controller killed it, if it did."""
    stepped: int = 0
    beat: WorkerBeat | None = None
    beat_at: float = 0.0
    progress_at: float = 0.0
    exit_status: int | None = None
    clues: tuple[Clue, ...] = ()
    """Clues about its end, from itself and from the kernel."""
    raised_clues: tuple[Clue, ...] = ()
    """Clues in the exception it raised."""
    weighed: tuple[Report, int, Diagnosis] | None = None
    """Its report, the number of diagnoses on record then, and the diagnosis of it alone that follows from both."""

    @property
    def rank(self) -> int:
        return self.known.rank

    @property
    def node(self) -> str:
        return self.known.node

    @property
    def device(self) -> int:
        return self.known.device

    @property
    def pid(self) -> int:
        return self.known.pid

    @property
    def joins(self) -> bool:
        return self.known.joins

    @property
    def alive(self) -> bool:
        return self.known.alive

    @property
    def ready(self) -> bool:
        """Whether it may be given work and has to answer: it has declared itself and was not turned away."""
        return self.known.alive and self.declared is not None
