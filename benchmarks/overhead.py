"""What supervision costs a healthy job: CPU seconds of our processes and hooks, and wall-clock against the bare script.

The same 8-worker training runs twice at the same time, once under `resihp run`, once under torchrun. Blocks of
iterations alternate: while one job computes, all ranks of the other wait at a gate (a blocking read of a pipe), so that
the machine's mood hits both alike. The waiting supervised job still beats once a second, charged to the bare one.

    python benchmarks/overhead.py [--blocks 30] [--iterations-per-block 10]

Printed: CPU share = (guardian, supervisor, store, agents, the hooks' threads in the workers) / (workers). The main
threads' part of the hooks is in the wall-clock ratio supervised / bare, the geometric mean over pairs of blocks with
its 95 % confidence interval.
"""

from __future__ import annotations

import argparse
import math
import os
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

WORKERS = 8
TRAIN = """
import gc, os, sys
import numpy as np
import resihp
from resihp.datasets import ByteFiles, PackedDataset
from megatron.core.transformer import TransformerConfig
import sysconfig

if "RESIHP_AGENT_FD" not in os.environ:  # our fork server does this for its workers, supervision or not
    gc.collect()
    gc.freeze()
gates, every, blocks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
rank = os.environ["RANK"]
done = open(f"{gates}/done", "wb", buffering=0)
gate = open(f"{gates}/gate.{rank}", "rb", buffering=0)

class Gated(PackedDataset):
    passed = 0
    def micro_batches(self, iteration):
        if iteration > 1 and (iteration - 2) % every == 0 and iteration > self.passed:
            self.passed = iteration
            done.write(b"x")
            gate.read(1)
        return super().micro_batches(iteration)

config = TransformerConfig(num_layers=4, hidden_size=128, num_attention_heads=4, attention_dropout=0.0,
                           hidden_dropout=0.0, use_cpu_initialization=True)
resihp.Trainer(
    config, vocab_size=256, optimizer=resihp.AdamW(lr=1e-3), sequence=512, tp=2, pp=2,
    dataset=Gated(ByteFiles(sysconfig.get_paths()["stdlib"], ".py"), budget=512, micro_batches_per_iteration=8),
).train(iterations=1 + every * blocks)
"""


class GatedJob:
    """A job whose ranks wait at a gate before each block."""

    def __init__(self, folder: Path, name: str, argv: list[str], environment: dict[str, str]) -> None:
        self.gates = folder / name
        self.gates.mkdir()
        self.name = name
        for pipe in ("done", *(f"gate.{rank}" for rank in range(WORKERS))):
            os.mkfifo(self.gates / pipe)
        # Opened for reading and writing, so that neither side ever sees an end of file.
        self._done = os.open(self.gates / "done", os.O_RDWR)
        self._gates = [os.open(self.gates / f"gate.{rank}", os.O_RDWR) for rank in range(WORKERS)]
        self.process = subprocess.Popen(
            [argument.replace("GATES", str(self.gates)) for argument in argv],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=open(folder / f"{name}.log", "w"),  # noqa: SIM115 - the child keeps it
        )

    def wait_at_gate(self) -> None:
        arrived = 0
        while arrived < WORKERS:
            if not select.select([self._done], [], [], 1.0)[0]:
                if self.process.poll() is not None:
                    raise SystemExit(f"{self.name} ended early with status {self.process.returncode}")
                continue
            arrived += len(os.read(self._done, WORKERS - arrived))

    def block(self) -> float:
        """Let all ranks run one block; seconds."""
        began = time.perf_counter()
        for gate in self._gates:
            os.write(gate, b"x")
        self.wait_at_gate()
        return time.perf_counter() - began


def cpu_seconds(job: GatedJob) -> tuple[float, float]:
    """(ours, workers'): CPU of our processes and of the hooks' threads, and of everything in the workers."""
    ours = workers = 0.0
    for process in [psutil.Process(job.process.pid), *psutil.Process(job.process.pid).children(recursive=True)]:
        times = process.cpu_times()
        command = " ".join(process.cmdline())
        threads = {t.id: t.user_time + t.system_time for t in process.threads()}
        hooks = [
            tid for tid in threads if Path(f"/proc/{process.pid}/task/{tid}/comm").read_text().strip() == "resihp-agent"
        ]
        if hooks:
            workers += times.user + times.system
            ours += sum(threads[tid] for tid in hooks)
        elif "forkserver" not in command:  # a fork server only imports, before training
            ours += times.user + times.system
    return ours, workers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--blocks", type=int, default=30)
    parser.add_argument("--iterations-per-block", type=int, default=10)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="resihp-overhead-"))
    (folder / "train.py").write_text(TRAIN)
    warm_up = 2
    script = [
        str(folder / "train.py"),
        "GATES",
        str(args.iterations_per_block),
        str(args.blocks + warm_up),
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "RESIHP_HOME": str(folder / "home"),
        "RESIHP_STATE": str(folder / "state"),
        "RESIHP_LOCAL": str(folder / "local"),
    }
    resihp = [sys.executable, "-m", "resihp", "run", "--local", "--nodes", "2", "--gpus-per-node", "4"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={WORKERS}"]
    jobs: list[GatedJob] = []
    try:
        jobs.append(GatedJob(folder, "bare", [*torchrun, *script], environment))
        jobs[0].wait_at_gate()
        jobs.append(
            GatedJob(
                folder, "supervised", [*resihp, "--tp", "2", "--pp", "2", "--", sys.executable, *script], environment
            )
        )
        bare, supervised = jobs
        supervised.wait_at_gate()
        for job in jobs:
            for _ in range(warm_up - 1):
                job.block()
        before, bare_before = cpu_seconds(supervised), sum(cpu_seconds(bare))
        pairs = []
        for number in range(args.blocks):
            order = (bare, supervised) if number % 2 else (supervised, bare)
            seconds = {job.name: job.block() for job in order}
            pairs.append(seconds["supervised"] / seconds["bare"])
            print(
                f"block {number + 1}: supervised {seconds['supervised']:.3f} s, bare {seconds['bare']:.3f} s",
                file=sys.stderr,
            )
        after, bare_after = cpu_seconds(supervised), sum(cpu_seconds(bare))
    finally:
        for job in jobs:
            job.process.terminate()
        for job in jobs:
            job.process.wait(30)
        shutil.rmtree(folder, ignore_errors=True)

    ours, workers = after[0] - before[0], after[1] - before[1]
    iterations = args.blocks * args.iterations_per_block
    logs = [math.log(ratio) for ratio in pairs]
    mean, half = statistics.mean(logs), 1.96 * statistics.stdev(logs) / math.sqrt(len(logs))
    print(
        f"CPU an iteration: supervision {1000 * ours / iterations:.2f} ms, workers {1000 * workers / iterations:.0f} ms"
    )
    print(f"  for comparison, torchrun and its workers {1000 * (bare_after - bare_before) / iterations:.0f} ms")
    print(f"  share {100 * ours / workers:.2f} % (target 1.5 %)")
    print(f"wall-clock supervised / bare over {args.blocks} pairs of blocks: {math.exp(mean):.3f}")
    low, high = math.exp(mean - half), math.exp(mean + half)
    print(f"  95 % confidence interval {low:.3f} to {high:.3f} (upper bound target 1.05)")


if __name__ == "__main__":
    main()
