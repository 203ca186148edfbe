"""Supervised jobs whose workers share one GPU, and what their ledgers say of what became of them.

What a job printed, its losses and, if it ended badly, its logs are kept in `jobs/` of the run's folder.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.on_gpu.figures import Figure, Scale, at_most
from benchmarks.on_gpu.processes import keep_logs, run_within

EXAMPLE = Path(__file__).parents[2] / "examples" / "pretrain_gpt.py"
AT = 6
"""Iteration in which faults fire."""
JOB_S = 90.0
"""How long one job may take: ten times what one of these sizes is expected to."""
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
LEDGER_TABLES = ("iterations", "failures", "reconfigurations", "workers")
MEMORY_PROBE_S = 0.5
LAST_CHARACTERS = 400
"""Of a job's standard error that are shown in a figure."""


class Shape(msgspec.Struct, frozen=True):
    """Virtual nodes, workers on each of them, and degrees."""

    nodes: int
    workers: int
    tp: int
    pp: int


EIGHT = Shape(2, 4, 2, 2)
FOUR = Shape(2, 2, 1, 2)


class Outcome(msgspec.Struct, frozen=True):
    """One job. `lost` are the ranks that did not end by themselves."""

    losses: dict[int, float]
    iteration_s: float
    recovery_s: float
    """From the first fault's detection to the next commit, all changes of the plan together."""
    detect_s: float
    lost: frozenset[int]
    device_bytes: int
    """The most memory of the device that was in use, by all; 0 if nobody can say."""
    trouble: str
    """Why it did not end well; empty if it did."""


def job(
    scale: Scale,
    name: str,
    environment: Mapping[str, str],
    faults: tuple[str, ...] = (),
    iterations: int = 0,
    shape: Shape = EIGHT,
    limit_s: float = JOB_S,
) -> Outcome:
    """Run one, for `limit_s` at most. What its ledger knows is kept, however it ends."""
    kept = scale.folder / "jobs" / re.sub(r"\W+", "-", name)
    kept.parent.mkdir(parents=True, exist_ok=True)
    log = kept.with_name(f"{kept.name}.log")
    log.write_text("")
    folder = Path(tempfile.mkdtemp(prefix="resihp-gpu-"))
    command = _command(scale, faults, iterations or scale.of(12, 8), shape)
    try:
        with _most_device_memory() as most_bytes:
            code = run_within(command, limit_s, log, {**os.environ, **environment, **_homes(folder)})
        rows = {table: _rows(folder, table) for table in LEDGER_TABLES}
        trouble = _trouble(code, limit_s, log, rows)
        if trouble:
            keep_logs(folder, kept)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    outcome = _outcome(rows, trouble, max(most_bytes, default=0))
    record = {"command": command, "outcome": msgspec.to_builtins(outcome), "ledger": rows}
    kept.with_name(f"{kept.name}.json").write_text(json.dumps(record, indent=1))
    return outcome


def _command(scale: Scale, faults: tuple[str, ...], iterations: int, shape: Shape) -> list[str]:
    sizes = {"layers": scale.of(8, 4), "hidden": scale.of(256, 32), "tokens": scale.of(512, 64), "micro-batches": 8}
    sizes["iterations"] = iterations
    command = [sys.executable, "-m", "resihp", "run", "--local"]
    command += ["--nodes", str(shape.nodes), "--gpus-per-node", str(shape.workers)]
    command += ["--tp", str(shape.tp), "--pp", str(shape.pp)]
    for fault in faults:
        command += ["--fault", fault.format(at=AT)]
    command += ["--", sys.executable, str(EXAMPLE)]
    for option, size in sizes.items():
        command += [f"--{option}", str(size)]
    return command


def _homes(folder: Path) -> dict[str, str]:
    return {
        "RESIHP_HOME": str(folder / "home"),
        "RESIHP_STATE": str(folder / "state"),
        "RESIHP_LOCAL": str(folder / "local"),
        "RESIHP_SHARE_GPUS": "1",
    }


def _trouble(code: int | None, limit_s: float, log: Path, rows: Mapping[str, list[dict[str, Any]]]) -> str:
    if code is None:
        return f"did not end within {limit_s:g} s"
    if code:
        return f"exit {code}: {log.read_text(errors='replace')[-LAST_CHARACTERS:]}"
    return "" if rows["iterations"] else "no iteration in its ledger"


