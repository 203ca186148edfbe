"""A job's commits on one clock, and the interruptions between them: the basis of `cost_accounts`. Pure; reads nothing.

The clock starts with the first committed iteration and never goes back: if the ledger's clock went back between two
commits, the later iteration counts as if it had followed at once. An iteration of unknown duration counts with the
median duration. If rows were thinned, a row represents the iterations removed before it. A script that does not report
to resihp may print only some iterations; then a row, which has no tokens, represents those before it as well.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from resihp.record.recovery import Moments, first_of

Row = dict[str, Any]
Floats = NDArray[np.float64]

SAME_MOMENT_S = 1e-3
"""Largest difference, in seconds, at which two times count as equal, because databases round times."""


def devices_of(nodes: int, gpus_per_node: int, configuration: object) -> int:
    """Return the number of devices in the requested layout: the devices of all nodes of the job's own allocation except
    its spares, whether the nodes joined or not. The configuration in the journal has the number of spare nodes
    (`[slurm] spares`)."""
    slurm = configuration.get("slurm") if isinstance(configuration, Mapping) else None
    spares = slurm.get("spares") if isinstance(slurm, Mapping) else 0
    return max(nodes - (spares if isinstance(spares, int) else 0), 0) * gpus_per_node


class Interruption(msgspec.Struct, frozen=True, kw_only=True):
    """Time lost between two commits to failures or to a change of plan. `iteration`: the first iteration after the
    interruption, None if there was none. `epoch`: epoch of the reconfiguration that ended the interruption, None
    without a recovery."""

    kind: str
    """Kind of the first failure, or `reconfiguration`."""
    failures: tuple[int, ...]
    epoch: int | None
    iteration: int | None
    before: int
    """Index of the last commit before the interruption was noticed; -1 if there was none."""
    after: int
    """Index of the first commit after the interruption; the number of commits if there was none."""
    detect_s: float
    redo_s: float
    reconfigure_s: float

    @property
    def lost_s(self) -> float:
        return self.detect_s + self.redo_s + self.reconfigure_s


@dataclass
class Counting:
    """Computes the counted time of each committed iteration; iterations must come in order of commits.

    The recorded seconds of an iteration are those of the slowest rank, and ranks begin an iteration one after the
    other: added up, iterations would exceed the elapsed time and hide losses. So an iteration counts at most the time
    since the last commit, plus the time by which that commit was late under the same plan. Several iterations that are
    committed at once share the time before them.
    """

    _spare_s: float = 0.0

    def of(self, seconds: float, passed_s: float, *, same_plan: bool) -> float:
        """Return the counted seconds of one iteration. `passed_s`: time since the previous commit, at least 0.
        `same_plan`: whether the previous commit was under the same plan."""
        bunched = passed_s < 0.5 * seconds
        counted = min(seconds, passed_s + self._spare_s)
        if bunched:
            self._spare_s += passed_s - counted
        else:
            self._spare_s = max(passed_s - seconds, 0.0) if same_plan else 0.0  # otherwise there was a transition
        return counted

    def of_many(self, seconds: Floats, passed_s: Floats, *, same_plan: bool) -> Floats:
        """Return the counted seconds of consecutive iterations under one plan. `same_plan`: whether the commit before
        the first of them was under the same plan."""
        if not seconds.size:
            return np.zeros(0)
        late = np.maximum(passed_s - seconds, 0.0)
        if not same_plan:
            late[0] = 0.0
        spare = np.concatenate(([self._spare_s], late))  # before each iteration and after the last
        for i in np.flatnonzero(passed_s < 0.5 * seconds):
            spare[i + 1] = spare[i] + passed_s[i] - min(seconds[i], passed_s[i] + spare[i])
        self._spare_s = float(spare[-1])
        return np.asarray(np.minimum(seconds, passed_s + spare[:-1]), dtype=np.float64)


class Course(msgspec.Struct, frozen=True, kw_only=True):
    """Commits on a clock that starts with the first committed iteration and never goes back. Times are in seconds, by
    commit."""

    iterations: tuple[int, ...]
    epochs: tuple[int, ...]
    ends_s: tuple[float, ...]
    took_s: tuple[float, ...]
    """Seconds of all iterations that the row represents, by commit."""
    begin: datetime | None
    """Start of the first iteration; of the first plan if no iteration is committed; None without a plan."""
    finished: tuple[datetime, ...]
    wall_s: float
    before_s: float
    """Seconds from the job's start to `begin`."""
    after_s: float
    """Seconds from the end of the wall time to the end of the job."""

    @property
    def committed_s(self) -> float:
        return min(sum(self.took_s), self.wall_s)

    def shares_of(self, done_s: float) -> tuple[float | None, float | None]:
        """Return goodput and ETTR for `done_s` seconds of work done; None if they are undefined."""
        held_s = self.before_s + self.wall_s + self.after_s
        goodput = done_s / self.wall_s if self.wall_s > 0 and self.took_s else None
        return goodput, min(done_s / held_s, 1.0) if held_s > 0 and self.took_s else None


