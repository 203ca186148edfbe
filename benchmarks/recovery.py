"""SIGKILL of one of eight workers to the first committed iteration afterwards: resihp against torchrun, in one run.

Same script, same sizes, TP2 PP2 DP2 on this machine, runs interleaved. resihp: `kill` fault in mid-iteration, moment of
the kill and of the next commit from its journal. torchrun: restarts all workers (--max-restarts), which load their last
checkpoint (every 5 iterations); moment of our SIGKILL to the first iteration line printed afterwards.

    python benchmarks/recovery.py [--runs 10]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

EXAMPLE = Path(__file__).parents[1] / "examples" / "pretrain_gpt.py"
SIZES = ["--layers", "4", "--hidden", "64", "--tokens", "256", "--micro-batches", "8"]
KILL_AT, ITERATIONS, VICTIM = 8, 14, 5


def resihp_run(folder: Path) -> dict[str, float]:
    """One supervised run with one kill; seconds by phase."""
    environment = {
        **os.environ,
        "RESIHP_HOME": str(folder / "home"),
        "RESIHP_STATE": str(folder / "state"),
        "RESIHP_LOCAL": str(folder / "local"),
    }
    wrapper = [sys.executable, "-m", "resihp"]
    subprocess.run(
        [
            *[*wrapper, "run", "--local", "--nodes", "2", "--gpus-per-node", "4", "--tp", "2", "--pp", "2"],
            *["--fault", f"kill:rank={VICTIM}@iteration={KILL_AT},phase=backward"],
            *["--", sys.executable, str(EXAMPLE), *SIZES, "--iterations", str(ITERATIONS)],
        ],
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def rows(table: str) -> list[dict[str, float]]:
        answer = subprocess.run(
            [*wrapper, "history", table, "--json"], env=environment, check=True, capture_output=True, text=True
        )
        found: list[dict[str, float]] = json.loads(answer.stdout)["rows"]
        return found

    (failure,), (change,) = rows("failures"), rows("reconfigurations")
    iterations = [row["seconds"] for row in rows("iterations") if row["seconds"]]
    phases = {name: change[f"{name}_seconds"] for name in ("park", "plan", "groups", "state", "first_iteration")}
    detect = failure["detect_seconds"]
    return {
        "total": detect + change["seconds"],
        "detect": detect,
        **phases,
        "iteration": statistics.median(iterations),
    }


def torchrun_run(folder: Path) -> float:
    """One torchrun job with one kill; seconds to the first iteration after the restart."""
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [
            *[sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=8", "--max-restarts=3"],
            *["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"],
            *[str(EXAMPLE), *SIZES, "--iterations", str(ITERATIONS), "--tp", "2", "--pp", "2"],
            *["--checkpoint-every", "5", "--checkpoint-folder", str(folder / "checkpoints"), "--resume"],
        ],
        env={**environment, "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    killed_at: float | None = None
    recovered: float | None = None
    assert process.stdout is not None
    for line in process.stdout:
        if not line.startswith("iteration "):
            continue
        if killed_at is None and int(line.split()[1].split("/")[0]) == KILL_AT - 1:
            for child in psutil.Process(process.pid).children(recursive=True):
                if child.environ().get("RANK") == str(VICTIM):
                    killed_at = time.monotonic()
                    child.send_signal(signal.SIGKILL)
                    break
        elif killed_at is not None and recovered is None and time.monotonic() - killed_at > 0.5:
            recovered = time.monotonic() - killed_at
    status = process.wait(60)
    if recovered is None or status != 0:
        raise SystemExit(f"torchrun: exit {status}, killed {killed_at is not None}, recovered {recovered}")
    return recovered


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=10)
    runs = parser.parse_args().runs
    ours: list[dict[str, float]] = []
    theirs: list[float] = []
    for run in range(runs):
        folder = Path(tempfile.mkdtemp(prefix="resihp-recovery-"))
        try:
            ours.append(resihp_run(folder))
            theirs.append(torchrun_run(folder))
        finally:
            shutil.rmtree(folder)
        print(f"run {run + 1}: resihp {ours[-1]['total']:.2f} s, torchrun {theirs[-1]:.2f} s", file=sys.stderr)

    table = Table(title=f"SIGKILL to the next committed iteration, 8 workers, {runs} runs each")
    for column in ("", "median s", "min", "max"):
        table.add_column(column, justify="left" if not column else "right")
    for name in ("detect", "park", "plan", "state", "groups", "first_iteration", "total"):
        values = [run[name] for run in ours]
        table.add_row(f"resihp {name}", *(f"{f(values):.3f}" for f in (statistics.median, min, max)))
    table.add_row("torchrun total", *(f"{f(theirs):.3f}" for f in (statistics.median, min, max)))
    Console(width=80).print(table)
    iteration = statistics.median(run["iteration"] for run in ours)
    total = statistics.median(run["total"] for run in ours)
    print(
        f"median iteration {iteration:.3f} s; resihp total minus one iteration {total - iteration:.3f} s (target 1.5)"
    )
    print(f"ratio torchrun / resihp {statistics.median(theirs) / total:.1f} (target 8)")


if __name__ == "__main__":
    main()
