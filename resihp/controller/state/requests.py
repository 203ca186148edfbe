"""Requests of people and of Slurm to the job: to stop, and to save."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Meaning = Literal["warning", "time-limit", "cancelled", "preempted", "unknown", "operator"]
"""Reason for which the job is asked to stop (`journal.JobSignalled`)."""
COINCIDENCE_S = 2.0
"""Agents signalled within this time, in seconds, were signalled together; deaths this close to the signal count as
caused by it."""
LONE_SIGNAL_S = 60.0
"""Time, in seconds, within which the end of a node counts as caused by a signal to its agent alone."""


@dataclass
class AgentSignal:
    """A signal from outside to a node's agent."""

    signal: int
    at: float
    reported: bool = False


@dataclass(kw_only=True)
class StopRequest:
    """A request that the job stop, and its progress. Times are the controller's."""

    signal: int
    first_at: float
    """Time of the first request: deaths from then on are not failures."""
    asked_at: float
    """Time of the last request: its grace period counts from here."""
    nodes: set[str] = field(default_factory=set)
    """Nodes whose agents were signalled as well."""
    meaning: Meaning | None = None
    """Why the job is asked to stop; None while Slurm is being asked."""
    journaled: bool = False
    """Whether it is in the journal."""
    writers: tuple[int, ...] = ()
    """Ranks that were ordered to save the state they hold."""
    interrupted: str = ""
    """The end of a process after training that only a signal explains."""


@dataclass
class Saves:
    """Checkpoints that operators asked for."""

    askers: dict[int, int] = field(default_factory=dict)
    """Requests still to be answered, and the iteration after which each was made."""
    number: int = 0
    """Number of the last order to write a checkpoint."""
    epoch: int = 0
    """Epoch in which that order was given: its recipient may not have passed it on before a new plan."""
