"""Train with fully_shard (FSDP2) and save with torch.distributed.checkpoint (DCP).

torchrun --standalone --nproc-per-node 4 examples/scripts/fsdp2_dcp.py
resihp run --local --nodes 2 --gpus-per-node 2 -- python examples/scripts/fsdp2_dcp.py

All ranks write their shards; DCP writes `.metadata` last, so a folder that has it is complete. DCP can load a
checkpoint into another number of ranks.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

GLOBAL_BATCH, WIDTH, LAYERS = 24, 32, 4

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=50)
parser.add_argument("--checkpoint-every", type=int, default=10)
parser.add_argument("--folder", type=Path, default=Path("checkpoints/fsdp2_dcp"))
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
layers = [nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)) for _ in range(LAYERS)]
model = nn.Sequential(*layers).to(device)
mesh = init_device_mesh(device.type, (world,))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

done = 0
if complete := sorted(options.folder.glob("step_*/.metadata")):
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=complete[-1].parent)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    done = int(complete[-1].parent.name.removeprefix("step_"))
    if rank == 0:
        print(f"continuing from {complete[-1].parent}", flush=True)

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
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=options.folder / f"step_{iteration:06}")
    time.sleep(options.sleep)
dist.destroy_process_group()
