"""Adds up all runs of one Slurm job, as `seff` does for a job without restarts and replacement nodes.

`run` computes one run from its rows in the ledger, `total` adds up the runs; both are pure. `read` finds the runs, for
`resihp.wrapper.commands.report.command`. GPU-hours are held from the start of a run on the job's own nodes, and on
replacements, which are separate Slurm jobs, from the time they joined; in both cases until Slurm took the node back.
GPU-hours are used by iterations that were kept: an iteration that a later run repeated counts only in the later run.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from resihp.errors import UsageError

if TYPE_CHECKING:
    from resihp.db.reading.queries import Reader

Row = dict[str, Any]
MAX_SIGNALS = 100


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run. `used`: GPU-hours of each iteration, in order. `iteration`: the last committed one; 0 if there is
    none."""

    name: str
    state: str
    exit_code: int | None
    reason: str | None
    began: datetime
    ended: datetime
    held_gpu_hours: float
    used: Sequence[tuple[int, float]]
    nodes_lost: int
    replacements: int
    preempted: bool

    @property
    def wall_s(self) -> float:
        return max((self.ended - self.began).total_seconds(), 0.0)

    @property
    def iteration(self) -> int:
        return self.used[-1][0] if self.used else 0


class Total(msgspec.Struct, frozen=True, kw_only=True):
    """All runs of a Slurm job, oldest first. `used_gpu_hours`: for each run, without iterations that later runs
    repeated."""

    slurm_job: str
    runs: Sequence[Run]
    used_gpu_hours: Sequence[float]

    @property
    def outcome(self) -> str:
        """Final outcome of the job in words, with its last iteration. It may differ from the state that Slurm
        reports."""
        last = self.runs[-1]
        if last.exit_code == 75:
            return "to be run again"
        iterations = max(run.iteration for run in self.runs)
        return f"{last.state}, iteration {iterations}" if iterations else last.state

    @property
    def wall_s(self) -> float:
        return sum(run.wall_s for run in self.runs)

    @property
    def held(self) -> float:
        return sum(run.held_gpu_hours for run in self.runs)

    @property
    def used(self) -> float:
        return sum(self.used_gpu_hours)

    @property
    def efficiency(self) -> float | None:
        """Used GPU-hours divided by held GPU-hours; None if no GPU-hours were held."""
        return min(self.used / self.held, 1.0) if self.held > 0 else None

    @property
    def nodes_lost(self) -> int:
        return sum(run.nodes_lost for run in self.runs)

    @property
    def restarts(self) -> int:
        return len(self.runs) - 1

    @property
    def preemptions(self) -> int:
        return sum(run.preempted for run in self.runs)


def run(
    job: Row,
    iterations: Sequence[Row],
    plans: Sequence[Row],
    nodes: Sequence[Row],
    signals: Sequence[Row],
    now: datetime,
) -> Run:
    """Return one run, computed from its rows. `signals`: events of the kind `JobSignalled`."""
    from resihp.db.reading.costs.goodput import course

    last_moment = job["last_entry_at"] if job["state"] == "abnormal" else job["ended_at"] or now
    ended = max(last_moment, job["started_at"])
    active = {row["epoch"]: row["active"] for row in plans}
    took_s = course(job, iterations, plans, ended).took_s
    held_s = 0.0
    for node in nodes:
        held_from = job["started_at"] if node["replacement"] is None else node["joined_at"]
        held_until = min(node["released_at"] or ended, ended)
        held_s += node["devices"] * max((held_until - held_from).total_seconds(), 0.0)
    return Run(
        name=job["name"],
        state=job["state"],
        exit_code=job["exit_code"],
        reason=job["reason"],
        began=job["started_at"],
        ended=ended,
        held_gpu_hours=held_s / 3600.0,
        used=[
            (row["iteration"], seconds * active.get(row["epoch"], 0) / 3600.0)
            for row, seconds in zip(iterations, took_s, strict=True)
        ],
        nodes_lost=sum(node["lost_at"] is not None for node in nodes),
        replacements=sum(node["replacement"] is not None for node in nodes),
        preempted=any("(preempted)" in row["text"] for row in signals),
    )


