"""Maintenance of nodes (bad, lost and new ones): when each became known, and the answers that are awaited."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class GivingBack:
    """Progress of giving a lost node back to Slurm, and when this supervisor lost it."""

    lost_at: float
    tries: int = 0
    """Number of times Slurm was asked to take it back."""
    next_try_at: float = 0.0
    asked: bool = False
    """Whether Slurm's answer to the last try is still to come."""


@dataclass
class NodeMaintenance:
    """Bad nodes and new ones: when this supervisor learned of them, and the answers it waits for."""

    found_at: dict[str, float] = field(default_factory=dict)
    """Time at which each verdict was found, by node."""
    decided_at: dict[int, float] = field(default_factory=dict)
    """Time at which each drain was decided, by number."""
    releases: dict[str, GivingBack] = field(default_factory=dict)
    """Progress of giving back each lost node."""
    unwatched: list[str] = field(default_factory=list)
    """Nodes that were lost just now, for which Slurm's view is not watched yet."""
    asked_at: dict[int, float] = field(default_factory=dict)
    """Time at which this supervisor asked for each replacement, by number."""
    ask_after: float = 0.0
    """No node is asked for before this time, because the last request was refused or ended."""
    declined: tuple[str, ...] = ()
    """Lost nodes for which no replacement was asked for, as last reported."""
    waits_s: list[float] = field(default_factory=list)
    """Seconds that nodes took to arrive, for requests of this supervisor."""
    kept: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Nodes that an administrator drains but that the layout cannot do without: Slurm's (state, reason) at the time."""
