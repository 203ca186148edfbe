"""All runs of one Slurm job, as one: what `seff` says of a job that never restarts and never gets other nodes.

`run` reckons one of them from its rows in the ledger, `total` adds them up; both are pure. `read` finds them, for
`wrapper.commands.report.command`. Held are the job's own nodes from the start of a run, and replacements, jobs of their
own in Slurm, since they joined; each until Slurm took it back. Used is what went into iterations that count: those that
a later run had to do again count there.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from resihp.errors import UsageError

if TYPE_CHECKING:
    from db.reading.queries import Reader

Row = dict[str, Any]
MOST_SIGNALS = 100


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run. `used`: GPU-hours by iteration, in order. `iteration`: the last one that it committed, 0 for none."""

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
    """All runs, the oldest first. `used_gpu_hours`: of each run, without what later ones did again."""

    slurm_job: str
    runs: Sequence[Run]
    used_gpu_hours: Sequence[float]

    @property
    def outcome(self) -> str:
        """What became of the job in the end, whatever Slurm calls it."""
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
        """Of the GPU-hours held, those that were used."""
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
    """One run from its rows; `signals` are events of the kind `JobSignalled`."""
    from db.reading.costs.goodput import course

    over = job["last_entry_at"] if job["state"] == "abnormal" else job["ended_at"] or now
    ended = max(over, job["started_at"])
    active = {row["epoch"]: row["active"] for row in plans}
    took_s = course(job, iterations, plans, ended).took_s
    held_s = 0.0
    for node in nodes:
        since = job["started_at"] if node["replacement"] is None else node["joined_at"]
        until = min(node["released_at"] or ended, ended)
        held_s += node["devices"] * max((until - since).total_seconds(), 0.0)
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
    """What they come to together."""
    ordered = sorted(runs, key=lambda each: each.began)
    counted: list[float] = []
    done_again_from = float("inf")
    for each in reversed(ordered):
        counted.append(sum(hours for iteration, hours in each.used if iteration < done_again_from))
        if each.used:
            done_again_from = min(done_again_from, each.used[0][0])
    return Total(slurm_job=slurm_job, runs=ordered, used_gpu_hours=counted[::-1])


def read(reader: Reader, name: str, pinned: str | None, ledger: str | None, now: datetime) -> Total | None:
    """All runs of the Slurm job that this run was in, from `ledger` or from each one's own; None without Slurm.
    `pinned`: as `ledgers.pinned` has this run."""
    from wrapper.job_folder import find_job, runs_of, slurm_job_of
    from wrapper.output.ledgers import opened

    slurm_job = slurm_job_of(name)
    if slurm_job is None:
        return None
    found = []
    if ledger is not None and ledger != "sqlite":
        names = dict.fromkeys(row["name"] for row in reader.jobs() if slurm_job_of(row["name"]) == slurm_job)
        found = [_read(reader, reader.job(each), now) for each in names]
    else:
        for job in runs_of(slurm_job, find_job(pinned).home):
            try:
                with opened(str(job.folder), ledger) as (own, row):
                    found.append(_read(own, row, now))
            except UsageError:
                continue  # a run that never began has no ledger
    return total(slurm_job, found) if found else None


def _read(reader: Reader, job: Row, now: datetime) -> Run:
    number = job["id"]
    plans, nodes = (reader.rows(table, number) for table in ("plans", "nodes"))
    signals = reader.events(number, ("JobSignalled",), MOST_SIGNALS)
    return run(job, reader.narrow("iterations", number), plans, nodes, signals, now.astimezone(UTC))


def lines(found: Total) -> list[tuple[str, ...]]:
    """A row for each run, and one for all: name, beginning, wall time, GPU-hours held and used, nodes lost, how it
    ended."""
    from wrapper.output.render import duration, hours

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
        for run, used in zip(found.runs, found.used_gpu_hours, strict=True)
    ]
    sums = (duration(found.wall_s), hours(found.held), hours(found.used), str(found.nodes_lost), found.outcome)
    return [*rows, ("all", "", *sums)] if len(rows) > 1 else rows


HEADS = ("run", "began (UTC)", "wall time", "GPU-hours held", "used", "nodes lost", "how it ended")


def sentence(found: Total) -> str:
    """How it ended, what share of the GPU-hours counts, restarts, preemptions, nodes lost and replaced."""
    from wrapper.output.render import percent

    def counted(number: int, what: str) -> str:
        return f"{number} {what}{'' if number == 1 else 's'}"

    replacements = sum(run.replacements for run in found.runs)
    told = [
        counted(found.restarts, "restart"),
        counted(found.preemptions, "preemption"),
        f"{counted(found.nodes_lost, 'node')} lost",
        f"{replacements} replaced by other Slurm jobs" if replacements else "",
    ]
    used = f"{percent(found.efficiency)} of the GPU-hours that it held went into iterations that count"
    return f"Slurm job {found.slurm_job}: {found.outcome}; {used}; {', '.join(filter(None, told))}."
