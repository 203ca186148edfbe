"""What people and Slurm ask of the job: to stop, and to save."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Meaning = Literal["warning", "time-limit", "cancelled", "preempted", "unknown", "operator"]
"""Why somebody wants the job to stop (`journal.JobSignalled`)."""
COINCIDENCE_S = 2.0
"""Agents that are signalled within this time are signalled together; so long deaths around it are nobody's fault."""
LEFT_S = 60.0
"""How long after its agent alone was signalled a node may end for that reason."""


@dataclass
class AgentSignal:
    """Somebody told a node's agent to stop."""

    signal: int
    at: float
    told: bool = False


@dataclass(kw_only=True)
class Departure:
    """The job was asked to stop, and how far it is. Times are the controller's."""

    signal: int
    first_at: float
    """When it began; what dies from then on is nobody's fault."""
    asked_at: float
    """When the last request came: its grace counts from here."""
    nodes: set[str] = field(default_factory=set)
    """Whose agents were signalled as well."""
    meaning: Meaning | None = None
    """None while Slurm is being asked."""
    told: bool = False
    """It is in the journal."""
    writers: tuple[int, ...] = ()
    """Ranks that were ordered to save what they hold."""
    interrupted: str = ""
    """What ended after training as only a signal ends it."""


@dataclass
class Saves:
    """Checkpoints that operators asked for."""

    askers: dict[int, int] = field(default_factory=dict)
    """Requests that are still to be answered, and after which iteration each was made."""
    number: int = 0
    """Of the last order to write one."""
    epoch: int = 0
    """In which that was given: who was told may not have passed it on before another plan."""
