"""resihp: training that continues when a GPU fails or slows down.

    import resihp
    trainer = resihp.Trainer(TransformerConfig(...), vocab_size=256, dataset=corpus, optimizer=resihp.AdamW(lr=3e-4))
    trainer.train(iterations=1000)

A script with a training loop of its own needs no line of resihp under `resihp run`; `resihp.reporting` has the calls
that it may add.

Importing this package is cheap: torch and megatron-core are loaded when `Trainer` or `AdamW` is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from resihp.errors import ResihpError, UsageError
from resihp.parallelism.workload import Dataset, Evaluation, MicroBatch

if TYPE_CHECKING:
    from resihp.executor.state.optimizer import AdamW
    from resihp.executor.trainer import Trainer
    from resihp.reporting.checkpoints import checkpointed
    from resihp.reporting.iterations import iteration, section

    __version__: str

__all__ = [
    "AdamW",
    "Dataset",
    "Evaluation",
    "MicroBatch",
    "ResihpError",
    "Trainer",
    "UsageError",
    "__version__",
    "checkpointed",
    "iteration",
    "section",
]

_LAZY = {
    "AdamW": "resihp.executor.state.optimizer",
    "Trainer": "resihp.executor.trainer",
    "checkpointed": "resihp.reporting.checkpoints",
    "iteration": "resihp.reporting.iterations",
    "section": "resihp.reporting.iterations",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'resihp' has no attribute {name!r}")


def _version() -> str:
    """Return the installed version, which names the commit: `0.1.dev1366+g17daa5a6`. In an editable installation this
    is the commit at which it was installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("resihp")
    except PackageNotFoundError:  # a checkout on PYTHONPATH
        return "0.1.dev0+unknown"
