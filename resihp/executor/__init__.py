"""Code that runs in a worker: the model's stage, interpreter of a plan's primitives, synchronisation, checkpoints.

Importing this package loads torch and megatron-core, once and as cheaply as possible (`_imports`). It starts no thread,
and imports nothing of the job wrapper, Slurm or the ledger.
"""

from resihp.executor import _imports

__all__ = ["_imports"]
