"""Data about the change from one plan to the next: the transition itself, a requested pause, and the causes of
changes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from resihp.parallelism.plan import Plan
from resihp.parallelism.transfers import Base
from resihp.protocol.messages import Parked, StepOutcome
from resihp.record.state import Occasion

Outlook = Literal["start", "redo", "commit", "between"]
"""The fate of the iteration that was in progress when a transition began (`PlanDecided.action`)."""


@dataclass
class Transition:
    """A transition: from a failure, or the start of the job, to the first committed iteration under a new plan."""

    epoch: int
    began_at: float
    stage_at: float
    committed_before: int
    initial: bool = False
    attempts: int = 1
    graceful: bool = False
    """Whether all ranks were asked to stop between two iterations, so that no iteration is lost."""
    urged: bool = False
    """Whether the ranks that have not parked were ordered to park at once."""
    cautious: bool = False
    """Whether a plan was refused, so that only a plan known to work may be proposed now."""
    resizes: bool = False
    """Whether only the number of micro-batches changes, because of the batch ramp-up."""
    tuned: Plan | None = None
    """The next plan, if it was made before the transition; None if it is still to be chosen."""
    waiting: set[int] = field(default_factory=set)
    """Ranks with a pending answer in the present stage."""
    asked: set[int] = field(default_factory=set)
    """Ranks that take part: they were ordered to park in this epoch, or belong to the first plan."""
    parked: dict[int, Parked] = field(default_factory=dict)
    plan: Plan | None = None
    base: Base | None = None
    next_iteration: int = 1
    finish: StepOutcome | None = None
    action: Outlook = "start"
    reason: str = ""
    failures: list[int] = field(default_factory=list)
    held_since: float | None = None
    """Time since which the decision waits, because state or all processes are lost (`rounds.rollback`); else None."""
    waits_for_processes: bool = False
    """Whether the user was told that a rollback waits for processes to start."""
    moved_at: float = 0.0
    """Time at which a rank last reported progress in building communicators or moving state."""
    park_s: float = 0.0
    plan_s: float = 0.0
    planning_s: float | None = None
    """Seconds of `plan_s` that the planner alone took; None if that was not reported."""
    groups_s: float = 0.0
    state_s: float = 0.0
    begun_at: float = 0.0
    bytes_moved: int = 0
    extra_bytes: int = 0


@dataclass
class Pause:
    """A request to all ranks to stop after an iteration; training goes on until then."""

    epoch: int
    reason: str
    asked: set[int]
    answers: dict[int, Parked] = field(default_factory=dict)
    failures: list[int] = field(default_factory=list)
    """Numbers of the failures that the next plan responds to."""
    resizes: bool = False
    """Whether all ranks stop by themselves, because the next iteration has another number of micro-batches."""
    tuned: Plan | None = None
    """The plan to continue with, unless something else happens first; None if it is still to be chosen."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """An event that may call for another plan."""

    reason: str
    since: int
    """First iteration that the change affects."""
    device: Occasion
    """The device or link that became slower or faster, or the new device; or "found" for a better plan that a search
    found."""
    failure: int | None = None
    rank: int | None = None
    """The newcomer that could be given work; None for a change of speed. Unlike a slowdown, a newcomer is not expected
    to go away."""
    question: str = ""
    """The question that the planning process answered with a better plan. It counts only while the question matches the
    situation. Empty for other changes."""
