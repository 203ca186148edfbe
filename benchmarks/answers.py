"""How soon do commands answer that anybody types all day: `resihp --help`, and `resihp jobs` with 1,000 past jobs?

Whole processes, one after the other in turn. Exits with 1 where a median is above its limit. On a machine with other
work the CPU seconds say more than the clock.

    python benchmarks/answers.py [--jobs 1000] [--times 11]
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

from wrapper import registry
from wrapper.job_files import entry_of
from wrapper.job_folder import create_local_job

LIMITS_S = {"--help": 0.2, "jobs": 0.3}
COMMANDS = (("--help",), ("jobs",), ("jobs", "--all"))


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


def measure(command: tuple[str, ...], folder: Path) -> tuple[float, float]:
    """Seconds by the clock, and of processors."""
    code = "from wrapper.__main__ import main; main()"
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
    parser.add_argument("--times", type=int, default=11)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="resihp-answers-") as made:
        folder = Path(made)
        os.environ |= {"RESIHP_STATE": f"{made}/state", "RESIHP_HOME": f"{made}/home", "RESIHP_LOCAL": f"{made}/local"}
        fill(asked.jobs)
        os.environ["RESIHP_HOME"] = f"{made}/another"
        for command in COMMANDS:
            measure(command, folder)
        found = [[measure(command, folder) for command in COMMANDS] for _ in range(asked.times)]
    table = Table(*("command", "median s", "fastest s", "CPU s", "limit s"), title=f"{asked.jobs} past jobs")
    slow = False
    for number, command in enumerate(COMMANDS):
        clock, cpu = zip(*(turn[number] for turn in found), strict=True)
        limit = LIMITS_S.get(" ".join(command))
        median = statistics.median(clock)
        slow |= limit is not None and median > limit
        figures = (median, min(clock), statistics.median(cpu))
        table.add_row(
            f"resihp {' '.join(command)}", *(f"{s:.3f}" for s in figures), "-" if limit is None else f"{limit}"
        )
    Console().print(table)
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
