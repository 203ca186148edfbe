"""Measure everything that one GPU can show about resihp, each block of it in a process and a time of its own.

    python -m benchmarks.gpu [BLOCK ...] [--full] [--minutes M] [--folder FOLDER] [--nccl LIBRARY]

Without a block: a first look, within nine minutes, most knowledge per minute first (`benchmarks.on_gpu.first_light`).
`--full`: the longer blocks, which measure against what is asked for. `--minutes` bounds all blocks together.

Prints each figure as soon as it is known, and in the end a table with what is asked for. Into FOLDER go `gpu.jsonl`, a
line for each figure as it comes; `gpu.json` and, for docs/measured.md, `gpu.md`; `logs/BLOCK.log`; and `jobs/`, what
each supervised job printed and its losses, also of those that ended badly. Exit code 1 if a figure is not what is asked
for or a block breaks, 0 if all are, or if there is no GPU: then one line says what is missing. `--rehearse` runs the
same code on a processor, with sizes that say nothing.

Several ranks on one GPU need NCCL 2.30 or later. `--nccl` names a library for the blocks that have them, where torch
brings an older one; `facts` prints the version that is loaded.

One GPU cannot show NVLink, InfiniBand, what NCCL says of a dead node, or building communicators at scale.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

if not __package__:  # run as a file, not with -m
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.on_gpu import first_light

FULL = {
    "facts": 20,
    "forks": 40,
    "micro": 75,
    "kernels": 420,
    "one-rank": 240,
    "throughput": 540,
    "recovery": 240,
    "shared": 420,
}
"""Seconds that each block of `--full` may take, in the order in which they run."""
ALL = {**first_light.BLOCKS, **FULL}
REHEARSAL_TIMES = 8
"""How many times longer a block may take on a processor."""

# Prints why there is nothing to measure, or nothing. torch's own words end at the first sentence.
_PROBE = """
import glob, sys, warnings
warnings.simplefilter("ignore")
def needs(module):
    raise SystemExit(f"{module} is not installed for {sys.executable}; pip install -e '.[train,dev]', then make gpu")
try:
    import torch
except ModuleNotFoundError as error:
    needs(error.name)
build = f"torch {torch.__version__}"
if torch.version.cuda is None and torch.version.hip is None:
    here = "" if glob.glob("/dev/nvidia[0-9]*") else "this machine has no /dev/nvidia0, and "
    ways = "install one for CUDA, or, if another Python here has one: make clean; make setup TORCH=site PYTHON=..."
    raise SystemExit(f"{here}{build} is a build for CPUs; {ways}")
try:
    torch.cuda.init()
except Exception as error:
    raise SystemExit(f"{build} sees no GPU: {str(error).strip().split('. ')[0]}; where there is one: make gpu")
if torch.cuda.get_device_capability() < (8, 0):
    raise SystemExit(f"{torch.cuda.get_device_name()} has no bf16; a GPU of compute capability 8.0 or later is needed")
try:
    import torch.nn.attention.varlen
except ModuleNotFoundError:
    raise SystemExit(f"{build} has no attention for packed documents; 2.10 or later is needed, 2.11 best")
try:
    import megatron.core, msgspec, psutil, rich, resihp.wrapper.cli
except ModuleNotFoundError as error:
    needs(error.name)
"""


def what_is_missing() -> str:
    """Return in one line why nothing can be measured here; empty if it can. In a process of its own: it starts CUDA."""
    probe = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, check=False)
    if probe.returncode == 0:
        return ""
    return (probe.stderr.strip().splitlines() or [f"torch ended its process with {probe.returncode}"])[-1]


def seconds_of(names: list[str], full: bool) -> dict[str, float]:
    """Return the blocks that were asked for, each with its own limit, in the order in which they run."""
    known = FULL if full else first_light.BLOCKS
    wanted = names or list(known)
    return {name: known.get(name, limit) for name, limit in ALL.items() if name in wanted}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    first, longer = (", ".join(blocks) for blocks in (first_light.BLOCKS, FULL))
    parser.add_argument("blocks", nargs="*", metavar="BLOCK", help=f"default: {first}; with --full: {longer}")
    parser.add_argument("--full", action="store_true", help="measure against what is asked for: about half an hour")
    parser.add_argument("--minutes", type=float, help="of all blocks together; a first look: 9")
    parser.add_argument("--folder", type=Path, default=Path("gpu-results"), help="where results and logs are written")
    parser.add_argument("--nccl", type=Path, help="a libnccl.so.2 for the blocks with several ranks on one GPU")
    parser.add_argument("--rehearse", action="store_true", help="on a processor, with sizes that say nothing")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.blocks) - set(ALL):
        parser.error(f"{', '.join(sorted(unknown))}: no block; there are {', '.join(ALL)}")
    if args.nccl is not None and not args.nccl.is_file():
        parser.error(f"--nccl {args.nccl}: no such file")
    if args.minutes is not None and args.minutes <= 0:
        parser.error(f"--minutes {args.minutes:g}: more than 0 are needed")
    return args


def main() -> int:
    args = parsed()
    reason = "" if args.rehearse or args.inside else what_is_missing()
    if reason:
        print(f"gpu: nothing is measured: {reason}")
        return 0
    from benchmarks.on_gpu import runner  # needs packages, which `what_is_missing` has looked for

    if args.inside:
        runner.inside(args.inside, rehearse=args.rehearse, brief=not args.full, folder=args.folder)
        return 0
    limits = seconds_of(args.blocks, args.full)
    minutes = args.minutes
    if minutes is None and not args.blocks and not args.full:
        minutes = first_light.MINUTES
    if args.rehearse:
        limits = {name: limit * REHEARSAL_TIMES for name, limit in limits.items()}
        minutes = args.minutes
    order = runner.Order(
        limits,
        seconds=60 * minutes if minutes else sum(limits.values()),
        flags=[flag for flag in ("full", "rehearse") if getattr(args, flag)],
        folder=args.folder,
        nccl=args.nccl,
    )
    return runner.run(order)


if __name__ == "__main__":
    sys.exit(main())
