"""A job's figures, computed record by record from its journal: iterations, goodput, ranks by state, failures. Pure.

`resihp.wrapper.sinks.metrics` and `resihp.wrapper.sinks.tensorboard` read records only through `follow`. A supervisor
that takes over passes all earlier records to `follow`, perhaps a million iterations, in the event loop that also sends
heartbeats; so packed records are processed by column. Goodput is defined as in the ledger
(`resihp.db.reading.queries`): the time that the committed iterations would have taken on all requested devices, divided
by the wall time since the first committed iteration began. Reads no clock.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, field, fields, replace
from typing import Literal

import numpy as np

from resihp.db.reading.costs.goodput import Counting
from resihp.record import journal
from resihp.record.packing import column
from resihp.wrapper.output.job_history import JobHistory
from resihp.wrapper.output.rank_health import rank_health

BUCKETS_S = (
    *(0.01, 0.025, 0.05),
    *(
        round(step * decade, 3)
        for decade in (0.1, 1.0, 10.0, 100.0)
        for step in (1, 1.25, 1.6, 2, 2.5, 3.15, 4, 5, 6.3, 8)
    ),
    1000.0,
)
"""Upper bounds, in seconds, of the histogram of iteration times. They are the same for all jobs, so that histograms of
several jobs can be added up. From 0.1 s on, each bound is about a quarter above the previous one (ISO 3, R10), so a
quantile is wrong by at most a quarter."""
PLANS_KEPT = 8
"""Number of plans of which iterations may still be committed."""
RANK_STATES = ("active", "standby", "starting", "slow", "suspected", "ended")


@dataclass
class Figures:
    """A job's figures, computed from its journal and updated by `follow`. Times are UTC, in seconds since 1970."""

    job: str = ""
    user: str = ""
    version: str = ""
    state: Literal["running", "completed", "failed", "cancelled", "abnormal"] = "running"
    exit_code: int | None = None
    started_at: float | None = None
    began_at: float | None = None
    """Time at which the first committed iteration began; None before the first commit. If the clock was set back
    between two commits, this time is moved back as well, so that the later iteration counts as if it had followed at
    once."""
    committed_at: float | None = None
    committed_epoch: int = 0
    """Epoch of the last committed iteration. The plan in effect may already have a later epoch."""
    last_at: float | None = None
    ended_at: float | None = None
    iteration: int = 0
    iterations: int = 0
    tokens: int = 0
    loss: float | None = None
    validation_loss: float | None = None
    seconds: array[float] = field(default_factory=lambda: array("d"))
    """Seconds of each committed iteration whose time is known."""
    buckets: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    """Number of `seconds` in each bucket of `BUCKETS_S`; the last bucket is for all longer times."""
    seconds_us: int = 0
    """Sum of `seconds`, in microseconds."""
    known_us: int = 0
    """Sum of the iteration times as goodput counts them (`counting`), in microseconds."""
    unused_us: int = 0
    """The part of `known_us` that corresponds to requested devices without work, in microseconds."""
    counting: Counting = field(default_factory=Counting)
    untimed: int = 0
    """Number of committed iterations whose time is unknown, because no rank that reports times survived."""
    last_seconds: float | None = None
    predicted_seconds: float | None = None
    history: JobHistory = field(default_factory=lambda: JobHistory(plans_kept=PLANS_KEPT))
    ended: int = 0
    """Number of workers that have ended, including workers of ranks that were started again."""
    nodes_lost: int = 0
    failures: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """Number of failures by (kind, component, node); the node is empty for a failure without one."""
    recovered: int = 0
    suspicions: Counter[str] = field(default_factory=Counter)
    """Number of suspicions of slowness, by component."""
    detector: str = "warming up"
    """The data that the detector judges by, as in `journal.CoverageChanged`."""
    unwatched: int = 0
    """Number of ranks with work from which the detector has had no report for long."""
    reconfigurations: Counter[str] = field(default_factory=Counter)
    reconfiguration_seconds: dict[str, float] = field(default_factory=dict)
    recovery_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds from failures to the first commits after them, summed by the action that recovered the job."""
    bytes_moved: int = 0
    drains: int = 0
    drain_answers: Counter[tuple[str, str]] = field(default_factory=Counter)
    replacements: dict[int, str] = field(default_factory=dict)
    checkpoints: int = 0
    checkpoint_iteration: int | None = None
    takeovers: int = 0

    def useful_s(self) -> float:
        """Return the seconds that the committed iterations would have taken on all requested devices. An iteration
        whose time is unknown counts as the median time."""
        unknown = self.untimed * float(np.median(self.seconds)) if self.untimed and self.seconds else 0.0
        return (self.known_us - self.unused_us) / 1e6 + unknown

    def wall_s(self, now: float) -> float:
        """Return the seconds from the start of the first committed iteration to `now`, or to the job's end: the last
        commit of a completed job, the last record of a job that was found dead."""
        if self.began_at is None:
            return 0.0
        until = now
        if self.state == "completed":
            until = self.committed_at or now
        elif self.state == "abnormal":
            until = self.last_at or now
        elif self.ended_at is not None:
            until = self.ended_at
        return max(until - self.began_at, 0.0)

    def goodput(self, now: float) -> float | None:
        """Return useful seconds divided by wall seconds, at most 1; None before the first commit."""
        wall_s = self.wall_s(now)
        return min(self.useful_s() / wall_s, 1.0) if wall_s > 0 and self.iterations else None

    @property
    def epoch(self) -> int:
        """Epoch of the plan in effect; 0 before the first plan."""
        return self.history.plans[-1].epoch if self.history.plans else 0

    def nodes(self) -> int:
        """Return the number of nodes that are part of the job now."""
        nodes = self.history.nodes.values()
        return sum(node.joined_at is not None and node.lost_at is None for node in nodes)

    def unused(self, epoch: int) -> float:
        """Return the share of the requested devices that have no work under the plan of this epoch; 0 if the plan is
        unknown."""
        requested, plan = self.history.gpus_requested, self.history.plan(epoch)
        if not requested or plan is None:
            return 0.0
        return max(1.0 - plan.computing / requested, 0.0)

    def ranks(self) -> dict[str, int]:
        """Return the number of ranks in each state. Each rank counts once; a running rank without a role in the plan in
        effect is `starting`."""
        plan, workers = self.history.shown_plan, self.history.workers
        health = rank_health(self.history, None if plan is None else plan.layout)
        counts: Counter[str] = Counter(state for rank, state in health.items() if not workers[rank].ended)
        counts["ended"] = self.ended
        return {state: counts[state] for state in RANK_STATES}


def snapshot(figures: Figures) -> Figures:
    """Return a copy of the figures that later calls of `follow` do not change."""
    return replace(figures, **{each.name: copy(getattr(figures, each.name)) for each in fields(figures)})


def followed(records: Iterable[journal.Record]) -> Figures:
    """Return the figures after these first records of a job."""
    figures = Figures()
    for record in records:
        follow(figures, record)
    return figures


def follow(figures: Figures, record: journal.Record) -> None:
    """Update the figures with the next record."""
    entry, at = record.entry, record.at
    if not (isinstance(entry, journal.JobEnded) and entry.state == "abnormal"):
        figures.last_at = at
    if isinstance(entry, journal.WorkerEnded):
        worker = figures.history.workers.get(entry.rank)
        figures.ended += worker is not None and not worker.ended
    figures.history.follow(record)
    match entry:
        case journal.JobStarted():
            figures.job, figures.user, figures.version = entry.job, entry.user, entry.version
            figures.started_at = at
        case journal.ModelDeclared():
            figures.iteration = max(figures.iteration, entry.declare.resume_from)
        case journal.IterationCommitted():
            _committed(figures, entry, at)
        case journal.EvaluationDone():
            figures.validation_loss = entry.loss
        case journal.IterationsPacked():
            _all_committed(figures, record, entry)
        case journal.NodeLost():
            figures.nodes_lost += 1
        case journal.Suspected(kind="slow", cleared=False):
            figures.suspicions[entry.component] += 1
        case journal.CoverageChanged():
            figures.detector, figures.unwatched = entry.detector, len(entry.unwatched)
        case journal.FailureFound():
            figures.failures[entry.kind, entry.component, entry.node or ""] += 1
        case journal.FailureEnded():
            figures.recovered += 1
        case journal.Reconfigured():
            _reconfigured(figures, entry, at)
        case journal.LeaderChosen():
            figures.takeovers += 1
        case journal.JobEnded():
            figures.state, figures.exit_code, figures.ended_at = entry.state, entry.exit_code, at
        case _:
            _count_upkeep(figures, entry)


def _count_upkeep(figures: Figures, entry: journal.AnyEntry) -> None:
    """Count checkpoints, drains, replacement nodes, and Slurm's answers to requests for drains."""
    match entry:
        case journal.RollbackDecided():
            figures.iteration = entry.iteration
        case journal.CheckpointCommitted():
            figures.checkpoints += 1
            figures.checkpoint_iteration = entry.iteration
        case journal.DrainDecided(measure="drain"):
            figures.drains += 1
        case journal.DrainAnswered():
            figures.drain_answers[entry.step, entry.outcome] += 1
        case journal.ReplacementAsked():
            figures.replacements[entry.replacement] = "asked"
        case journal.ReplacementChanged():
            figures.replacements[entry.replacement] = entry.state


