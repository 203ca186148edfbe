"""Two process groups: actors play with the newest policy, learners train it with DistributedDataParallel.

torchrun --standalone --nproc-per-node 4 examples/scripts/actors_and_learners.py
resihp run --local --nodes 2 --gpus-per-node 2 -- python examples/scripts/actors_and_learners.py

The first half of the ranks are learners, the others actors. In each iteration rank 0 sends the policy to all, and each
actor sends what it played to a learner. The policy chooses an angle; the reward is its cosine to a hidden angle.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

EPISODES, WIDTH = 16, 8

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=50)
parser.add_argument("--checkpoint-every", type=int, default=10)
parser.add_argument("--folder", type=Path, default=Path("checkpoints/actors_and_learners"))
parser.add_argument("--sleep", type=float, default=0.0, help="seconds to wait in each iteration")
options = parser.parse_args()
options.folder.mkdir(parents=True, exist_ok=True)

on_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_gpu else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
pairs = world // 2  # learner i learns from actor pairs + i; a last rank of an odd number only waits
learners = dist.new_group(range(pairs))

torch.manual_seed(0)
policy = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
done = 0
if checkpoints := sorted(options.folder.glob("step_*.pt")):
    state = torch.load(checkpoints[-1], map_location=device)
    policy.load_state_dict(state["policy"])
    optimizer.load_state_dict(state["optimizer"])
    done = state["iteration"]
    if rank == 0:
        print(f"continuing from {checkpoints[-1]}", flush=True)
model = DistributedDataParallel(policy, process_group=learners) if rank < pairs else policy

for iteration in range(done + 1, options.iterations + 1):
    for parameter in policy.parameters():
        dist.broadcast(parameter.data, src=0)
    episodes = torch.empty(EPISODES, WIDTH + 2, device=device)  # situation, angle, reward
    if pairs <= rank < 2 * pairs:
        generator = torch.Generator().manual_seed(iteration * pairs + rank)
        situation = torch.randn(EPISODES, WIDTH, generator=generator).to(device)
        noise = 0.3 * torch.randn(EPISODES, 1, generator=generator).to(device)
        angle = policy(situation).detach() + noise
        reward = torch.cos(angle - situation[:, :1])
        dist.send(torch.cat([situation, angle, reward], dim=1), dst=rank - pairs)
    elif rank < pairs:
        dist.recv(episodes, src=rank + pairs)
        situation, angle, reward = episodes[:, :WIDTH], episodes[:, -2:-1], episodes[:, -1:]
        loss = ((reward - reward.mean()) * (angle - model(situation)).square()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        totals = torch.stack([loss.detach(), reward.mean()])
        dist.all_reduce(totals, group=learners)
    if rank == 0:
        loss, reward = (totals / pairs).tolist()
        print(f"iteration {iteration}/{options.iterations} loss {loss:.4f} reward {reward:.4f}", flush=True)
        if iteration % options.checkpoint_every == 0:
            unfinished = options.folder / "unfinished.pt"
            state = {"iteration": iteration, "policy": policy.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, unfinished)
            unfinished.rename(options.folder / f"step_{iteration:06}.pt")
    time.sleep(options.sleep)
dist.destroy_process_group()