def _outcome(rows: Mapping[str, list[dict[str, Any]]], trouble: str, device_bytes: int) -> Outcome:
    seconds = [row["seconds"] for row in rows["iterations"] if row["seconds"]]
    return Outcome(
        losses={row["iteration"]: row["loss"] for row in rows["iterations"]},
        iteration_s=statistics.median(seconds) if seconds else 0.0,
        recovery_s=sum(row["seconds"] or 0.0 for row in rows["reconfigurations"]),
        detect_s=max((row["detect_seconds"] or 0.0 for row in rows["failures"]), default=0.0),
        lost=frozenset(row["rank"] for row in rows["workers"] if row["exit"] != 0),
        device_bytes=device_bytes,
        trouble=trouble,
    )


def _rows(folder: Path, table: str) -> list[dict[str, Any]]:
    """Rows of a job's ledger; none if it has no such ledger."""
    command = [sys.executable, "-m", "resihp", "history", table, "--json"]
    environment = {**os.environ, **_homes(folder)}
    answer = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    if answer.returncode:
        print(f"{table}: exit {answer.returncode}: {answer.stderr}", file=sys.stderr)
        return []
    rows: list[dict[str, Any]] = json.loads(answer.stdout)["rows"]
    return rows


@contextmanager
def _most_device_memory() -> Iterator[list[int]]:
    """Collect the bytes of the device that are in use while the body runs. By nvidia-smi: a context would count."""
    used: list[int] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(MEMORY_PROBE_S):
            command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
            answer = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
            used.extend(int(megabytes) << 20 for megabytes in answer[:1] if megabytes.isdigit())

    if shutil.which("nvidia-smi") is None:
        yield used
        return
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield used
    finally:
        done.set()
        thread.join()


def compared(
    scale: Scale,
    name: str,
    environment: Mapping[str, str],
    faults: Mapping[str, tuple[str, ...]],
    shape: Shape = EIGHT,
) -> Iterator[Figure]:
    """Run a job without a fault, and then one with each of them. A job that ends badly costs no other."""
    undisturbed = job(scale, f"{name} no fault", environment, shape=shape)
    yield from described(name, undisturbed)
    for fault, orders in faults.items():
        outcome = job(scale, f"{name} {fault}", environment, orders, shape=shape)
        yield from judged(f"{name}: {fault}", orders, outcome, undisturbed)


def described(name: str, outcome: Outcome) -> Iterator[Figure]:
    """What a job without a fault shows."""
    if outcome.trouble:
        yield Figure(f"{name}: without a fault", _ended(outcome), "ends well", False)
        return
    yield Figure(f"{name}: without a fault", f"{outcome.iteration_s:.3f} s an iteration, {_losses(outcome)}")
    if outcome.device_bytes:
        yield Figure(f"{name}: most device memory in use", f"{outcome.device_bytes / 1e9:.2f} GB")


def judged(name: str, faults: tuple[str, ...], outcome: Outcome, undisturbed: Outcome) -> Iterator[Figure]:
    """Who was lost, whether the curve is the undisturbed one, and how long it took."""
    if outcome.trouble:
        yield Figure(name, _ended(outcome), "ends well", False)
        return
    wanted = frozenset(int(fault.partition("rank=")[2].partition("@")[0]) for fault in faults)
    ranks, wanted_ranks = (", ".join(map(str, sorted(each))) for each in (outcome.lost, wanted))
    yield Figure(f"{name}: ranks lost", ranks, wanted_ranks, outcome.lost == wanted)
    if not undisturbed.trouble:
        same = outcome.losses.keys() == undisturbed.losses.keys()
        off = max(abs(loss / undisturbed.losses[i] - 1) for i, loss in outcome.losses.items()) if same else 1.0
        yield at_most(f"{name}: losses off the undisturbed", off, 1e-4)
    took = outcome.recovery_s - outcome.iteration_s * len(faults)
    noticed = f"noticed after {outcome.detect_s:.2f} s"
    yield at_most(f"{name}: to the next commit beyond an iteration, {noticed}", took, 2, " s")


def _ended(outcome: Outcome) -> str:
    return f"{_losses(outcome)}; {outcome.trouble}"


def _losses(outcome: Outcome) -> str:
    if not outcome.losses:
        return "no loss"
    first, last = min(outcome.losses), max(outcome.losses)
    return f"losses {outcome.losses[first]:.4f} to {outcome.losses[last]:.4f} in iterations {first} to {last}"
