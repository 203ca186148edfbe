"""Root causes that are not journaled as failures yet, and faults to be injected."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from resihp.detector.diagnosis.diagnosis import Diagnosis
from resihp.faults import Fault
from resihp.record.state import Device


@dataclass(kw_only=True)
class Incident:
    """A root cause found during the transition in progress. It becomes a FailureFound entry when the new plan is
    decided."""

    kind: Literal["fail-stop", "communication", "program"]
    component: Literal["process", "device", "node", "link", "script"]
    cause: str
    evidence: str
    found_at: float
    iteration: int
    epoch: int
    ranks: set[int] = field(default_factory=set)
    node: str | None = None
    device: int | None = None
    detect_s: float | None = None
    earlier_s: float = 0.0
    """Seconds before `found_at` during which training already stood still because of this cause."""
    diagnosis: Diagnosis | None = None
    """The diagnosis from logs and kernel messages; None if there is none."""
    died: bool = False
    """Whether a node was lost although none of its hardware is known to be broken."""
    explains: set[str] = field(default_factory=set)
    """Log lines about the node that were used as evidence. They explain no later failure."""
    condemned: Device | None = None
    """(node, device) that counts as dead because of the reports about the process that ended there; None if no device
    does."""

    @property
    def noticed_at(self) -> float:
        return self.found_at - self.earlier_s


@dataclass
class ArmedFault:
    fault: Fault
    refused: str = ""
    """Reason for which the fault could not be injected when it was due; empty if there is none."""

    @property
    def excuse(self) -> str:
        """Reason for which the fault was not injected."""
        in_iteration = self.fault.phase in ("forward", "backward", "reduce", "step")
        return self.refused or f"its {'iteration' if in_iteration else 'transition'} never came"
