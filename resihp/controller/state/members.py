"""The current state of nodes and worker processes: their part of the record, and their latest reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from resihp.detector.diagnosis.diagnosis import Diagnosis
from resihp.detector.diagnosis.reports import Report
from resihp.protocol.messages import Clue, Declare, Raised, ScriptTotals, WorkerBeat
from resihp.record.state import KnownNode, KnownWorker


@dataclass
class Node:
    """The current state of a node: its part of the record, and the time of its last heartbeat."""

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
    """The current state of a worker process, from its start to its exit."""

    known: KnownWorker
    spawned_at: float = 0.0
    declared: Declare | None = None
    """Its declaration of model and workload, once found to match the job's; None before that, and after it was turned
    away."""
    raised: Raised | None = None
    finished: bool = False
    unwilling: str = ""
    """Reason for which its script cannot start, as reported by the script; empty if it has not reported one."""
    follows: Follows = ""
    """Whether it failed because another rank ended, judged by its exception or by its last output. Empty if that is not
    known."""
    failed_at: float | None = None
    """Time at which it raised an exception or ended, whichever came first; None before that."""
    fenced: str | None = None
    """Reason for which the controller killed it; None if it did not."""
    hang_evidence: str = ""
    """Stacks of all ranks at the time when it was killed because it hung; empty if it was not."""
    stepped: int = 0
    beat: WorkerBeat | None = None
    beat_at: float = 0.0
    totals: ScriptTotals | None = None
    """What a script has reported with `resihp.iteration` and `resihp.section`; None if it calls neither."""
    progress_at: float = 0.0
    exit_status: int | None = None
    clues: tuple[Clue, ...] = ()
    """Log lines about its end, from the process and from the kernel."""
    raised_clues: tuple[Clue, ...] = ()
    """Significant lines of the traceback that it reported."""
    weighed: tuple[Report, int, Diagnosis] | None = None
    """Cache of the diagnosis of this process alone: its report, the number of recorded diagnoses, and the diagnosis
    that follows from both."""

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
        """Whether it may be given work and has to answer orders: it is alive, has declared the job's model, and was not
        turned away."""
        return self.known.alive and self.declared is not None

    def note_beat(self, beat: WorkerBeat, at: float) -> None:
        """Note a heartbeat. One without totals of a script leaves those of the beat before."""
        self.beat, self.beat_at = beat, at
        if beat.script is not None:
            self.totals = beat.script
