"""A callback that reports the iterations and checkpoints of Hugging Face's Trainer. Importing it imports
transformers."""

from __future__ import annotations

import os
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from resihp.reporting.checkpoints import checkpointed
from resihp.reporting.iterations import iteration


class ResihpCallback(TrainerCallback):
    """Report each step, the losses that the Trainer logs, and each checkpoint.

        trainer = Trainer(..., callbacks=[ResihpCallback()])

    The Trainer logs a step's loss after its end, so a step is reported when the next one begins.
    """

    def __init__(self) -> None:
        self._step = 0
        """The last step; 0 if it is reported."""
        self._loss: float | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._report()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._step = state.global_step

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        loss = (logs or {}).get("loss")
        if self._step and isinstance(loss, int | float):
            self._loss = loss

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._report()
        folder = os.path.join(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        if state.is_world_process_zero and os.path.isdir(folder):
            checkpointed(folder, iteration=state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._report()

    def _report(self) -> None:
        if self._step:
            iteration(self._step, loss=self._loss)
            self._step, self._loss = 0, None
