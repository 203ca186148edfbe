"""Iterations: the ranks' reports, the expected times, and the progress of tuning the job by its measured times."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from resihp.protocol.messages import Evaluated, StepOutcome, Stepped
from resihp.scheduler.cost.profile import Profile


@dataclass
class IterationReports:
    """The ranks' reports of one iteration's step, until it is committed."""

    outcome: StepOutcome
    """The same for all ranks."""
    epoch: int = 0
    """The highest epoch in which any rank took the step."""
    by_rank: dict[int, Stepped | None] = field(default_factory=dict)
    """Ranks that took the step; None where a rank reported it while parking, which does not include its duration."""
    evaluation: Evaluated | None = None
    """The evaluation of the weights after it, if reported before it was committed."""
    _working: frozenset[int] = frozenset()
    _lacking: set[int] = field(default_factory=set)
    """Those of `_working` that have not reported: kept, because each of thousands of reports needs it."""

    def add(self, rank: int, epoch: int, report: Stepped | None) -> None:
        """Add a rank's report; its first one counts."""
        if rank not in self.by_rank:
            self.by_rank[rank] = report
            self.epoch = max(self.epoch, epoch)
        self._lacking.discard(rank)

    def is_complete(self, working: frozenset[int]) -> bool:
        """Return whether all ranks that have work have reported."""
        if self._working is not working:
            self._working, self._lacking = working, set(working - self.by_rank.keys())
        return not self._lacking

    def of_epoch(self, epoch: int) -> dict[int, Stepped]:
        """Return the reports that include a duration, under the plan of `epoch`."""
        timed = ((rank, report) for rank, report in self.by_rank.items() if report is not None and report.seconds)
        return {rank: report for rank, report in timed if report.epoch == epoch}

    @property
    def seconds(self) -> float | None:
        """Duration of the slowest rank; None where no rank reported one."""
        return max((report.seconds for report in self.by_rank.values() if report is not None), default=0.0) or None


@dataclass(frozen=True)
class Forecast:
    """Predicted time of the iteration under way, from its own workload."""

    epoch: int
    iteration: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Promise:
    """Expected effect of a plan that was tuned by measured times: iterations take `ratio` of the time `before`."""

    ratio: float
    before: float
    """Median seconds per token under the previous plan."""
    epoch: int = 0
    """Epoch of the plan; 0 until it is decided."""


@dataclass
class Tuning:
    """Progress of tuning the plan to measured iteration times (`resihp.controller.tuning.retuning`)."""

    epoch: int = 0
    """Epoch of the plan whose iterations are counted."""
    seen: int = 0
    """Iterations committed under it."""
    look_at: int = 1
    """Number of iterations after which the tuner may be asked next."""
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=40))
    """Seconds per token of the latest of them, without the very first."""
    settled: tuple[object, ...] | None = None
    """Layout, shares and orders for which the tuner was last asked, or which it made."""
    profile: Profile | None = None
    """The times with which it was asked."""
    promise: Promise | None = None
    """A prediction that is still to be verified."""