def _reconfigured(figures: Figures, entry: journal.Reconfigured, at: float) -> None:
    figures.reconfigurations[entry.action] += 1
    seconds = figures.reconfiguration_seconds.get(entry.action, 0.0) + entry.seconds
    figures.reconfiguration_seconds[entry.action] = seconds
    figures.bytes_moved += entry.bytes_moved
    if entry.failures:
        mended = figures.history.recovery(entry, at)
        whole = entry.seconds if mended is None else mended.seconds_to_recover
        figures.recovery_seconds[entry.action] = figures.recovery_seconds.get(entry.action, 0.0) + whole


def _committed(figures: Figures, entry: journal.IterationCommitted, at: float) -> None:
    """Count one iteration. Times are rounded to microseconds, as in packed records, so that no counter goes back when a
    later supervisor reads the packed records instead."""
    at = round(at * 1e6) / 1e6
    stands_for = _iterations_of(figures, entry)
    if entry.seconds is None:
        figures.untimed += 1
    else:
        micros = round(entry.seconds * 1e6)
        seconds = micros / 1e6
        figures.seconds.append(seconds)
        figures.seconds_us += micros
        figures.buckets[bisect_left(BUCKETS_S, seconds)] += 1
        passed_s = None if figures.committed_at is None else at - figures.committed_at
        counted_us = stands_for * micros
        if passed_s is not None and passed_s >= 0.0:
            same = entry.epoch == figures.committed_epoch
            counted_us = round(figures.counting.of(stands_for * seconds, passed_s, same_plan=same) * 1e6)
        elif passed_s is not None and figures.began_at is not None:
            figures.began_at += passed_s - seconds
        figures.known_us += counted_us
        figures.unused_us += round(counted_us * figures.unused(entry.epoch))
    if figures.began_at is None:
        figures.began_at = at - (entry.seconds or 0.0)
    figures.committed_at, figures.committed_epoch = at, entry.epoch
    figures.iterations += stands_for
    figures.iteration = entry.outcome.iteration
    figures.tokens += entry.outcome.tokens
    figures.loss = None if entry.outcome.loss_is_unknown else entry.outcome.loss
    figures.last_seconds, figures.predicted_seconds = entry.seconds, entry.predicted_seconds


