"""A healthy DDP script with pauses far longer than its iterations: the healthy script of `benchmarks.hangs`.

`python pausing_script.py ITERATIONS SEED`. Every 250th iteration is followed by one of these, in turn: an evaluation of
one rank, or of all ranks one after the other, while the others wait; a checkpoint written slowly by one rank; a
compilation on one rank, in its process or by a child of it; data that a reader process prepares for long; a rank that
reads a large file slowly.
"""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

ITERATIONS, PAUSE_EVERY, WIDTH = int(sys.argv[1]), 250, 16
COMPILER = """\
import sys, time
until = time.monotonic() + float(sys.argv[1])
while time.monotonic() < until:
    sum(range(10**5))
    time.sleep(0.05)
"""
draw = random.Random(int(sys.argv[2]))
file = Path(f"{sys.argv[2]}.checkpoint")


def compute(seconds: float, share: float = 1.0) -> None:
    """Use a processor for a share of the time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        began = time.thread_time()
        while time.thread_time() - began < 0.1 * share:
            torch.randn(64, 64) @ torch.randn(64, 64)
        time.sleep(0.1 * (1 - share))


def evaluate_on_one_rank(seconds: float) -> None:
    if rank == chosen:
        compute(seconds, 0.3)
    dist.barrier()


def evaluate_in_turn(seconds: float) -> None:
    for turn in range(world):
        if rank == turn:
            compute(seconds / world, 0.3)
        dist.barrier()


def save_slowly(seconds: float) -> None:
    if rank == chosen:
        until = time.monotonic() + seconds
        with file.open("wb") as checkpoint:
            while time.monotonic() < until:
                checkpoint.write(os.urandom(1 << 16))
                checkpoint.flush()
                time.sleep(1)
    dist.barrier()


def compile_in_process(seconds: float) -> None:
    if rank == chosen:
        compute(seconds, 0.5)


def compile_in_child(seconds: float) -> None:
    if rank == chosen:
        subprocess.run([sys.executable, "-c", COMPILER, str(seconds)])


class Prepared(Dataset):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> torch.Tensor:
        compute(self.seconds, 0.3)
        return torch.zeros(1)


def wait_for_reader(seconds: float) -> None:
    if rank == chosen:
        for _ in DataLoader(Prepared(seconds), num_workers=1):
            pass


def read_slowly(seconds: float) -> None:
    if rank == chosen:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            with open("/dev/zero", "rb") as zeros:
                zeros.read(1 << 18)
            time.sleep(2)


PAUSES = (
    evaluate_on_one_rank,
    evaluate_in_turn,
    save_slowly,
    compile_in_process,
    compile_in_child,
    wait_for_reader,
    read_slowly,
)

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
model = DistributedDataParallel(nn.Linear(WIDTH, WIDTH))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for iteration in range(1, ITERATIONS + 1):
    inputs = torch.randn(8, WIDTH)
    loss = (model(inputs) - inputs.sin()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    if rank == 0:
        print(f"iteration {iteration}/{ITERATIONS} loss {total.item() / world:.4f}", flush=True)
    time.sleep(0.01)
    if iteration % PAUSE_EVERY == 0:
        chosen, seconds = draw.randrange(world), draw.uniform(25, 45)
        PAUSES[(int(sys.argv[2]) + iteration // PAUSE_EVERY) % len(PAUSES)](seconds)
dist.destroy_process_group()
