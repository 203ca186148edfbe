"""Data about bad, lost and new nodes: the times of events, and the answers that are pending."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class GivingBack:
    """The progress of giving a lost node back to Slurm. `lost_at`: the time at which this supervisor lost the node."""

    lost_at: float
    tries: int = 0
    """Number of times that Slurm was asked to take the node back."""
    next_try_at: float = 0.0
    asked: bool = False
    """Whether Slurm's answer to the last request is pending."""


@dataclass
class ReservedTime:
    """The next reservation on nodes of the job. `at`: its beginning, on the controller's clock."""

    name: str
    nodes: tuple[str, ...]
    at: float
    saves: bool = False
    """Whether the checkpoint before it has been ordered."""


@dataclass
class NodeMaintenance:
    """The state of all measures against bad nodes and requests for new ones."""

    found_at: dict[str, float] = field(default_factory=dict)
    """Time at which a failure was attributed to each node, by node."""
    decided_at: dict[int, float] = field(default_factory=dict)
    """Time at which each measure was decided, by the number of the drain."""
    releases: dict[str, GivingBack] = field(default_factory=dict)
    """Progress of giving back each lost node, by node."""
    unwatched: list[str] = field(default_factory=list)
    """Lost nodes for which no order to watch Slurm's view has been given yet."""
    asked_at: dict[int, float] = field(default_factory=dict)
    """Time at which this supervisor requested each replacement, by the number of the request."""
    ask_after: float = 0.0
    """Earliest time of the next request for a node, after the last request was refused, ended or not worth its cost."""
    script_due_at: float = 0.0
    """Time from which the nodes of a script that does not declare a model are looked at again."""
    declined: tuple[str, ...] = ()
    """Lost nodes for which a request was last declined, so that the same refusal is recorded only once."""
    waits_s: list[float] = field(default_factory=list)
    """Seconds from each of this supervisor's requests to the arrival of the node."""
    ending: set[str] = field(default_factory=set)
    """Nodes of replacements whose own Slurm job is ending, which their agents were told by a signal."""
    taken_by_slurm: set[str] = field(default_factory=set)
    """Nodes of replacements whose own Slurm job was ended or suspended for a reason other than the node."""
    reserved: ReservedTime | None = None
    """The next reservation on nodes of the job, as far as Slurm has reported it."""
    kept: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Nodes that an administrator drains but that the layout needs, with Slurm's (state, reason) at the time of that
    decision."""