def _iterations_of(figures: Figures, entry: journal.IterationCommitted) -> int:
    """Return how many iterations an entry stands for: of a script that prints only some of them, those since the entry
    before."""
    if not entry.outcome.is_printed or figures.committed_at is None:
        return 1
    return max(entry.outcome.iteration - figures.iteration, 1)


def _all_committed(figures: Figures, record: journal.Record, entry: journal.IterationsPacked) -> None:
    """Count packed iterations, with the same result as calling `_committed` for each. They are consecutive and have one
    epoch."""
    ats = np.cumsum(column(record, "passed"), dtype=np.int64) / 1e6
    micros = np.asarray(column(record, "seconds"))
    seconds, timed = micros / 1e6, micros >= 0
    before = np.nan if figures.committed_at is None else figures.committed_at
    passed_s = np.diff(ats, prepend=before)
    through = timed & (passed_s >= 0.0)
    same = entry.epoch == figures.committed_epoch or not bool(through[0])
    figures.seconds_us += int(micros[timed].sum())
    taken = np.bincount(np.searchsorted(BUCKETS_S, seconds[timed]), minlength=len(BUCKETS_S) + 1)
    figures.buckets = [before + more for before, more in zip(figures.buckets, taken.tolist(), strict=True)]
    counted_s = figures.counting.of_many(seconds[through], passed_s[through], same_plan=same)
    counted_us = np.concatenate((micros[timed & ~through], np.rint(counted_s * 1e6)))
    figures.known_us += int(counted_us.sum())
    figures.unused_us += int(np.rint(counted_us * figures.unused(entry.epoch)).sum())
    figures.seconds.frombytes(seconds[timed].tobytes())
    figures.untimed += entry.count - int(timed.sum())
    if figures.began_at is None:
        figures.began_at = float(ats[0] - seconds[0] * timed[0])
    set_back = timed & (passed_s < 0.0)
    figures.began_at += float((passed_s - seconds)[set_back].sum())
    figures.committed_at, figures.committed_epoch = float(ats[-1]), entry.epoch
    figures.iterations += entry.count
    figures.iteration = entry.first + entry.count - 1
    figures.tokens += sum(column(record, "tokens"))
    figures.loss = column(record, "loss")[-1]
    figures.last_seconds = _seconds(int(micros[-1]))
    figures.predicted_seconds = _seconds(column(record, "predicted_seconds")[-1])


def _seconds(micros: int) -> float | None:
    return None if micros < 0 else micros / 1e6
