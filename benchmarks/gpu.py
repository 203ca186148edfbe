"""Everything that one GPU can show about the executor, each block of it in a process and a time of its own.

    python -m benchmarks.gpu [BLOCK ...] [--folder FOLDER] [--minutes M]

Prints each figure beside what is asked for; writes `gpu.json` and, for docs/measured.md, `gpu.md`. Exit code 1 if a
figure is not what is asked for or a block breaks, 0 if all are, or if there is no GPU: then one line says so.
`--rehearse` runs the same code on a processor, with sizes that say nothing.

One GPU cannot show NVLink, InfiniBand, what NCCL says of a dead node, or building communicators at scale.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.on_gpu.figures import Figure, Missing, Scale

BLOCKS = {
    "inventory": 3,
    "kernels": 7,
    "one-rank": 4,
    "throughput": 9,
    "recovery": 9,
    "shared": 9,
}
"""Minutes that each may take, in the order in which they run."""


class Block(msgspec.Struct, frozen=True):
    """What became of one block."""

    name: str
    seconds: float
    figures: list[Figure]
    trouble: str
    """Why there are no figures, or no more."""
    broken: bool


def run_block(name: str, rehearse: bool, minutes: float) -> Block:
    """In a process of its own, killed when its time is over: what CUDA does to one block, it does to no other."""
    began, trouble = time.monotonic(), ""
    command = [sys.executable, "-m", "benchmarks.gpu", "--inside", name, *(["--rehearse"] if rehearse else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    try:
        output, _ = process.communicate(timeout=60 * minutes)
        if process.returncode:
            trouble = f"ended with {process.returncode}; its words are above"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        trouble = f"did not end within {minutes:g} minutes"
    answers = [json.loads(line) for line in output.splitlines()]
    figures = [msgspec.convert(answer, Figure) for answer in answers if "missing" not in answer]
    missing = next((answer["missing"] for answer in answers if "missing" in answer), "")
    return Block(name, time.monotonic() - began, figures, trouble or missing, bool(trouble))


def inside(name: str, scale: Scale) -> None:
    """One block, in this process: a line of JSON on standard output for each figure, as soon as it is known."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not among them
    measure = importlib.import_module(f"benchmarks.on_gpu.{name.replace('-', '_')}").measure
    try:
        for figure in measure(scale):
            print(json.dumps(msgspec.to_builtins(figure)), file=answers, flush=True)
    except Missing as reason:
        print(json.dumps({"missing": str(reason)}), file=answers, flush=True)


def no_gpu() -> str:
    """Why nothing can be measured here; empty if it can. In a process of its own: it starts CUDA."""
    asked = "import torch; assert torch.cuda.is_available(), f'torch {torch.__version__} sees none'"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr.strip().splitlines()[-1].partition(": ")[2]


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
        rows.append(f"| **{block.name}**, {block.seconds:.0f} s | {block.trouble} | |")
        for figure in block.figures:
            missed = ", **missed**" if figure.met is False else ""
            rows.append(f"| {figure.name} | {figure.value}{missed} | {figure.asked} |")
    return "\n".join(rows) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("blocks", nargs="*", metavar="BLOCK", help=f"default: all of {', '.join(BLOCKS)}")
    parser.add_argument("--folder", type=Path, default=Path(), help="where gpu.json and gpu.md are written")
    parser.add_argument("--minutes", type=float, help="of each block, instead of its own limit")
    parser.add_argument("--rehearse", action="store_true", help="on a processor, with sizes that say nothing")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        inside(args.inside, Scale(not args.rehearse))
        return 0
    if unknown := set(args.blocks) - set(BLOCKS):
        parser.error(f"{', '.join(sorted(unknown))}: no block; there are {', '.join(BLOCKS)}")
    reason = "" if args.rehearse else no_gpu()
    if reason:
        print(f"gpu: nothing is measured: {reason}; on a machine with one: make gpu")
        return 0
    blocks = []
    for name, minutes in BLOCKS.items():
        if not args.blocks or name in args.blocks:
            print(f"{name} (at most {args.minutes or minutes:g} minutes)", file=sys.stderr)
            blocks.append(run_block(name, args.rehearse, args.minutes or minutes))
    args.folder.mkdir(parents=True, exist_ok=True)
    (args.folder / "gpu.json").write_bytes(msgspec.json.format(msgspec.json.encode(blocks), indent=1))
    (args.folder / "gpu.md").write_text(markdown(blocks))
    show(blocks, Console(width=None if sys.stdout.isatty() else 140))
    missed = [figure for block in blocks for figure in block.figures if figure.met is False]
    return 1 if missed or any(block.broken for block in blocks) else 0


if __name__ == "__main__":
    sys.exit(main())
