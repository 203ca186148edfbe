"""The progress of a supervisor before it leads training: at the start of a new job, or after the death of the previous
supervisor."""

from __future__ import annotations

from dataclasses import dataclass, field

from resihp.controller.interface import AnyEvent
from resihp.controller.state.iterations import HangWatch, OwnWork
from resihp.protocol.messages import Clue, Inventory
from resihp.record.state import HowLost


@dataclass
class Restarting:
    """The end of a round, before the next one. `waiting`: nodes that have not reported the end of their processes, with
    their ranks. `since`: time of the order. `ended_at`: time since which no process is left; 0 before that.
    `waits_for_nodes`, `waits_for_fence`: whether the user was told that the next round lacks a node, or that processes
    of a silent node may still run."""

    waiting: dict[str, list[int]]
    since: float
    ended_at: float = 0.0
    waits_for_nodes: bool = False
    waits_for_fence: bool = False


@dataclass
class Beginning:
    """The progress of a job's start, until the first plan."""

    enough_at: float | None = None
    """Time since which enough nodes have joined to start without the missing ones; None while too few have."""
    checkpoints_since: float = 0.0
    """Time since which the first processes could be started, but for the search for checkpoints; 0 before that."""
    done_at: float = 0.0
    """Time at which the last process of a script had ended; 0 before that."""
    ordered_at: float = 0.0
    """Time at which this supervisor ordered the first processes to start; 0 before that."""
    awaited: set[int] = field(default_factory=set)
    """Ranks that have neither declared their model nor been lost."""
    early_at: float | None = None
    """Time of the last loss or error during the start; None if there was none."""
    reported: set[str] = field(default_factory=set)
    """Texts of errors and exits that were already reported. If many ranks end in the same way, only the first is
    reported."""
    met: bool = False
    """Whether ranks have created process groups of their own, or reported iterations, without declaring a model
    (`messages.Beat`)."""
    last_since: tuple[int, float] | None = None
    """(number, time): the number of processes that have ended, all of them successfully, and the time since which it is
    this number. None while no process is running, or any has failed."""
    idle_noticed: bool = False
    """Whether the user was told that the remaining processes are idle."""
    ending: Restarting | None = None
    """The end of this round; None until it is decided to start the script again."""
    restarted: float | None = None
    """Time at which the round before was ordered to end; None if this is the first round, or not known after a
    take-over."""
    hang: HangWatch = field(default_factory=HangWatch)
    own_work: OwnWork = field(default_factory=OwnWork)
    examined: bool = False
    """Whether all devices and links have been probed."""


@dataclass
class Recovery:
    """The progress of a take-over: a new supervisor waits for the agents of the dead one."""

    undisturbed: bool
    """Whether the newest plan in the journal is the plan in effect, so that no change of plan was in progress."""
    began_at: float | None = None
    first_at: float | None = None
    """Time at which the first agent reconnected; None before that."""
    inventories: dict[str, Inventory] = field(default_factory=dict)
    exits: dict[int, int] = field(default_factory=dict)
    lost: dict[str, tuple[str, HowLost]] = field(default_factory=dict)
    """`exits`: exit status of each rank that ended during the wait. `lost`: reason and kind of the loss of each node
    that was lost during the wait."""
    clues: dict[int, tuple[Clue, ...]] = field(default_factory=dict)
    """Log lines about the ranks that ended during the wait."""
    waiting: list[AnyEvent] = field(default_factory=list)
    """Other events that arrived during the wait, in order; they are handled after it."""
