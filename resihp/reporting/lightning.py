"""A callback that reports the iterations and checkpoints of Lightning's Trainer. Importing it imports lightning, or
pytorch_lightning if the script has imported that or has nothing else."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from resihp.reporting.checkpoints import checkpointed
from resihp.reporting.iterations import iteration


def _package() -> Any:
    """Return the package that the script uses, `lightning.pytorch` or `pytorch_lightning`."""
    uses_other = "pytorch_lightning" in sys.modules and "lightning" not in sys.modules
    return import_module("pytorch_lightning" if uses_other or find_spec("lightning") is None else "lightning.pytorch")


_lightning: Any = _package()
_Callback: Any = _lightning.Callback


class ResihpCallback(_Callback):
    """Report each optimizer step, and each checkpoint of a ModelCheckpoint.

        trainer = lightning.Trainer(..., callbacks=[ResihpCallback()])

    The loss is that of rank 0's batch. One on a GPU is read only every `log_every_n_steps` steps, because that waits
    for the GPU. Checkpoints that are written in the background, or to an address (`s3://`), are not reported.
    """

    def __init__(self) -> None:
        super().__init__()
        self._step = 0
        self._saved: set[str] = set()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._step = trainer.global_step

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self._report_checkpoints(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        step = trainer.global_step
        if step == self._step:
            return  # gradients are accumulated
        self._step = step
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        is_read = loss is not None and (loss.device.type == "cpu" or step % max(trainer.log_every_n_steps, 1) == 0)
        iteration(step, loss=loss if is_read else None)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._report_checkpoints(trainer)

    def _report_checkpoints(self, trainer: Any) -> None:
        """Report new checkpoints. Lightning tells callbacks only before it saves; after that it waits for all ranks."""
        if not trainer.is_global_zero:
            return
        for callback in trainer.checkpoint_callbacks:
            path = str(getattr(callback, "_last_checkpoint_saved", ""))
            if path in self._saved or not path or "://" in path:
                continue
            self._saved.add(path)
            in_background = isinstance(trainer.strategy.checkpoint_io, _lightning.plugins.AsyncCheckpointIO)
            if not in_background and os.path.exists(path):
                checkpointed(path, iteration=callback._last_global_step_saved)
