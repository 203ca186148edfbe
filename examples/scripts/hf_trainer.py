"""Train a tiny Llama with the Hugging Face Trainer.

torchrun --standalone --nproc-per-node 4 examples/scripts/hf_trainer.py
resihp run --local --nodes 2 --gpus-per-node 2 -- python examples/scripts/hf_trainer.py

Needs `pip install transformers accelerate`. The Trainer saves and loads by itself; rank 0 writes `trainer_state.json`
last.
"""

import argparse
import os
import time
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

VOCABULARY, LENGTH, GLOBAL_BATCH = 64, 32, 24


class Sequences(Dataset):
    """Arithmetic sequences modulo the vocabulary."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        first, step = torch.randint(VOCABULARY, (2,), generator=torch.Generator().manual_seed(index))
        tokens = (first + step % 5 * torch.arange(LENGTH)) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


class Pause(TrainerCallback):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_step_end(self, *_: object, **__: object) -> None:
        time.sleep(self.seconds)


def newest_complete(folder: Path) -> str | None:
    """Return the newest checkpoint that has the Trainer's last file."""
    complete = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]
    return str(max(complete, key=lambda path: int(path.name.split("-")[1]))) if complete else None


parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=50)
parser.add_argument("--checkpoint-every", type=int, default=10)
parser.add_argument("--folder", type=Path, default=Path("checkpoints/hf_trainer"))
parser.add_argument("--sleep", type=float, default=0.0, help="seconds to wait in each iteration")
options = parser.parse_args()

arguments = TrainingArguments(
    output_dir=str(options.folder),
    max_steps=options.iterations,
    save_steps=options.checkpoint_every,
    logging_steps=1,
    per_device_train_batch_size=GLOBAL_BATCH // int(os.environ["WORLD_SIZE"]),
    learning_rate=3e-3,
    lr_scheduler_type="constant",
    use_cpu=not torch.cuda.is_available(),
    ddp_find_unused_parameters=False,
    report_to="none",
    disable_tqdm=True,
)
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
    )
)
trainer = Trainer(model=model, args=arguments, train_dataset=Sequences(), callbacks=[Pause(options.sleep)])
trainer.train(resume_from_checkpoint=newest_complete(options.folder))
trainer.accelerator.end_training()
