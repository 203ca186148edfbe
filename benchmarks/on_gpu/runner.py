"""Run blocks one after the other, each in a process and a time of its own, and keep what they yield.

What CUDA does to one block it does to no other, and a block that is ended keeps what it had yielded by then.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.on_gpu import first_light
from benchmarks.on_gpu.figures import Figure, Missing, Scale
from benchmarks.on_gpu.processes import keep_logs, run_within

SHORTEST_S = 15.0
"""A block that has less time left than this is not begun, unless its own limit is shorter."""
LAST_LINES = 15
"""Of a broken block's log that are printed."""
SEVERAL_RANKS = ("nccl", "shared")
"""Blocks with several of NCCL's ranks on one GPU, which `--nccl` is for."""


class Block(msgspec.Struct, frozen=True):
    """What became of one block."""

    name: str
    seconds: float
    figures: list[Figure]
    trouble: str
    """Why there are no figures, or no more."""
    broken: bool


class Order(msgspec.Struct, frozen=True):
    """Blocks to run with the seconds that each may take, and the seconds that all together may."""

    limits: dict[str, float]
    seconds: float
    flags: list[str]
    folder: Path
    nccl: Path | None = None


def run(order: Order) -> int:
    """Run the blocks, write the files, print the table. Returns the exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # which ends the block's processes, too
    (order.folder / "logs").mkdir(parents=True, exist_ok=True)
    (order.folder / "gpu.jsonl").write_text("")
    began = time.monotonic()
    blocks: list[Block] = []
    for name, limit in order.limits.items():
        left_s = order.seconds - (time.monotonic() - began)
        if blocks and left_s < min(SHORTEST_S, limit):
            blocks.append(Block(name, 0.0, [], "not run: no time was left", False))
            continue
        blocks.append(run_block(name, min(limit, left_s), order))
    encoded = msgspec.json.format(msgspec.json.encode(blocks), indent=1)
    (order.folder / "gpu.json").write_bytes(encoded)
    (order.folder / "gpu.md").write_text(markdown(blocks))
    show(blocks, Console(width=None if sys.stdout.isatty() else 160))
    missed = [figure for block in blocks for figure in block.figures if figure.met is False]
    return 1 if missed or any(block.broken for block in blocks) else 0


def run_block(name: str, seconds: float, order: Order) -> Block:
    print(f"{name} (at most {seconds:.0f} s)", file=sys.stderr)
    log = order.folder / "logs" / f"{name}.log"
    log.write_text("")
    figures: list[Figure] = []
    reasons: list[str] = []

    def line(text: str) -> None:
        answer = json.loads(text)
        with (order.folder / "gpu.jsonl").open("a") as file:
            file.write(json.dumps({"block": name, "unix_time": round(time.time(), 1), **answer}) + "\n")
        if "missing" in answer:
            reasons.append(answer["missing"])
            return
        figures.append(msgspec.convert(answer, Figure))
        print(f"  {figures[-1].name}: {figures[-1].value}", file=sys.stderr)

    command = [sys.executable, "-m", "benchmarks.gpu", "--inside", name, "--folder", str(order.folder)]
    command += [f"--{flag}" for flag in order.flags]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rg-") as scratch:  # short: a path to a socket has 107 bytes at most
        environment = {**_environment(name, order), "TMPDIR": scratch}
        code = run_within(command, seconds, log, environment, line)
        if code != 0:
            keep_logs(Path(scratch), order.folder / "logs" / name)
    trouble = {0: "", None: f"stopped: its {seconds:.1f} s were over"}.get(code, f"ended with {code}; see {log}")
    if trouble:
        print(*log.read_text(errors="replace").splitlines()[-LAST_LINES:], sep="\n", file=sys.stderr)
    return Block(name, time.monotonic() - began, figures, trouble or "; ".join(reasons), bool(trouble))


def _environment(name: str, order: Order) -> dict[str, str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    if order.nccl is not None and name in SEVERAL_RANKS:
        environment["LD_PRELOAD"] = str(order.nccl.resolve())
    return environment


def inside(name: str, *, rehearse: bool, brief: bool, folder: Path) -> None:
    """Run one block in this process: a line of JSON on standard output for each figure, as soon as it is known."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not among them
    scale = Scale(full=not rehearse, brief=brief, folder=folder)
    try:
        for figure in measure_of(name)(scale):
            print(json.dumps(msgspec.to_builtins(figure)), file=answers, flush=True)
    except Missing as reason:
        print(json.dumps({"missing": str(reason)}), file=answers, flush=True)


def measure_of(name: str) -> Callable[[Scale], Iterable[Figure]]:
    if name in first_light.BLOCKS:
        measure: Callable[[Scale], Iterable[Figure]] = getattr(first_light, name)
        return measure
    from benchmarks.on_gpu import one_rank, recovery, shared, throughput

    return {
        "one-rank": one_rank.measure,
        "throughput": throughput.measure,
        "recovery": recovery.measure,
        "shared": shared.measure,
    }[name]


def show(blocks: list[Block], console: Console) -> None:
    table = Table("", "measured", "asked for", "")
    for block in blocks:
        table.add_row(f"[bold]{block.name}[/] ({block.seconds:.0f} s)", block.trouble, "", _mark(not block.broken))
        for figure in block.figures:
            table.add_row(f"  {figure.name}", figure.value, figure.asked, _mark(figure.met))
    console.print(table)


def _mark(met: bool | None) -> str:
    return "" if met is None else "ok" if met else "[bold red]missed[/]"


def markdown(blocks: list[Block]) -> str:
    rows = ["| | measured | asked for |", "|---|---|---|"]
    for block in blocks:
        rows.append(f"| **{block.name}**, {block.seconds:.0f} s | {_cell(block.trouble)} | |")
        for figure in block.figures:
            missed = ", **missed**" if figure.met is False else ""
            rows.append(f"| {_cell(figure.name)} | {_cell(figure.value)}{missed} | {figure.asked} |")
    return "\n".join(rows) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
