"""Train megatron-core's GPTModel in a plain loop, with tensor and data parallelism.

torchrun --standalone --nproc-per-node 4 examples/scripts/megatron_gpt.py --tp 2
resihp run --local --nodes 2 --gpus-per-node 2 --tp 2 -- python examples/scripts/megatron_gpt.py --tp {tp}

As in Megatron-LM, `latest_checkpointed_iteration.txt` names the newest complete checkpoint; it is replaced after all
ranks have written their files. Each tensor-parallel rank of the first replica writes its part of the model.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer import TransformerConfig
from torch import nn

VOCABULARY, LENGTH, GLOBAL_BATCH = 64, 32, 24

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=50)
parser.add_argument("--checkpoint-every", type=int, default=10)
parser.add_argument("--folder", type=Path, default=Path("checkpoints/megatron_gpt"))
parser.add_argument("--sleep", type=float, default=0.0, help="seconds to wait in each iteration")
parser.add_argument("--tp", type=int, default=1, help="tensor-parallel degree")
options = parser.parse_args()
options.folder.mkdir(parents=True, exist_ok=True)

on_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_gpu else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
parallel_state.initialize_model_parallel(tensor_model_parallel_size=options.tp)
replica = parallel_state.get_data_parallel_rank()
replicas = parallel_state.get_data_parallel_world_size()
part = parallel_state.get_tensor_model_parallel_rank()


def share_of_batch(iteration: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(iteration)
    first, step = torch.randint(VOCABULARY, (2, GLOBAL_BATCH, 1), generator=generator)
    tokens = (first + step % 5 * torch.arange(LENGTH + 1)) % VOCABULARY
    return tokens[replica::replicas].to(device)


class FusedAttention(nn.Module):
    """torch's causal attention in place of megatron-core's own, which needs CUDA."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object):
        heads_first = [tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)]
        return F.scaled_dot_product_attention(*heads_first, is_causal=True).permute(2, 0, 1, 3).flatten(2)


torch.manual_seed(0)
config = TransformerConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    tensor_model_parallel_size=options.tp,
    use_cpu_initialization=True,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
specification = get_gpt_layer_local_spec()
specification.submodules.self_attention.submodules.core_attention = FusedAttention
model = GPTModel(config, specification, vocab_size=VOCABULARY, max_sequence_length=LENGTH).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
positions = torch.arange(LENGTH, device=device)[None]

done, newest = 0, options.folder / "latest_checkpointed_iteration.txt"
if newest.exists():
    done = int(newest.read_text())
    state = torch.load(options.folder / f"iter_{done:07}" / f"tp_{part}.pt", map_location=device)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    if rank == 0:
        print(f"continuing from iteration {done}", flush=True)

for iteration in range(done + 1, options.iterations + 1):
    tokens = share_of_batch(iteration)
    loss = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).mean()
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=parallel_state.get_data_parallel_group())
        parameter.grad /= replicas
    optimizer.step()
    average = loss.detach() / world
    dist.all_reduce(average)
    if rank == 0:
        print(f"iteration {iteration}/{options.iterations} | lm loss: {average.item():.6E} |", flush=True)
    if iteration % options.checkpoint_every == 0:
        if replica == 0:
            folder = options.folder / f"iter_{iteration:07}"
            folder.mkdir(exist_ok=True)
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / f"tp_{part}.pt")
        dist.barrier()
        if rank == 0:
            unfinished = newest.with_suffix(".unfinished")
            unfinished.write_text(str(iteration))
            unfinished.rename(newest)
    time.sleep(options.sleep)
dist.destroy_process_group()
