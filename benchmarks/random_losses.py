"""Does a job outlive ranks that are killed or stopped again and again? Eight workers on this machine's processors.

TP2 PP2 DP2 on four nodes of two devices, without checkpoints. For so many seconds, a live worker gets SIGKILL or
SIGSTOP each 4 to 14 s, drawn from the seed; then the job trains on to its end. Each device may come back as often as it
loses its process. The job has to complete with every iteration committed once. A run in which nothing died counts as
failed.

    python -m benchmarks.random_losses [--seeds 5] [--seconds 300] [--iterations 400]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil

EXAMPLE = Path(__file__).parents[1] / "examples" / "pretrain_gpt.py"
WRAPPER = [sys.executable, "-m", "resihp"]
BETWEEN_S = (4.0, 14.0)
START_S = 60.0
"""How long the first workers may take to train."""


class Run(NamedTuple):
    """What was done to a job, and what became of it."""

    seed: int
    kills: int
    stops: int
    exit_code: int
    committed: int
    gapless: bool
    layouts: int
    with_mirrors: int
    """Plans in effect under which ranks held copies of state and computed nothing."""
    last_words: str

    @property
    def completed(self) -> bool:
        return self.exit_code == 0 and self.gapless and self.kills + self.stops > 0

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: {self.kills} kills, {self.stops} stops; exit {self.exit_code}, {self.committed} "
            f"iterations{'' if self.gapless else ' WITH GAPS'}, {self.layouts} layouts, {self.with_mirrors} of them "
            f"with mirrors{'' if self.completed else f': {self.last_words}'}"
        )


def workers(job: psutil.Process) -> list[psutil.Process]:
    """Return the processes that train, of a job that was started as `job`."""
    found = []
    for process in job.children(recursive=True):
        try:
            title = " ".join(process.cmdline())
            if " rank " in title and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return sorted(found, key=lambda process: process.pid)


def disturb(job: psutil.Process, rng: random.Random, seconds: float) -> tuple[int, int]:
    """Kill and stop workers for so long, or until the job ends; return how many of each."""
    kills = stops = 0
    until = time.monotonic() + START_S
    while len(workers(job)) < 8 and time.monotonic() < until and job.is_running():
        time.sleep(0.5)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(rng.uniform(*BETWEEN_S))
        live = workers(job) if job.is_running() and job.status() != psutil.STATUS_ZOMBIE else []
        if not live:
            break
        victim, stopped = rng.choice(live), rng.random() < 0.3
        try:
            victim.send_signal(signal.SIGSTOP if stopped else signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
        kills, stops = kills + (not stopped), stops + stopped
    return kills, stops


def run(seed: int, seconds: float, iterations: int) -> Run:
    """Run one job, and read from its ledger what became of it."""
    folder = Path(tempfile.mkdtemp(prefix="resihp-random-losses-"))
    environment = {
        **os.environ,
        "RESIHP_HOME": str(folder / "home"),
        "RESIHP_STATE": str(folder / "state"),
        "RESIHP_LOCAL": str(folder / "local"),
        "RESIHP_EMULATED_LAYER_MS": "15",
        "RESIHP_ADAPT__COME_BACKS": "99",
    }
    command = [
        *[*WRAPPER, "run", "--local", "--nodes", "4", "--gpus-per-node", "2", "--tp", "2", "--pp", "2"],
        *["--", sys.executable, str(EXAMPLE), "--layers", "6", "--iterations", str(iterations)],
    ]
    try:
        with (folder / "log").open("w") as log:
            job = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
            kills, stops = disturb(psutil.Process(job.pid), random.Random(seed), seconds)
            exit_code = job.wait()

        def rows(view: str) -> list[dict[str, Any]]:
            answer = subprocess.run(
                [*WRAPPER, "history", view, "--json"], env=environment, check=True, capture_output=True, text=True
            )
            found: list[dict[str, Any]] = json.loads(answer.stdout)["rows"]
            return found

        committed = [row["iteration"] for row in rows("iterations")]
        plans = [plan for plan in rows("plans") if plan["in_effect_at"]]
        mirrored = sum(any(not share for share in plan["assignment"]) for plan in plans)
        words = [line for line in (folder / "log").read_text().splitlines() if "failed:" in line or "lost" in line][-2:]
        gapless = sorted(committed) == list(range(1, len(committed) + 1))
        return Run(seed, kills, stops, exit_code, len(committed), gapless, len(plans), mirrored, " ".join(words))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Print what became of each job; exit with 1 where one did not complete."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--iterations", type=int, default=400)
    asked = parser.parse_args()
    runs = []
    for seed in range(asked.first, asked.first + asked.seeds):
        runs.append(run(seed, asked.seconds, asked.iterations))
        print(runs[-1], flush=True)
    done = sum(one.completed for one in runs)
    print(f"jobs that completed, every iteration once: {done} of {len(runs)}")
    if done < len(runs):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
