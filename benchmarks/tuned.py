"""A tuned job that is tuned again by the times that it has measured: gain promised and kept, in one run.

Eight workers on this machine, TP1 PP4 DP2, emulate a device each (`resihp.executor.emulation`). Their head takes as
long as three layers, where its operations say that it takes two thirds of one: what is planned before anything is
measured cannot know. After 40 iterations the controller tunes the job with what it has learnt. Promised is the ratio
of its two predictions, kept that of the medians of iteration times before and after, the first ones under each plan
left out.

    python benchmarks/tuned.py [--runs 1] [--layer-ms 24]
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
from typing import Any

from rich.console import Console
from rich.table import Table

from resihp.executor.emulation import HEAD_LAYERS, LAYER_MS

EXAMPLE = Path(__file__).parents[1] / "examples" / "pretrain_gpt.py"
SIZES = ["--layers", "12", "--hidden", "32", "--tokens", "64", "--micro-batches", "8"]
HEAD, ITERATIONS, SETTLING = 3, 75, 3


def rows(view: str, environment: dict[str, str]) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "resihp", "history", view, "--json"]
    answer = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    found: list[dict[str, Any]] = json.loads(answer.stdout)["rows"]
    return found


def ran(folder: Path, layer_ms: float) -> tuple[list[dict[str, Any]], list[dict[str, Any]], str]:
    """Plans, iterations, and what the job said of its tuning."""
    environment = {
        **os.environ,
        "RESIHP_HOME": str(folder / "home"),
        "RESIHP_STATE": str(folder / "state"),
        "RESIHP_LOCAL": str(folder / "local"),
        "RESIHP_ADAPT__EXAMINE": "false",
        LAYER_MS: str(layer_ms),
        HEAD_LAYERS: str(HEAD),
    }
    command = [sys.executable, "-m", "resihp", "run", "--local", "--nodes", "2", "--gpus-per-node", "4"]
    command += ["--tp", "1", "--pp", "4", "--tune", "--", sys.executable, str(EXAMPLE), *SIZES]
    done = subprocess.run(
        [*command, "--iterations", str(ITERATIONS)], env=environment, check=False, capture_output=True, text=True
    )
    said = [line for line in (done.stdout + done.stderr).splitlines() if "measured times" in line]
    return rows("plans", environment), rows("iterations", environment), "\n".join(said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--layer-ms", type=float, default=24.0)
    options = parser.parse_args()
    table = Table(title=f"TP1 PP4 DP2, 8 micro-batches, a head of {HEAD} layers: tuned again by measured times")
    for name in ("run", "chunks", "before, s", "after, s", "promised", "kept", "points"):
        table.add_column(name, justify="right")
    console = Console(width=110)
    for run in range(options.runs):
        folder = Path(tempfile.mkdtemp(prefix="resihp-tuned-"))
        try:
            plans, iterations, said = ran(folder, options.layer_ms)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        console.print(said, markup=False, highlight=False)
        taken = [plan for plan in plans if plan["in_effect_at"]]
        for before, after in itertools.pairwise(taken):
            times = [
                [row["seconds"] for row in iterations if row["epoch"] == plan["epoch"] and row["seconds"]][SETTLING:]
                for plan in (before, after)
            ]
            if not after["present"] or not all(times):
                continue
            was, now = map(statistics.median, times)
            promised, kept = after["predicted"] / after["present"], now / was
            chunks = max(len(stage.get("chunks", [1])) for stages in after["layout"]["replicas"] for stage in stages)
            table.add_row(
                str(run + 1),
                str(chunks),
                f"{was:.3f}",
                f"{now:.3f}",
                f"{promised:.3f}",
                f"{kept:.3f}",
                f"{100 * (kept - promised):+.1f}",
            )
    console.print(table)


if __name__ == "__main__":
    main()
