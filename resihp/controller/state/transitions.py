"""From one plan to the next: the transition under way, a pause that is asked for, and what may call for either."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from resihp.parallelism.plan import Plan
from resihp.parallelism.transfers import Base
from resihp.protocol.messages import Parked, StepOutcome
from resihp.record.state import Occasion

Outlook = Literal["start", "redo", "commit", "between"]
"""What becomes of the iteration that was under way when a transition began."""


@dataclass
class Transition:
    """From a failure (or the start of the job) to the first committed iteration under a new plan."""

    epoch: int
    began_at: float
    stage_at: float
    committed_before: int
    initial: bool = False
    attempts: int = 1
    graceful: bool = False
    """Everybody was asked to stop between two iterations."""
    urged: bool = False
    """Whoever has not parked was asked to stop at once."""
    cautious: bool = False
    """A plan was refused: propose no other than one that is known to work."""
    resizes: bool = False
    """Nothing but the number of micro-batches changes, as the job's ramp-up says."""
    tuned: Plan | None = None
    """What it is about, where the plan is known already."""
    waiting: set[int] = field(default_factory=set)
    """Ranks whose answer this stage still needs."""
    asked: set[int] = field(default_factory=set)
    """Ranks that take part: asked to park for this epoch, or of the first plan."""
    parked: dict[int, Parked] = field(default_factory=dict)
    plan: Plan | None = None
    base: Base | None = None
    next_iteration: int = 1
    finish: StepOutcome | None = None
    action: Outlook = "start"
    reason: str = ""
    failures: list[int] = field(default_factory=list)
    moved_at: float = 0.0
    """When a rank last showed that it builds or moves state."""
    park_s: float = 0.0
    plan_s: float = 0.0
    planning_s: float | None = None
    """Of these, those in which nothing was done but to decide; None where nobody has told."""
    groups_s: float = 0.0
    state_s: float = 0.0
    begun_at: float = 0.0
    bytes_moved: int = 0
    extra_bytes: int = 0


@dataclass
class Pause:
    """A request to stop after an iteration, while training goes on."""

    epoch: int
    reason: str
    asked: set[int]
    answers: dict[int, Parked] = field(default_factory=dict)
    failures: list[int] = field(default_factory=list)
    """Verdicts that it answers to."""
    resizes: bool = False
    """Everybody stops by itself: the next iteration has another number of micro-batches."""
    tuned: Plan | None = None
    """The plan to go on with, if nothing comes in between."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """Something that may call for another plan."""

    reason: str
    since: int
    """First iteration in which things were as they are."""
    device: Occasion
    """What is slower or faster, or new; or that a better plan was found."""
    failure: int | None = None
    rank: int | None = None
    """The newcomer that could be given work. Unlike a slow-down, it is not expected to pass."""
    question: str = ""
    """To which a better plan was found, as long as that is the answer to how things are."""