def course(job: Row, iterations: Sequence[Row], plans: Sequence[Row], now: datetime) -> Course:
    """Return the clock of a job. `iterations` must be in order."""
    ends, took = _ends_and_seconds(iterations)
    wall_s = ends[-1] if ends else 0.0
    end = job["last_entry_at"] if job["state"] == "abnormal" else job["ended_at"] or now
    begin = plans[0]["decided_at"] if plans else None
    after_s = 0.0
    if iterations:
        first, last = iterations[0], iterations[-1]
        begin = first["finished_at"] - timedelta(seconds=took[0])
        tail_s = max((end - last["finished_at"]).total_seconds(), 0.0)
        if job["state"] == "completed":
            after_s = tail_s
        else:
            wall_s += tail_s
    elif begin is not None:
        wall_s = max((end - begin).total_seconds(), 0.0)
    return Course(
        iterations=tuple(row["iteration"] for row in iterations),
        epochs=tuple(row["epoch"] for row in iterations),
        ends_s=tuple(ends),
        took_s=tuple(took),
        begin=begin,
        finished=tuple(row["finished_at"] for row in iterations),
        wall_s=wall_s,
        before_s=max(((begin or end) - job["started_at"]).total_seconds(), 0.0),
        after_s=after_s,
    )


def _ends_and_seconds(iterations: Sequence[Row]) -> tuple[list[float], list[float]]:
    """Return, by commit, the time on the clock and the seconds of the iterations that the row represents."""
    known_seconds = [row["seconds"] for row in iterations if row["seconds"] is not None]
    typical = statistics.median(known_seconds) if known_seconds else 0.0
    ends, took = [], []
    at, former, counts = 0.0, None, Counting()
    for row in iterations:
        seconds = typical if row["seconds"] is None else row["seconds"]
        if former is None:
            at = seconds
        else:
            behind = row["iteration"] - former["iteration"]
            passed = (row["finished_at"] - former["finished_at"]).total_seconds()
            whole = behind * seconds
            at += passed if passed >= 0.0 else whole
            if behind > 1 and row["tokens"]:
                seconds = whole if passed < 0.0 else min(whole, passed)
            elif passed >= 0.0:
                seconds = counts.of(whole, passed, same_plan=row["epoch"] == former["epoch"])
        ends.append(at)
        took.append(seconds)
        former = row
    return ends, took


