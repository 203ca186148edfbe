"""What a rank of a trial of `benchmarks.scripts` does after its imports: note its process id, and raise on a signal.

`benchmarks.scripts` inserts a call of `observe` into a copy of the script.

The folder `ranks` of the trial gets a file `ROUND.RANK` with the process id. Between two operations of the script,
SIGUSR1 raises ValueError in it, SIGUSR2 an out-of-memory error; SIGRTMIN + 1 makes it enter a collective alone, and
SIGRTMIN + 2 makes it wait for a data loader's process that never answers.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import FrameType


def fail(number: int, _: FrameType | None) -> None:
    if number == signal.SIGUSR1:
        raise ValueError("no such token: 17")
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


class Batches:
    """A data set that is never read."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        time.sleep(10**6)
        return index


def hang(number: int, _: FrameType | None) -> None:
    import torch.distributed as dist
    from torch.utils.data import DataLoader

    if number == signal.SIGRTMIN + 1:
        dist.barrier()
    for _batch in DataLoader(Batches(), num_workers=1):
        pass


def observe() -> None:
    note = Path(os.environ["TRIAL_FOLDER"], "ranks", f"{os.environ['TORCHELASTIC_RESTART_COUNT']}.{os.environ['RANK']}")
    note.write_text(str(os.getpid()))
    signal.signal(signal.SIGUSR1, fail)
    signal.signal(signal.SIGUSR2, fail)
    signal.signal(signal.SIGRTMIN + 1, hang)
    signal.signal(signal.SIGRTMIN + 2, hang)
