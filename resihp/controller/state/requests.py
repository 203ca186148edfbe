"""Requests to stop the job or to save a checkpoint, by operators or by Slurm, and the end of a job with too few
nodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Meaning = Literal["warning", "time-limit", "cancelled", "preempted", "unknown", "operator"]
"""Reason for which the job is asked to stop (`journal.JobSignalled`)."""
COINCIDENCE_S = 2.0
"""Seconds. Agents that receive a signal within this time of each other were signalled together. Deaths within this time
of a signal count as caused by the signal."""
LONE_SIGNAL_S = 60.0
"""Seconds. If only one node's agent receives a signal, the loss of the node within this time counts as caused by the
signal."""


@dataclass
class AgentSignal:
    """A signal that a node's agent received from a process other than resihp."""

    signal: int
    at: float
    reported: bool = False


@dataclass(kw_only=True)
class StopRequest:
    """A request to stop the job, and its progress. Times are on the controller's clock."""

    signal: int
    first_at: float
    """Time of the first request. Deaths after it are not failures."""
    asked_at: float
    """Time of the last request, at which its grace period begins."""
    nodes: set[str] = field(default_factory=set)
    """Nodes with agents that received a signal as well."""
    meaning: Meaning | None = None
    """Reason for which the job is to stop; None while Slurm is being asked."""
    journaled: bool = False
    """Whether the request is in the journal."""
    writers: tuple[int, ...] = ()
    """Ranks that were ordered to write a checkpoint; empty before the order."""
    interrupted: str = ""
    """Text about a worker that ended abnormally after training, for which only the signal is an explanation; empty if
    there is none."""


@dataclass
class Saves:
    """Checkpoints that operators requested, or that are due before a reservation."""

    askers: dict[int, int] = field(default_factory=dict)
    """Pending requests, by number, with the last committed iteration at the time of each request."""
    since: int | None = None
    """Last committed iteration when a checkpoint before a reservation became due; None if none is due."""
    number: int = 0
    """Number of the last order to write a checkpoint; 0 if there was none."""
    epoch: int = 0
    """Epoch of the last order; 0 if no request is pending. In a new epoch the order is given again, because its
    recipient may not have passed it on."""
    before: int = 0
    """Iteration of the newest checkpoint at the time of the last order."""


@dataclass(frozen=True, kw_only=True)
class Closing:
    """The end of a job with too few nodes, which waits until it is decided what to do about the failed ones."""

    exit_code: int
    reason: str
    requeue: bool
    until: float
    """Time at which the job ends at the latest, on the controller's clock."""