def interruptions(
    job: Row, clock: Course, failures: Sequence[Row], reconfigurations: Sequence[Row]
) -> list[Interruption]:
    """Return the interruptions of training, in order of time. A transition that ended several failures has the kind of
    the first one."""
    summed = (0.0, *accumulate(clock.took_s))
    first_of: dict[int, int] = {}
    for index, epoch in enumerate(clock.epochs):
        first_of.setdefault(epoch, index)
    mended: dict[int, list[Row]] = {}
    for row in sorted(failures, key=lambda row: row["noticed_at"]):
        if row["recovered_epoch"] is not None:
            mended.setdefault(row["recovered_epoch"], []).append(row)

    def span(
        caused_by: list[Row], epoch: int | None, action: str, began_s: tuple[float, float], after: int, end_s: float
    ) -> Interruption:
        """Return the interruption between the last commit before the failure was noticed and `end_s`, the time of
        commit `after` (or the end, if that commit does not exist).

        `began_s`: when the failure happened, and when it was noticed.
        """
        failed_s, noticed_s = began_s
        before = min(bisect_right(clock.ends_s, noticed_s + SAME_MOMENT_S), after) - 1
        begin_s = clock.ends_s[before] if before >= 0 else 0.0
        meanwhile = summed[min(after, len(clock.took_s))] - summed[before + 1]
        own = clock.took_s[after] if after < len(clock.took_s) else 0.0
        lost_s = max(end_s - begin_s - meanwhile - own, 0.0)
        unnoticed = min(max(noticed_s - begin_s - meanwhile, 0.0), lost_s)
        detect = min(max(noticed_s - failed_s, 0.0), unnoticed)
        redo = unnoticed - detect if action == "redo" else 0.0
        return Interruption(
            kind=caused_by[0]["kind"] if caused_by else "reconfiguration",
            failures=tuple(row["failure"] for row in caused_by),
            epoch=epoch,
            iteration=clock.iterations[after] if after < len(clock.iterations) else None,
            before=before,
            after=after,
            detect_s=detect,
            redo_s=redo,
            reconfigure_s=lost_s - detect - redo,
        )

    spans = []
    for row in reconfigurations:
        after = first_of.get(row["epoch"], bisect_right(clock.finished, row["finished_at"]) - 1)
        if after < 0:
            continue
        end_s, caused_by = clock.ends_s[after], mended.get(row["epoch"], [])
        began_s = _began_s(caused_by, clock.finished[after], end_s) or (end_s - row["seconds"],) * 2
        spans.append(span(caused_by, row["epoch"], row["action"], began_s, after, end_s))
    known_at, known_s = (clock.finished[-1], clock.ends_s[-1]) if clock.finished else (clock.begin, 0.0)
    if known_at is not None and (unmended := _unrecovered(job, clock, failures)):
        stopped_s = _began_s(unmended, known_at, known_s)
        assert stopped_s is not None, "unmended failures exclude those that are only slow"
        spans.append(span(unmended, None, "redo", stopped_s, len(clock.finished), clock.wall_s))
    return spans


def _began_s(failures: Sequence[Row], known_at: datetime, known_s: float) -> tuple[float, float] | None:
    """Return the times of the first failure and of the first notice, on the clock of commits, which shows `known_s` at
    the moment `known_at`.

    None if nothing stopped training: iterations continue while something is slow, and only the change of plan
    interrupts them.
    """
    stopped = [Moments.of_times(row["failed_at"], row["noticed_at"]) for row in failures if row["kind"] != "fail-slow"]
    if not stopped:
        return None
    first, known_time = first_of(stopped), known_at.timestamp()
    return known_s - (known_time - first.began_at), known_s - (known_time - first.noticed_at)


def _unrecovered(job: Row, clock: Course, failures: Sequence[Row]) -> list[Row]:
    """Return the failures that stopped training until the job's end, the first one first. Failures after which training
    continued are not included."""
    last = clock.finished[-1] if clock.finished else clock.begin
    over = job["state"] not in ("running", "completed")
    unrecovered = [
        row
        for row in failures
        if row["recovered_epoch"] is None
        and row["kind"] != "fail-slow"
        and (over or last is None or (row["noticed_at"] - last).total_seconds() >= -SAME_MOMENT_S)
    ]
    return sorted(unrecovered, key=lambda row: row["noticed_at"])
