"""Data about iterations: the ranks' reports, the predicted times, and the progress of tuning the plan to measured
times."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from resihp.detector.hangs.culprits import Look
from resihp.detector.offline.iteration_model import IterationModel
from resihp.detector.own_seconds import OwnSeconds
from resihp.protocol.messages import Evaluated, ScriptTotals, StepOutcome, Stepped
from resihp.scheduler.cost.profile import Profile


@dataclass
class IterationReports:
    """The ranks' reports of an iteration's step, kept until the iteration is committed."""

    outcome: StepOutcome
    """Outcome of the step, equal on all ranks."""
    epoch: int = 0
    """The highest epoch in which any rank took the step."""
    by_rank: dict[int, Stepped | None] = field(default_factory=dict)
    """Reports of the ranks that took the step, by rank. None if the rank reported the step while parking, without a
    duration."""
    evaluation: Evaluated | None = None
    """Evaluation of the weights after this iteration, if it was reported before the commit; else None."""
    _working: frozenset[int] = frozenset()
    _lacking: set[int] = field(default_factory=set)
    """Ranks of `_working` that have not reported. Kept up to date, because it is needed at each of thousands of
    reports."""

    def add(self, rank: int, epoch: int, report: Stepped | None) -> None:
        """Add a rank's report. Only the first report of a rank counts."""
        if rank not in self.by_rank:
            self.by_rank[rank] = report
            self.epoch = max(self.epoch, epoch)
        self._lacking.discard(rank)

    def is_complete(self, working: frozenset[int]) -> bool:
        """Return whether all ranks with work have reported. `working`: these ranks."""
        if self._working is not working:
            self._working, self._lacking = working, set(working - self.by_rank.keys())
        return not self._lacking

    def of_epoch(self, epoch: int) -> dict[int, Stepped]:
        """Return the reports that were made under the plan of `epoch` and include a duration, by rank."""
        timed = ((rank, report) for rank, report in self.by_rank.items() if report is not None and report.seconds)
        return {rank: report for rank, report in timed if report.epoch == epoch}

    @property
    def seconds(self) -> float | None:
        """Seconds that the slowest rank took; None if no rank reported a duration."""
        return max((report.seconds for report in self.by_rank.values() if report is not None), default=0.0) or None


@dataclass
class LossWatch:
    """The losses that a script prints (`scripts.bad_losses`), as this supervisor has seen them."""

    round: int = 0
    history: tuple[float, ...] = ()
    """The last good losses before the present round; empty if there were few."""
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=50))
    """The last good losses of the present round."""
    finite_ranks: set[int] = field(default_factory=set)
    """Ranks with a loss that was finite."""
    bad_since: int = 0
    """Iteration of the first of the bad losses that were printed last; 0 if the last loss was good."""
    bad_count: int = 0
    is_hopeless: bool = False
    """Whether so many losses in a row were bad that going on is worthless."""
    is_refused: bool = False
    """Whether the script cannot be started again because of them."""

    @property
    def has_recovered(self) -> bool:
        """Whether the losses of the present round were good for long enough to belong to their history."""
        return len(self.recent) == self.recent.maxlen

    def begin_round(self, number: int, min_history: int) -> None:
        if len(self.recent) >= min_history:
            self.history = tuple(self.recent)
        self.recent.clear()
        self.round, self.bad_since, self.bad_count, self.is_hopeless, self.is_refused = number, 0, 0, False, False

    def good(self, rank: int, loss: float) -> None:
        self.bad_since, self.bad_count, self.is_hopeless, self.is_refused = 0, 0, False, False
        if math.isfinite(loss):
            self.finite_ranks.add(rank)
            self.recent.append(loss)

    def bad(self, iteration: int) -> None:
        self.bad_since, self.bad_count = self.bad_since or iteration, self.bad_count + 1


