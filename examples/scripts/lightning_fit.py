"""Train a small network with Lightning's Trainer.

torchrun --standalone --nproc-per-node 4 examples/scripts/lightning_fit.py
resihp run --local --nodes 2 --gpus-per-node 2 -- python examples/scripts/lightning_fit.py

Needs `pip install lightning`. Lightning finds torchrun's variables by itself; the numbers of devices and nodes must
agree with them. Its loops do not continue at the right sample of an ordinary data loader, so the batch of an iteration
is made from its number.
"""

import argparse
import os
import time
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

GLOBAL_BATCH, WIDTH = 24, 32

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=50)
parser.add_argument("--checkpoint-every", type=int, default=10)
parser.add_argument("--folder", type=Path, default=Path("checkpoints/lightning_fit"))
parser.add_argument("--sleep", type=float, default=0.0, help="seconds to wait in each iteration")
options = parser.parse_args()


class Network(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, WIDTH))

    def training_step(self, _: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.global_step + 1)
        batch = torch.randn(GLOBAL_BATCH, WIDTH, generator=generator)
        inputs = batch[self.global_rank :: self.trainer.world_size].to(self.device)
        loss = (self.layers(inputs) - inputs.sin()).square().mean()
        average = self.trainer.strategy.reduce(loss.detach())
        self.print(f"iteration {self.global_step + 1}/{options.iterations} loss {average.item():.4f}", flush=True)
        time.sleep(options.sleep)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


lightning.seed_everything(0, verbose=False)
save = ModelCheckpoint(
    options.folder,
    filename="step_{step:06}",
    auto_insert_metric_name=False,
    every_n_train_steps=options.checkpoint_every,
    save_top_k=-1,
)
trainer = lightning.Trainer(
    accelerator="auto" if torch.cuda.is_available() else "cpu",
    strategy="ddp",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
    max_steps=options.iterations,
    max_epochs=-1,
    callbacks=[save],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
newest = max(options.folder.glob("step_*.ckpt"), default=None)
trainer.fit(Network(), DataLoader(range(options.iterations * GLOBAL_BATCH)), ckpt_path=newest)
