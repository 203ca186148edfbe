"""Does a process that comes back get its work, and a device at 70 % not as much as others? The demo's job, many times.

TP2 PP2 DP2 on this machine's processors, 45 iterations; in the tenth a process dies and is started again on its device.
Runs alternate: alone, and beside a process that multiplies and copies all the time. In the second half of the answer
the same device is made slow as its process dies, and stays so. A run whose faults have not fired counts as failed.

    python benchmarks/come_backs.py [--runs 40] [--slow-runs 10]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

EXAMPLE = Path(__file__).parents[1] / "examples" / "pretrain_gpt.py"
WRAPPER = [sys.executable, "-m", "resihp"]
VICTIM, DIES_AT, ITERATIONS, SPEED = 5, 10, 45, 0.7
EQUAL = 0.95
"""Of what the device had to do before: from here on it takes part as if it were healthy."""
BUSY = """
import numpy
source = numpy.random.rand(8 << 20)
target = numpy.empty_like(source)
matrix = numpy.random.rand(700, 700)
while True:
    matrix @ matrix
    target[:] = source
"""


class ComeBack(NamedTuple):
    """What became of the process that came back."""

    faults: int
    """How many were injected."""
    exit_code: int
    rank: int | None
    joined_s: float | None
    """From its start until a plan was in effect that gives it work; None where none did."""
    joined_iteration: int | None
    most_weight: float
    """The largest share of its device's first work that it was given under any plan."""
    rounds: list[str]
    """Each probe of it: on which occasion, its speed, and what followed."""

    @property
    def takes_part_equally(self) -> bool:
        return self.most_weight >= EQUAL

    def __str__(self) -> str:
        when = "never got work"
        if self.joined_s is not None:
            when = f"got work after {self.joined_s:.1f} s, in iteration {self.joined_iteration}"
        probes = "; ".join(self.rounds) or "no probe"
        return f"exit {self.exit_code}, {self.faults} faults fired, {when}, weight {self.most_weight:.2f} ({probes})"


@contextmanager
def busy_process(wanted: bool) -> Iterator[None]:
    """Compute beside the job, on one core."""
    if not wanted:
        yield
        return
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    process = subprocess.Popen([sys.executable, "-c", BUSY], env=os.environ | threads)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def demo(folder: Path, *, slow: bool) -> ComeBack:
    """Run the job once, with its home in `folder`, and read from its ledger what became of the come-back."""
    environment = {
        **os.environ,
        "RESIHP_HOME": str(folder / "home"),
        "RESIHP_STATE": str(folder / "state"),
        "RESIHP_LOCAL": str(folder / "local"),
    }
    faults = ["--fault", f"slow:rank={VICTIM},speed={SPEED}@iteration={DIES_AT}"] if slow else []
    faults += ["--fault", f"crash:rank={VICTIM}@iteration={DIES_AT},phase=backward"]
    job = subprocess.run(
        [
            *[*WRAPPER, "run", "--local", "--nodes", "4", "--gpus-per-node", "2", "--tp", "2", "--pp", "2"],
            *[*faults, "--", sys.executable, str(EXAMPLE), "--layers", "6", "--iterations", str(ITERATIONS)],
        ],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )

    def rows(view: str) -> list[dict[str, Any]]:
        answer = subprocess.run(
            [*WRAPPER, "history", view, "--json"], env=environment, check=True, capture_output=True, text=True
        )
        found: list[dict[str, Any]] = json.loads(answer.stdout)["rows"]
        return found

    return _outcome(job.returncode, rows("events"), rows("workers"), rows("plans"), rows("probes"))


def _outcome(
    exit_code: int,
    events: list[dict[str, Any]],
    workers: list[dict[str, Any]],
    plans: list[dict[str, Any]],
    probes: list[dict[str, Any]],
) -> ComeBack:
    fired = sum(event["kind"] == "FaultInjected" for event in events)
    newcomer = next((worker for worker in workers if worker["rank"] == 2 * 4), None)
    if newcomer is None or not plans:
        return ComeBack(fired, exit_code, None, None, None, 0.0, [])
    rank = newcomer["rank"]
    usual = _work(plans[0], VICTIM)
    with_it = [plan for plan in plans if plan["in_effect_at"] and _work(plan, rank)]
    rounds = [
        f"{probe['occasion']} {probe['speed'] or 0:.0%}, {'fit' if probe['passed'] else 'not fit'}"
        for probe in probes
        if probe["rank"] == rank and probe["kind"] == "device"
    ]
    if not with_it:
        return ComeBack(fired, exit_code, rank, None, None, 0.0, rounds)
    joined = datetime.fromisoformat(with_it[0]["in_effect_at"]) - datetime.fromisoformat(newcomer["started_at"])
    weight = max(_work(plan, rank) for plan in with_it) / usual
    return ComeBack(fired, exit_code, rank, joined.total_seconds(), with_it[0]["next_iteration"], weight, rounds)


def _work(plan: dict[str, Any], rank: int) -> float:
    """Return a rank's share of each iteration: layers times micro-batches, divided by those that share them."""
    for replica, micro_batches in zip(plan["layout"]["replicas"], plan["assignment"], strict=True):
        for stage in replica:
            if rank in stage["ranks"]:
                first, last = stage["layers"]
                return float((last - first + 1) * len(micro_batches) / len(stage["ranks"]))
    return 0.0


def run_all(runs: int, *, slow: bool) -> int:
    """Run the job so many times; returns in how many of them it went as promised."""
    good = 0
    for run in range(runs):
        folder = Path(tempfile.mkdtemp(prefix="resihp-come-backs-"))
        busy = bool(run % 2)
        try:
            with busy_process(busy):
                outcome = demo(folder, slow=slow)
        finally:
            shutil.rmtree(folder)
        fired = outcome.faults == 1 + slow
        as_promised = not outcome.takes_part_equally if slow else outcome.joined_s is not None
        good += fired and outcome.exit_code == 0 and as_promised
        device = f"device at {SPEED:.0%}" if slow else "healthy device"
        beside = "beside a busy process" if busy else "alone"
        print(f"{device}, run {run + 1}, {beside}: {outcome}", flush=True)
    return good


def main() -> None:
    """Print each run, and how many of them went as promised; exit with 1 where not all did."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--slow-runs", type=int, default=10)
    asked = parser.parse_args()
    joined = run_all(asked.runs, slow=False)
    kept_out = run_all(asked.slow_runs, slow=True)
    print(f"healthy come-backs that got work: {joined} of {asked.runs}")
    print(f"devices at {SPEED:.0%} that took no equal part: {kept_out} of {asked.slow_runs}")
    if (joined, kept_out) != (asked.runs, asked.slow_runs):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