def total(slurm_job: str, runs: Sequence[Run]) -> Total:
    """Return the sum of the runs of a Slurm job."""
    ordered = sorted(runs, key=lambda ordered_run: ordered_run.began)
    used_gpu_hours: list[float] = []
    repeated_from = float("inf")
    for ordered_run in reversed(ordered):
        used_gpu_hours.append(sum(hours for iteration, hours in ordered_run.used if iteration < repeated_from))
        if ordered_run.used:
            repeated_from = min(repeated_from, ordered_run.used[0][0])
    return Total(slurm_job=slurm_job, runs=ordered, used_gpu_hours=used_gpu_hours[::-1])


def read(reader: Reader, name: str, pinned: str | None, ledger: str | None, now: datetime) -> Total | None:
    """Return all runs of the Slurm job that this run belongs to; None without Slurm. They are read from `ledger`, or
    from each run's own ledger.

    `pinned`: this run, as returned by `ledgers.pinned`.
    """
    from resihp.wrapper.job_folder import find_job, runs_of, slurm_job_of
    from resihp.wrapper.output.ledgers import opened

    slurm_job = slurm_job_of(name)
    if slurm_job is None:
        return None
    runs_found = []
    if ledger is not None and ledger != "sqlite":
        names = dict.fromkeys(row["name"] for row in reader.jobs() if slurm_job_of(row["name"]) == slurm_job)
        runs_found = [_read(reader, reader.job(run_name), now) for run_name in names]
    else:
        for job in runs_of(slurm_job, find_job(pinned).home):
            try:
                with opened(str(job.folder), ledger) as (run_reader, row):
                    runs_found.append(_read(run_reader, row, now))
            except UsageError:
                continue  # a run that never began has no ledger
    return total(slurm_job, runs_found) if runs_found else None


def _read(reader: Reader, job: Row, now: datetime) -> Run:
    number = job["id"]
    plans, nodes = (reader.rows(table, number) for table in ("plans", "nodes"))
    signals = reader.events(number, ("JobSignalled",), MAX_SIGNALS)
    return run(job, reader.narrow("iterations", number), plans, nodes, signals, now.astimezone(UTC))


def lines(all_runs: Total) -> list[tuple[str, ...]]:
    """Return a row for each run, and one for the sum of all runs, with the columns of `RUN_HEADINGS`."""
    from resihp.wrapper.output.render import duration, hours

    rows: list[tuple[str, ...]] = [
        (
            run.name,
            f"{run.began:%Y-%m-%d %H:%M:%S}",
            duration(run.wall_s),
            hours(run.held_gpu_hours),
            hours(used),
            str(run.nodes_lost),
            run.state + (f": {run.reason}" if run.reason and run.state != "completed" else ""),
        )
        for run, used in zip(all_runs.runs, all_runs.used_gpu_hours, strict=True)
    ]
    sums = (
        duration(all_runs.wall_s),
        hours(all_runs.held),
        hours(all_runs.used),
        str(all_runs.nodes_lost),
        all_runs.outcome,
    )
    return [*rows, ("all", "", *sums)] if len(rows) > 1 else rows


RUN_HEADINGS = ("run", "began (UTC)", "wall time", "GPU-hours held", "used", "nodes lost", "outcome")


def sentence(all_runs: Total) -> str:
    """Return a sentence on the outcome, the share of used GPU-hours, restarts, preemptions, and nodes lost and
    replaced."""
    from resihp.wrapper.output.render import percent

    def counted(number: int, noun: str) -> str:
        return f"{number} {noun}{'' if number == 1 else 's'}"

    replacements = sum(run.replacements for run in all_runs.runs)
    counts = [
        counted(all_runs.restarts, "restart"),
        counted(all_runs.preemptions, "preemption"),
        f"{counted(all_runs.nodes_lost, 'node')} lost",
        f"{replacements} replaced by other Slurm jobs" if replacements else "",
    ]
    used = f"{percent(all_runs.efficiency)} of its GPU-hours went into iterations that were kept"
    return f"Slurm job {all_runs.slurm_job}: {all_runs.outcome}; {used}; {', '.join(filter(None, counts))}."
