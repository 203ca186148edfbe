"""Seconds that a running job lost, by cause, as counters that never go back: for `wrapper.sinks.metrics`.

One model of time: what `db.reading.costs.cost_accounts` makes of a ledger's rows, over a window of them. Every `STEP`
commits the time up to `LAG` commits ago is settled: added once, and never changed again. By then it is known what
interrupted it. So counters are a few iterations behind, and at a job's end they are up to it.

When that is done depends on records alone, and times are reckoned with to the microsecond, which packed records have,
too: who takes over and reads the journal comes to the very same figures. What differs from the ledger's account, which
knows the whole job: medians are those of the window, and where something turns out to have been slow for more than
`CONTEXT` iterations, only these count. Reads no clock; knows nothing of devices, so tells no GPU-hours.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

import numpy as np

from db.reading.costs import cost_accounts
from db.reading.costs.goodput import Floats, course
from db.reading.costs.timeline import CAUSES, SHARES, HeldTime
from resihp.record import journal
from resihp.record.packing import unpack

Row = dict[str, Any]
STEP = 64
LAG = 16
CONTEXT = 128
"""Settled commits that are still looked at: how long iterations, and the pauses between them, usually take."""
_SLOW = SHARES.index("slow")


class LostTime:
    """`submit` takes a record, at no cost; `step` does the work. `past`: records of before, packed or not.

    Not safe to use from several threads, but for `submit` beside the others.
    """

    def __init__(self, past: Iterable[journal.Record] = ()) -> None:
        self._told = deque(past)
        self._unpacked: Iterator[journal.Record] = iter(())
        self._settled: Floats = np.zeros(len(SHARES))
        self._rest: Floats | None = None
        """Of a job that is over: what came after what was settled."""
        self._over = False
        """It has ended, and nothing that is told later is of its time; one that was only found dead may go on."""
        self._done = 0
        """Commits that were settled."""
        self._first = 0
        """The number of the window's first commit, from 0."""
        self._iterations: list[Row] = []
        self._failures: dict[int, Row] = {}
        self._late: set[int] = set()
        """Failures that are not in what was settled."""
        self._reconfigurations: dict[int, tuple[Row, int]] = {}
        """By epoch; with the number of the commit that each ended with."""
        self._plans: dict[int, Row] = {}
        self._checkpoints: set[int] = set()
        self._started_at: datetime | None = None
        self._shape: Row = {"nodes": 0, "gpus_per_node": 0}
        """Devices that were asked for, as the job's row tells."""
        self._last_at: datetime | None = None

    def submit(self, record: journal.Record) -> None:
        self._told.append(record)

    @property
    def waiting(self) -> int:
        """Records that were told and not looked at yet; a packed one counts as one."""
        return len(self._told)

    def step(self) -> bool:
        """Take in what was told, until something was settled. False where nothing is left."""
        while (record := self._next()) is not None:
            if self._follow(record.entry, datetime.fromtimestamp(round(record.at * 1e6) / 1e6, UTC)):
                return True
        return False

    def by_cause(self) -> dict[str, float]:
        """Seconds lost so far, by `CAUSES`."""
        seconds = self._settled if self._rest is None else self._settled + self._rest
        return dict(zip(CAUSES, seconds[1:].tolist(), strict=True))

    def _next(self) -> journal.Record | None:
        while (record := next(self._unpacked, None)) is None and self._told:
            self._unpacked = unpack([self._told.popleft()])
        return record

    def _follow(self, entry: journal.AnyEntry, at: datetime) -> bool:
        """Rows as `db.projection` makes them, of the columns that accounts need. True: some time was settled."""
        if self._over:
            return False
        self._rest = None
        if not (isinstance(entry, journal.JobEnded) and entry.state == "abnormal"):  # nobody lived to tell that
            self._last_at = at
        match entry:
            case journal.JobStarted():
                self._started_at = at
                asked = json.dumps({"slurm": entry.configuration.get("slurm")}, default=str)
                self._shape = {
                    "nodes": entry.nodes,
                    "gpus_per_node": entry.gpus_per_node,
                    "configuration": asked,
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
        if count % STEP:
            return False
        found, late = self._between(self._job(at, "running"), self._done, count - LAG)
        self._settled = self._settled + found
        self._settled[_SLOW] += late
        self._done = count - LAG
        self._late.clear()
        self._forget()
        return True

    def _job(self, now: datetime, state: str) -> Row:
        """Its row, from where the window begins on."""
        started_at = self._started_at or now
        if self._first:
            started_at = self._iterations[0]["finished_at"]
        over = state != "running"
        last_at = self._last_at or now
        return {"state": state, "started_at": started_at, "ended_at": now if over else None, "last_entry_at": last_at,
                "account": None, **self._shape}  # fmt: skip

    def _between(self, job: Row, begin: int, end: int | None) -> tuple[Floats, float]:
        """Seconds by `SHARES` from the end of commit `begin` to that of commit `end`, both counted from 1; and what was
        slow before that, and was not known to be."""
        plans = sorted(self._plans.values(), key=lambda row: row["epoch"])
        clock = course(job, self._iterations, plans, job["last_entry_at"])

        def at(count: int) -> float:
            return clock.before_s + clock.ends_s[count - self._first - 1]

        since_s = at(begin) if begin else -np.inf
        until_s = np.inf if end is None else at(end)
        laid_out = self._timeline(job, plans, self._failures.values())
        found, _ = laid_out.between(since_s, until_s)
        known = self._iterations[begin - self._first - 1]["iteration"] if begin else 0
        if not any(row["kind"] == "fail-slow" and row["iteration"] <= known for row in self._late_ones()):
            return found, 0.0
        former = [row for row in self._failures.values() if row["failure"] not in self._late]
        now, _ = laid_out.between(-np.inf, since_s)
        before, _ = self._timeline(job, plans, former).between(-np.inf, since_s)
        late = max(float(now[_SLOW] - before[_SLOW]), 0.0)
        return found, late

    def _late_ones(self) -> list[Row]:
        return [self._failures[failure] for failure in self._late]

    def _timeline(self, job: Row, plans: list[Row], failures: Iterable[Row]) -> HeldTime:
        return cost_accounts.timeline(
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
        """What no window will tell of any more."""
        passed = self._done - CONTEXT - self._first
        if passed <= 0:
            return
        del self._iterations[:passed]
        self._first += passed
        begin = self._iterations[0]
        self._plans = {e: row for e, row in self._plans.items() if e >= begin["epoch"]}
        self._reconfigurations = {e: each for e, each in self._reconfigurations.items() if each[1] > self._first}
        self._failures = {n: row for n, row in self._failures.items() if self._matters(row, begin)}
        self._checkpoints = {each for each in self._checkpoints if each >= begin["iteration"]}

    def _matters(self, failure: Row, begin: Row) -> bool:
        if failure["kind"] == "fail-slow" and (failure["ended_iteration"] or np.inf) > begin["iteration"]:
            return True
        mended = failure["recovered_epoch"]
        return mended in self._reconfigurations if mended is not None else failure["noticed_at"] >= begin["finished_at"]


def _micros(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e6) / 1e6
