"""The example, as slow as a file says: `python paced.py FILE [options of the example]`.

FILE holds the seconds that loading a micro-batch takes, which may change while it trains; without FILE, no time at all.
So a test decides when a job that waits for something may come to its end, whatever the machine's speed. A file FILE.ecc
names a Slurm node whose GPUs have a memory error from then on, as CUDA reports it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from resihp.datasets import PackedDataset
from resihp.parallelism.workload import MicroBatch

LOOK_EVERY_S = 0.05
EXAMPLE = Path(__file__).parents[2] / "examples" / "pretrain_gpt.py"


class Paced(PackedDataset):
    """Each micro-batch keeps those waiting who need its tokens."""

    pace: Path

    def micro_batches(self, iteration: int) -> tuple[MicroBatch, ...]:
        batches = super().micro_batches(iteration)
        return tuple(msgspec.structs.replace(each, load=partial(self._slowly, each.load)) for each in batches)

    def _slowly(self, load: Callable[[], Any]) -> Any:
        began = time.monotonic()
        while time.monotonic() - began < self._pace_s():
            time.sleep(LOOK_EVERY_S)
        broken = self.pace.with_name(f"{self.pace.name}.ecc")
        if broken.exists() and broken.read_text() == os.environ.get("SLURMD_NODENAME"):
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
        return load()

    def _pace_s(self) -> float:
        try:
            return float(self.pace.read_text())
        except (OSError, ValueError):  # not there, or just being written
            return 0.0


def main() -> None:
    Paced.pace = Path(sys.argv.pop(1))
    spec = importlib.util.spec_from_file_location("example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.PackedDataset = Paced  # type: ignore[attr-defined]
    example.main()


if __name__ == "__main__":
    main()
