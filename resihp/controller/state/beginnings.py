"""How far a supervisor is with its first plan: of a new job, or of one whose supervisor died."""

from __future__ import annotations

from dataclasses import dataclass, field

from resihp.controller.interface import AnyEvent
from resihp.controller.state.examinations import SecondLooks
from resihp.protocol.messages import Clue, Inventory
from resihp.record.state import HowLost


@dataclass
class Beginning:
    """How far the start is, until there is a first plan."""

    enough_at: float | None = None
    """Since when so many nodes are there that the others can be spared."""
    ordered_at: float = 0.0
    """When this supervisor asked for the first processes."""
    awaited: set[int] = field(default_factory=set)
    """Ranks that have neither declared what they train nor been lost."""
    early_at: float | None = None
    """When something was last lost, or went wrong."""
    told: set[str] = field(default_factory=set)
    """What scripts ended with, as was told: of many ranks that end alike, the first is."""
    met: bool = False
    """Ranks have met by themselves, without having said what they train (`messages.Beat`)."""
    last_since: tuple[int, float] | None = None
    """How many processes had ended, all of them well, and since when so many, while others were still there."""
    idle_noticed: bool = False
    """It was said that those do nothing."""
    examined: bool = False
    """Devices and links have been measured."""
    second_looks: SecondLooks | None = None
    """While devices are in doubt."""


@dataclass
class Recovery:
    """A new supervisor waits for the agents of a dead one."""

    undisturbed: bool
    """The journal knows of no plan that was decided and is not in effect."""
    began_at: float | None = None
    first_at: float | None = None
    """When the first agent came back."""
    inventories: dict[str, Inventory] = field(default_factory=dict)
    exits: dict[int, int] = field(default_factory=dict)
    lost: dict[str, tuple[str, HowLost]] = field(default_factory=dict)
    """Ranks that ended and nodes that were lost meanwhile: how, and why."""
    clues: dict[int, tuple[Clue, ...]] = field(default_factory=dict)
    """What was said of the ends of ranks meanwhile."""
    waiting: list[AnyEvent] = field(default_factory=list)
    """What else came meanwhile."""
