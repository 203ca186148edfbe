"""Seconds that a running job has lost, by cause, as counters that never decrease. Used by
`resihp.wrapper.sinks.metrics`.

The model of lost time is in `resihp.db.reading.costs.cost_accounts`; this module applies it to a window of the journal
instead of the ledger's rows. After every `SETTLE_EVERY_COMMITS` commits, the time up to `SETTLE_LAG_COMMITS` commits
ago is settled: it is added to the counters once and never changed again, since by then it is known which failures
interrupted it. So the counters are a few iterations late, and complete at the end of a job.

Settling depends only on records, and times are rounded to microseconds, as in packed records. So a supervisor that
takes over and reads the journal computes exactly the same counters. They differ from the ledger's account, which covers
the whole job, in two ways: medians are those of the window; and a slow-down that is discovered after more than
`CONTEXT_COMMITS` iterations counts only for the last `CONTEXT_COMMITS` of them. Reads no clock. Computes no GPU-hours,
as it does not know which devices were held.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

import numpy as np

from resihp.db.reading.costs.goodput import Floats, course
from resihp.db.reading.costs.job_timeline import timeline
from resihp.db.reading.costs.timeline import CAUSES, SHARES, HeldTime
from resihp.record import journal
from resihp.record.packing import unpack

Row = dict[str, Any]
SETTLE_EVERY_COMMITS = 64
SETTLE_LAG_COMMITS = 16
CONTEXT_COMMITS = 128
"""Number of settled commits that stay in the window: they give the usual times of iterations and of the pauses between
them."""
_SLOW = SHARES.index("slow")


class LostTime:
    """Counters of lost seconds. `submit` only appends a record; `step` processes records.

    `past`: earlier records, packed or not. Not safe to use from several threads, except that `submit` may be called
    during the other methods.
    """

    def __init__(self, past: Iterable[journal.Record] = ()) -> None:
        self._waiting = deque(past)
        self._unpacked: Iterator[journal.Record] = iter(())
        self._settled: Floats = np.zeros(len(SHARES))
        self._rest: Floats | None = None
        """Lost seconds after the settled time, by `SHARES`; None until the job has ended."""
        self._over = False
        """Whether the job has ended, so that later records do not count. False for a job that was only found dead, as
        it may continue."""
        self._done = 0
        """Number of commits up to which time is settled."""
        self._first = 0
        """Number of commits before the window."""
        self._iterations: list[Row] = []
        self._failures: dict[int, Row] = {}
        self._late: set[int] = set()
        """Numbers of failures that were found since time was last settled."""
        self._reconfigurations: dict[int, tuple[Row, int]] = {}
        """By epoch: the row of the reconfiguration, and the index of the commit that ended it."""
        self._plans: dict[int, Row] = {}
        self._checkpoints: set[int] = set()
        self._started_at: datetime | None = None
        self._shape: Row = {"nodes": 0, "gpus_per_node": 0}
        """Number of requested devices, with the column names of the job's row."""
        self._last_at: datetime | None = None

    def submit(self, record: journal.Record) -> None:
        self._waiting.append(record)

    @property
    def waiting(self) -> int:
        """Number of records that are not processed yet; a packed record counts as one."""
        return len(self._waiting)

    def step(self) -> bool:
        """Process records until some time is settled. Returns False if all records are processed and no time was
        settled."""
        while (record := self._next()) is not None:
            if self._follow(record.entry, datetime.fromtimestamp(round(record.at * 1e6) / 1e6, UTC)):
                return True
        return False

    def by_cause(self) -> dict[str, float]:
        """Return the seconds lost so far, by cause (`CAUSES`)."""
        seconds = self._settled if self._rest is None else self._settled + self._rest
        return dict(zip(CAUSES, seconds[1:].tolist(), strict=True))

    def _next(self) -> journal.Record | None:
        while (record := next(self._unpacked, None)) is None and self._waiting:
            self._unpacked = unpack([self._waiting.popleft()])
        return record

    def _follow(self, entry: journal.AnyEntry, at: datetime) -> bool:
        """Update the rows with one entry. The rows are like those of `resihp.db.projection`, with only the columns that
        the accounts need. Returns True if some time was settled."""
        if self._over:
            return False
        self._rest = None
        if not (isinstance(entry, journal.JobEnded) and entry.state == "abnormal"):  # written later, by another process
            self._last_at = at
        match entry:
            case journal.JobStarted():
                self._started_at = at
                configuration = json.dumps({"slurm": entry.configuration.get("slurm")}, default=str)
                self._shape = {
                    "nodes": entry.nodes,
                    "gpus_per_node": entry.gpus_per_node,
                    "configuration": configuration,
                }
            case journal.PlanDecided():
                self._plans[entry.plan.epoch] = {
                    "epoch": entry.plan.epoch,
                    "active": len(entry.plan.computing),
                    "standby": len(entry.plan.layout.standby) + len(entry.plan.mirroring),
                    "decided_at": at,
                    "in_effect_at": None,
                    "unaffected_by": json.dumps(entry.unaffected_by) if entry.unaffected_by else None,
                }
            case journal.PlanInEffect():
                if entry.epoch in self._plans:
                    self._plans[entry.epoch]["in_effect_at"] = at
            case journal.FailureFound():
                self._found(entry, at)
            case journal.FailureEnded():
                if entry.failure in self._failures:
                    self._failures[entry.failure]["ended_iteration"] = entry.iteration
            case journal.Reconfigured():
                row = {"epoch": entry.epoch, "action": entry.action, "seconds": entry.seconds, "finished_at": at}
                self._reconfigurations[entry.epoch] = row, self._first + len(self._iterations) - 1
                for failure in entry.failures:
                    if failure in self._failures:
                        self._failures[failure]["recovered_epoch"] = entry.epoch
            case journal.CheckpointCommitted():
                self._checkpoints.add(entry.iteration)
            case journal.IterationCommitted():
                return self._committed(entry, at)
            case journal.JobEnded():
                self._rest, _ = self._between(self._job(at, entry.state), self._done, None)
                self._over = entry.state != "abnormal"
                return True
        return False

    def _found(self, entry: journal.FailureFound, at: datetime) -> None:
        failed_at = entry.failed_at(at.timestamp())
        self._failures[entry.failure] = {
            "failure": entry.failure,
            "kind": entry.kind,
            "component": entry.component,
            "hardware": entry.hardware,
            "iteration": entry.iteration,
            "epoch": entry.epoch,
            "idle": entry.idle,
            "failed_at": None if failed_at is None else datetime.fromtimestamp(failed_at, UTC),
            "noticed_at": datetime.fromtimestamp(entry.noticed_at(at.timestamp()), UTC),
            "detect_seconds": entry.detect_s,
            "recovered_epoch": None,
            "ended_iteration": None,
        }
        self._late.add(entry.failure)

    def _committed(self, entry: journal.IterationCommitted, at: datetime) -> bool:
        plan = self._plans.get(entry.epoch)
        if plan is not None and plan["in_effect_at"] is None:
            plan["in_effect_at"] = at
        row = {
            "iteration": entry.outcome.iteration,
            "epoch": entry.epoch,
            "seconds": _micros(entry.seconds),
            "predicted_seconds": _micros(entry.predicted_seconds),
            "tokens": entry.outcome.tokens,
            "finished_at": at,
        }
        self._iterations.append(row)
        count = self._first + len(self._iterations)
        if count % SETTLE_EVERY_COMMITS:
            return False
        seconds, late = self._between(self._job(at, "running"), self._done, count - SETTLE_LAG_COMMITS)
        self._settled = self._settled + seconds
        self._settled[_SLOW] += late
        self._done = count - SETTLE_LAG_COMMITS
        self._late.clear()
        self._forget()
        return True

    def _job(self, now: datetime, state: str) -> Row:
        """Return the job's row as if the job had begun with the window."""
        started_at = self._started_at or now
        if self._first:
            started_at = self._iterations[0]["finished_at"]
        over = state != "running"
        last_at = self._last_at or now
        return {"state": state, "started_at": started_at, "ended_at": now if over else None, "last_entry_at": last_at,
                "account": None, **self._shape}  # fmt: skip

    def _between(self, job: Row, begin: int, end: int | None) -> tuple[Floats, float]:
        """Return the seconds by `SHARES` from the end of commit `begin` to the end of commit `end`, both counted from
        1; and the slow seconds before `begin` that were found to be slow only now."""
        plans = sorted(self._plans.values(), key=lambda row: row["epoch"])
        clock = course(job, self._iterations, plans, job["last_entry_at"])

        def at(count: int) -> float:
            return clock.before_s + clock.ends_s[count - self._first - 1]

        since_s = at(begin) if begin else -np.inf
        until_s = np.inf if end is None else at(end)
        laid_out = self._timeline(job, plans, self._failures.values())
        seconds, _ = laid_out.between(since_s, until_s)
        last_settled = self._iterations[begin - self._first - 1]["iteration"] if begin else 0
        if not any(row["kind"] == "fail-slow" and row["iteration"] <= last_settled for row in self._late_ones()):
            return seconds, 0.0
        former = [row for row in self._failures.values() if row["failure"] not in self._late]
        now, _ = laid_out.between(-np.inf, since_s)
        before, _ = self._timeline(job, plans, former).between(-np.inf, since_s)
        late = max(float(now[_SLOW] - before[_SLOW]), 0.0)
        return seconds, late

    def _late_ones(self) -> list[Row]:
        return [self._failures[failure] for failure in self._late]

    def _timeline(self, job: Row, plans: list[Row], failures: Iterable[Row]) -> HeldTime:
        return timeline(
            job,
            self._iterations,
            list(failures),
            [row for row, _ in self._reconfigurations.values()],
            plans,
            self._checkpoints,
            [],
            job["last_entry_at"],
        )

    def _forget(self) -> None:
        """Drop the rows that no later window needs."""
        passed = self._done - CONTEXT_COMMITS - self._first
        if passed <= 0:
            return
        del self._iterations[:passed]
        self._first += passed
        begin = self._iterations[0]
        self._plans = {e: row for e, row in self._plans.items() if e >= begin["epoch"]}
        self._reconfigurations = {e: entry for e, entry in self._reconfigurations.items() if entry[1] > self._first}
        self._failures = {n: row for n, row in self._failures.items() if self._matters(row, begin)}
        self._checkpoints = {iteration for iteration in self._checkpoints if iteration >= begin["iteration"]}

    def _matters(self, failure: Row, begin: Row) -> bool:
        if failure["kind"] == "fail-slow" and (failure["ended_iteration"] or np.inf) > begin["iteration"]:
            return True
        mended = failure["recovered_epoch"]
        return mended in self._reconfigurations if mended is not None else failure["noticed_at"] >= begin["finished_at"]


def _micros(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e6) / 1e6
