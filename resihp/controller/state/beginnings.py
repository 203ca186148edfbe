"""Progress of a supervisor towards its first plan: of a new job, or of one whose supervisor died."""

from __future__ import annotations

from dataclasses import dataclass, field

from resihp.controller.interface import AnyEvent
from resihp.protocol.messages import Clue, Inventory
from resihp.record.state import HowLost


@dataclass
class Beginning:
    """Progress of the start, until there is a first plan."""

    enough_at: float | None = None
    """Time since which enough nodes have joined to do without the others."""
    ordered_at: float = 0.0
    """Time at which this supervisor ordered the first processes."""
    awaited: set[int] = field(default_factory=set)
    """Ranks that have neither declared what they train nor been lost."""
    early_at: float | None = None
    """Time of the last loss or error."""
    reported: set[str] = field(default_factory=set)
    """Ends of scripts that were already reported: of many ranks that end alike, the first is reported."""
    met: bool = False
    """Whether ranks have set up communication on their own, without declaring what they train (`messages.Beat`)."""
    last_since: tuple[int, float] | None = None
    """Number of processes that ended, all of them successfully, and since when it is that many while others were still
    running."""
    idle_noticed: bool = False
    """Whether it was reported that the remaining processes do nothing."""
    examined: bool = False
    """Whether devices and links have been measured."""


@dataclass
class Recovery:
    """State of a new supervisor that waits for the agents of a dead one."""

    undisturbed: bool
    """Whether the journal has no plan that was decided and is not in effect."""
    began_at: float | None = None
    first_at: float | None = None
    """Time at which the first agent reconnected."""
    inventories: dict[str, Inventory] = field(default_factory=dict)
    exits: dict[int, int] = field(default_factory=dict)
    lost: dict[str, tuple[str, HowLost]] = field(default_factory=dict)
    """Ranks that ended and nodes that were lost while waiting: how, and why."""
    clues: dict[int, tuple[Clue, ...]] = field(default_factory=dict)
    """Clues about the ends of ranks that arrived while waiting."""
    waiting: list[AnyEvent] = field(default_factory=list)
    """Other events that arrived while waiting."""
