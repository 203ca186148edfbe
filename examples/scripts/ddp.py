"""Train a small network with DistributedDataParallel, and continue from the newest checkpoint.

torchrun --standalone --nproc-per-node 4 examples/scripts/ddp.py
resihp run --local --nodes 2 --gpus-per-node 2 -- python examples/scripts/ddp.py

The batch of an iteration depends on nothing but its number, and each rank takes its share of it: the losses after a
restart are those of a run that was not disturbed. Rank 0 writes a checkpoint under another name and then renames it, so
that none is half written.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

GLOBAL_BATCH, WIDTH = 24, 32

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=50)
parser.add_argument("--checkpoint-every", type=int, default=10)
parser.add_argument("--folder", type=Path, default=Path("checkpoints/ddp"))
parser.add_argument("--sleep", type=float, default=0.0, help="seconds to wait in each iteration")
options = parser.parse_args()
options.folder.mkdir(parents=True, exist_ok=True)

on_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_gpu else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()


def share_of_batch(iteration: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(iteration)
    return torch.randn(GLOBAL_BATCH, WIDTH, generator=generator)[rank::world].to(device)


torch.manual_seed(0)
network = nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, WIDTH)).to(device)
model = DistributedDataParallel(network)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

done = 0
if checkpoints := sorted(options.folder.glob("step_*.pt")):
    state = torch.load(checkpoints[-1], map_location=device)
    network.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    done = state["iteration"]
    if rank == 0:
        print(f"continuing from {checkpoints[-1]}", flush=True)

for iteration in range(done + 1, options.iterations + 1):
    inputs = share_of_batch(iteration)
    loss = (model(inputs) - inputs.sin()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    average = loss.detach() / world
    dist.all_reduce(average)
    if rank == 0:
        print(f"iteration {iteration}/{options.iterations} loss {average.item():.4f}", flush=True)
        if iteration % options.checkpoint_every == 0:
            unfinished = options.folder / "unfinished.pt"
            state = {"iteration": iteration, "model": network.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, unfinished)
            unfinished.rename(options.folder / f"step_{iteration:06}.pt")
    time.sleep(options.sleep)
dist.destroy_process_group()
