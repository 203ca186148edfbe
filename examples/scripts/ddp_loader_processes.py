"""Train with DistributedDataParallel, and read the data in two further processes of each rank.

torchrun --standalone --nproc-per-node 4 examples/scripts/ddp_loader_processes.py
resihp run --local --nodes 2 --gpus-per-node 2 -- python examples/scripts/ddp_loader_processes.py

The sampler begins with the first sample after the checkpoint. A rank that is killed leaves its readers behind for some
seconds: whoever starts the script again must be able to do that beside them, or end them.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

GLOBAL_BATCH, WIDTH = 24, 32

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=50)
parser.add_argument("--checkpoint-every", type=int, default=10)
parser.add_argument("--folder", type=Path, default=Path("checkpoints/ddp_loader_processes"))
parser.add_argument("--sleep", type=float, default=0.0, help="seconds to wait in each iteration")
options = parser.parse_args()
options.folder.mkdir(parents=True, exist_ok=True)

on_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_gpu else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()


class Samples(Dataset):
    def __len__(self) -> int:
        return options.iterations * GLOBAL_BATCH

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))


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

samples = Samples()
order = range(done * GLOBAL_BATCH + rank, len(samples), world)
loader = DataLoader(samples, batch_size=GLOBAL_BATCH // world, sampler=order, num_workers=2, drop_last=True)
for iteration, batch in enumerate(loader, start=done + 1):
    inputs = batch.to(device)
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
