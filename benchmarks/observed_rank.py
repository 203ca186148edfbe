"""What a rank of a trial of `benchmarks.scripts` does after its imports: note its process id, and raise on a signal.

`benchmarks.scripts` inserts a call of `observe` into a copy of the script.

The folder `ranks` of the trial gets a file `ROUND.RANK` with the process id. SIGUSR1 raises ValueError in the script,
SIGUSR2 an out-of-memory error, between two of its operations.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import FrameType


def fail(number: int, _: FrameType | None) -> None:
    if number == signal.SIGUSR1:
        raise ValueError("no such token: 17")
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


def observe() -> None:
    note = Path(os.environ["TRIAL_FOLDER"], "ranks", f"{os.environ['TORCHELASTIC_RESTART_COUNT']}.{os.environ['RANK']}")
    note.write_text(str(os.getpid()))
    signal.signal(signal.SIGUSR1, fail)
    signal.signal(signal.SIGUSR2, fail)
