"""Nodes and worker processes as they are now: what is on record of them, and what is heard of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from resihp.detector.diagnosis.diagnosis import Diagnosis, Report
from resihp.protocol.messages import Clue, Declare, Raised, WorkerBeat
from resihp.record.state import KnownNode, KnownWorker


@dataclass
class Node:
    """A node as it is now: what is on record of it, and what is heard of it."""

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
    """What it trains, once that was found to be what the job trains."""
    raised: Raised | None = None
    finished: bool = False
    unwilling: str = ""
    """Why its script cannot start, as it said itself."""
    follows: Follows = ""
    """Whether it failed for another rank's end, by what it raised, or wrote before it ended; empty: it does not say."""
    failed_at: float | None = None
    """When it raised, or ended, whichever was first."""
    fenced: str | None = None
    """Why the controller killed it, if it did."""
    stepped: int = 0
    beat: WorkerBeat | None = None
    beat_at: float = 0.0
    progress_at: float = 0.0
    exit_status: int | None = None
    clues: tuple[Clue, ...] = ()
    """What was said of its end, by itself and by the kernel."""
    raised_clues: tuple[Clue, ...] = ()
    """What is read of that in what it raised."""
    weighed: tuple[Report, int, Diagnosis] | None = None
    """Of what came the last verdict on it alone, of how many earlier ones, and which."""

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
        """Whether it may be given work, and has to answer: it declared, and was not turned away."""
        return self.known.alive and self.declared is not None


def natural(name: str) -> tuple[tuple[int, str | int], ...]:
    """Sort key that puts n2 before n10."""
    return tuple((1, int(part)) if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name) if part)
