"""Run a training script as one rank of a trial of `benchmarks.scripts`: note the process id, and raise on a signal.

`python observed_rank.py FOLDER SCRIPT ARGUMENTS`; FOLDER gets a file `ROUND.RANK` with the process id. SIGUSR1 raises
ValueError in the script, SIGUSR2 an out-of-memory error, between two of its operations.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path
from types import FrameType


def fail(number: int, _: FrameType | None) -> None:
    if number == signal.SIGUSR1:
        raise ValueError("no such token: 17")
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


def main() -> None:
    folder, script, *arguments = sys.argv[1:]
    note = Path(folder) / f"{os.environ['TORCHELASTIC_RESTART_COUNT']}.{os.environ['RANK']}"
    note.write_text(str(os.getpid()))
    signal.signal(signal.SIGUSR1, fail)
    signal.signal(signal.SIGUSR2, fail)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
