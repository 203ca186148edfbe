"""How soon do commands answer that anybody types all day: `resihp --help`, and `resihp jobs` with 1,000 past jobs and 3
running ones?

Whole processes, one after the other in turn. Of a running job there is what its supervisor keeps: lock, journal, ledger
and progress file; `by ledgers` is without the last, when the ledgers are opened instead. Exits with 1 where a median is
above its limit. On a machine with other work the CPU seconds say more than the clock.

    python benchmarks/answers.py [--jobs 1000] [--running 3] [--times 11]
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from resihp.db.writer import Ledger
from resihp.parallelism.layout import Layout
from resihp.parallelism.plan import Plan, spread
from resihp.record import journal, journal_file

if not __package__:  # run as a file, not with -m
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from resihp.wrapper import registry
from resihp.wrapper.job_files.job import Job
from resihp.wrapper.job_files.registered import entry_of
from resihp.wrapper.job_folder import create_local_job, take_lock
from resihp.wrapper.sinks.progress_file import ProgressFileWriter
from tests.db.conftest import outcome, started

LIMITS_S = {"resihp --help": 0.2, "resihp jobs": 0.3}
COMMANDS = (("--help",), ("jobs",), ("jobs", "--all"))
ITERATIONS, PACE_S = 100, 60.0
"""Of a running job: so slow that it does not look stuck while this is measured."""


def fill(jobs: int) -> None:
    """Past jobs, one an hour, the newest a moment ago, each with its folder."""
    now = time.time()
    for number in range(jobs):
        job = create_local_job()
        file = msgspec.structs.replace(job.read(), created_at=now - 3600.0 * number - 3000.0)
        registry.drop(entry_of(job, job.read()))
        (job.folder / "job.json").write_bytes(msgspec.json.encode(file))
        entry = msgspec.structs.replace(
            entry_of(job, file),
            state="completed",
            exit_code=0,
            ended_at=now - 3600.0 * number,
            nodes=4,
            gpus_per_node=8,
            layout="DP2 x PP2 x TP8",
            iterations=1000,
            target=1000,
            loss=2.3,
            last_iteration_at=now - 3600.0 * number,
        )
        if trouble := registry.save(entry):
            raise SystemExit(trouble)


def begin(jobs: int) -> list[Job]:
    """Running jobs, led by this process, as their supervisors leave them for others to see."""
    begun = []
    for _ in range(jobs):
        job = create_local_job()
        if take_lock(job) is None:
            raise SystemExit(f"{job.folder}: is led by somebody else")
        now = time.time()
        writer = journal_file.Journal(job.journal_file, sync=False)
        layout = Layout.uniform(tp=8, pp=2, dp=2, layers=16)
        for entry in (
            started(job.name),
            journal.PlanDecided(
                plan=Plan(epoch=1, layout=layout, assignment=spread(4, 2)),
                next_iteration=1,
                action="start",
                finish=None,
                reason="start",
            ),
        ):
            writer.append(entry, now - PACE_S * (ITERATIONS + 1))
        for number in range(1, ITERATIONS + 1):
            entry = journal.IterationCommitted(epoch=1, outcome=outcome(number), seconds=PACE_S, predicted_seconds=None)
            writer.append(entry, now - PACE_S * (ITERATIONS - number))
        writer.close()
        with Ledger.open("sqlite", job.folder) as ledger:
            for record in job.records():
                ledger.submit(record)
        job.set_ledger(ledger.url)
        ProgressFileWriter(job, job.records())
        while not job.progress_file.exists():
            time.sleep(0.01)
        begun.append(job)
    return begun


def measure(command: tuple[str, ...], folder: Path) -> tuple[float, float]:
    """Seconds by the clock, and of processors."""
    code = "from resihp.__main__ import main; main()"
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        [sys.executable, "-P", "-c", code, *command],
        cwd=folder,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    took_s, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return took_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--running", type=int, default=3)
    parser.add_argument("--times", type=int, default=11)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="resihp-answers-") as made:
        folder = Path(made)
        os.environ |= {"RESIHP_STATE": f"{made}/state", "RESIHP_HOME": f"{made}/home", "RESIHP_LOCAL": f"{made}/local"}
        fill(asked.jobs)
        running = begin(asked.running)
        os.environ["RESIHP_HOME"] = f"{made}/another"
        for command in COMMANDS:
            measure(command, folder)
        found: dict[str, list[tuple[float, float]]] = {f"resihp {' '.join(command)}": [] for command in COMMANDS}
        for _ in range(asked.times):
            for command in COMMANDS:
                found[f"resihp {' '.join(command)}"].append(measure(command, folder))
        for job in running:
            job.progress_file.unlink()
        found["resihp jobs, by ledgers"] = [measure(("jobs",), folder) for _ in range(asked.times if running else 0)]
    table = Table(
        *("command", "median s", "fastest s", "CPU s", "limit s"),
        title=f"{asked.jobs} past jobs, {asked.running} running",
    )
    slow = False
    for name, times in found.items():
        if not times:
            continue
        clock, cpu = zip(*times, strict=True)
        limit = LIMITS_S.get(name)
        median = statistics.median(clock)
        slow |= limit is not None and median > limit
        figures = (median, min(clock), statistics.median(cpu))
        table.add_row(name, *(f"{s:.3f}" for s in figures), "-" if limit is None else f"{limit}")
    Console().print(table)
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
