"""The transition from one plan to the next, a requested pause, and changes that may call for either."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from resihp.parallelism.plan import Plan
from resihp.parallelism.transfers import Base
from resihp.protocol.messages import Parked, StepOutcome
from resihp.record.state import Occasion

Outlook = Literal["start", "redo", "commit", "between"]
"""The fate of the iteration that was under way when a transition began."""


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
    """Whether all ranks were asked to stop between two iterations."""
    urged: bool = False
    """Whether the ranks that have not parked were asked to stop at once."""
    cautious: bool = False
    """Whether a plan was refused, so that only a plan known to work may be proposed."""
    resizes: bool = False
    """Whether only the number of micro-batches changes, as the job's ramp-up requires."""
    tuned: Plan | None = None
    """The plan it leads to, if that is known already."""
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
    """Time at which a rank last showed that it builds communicators or moves state."""
    park_s: float = 0.0
    plan_s: float = 0.0
    planning_s: float | None = None
    """Seconds of `plan_s` spent on nothing but the decision; None if that was not reported."""
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
    """Verdicts it responds to."""
    resizes: bool = False
    """Whether all ranks stop by themselves, because the next iteration has another number of micro-batches."""
    tuned: Plan | None = None
    """The plan to continue with, unless something happens in between."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change that may call for another plan."""

    reason: str
    since: int
    """First iteration for which it holds."""
    device: Occasion
    """The device or link that is slower, faster or new; or the fact that a better plan was found."""
    failure: int | None = None
    rank: int | None = None
    """The newcomer that could be given work. Unlike a slowdown, it is not expected to pass."""
    question: str = ""
    """The question whose answer is a better plan, as long as that question matches the situation."""
