"""What runs in a worker: the model's stage, the interpreter of a plan's primitives, synchronisation, checkpoints.

Importing this package loads torch and megatron-core, once and in the cheapest way known (`_imports`); it starts no
thread, and nothing of the job wrapper, Slurm or the ledger is imported from here.
"""

from resihp.executor import _imports

__all__ = ["_imports"]
