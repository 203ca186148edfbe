"""Root causes that are no verdicts yet, and faults that are to be injected."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from resihp.detector.diagnosis.diagnosis import Diagnosis
from resihp.faults import Fault
from resihp.record.state import Device


@dataclass(kw_only=True)
class Incident:
    """A root cause found during the transition under way; becomes a FailureFound entry when the new plan is decided."""

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
    """How long before it was found something was wrong already, and training was stopped for it."""
    diagnosis: Diagnosis | None = None
    """Why, as far as anybody said so."""
    died: bool = False
    """A node that was lost, and of which nothing is known to be broken."""
    explains: set[str] = field(default_factory=set)
    """Lines about its node as such that it is told by: they are no cause of what comes later."""
    condemned: Device | None = None
    """(node, device) taken for dead as soon as its process had ended, for what was said of it."""

    @property
    def noticed_at(self) -> float:
        return self.found_at - self.earlier_s


@dataclass
class ArmedFault:
    fault: Fault
    refused: str = ""
    """Why it could not be carried out when its moment came, if it came."""

    @property
    def excuse(self) -> str:
        """Why it did not fire."""
        in_iteration = self.fault.phase in ("forward", "backward", "reduce", "step")
        return self.refused or f"its {'iteration' if in_iteration else 'transition'} never came"
