"""What ranks say of iterations, what these should take, and how far the job is with being tuned by their times."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from resihp.protocol.messages import Evaluated, StepOutcome, Stepped
from resihp.scheduler.cost.profile import Profile


@dataclass
class IterationReports:
    """What ranks said of one iteration's step, until it is committed."""

    outcome: StepOutcome
    """The same for all."""
    epoch: int = 0
    """The highest in which anybody took it."""
    by_rank: dict[int, Stepped | None] = field(default_factory=dict)
    """Who took it; None where a rank said so as it parked, which does not tell how long it took."""
    evaluation: Evaluated | None = None
    """Of the weights after it, told before it was committed."""
    _working: frozenset[int] = frozenset()
    _lacking: set[int] = field(default_factory=set)
    """Of these ranks, those that have not reported: kept, for thousands of reports each ask for it."""

    def add(self, rank: int, epoch: int, report: Stepped | None) -> None:
        """What a rank says first counts."""
        if rank not in self.by_rank:
            self.by_rank[rank] = report
            self.epoch = max(self.epoch, epoch)
        self._lacking.discard(rank)

    def is_complete(self, working: frozenset[int]) -> bool:
        """Whether all ranks that have work have reported."""
        if self._working is not working:
            self._working, self._lacking = working, set(working - self.by_rank.keys())
        return not self._lacking

    def of_epoch(self, epoch: int) -> dict[int, Stepped]:
        """Reports that tell how long it took, under one plan."""
        known = ((rank, report) for rank, report in self.by_rank.items() if report is not None and report.seconds)
        return {rank: report for rank, report in known if report.epoch == epoch}

    @property
    def seconds(self) -> float | None:
        """The slowest rank's; None where none told."""
        return max((report.seconds for report in self.by_rank.values() if report is not None), default=0.0) or None


@dataclass(frozen=True)
class Forecast:
    """What the iteration under way should take, by its own workload."""

    epoch: int
    iteration: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Promise:
    """What a plan that was tuned by measured times is to be: `ratio` of what iterations took `before`."""

    ratio: float
    before: float
    """Median seconds a token under the plan before it."""
    epoch: int = 0
    """Of the plan; 0 until it is decided."""


@dataclass
class Tuning:
    """How far the job is with being tuned by its own times (`resihp.controller.tuning.retuning`)."""

    epoch: int = 0
    """Of the plan whose iterations are counted."""
    seen: int = 0
    """Iterations committed under it."""
    look_at: int = 1
    """With which of them the tuner may be asked next."""
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=40))
    """Seconds a token of the last of them, the very first left out."""
    settled: tuple[object, ...] | None = None
    """Layout, shares and orders for which the tuner was asked last, or which it made."""
    profile: Profile | None = None
    """With which times it was asked."""
    promise: Promise | None = None
    """That is still to be looked up."""
