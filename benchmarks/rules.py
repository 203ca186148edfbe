"""The same job, the same kills, planned by each rule in turn: what iterations take after each loss.

Eight workers on this machine, TP1 PP4 DP2, emulate a device each (`resihp.executor.emulation`). Rank 5, the second
stage of the second pipeline, is killed, then rank 3, the last stage of the first. Nothing else differs between the jobs
but `resihp run --planner`. A rule under which nothing can run any more ends its job; that is shown, too.

    python benchmarks/rules.py [--runs 3]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from resihp.executor.emulation import LAYER_MS
from resihp.settings import PlannerName

EXAMPLE = Path(__file__).parents[1] / "examples" / "pretrain_gpt.py"
SIZES = ["--layers", "8", "--hidden", "32", "--tokens", "64", "--micro-batches", "16"]
RULES: tuple[PlannerName, ...] = ("resihp", "resihp-paper", "paper-tp-pp", "drop-replica")
KILLS, ITERATIONS = ((5, 6), (3, 14)), 22
"""(rank, iteration) of each, and the job's goal."""
SETTLING = 2
"""First iterations after a change that do not count."""


def ran(rule: str, folder: Path) -> list[float | None]:
    """Median seconds of an iteration before the first kill and after each; None where the job had ended."""
    environment = {
        **os.environ,
        "RESIHP_HOME": str(folder / "home"),
        "RESIHP_STATE": str(folder / "state"),
        "RESIHP_LOCAL": str(folder / "local"),
        "RESIHP_ADAPT__DETECT": "false",
        "RESIHP_ADAPT__EXAMINE": "false",
        LAYER_MS: "15",
    }
    wrapper = [sys.executable, "-m", "resihp"]
    faults = [word for rank, i in KILLS for word in ("--fault", f"kill:rank={rank}@iteration={i},phase=backward")]
    subprocess.run(
        [
            *[*wrapper, "run", "--local", "--nodes", "2", "--gpus-per-node", "4", "--tp", "1", "--pp", "4"],
            *["--planner", rule, *faults, "--", sys.executable, str(EXAMPLE), *SIZES, "--iterations", str(ITERATIONS)],
        ],
        env=environment,
        check=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    answer = subprocess.run(
        [*wrapper, "history", "iterations", "--json"], env=environment, check=True, capture_output=True, text=True
    )
    seconds = {row["iteration"]: row["seconds"] for row in json.loads(answer.stdout)["rows"]}
    bounds = [1, *(i for _, i in KILLS), ITERATIONS + 1]
    spans = [range(begin + SETTLING, end) for begin, end in itertools.pairwise(bounds)]
    found = [[seconds[i] for i in span if seconds.get(i)] for span in spans]
    return [statistics.median(times) if times else None for times in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=3)
    runs = parser.parse_args().runs
    found: dict[str, list[list[float | None]]] = {rule: [] for rule in RULES}
    for _ in range(runs):
        for rule in RULES:  # interleaved
            folder = Path(tempfile.mkdtemp(prefix="resihp-rules-"))
            try:
                found[rule].append(ran(rule, folder))
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    table = Table(title=f"Seconds of an iteration (share of the healthy throughput), medians of {runs} jobs each")
    for name in ("--planner", "healthy", "a stage lost", "another in the other pipeline"):
        table.add_column(name, justify="left" if name == "--planner" else "right")
    for rule, jobs in found.items():
        columns = [[one[k] for one in jobs] for k in range(1 + len(KILLS))]
        medians = [statistics.median(s for s in times if s) if all(times) else None for times in columns]
        healthy = medians[0]
        told = ["ended" if s is None else f"{s:.3f}" + (f" ({healthy / s:.0%})" if healthy else "") for s in medians]
        table.add_row(rule, *told)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
