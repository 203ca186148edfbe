"""Bad nodes, lost ones and new ones: since when they are known of, and what is waited for."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class GivingBack:
    """How far a lost node is given back to Slurm, and since when it is lost for this supervisor."""

    lost_at: float
    tries: int = 0
    """How often Slurm was asked to take it back."""
    next_try_at: float = 0.0
    asked: bool = False
    """Slurm's answer to the last try is still to come."""


@dataclass
class Upkeep:
    """Bad nodes and new ones: since when this supervisor knows of them, and what it waits for."""

    found_at: dict[str, float] = field(default_factory=dict)
    """When each verdict was found, by node."""
    decided_at: dict[int, float] = field(default_factory=dict)
    """When each drain was decided."""
    releases: dict[str, GivingBack] = field(default_factory=dict)
    """Of lost nodes."""
    unwatched: list[str] = field(default_factory=list)
    """Nodes that were lost just now."""
    asked_at: dict[int, float] = field(default_factory=dict)
    """When each node was asked for that this supervisor asked for."""
    ask_after: float = 0.0
    """No node is asked for before: the last request was refused, or ended."""
    declined: tuple[str, ...] = ()
    """Lost nodes for which nobody was asked for, as was told last."""
    waits_s: list[float] = field(default_factory=list)
    """How long nodes took to come that this supervisor asked for."""
    kept: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Nodes that an administrator drains and that the layout cannot do without, as Slurm saw them then."""
