"""Root causes that are not verdicts yet, and faults to be injected."""

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
    """Time before it was found during which something was already wrong and training stood still because of it."""
    diagnosis: Diagnosis | None = None
    """The cause, as far as anything reported it."""
    died: bool = False
    """Whether it is the loss of a node of which nothing is known to be broken."""
    explains: set[str] = field(default_factory=set)
    """Node-level log lines used as evidence here; not to be reused for later failures."""
    condemned: Device | None = None
    """(node, device) taken for dead as soon as its process had ended, because of the reports about it."""

    @property
    def noticed_at(self) -> float:
        return self.found_at - self.earlier_s


@dataclass
class ArmedFault:
    fault: Fault
    refused: str = ""
    """Reason why it could not be injected when its moment came."""

    @property
    def excuse(self) -> str:
        """Reason why it was not injected."""
        in_iteration = self.fault.phase in ("forward", "backward", "reduce", "step")
        return self.refused or f"its {'iteration' if in_iteration else 'transition'} never came"