@dataclass
class PrintedCounter:
    """The iteration counter that a script prints, as this supervisor has seen it."""

    rank: int = -1
    """Rank with the last line that counted; -1 before the first."""
    iteration: int = 0
    """Its last iteration, which is less than `JobRecord.committed` while iterations are done again."""
    at: float = 0.0
    """Time of the last line that counted."""
    noted_at: float = float("-inf")
    """Time of the last `CounterSeen` entry."""
    losses: LossWatch = field(default_factory=LossWatch)
    is_finite: bool = True
    """Whether the last loss was finite, or none was printed."""
    goal: int | None = None
    """The last iteration of the script; None if not printed."""
    caller: int | None = None
    """Rank whose calls of `resihp.iteration` count, so that printed lines do not; None if no rank has called it."""
    has_losses: bool = False
    """Whether this rank has reported a loss."""
    model: IterationModel | None = None
    """Predicts the seconds of iterations with a known workload; None before the first."""


@dataclass
class HangWatch:
    """The inspection of a script without new iterations (`scripts.script_hangs`)."""

    gaps_s: deque[float] = field(default_factory=lambda: deque(maxlen=50))
    """Seconds between the latest printed iterations."""
    longest_s: float = 0.0
    """The longest gap so far."""
    is_begun: bool = False
    """Whether an iteration was printed in this round."""
    asked_at: float | None = None
    """Time of the last order to inspect all processes; None if the script is not suspected to hang."""
    is_judged: bool = False
    """Whether the answers to that order have been judged."""
    looks: dict[int, Look] = field(default_factory=dict)
    """The answers, by rank."""
    before: dict[int, Look] = field(default_factory=dict)
    """The answers to the order before."""
    nccl: str = ""
    """What NCCL's service has answered last; empty without an answer."""
    unmoved: list[int] = field(default_factory=list)
    """The ranks that the last judgement found to hold up the script and to do nothing."""
    moved_at: float = float("-inf")
    """Time of the last inspection that found a rank, for which the others wait, in other functions than before."""

    def forget_looks(self) -> None:
        """Begin anew: there is progress again, or the ranks that hang are ended."""
        self.asked_at, self.looks, self.before, self.is_judged, self.nccl = None, {}, {}, False, ""
        self.unmoved, self.moved_at = [], float("-inf")

    def of_next_round(self) -> HangWatch:
        """Return the watch of the next round, which keeps the known gaps."""
        return HangWatch(gaps_s=self.gaps_s, longest_s=self.longest_s)


@dataclass
class OwnWork:
    """The ranks' own work in a script that measures it (`scripts.slow_ranks`)."""

    before: dict[int, ScriptTotals] = field(default_factory=dict)
    """Totals of each rank at the beginning of the present window."""
    began_at: float = 0.0
    """Time at which the present window began."""
    seconds: OwnSeconds = field(default_factory=OwnSeconds)

    def of_next_round(self, ranks: int) -> OwnWork:
        """Return the state of the next round, which keeps what is usual if it has as many ranks."""
        if self.seconds.ranks != ranks:
            return OwnWork()
        self.seconds.begin_round()
        return OwnWork(seconds=self.seconds)


@dataclass(frozen=True)
class Forecast:
    """Predicted seconds of the iteration in progress, computed from the iteration's workload."""

    epoch: int
    iteration: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Promise:
    """Expected effect of a plan tuned to measured times: an iteration takes `ratio` times as long as `before`."""

    ratio: float
    before: float
    """Median seconds per token under the previous plan."""
    epoch: int = 0
    """Epoch of the tuned plan; 0 until the plan is decided."""


@dataclass
class Tuning:
    """Progress of tuning the plan to measured iteration times (`resihp.controller.tuning.retuning`)."""

    epoch: int = 0
    """Epoch of the plan under which `seen` counts iterations."""
    seen: int = 0
    """Number of iterations committed under the plan of `epoch`."""
    look_at: int = 1
    """Value of `seen` from which on the tuner may be called again."""
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=40))
    """Seconds per token of the latest iterations under the plan, without the plan's first iteration."""
    settled: tuple[object, ...] | None = None
    """Layout, shares of micro-batches and orders of work with which the tuner was last called, or that it returned;
    None if it was never called."""
    profile: Profile | None = None
    """The measured times with which the tuner was last called."""
    promise: Promise | None = None
    """The tuned plan's predicted effect, until it is verified; None if there is none."""
