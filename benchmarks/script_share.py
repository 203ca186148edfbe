"""What supervision costs a script that does not use resihp: CPU seconds of our processes, as a share of the ranks'.

    python -m benchmarks.script_share [--seconds 300] [--iteration-seconds 1.0 0.1]

A DDP script computes with four ranks on two virtual nodes, without a pause, and prints a line in each iteration. After
a warm-up of 40 s the CPU is counted of guardian, supervisor, agents, fork servers and early workers, and of the ranks,
as `/proc/PID/stat` has it. A row for each length of an iteration: both in seconds, and shares of the ranks' CPU in
percent, in total and by process.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

WARM_UP_S = 40.0
SCRIPT = """\
import sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

seconds = float(sys.argv[1])
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(256, 256))
inputs = torch.randn(64, 256)
iteration = 0
while True:
    iteration += 1
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with model.no_sync():
            model(inputs).square().mean().backward()
    loss = model(inputs).square().mean()
    loss.backward()
    model.zero_grad()
    if dist.get_rank() == 0:
        print(f"iteration {iteration}/1000000 loss {loss.item():.4f}", flush=True)
"""
ROLE = re.compile(r"resihp job \S+ (guardian|supervisor|agent|fork server|early rank|rank)")


def cpu_seconds(pid: int) -> Counter[str]:
    """Return the CPU seconds of a job's processes so far, by what they are."""
    seconds: Counter[str] = Counter()
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        try:
            role = ROLE.match(process.cmdline()[0])
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        seconds[role[1] if role else "other"] += times.user + times.system
    return seconds


def measure(folder: Path, iteration_s: float, seconds: float) -> Counter[str]:
    (folder / "train.py").write_text(SCRIPT)
    environment = os.environ | {
        "RESIHP_HOME": str(folder / "home"),
        "RESIHP_LOCAL": str(folder / "local"),
        "RES_OPTIONS": "timeout:1 attempts:1",
    }
    command = [sys.executable, "-m", "resihp", "run", "--local", "--nodes", "2", "--gpus-per-node", "2", "train.py"]
    with open(folder / "output", "w") as output:
        job = subprocess.Popen([*command, str(iteration_s)], env=environment, cwd=folder, stdout=output, stderr=output)
    try:
        time.sleep(WARM_UP_S)
        before = cpu_seconds(job.pid)
        time.sleep(seconds)
        after = cpu_seconds(job.pid)
    finally:
        for process in [*psutil.Process(job.pid).children(recursive=True), psutil.Process(job.pid)]:
            process.kill()
        job.wait()
    return after - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--iteration-seconds", type=float, nargs="+", default=[1.0, 0.1])
    options = parser.parse_args()
    for iteration_s in options.iteration_seconds:
        with tempfile.TemporaryDirectory(prefix="share-") as folder:
            spent = measure(Path(folder), iteration_s, options.seconds)
        ranks_s = spent.pop("rank")
        shares = ", ".join(f"{role} {100 * role_s / ranks_s:.3f}" for role, role_s in spent.most_common())
        ours_s = spent.total()
        print(
            f"iteration of {iteration_s:g} s: ranks {ranks_s:.1f} s, resihp {ours_s:.2f} s, "
            f"{100 * ours_s / ranks_s:.2f} % ({shares})",
            flush=True,
        )


if __name__ == "__main__":
    main()
