"""Supervised jobs of eight workers that share one GPU, and what their ledgers say of what became of them."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.on_gpu.figures import Figure, Scale, at_most

EXAMPLE = Path(__file__).parents[2] / "examples" / "pretrain_gpt.py"
AT = 6
"""Iteration in which faults fire."""
FAULTS = {
    "killed in backward": ("kill:rank=5@iteration={at},phase=backward",),
    "killed in reduce": ("kill:rank=5@iteration={at},phase=reduce",),
    "killed once it has reduced": ("kill:rank=5@iteration={at},phase=step",),
    "killed, and another in the transfer": (
        "kill:rank=5@iteration={at},phase=backward",
        "kill:rank=2@iteration={at},phase=transfer",
    ),
    "hangs": ("hang:rank=5@iteration={at},phase=backward",),
}
"""What happens, and how it is asked for. Eight ranks as TP2 PP2 DP2."""


class Outcome(msgspec.Struct, frozen=True):
    """One job. `lost` are the ranks that did not end by themselves."""

    losses: dict[int, float]
    iteration_s: float
    recovery_s: float
    """From the first fault's detection to the next commit, all changes of the plan together."""
    detect_s: float
    lost: frozenset[int]


def job(scale: Scale, environment: Mapping[str, str], faults: tuple[str, ...] = (), iterations: int = 0) -> Outcome:
    """Run one. Raises RuntimeError with the job's last words if it does not end well."""
    iterations = iterations or scale.of(20, 8)
    sizes = {"layers": scale.of(8, 4), "hidden": scale.of(1024, 32), "tokens": scale.of(4096, 64), "micro-batches": 8}
    folder = Path(tempfile.mkdtemp(prefix="resihp-gpu-"))
    settings = {
        "RESIHP_HOME": str(folder / "home"),
        "RESIHP_STATE": str(folder / "state"),
        "RESIHP_LOCAL": str(folder / "local"),
        "RESIHP_SHARE_GPUS": "1",
    }
    command = [sys.executable, "-m", "wrapper", "run", "--local", "--nodes", "2", "--gpus-per-node", "4"]
    command += ["--tp", "2", "--pp", "2", *(part for fault in faults for part in ("--fault", fault.format(at=AT)))]
    command += ["--", sys.executable, str(EXAMPLE), "--iterations", str(iterations)]
    command += [part for name, size in sizes.items() for part in (f"--{name}", str(size))]
    try:
        done = subprocess.run(
            command, env={**os.environ, **settings, **environment}, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(faults) or 'no fault'}: exit {done.returncode}: {done.stderr[-2000:]}")
        rows = {table: _rows(folder, table) for table in ("iterations", "failures", "reconfigurations", "workers")}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Outcome(
        losses={row["iteration"]: row["loss"] for row in rows["iterations"]},
        iteration_s=statistics.median(row["seconds"] for row in rows["iterations"] if row["seconds"]),
        recovery_s=sum(row["seconds"] for row in rows["reconfigurations"]),
        detect_s=max((row["detect_seconds"] for row in rows["failures"]), default=0.0),
        lost=frozenset(row["rank"] for row in rows["workers"] if row["exit"] != 0),
    )


def _rows(folder: Path, table: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "wrapper", "history", table, "--json"]
    answer = subprocess.run(
        command,
        env={**os.environ, "RESIHP_HOME": str(folder / "home"), "RESIHP_STATE": str(folder / "state")},
        check=True,
        capture_output=True,
        text=True,
    )
    found: list[dict[str, Any]] = json.loads(answer.stdout)["rows"]
    return found


def judged(name: str, faults: tuple[str, ...], outcome: Outcome, undisturbed: Outcome) -> list[Figure]:
    """Who was lost, whether the curve is the undisturbed one, and how long it took."""
    wanted = frozenset(int(fault.partition("rank=")[2].partition("@")[0]) for fault in faults)
    same = outcome.losses.keys() == undisturbed.losses.keys()
    off = max(abs(loss / undisturbed.losses[i] - 1) for i, loss in outcome.losses.items()) if same else 1.0
    took = outcome.recovery_s - outcome.iteration_s * len(faults)
    return [
        Figure(
            f"{name}: ranks lost",
            ", ".join(map(str, sorted(outcome.lost))),
            ", ".join(map(str, sorted(wanted))),
            outcome.lost == wanted,
        ),
        at_most(f"{name}: losses off the undisturbed", off, 1e-4),
        at_most(
            f"{name}: to the next commit beyond an iteration, noticed after {outcome.detect_s:.2f} s", took, 2, " s"
        ),
    ]
