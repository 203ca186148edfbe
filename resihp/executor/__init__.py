"""Code that runs in a worker: the rank's stage of the model, the interpreter of programs, synchronisation, checkpoints.

Importing this package imports torch and megatron-core, as fast as possible (`_imports`). The import starts no thread.
The package never imports the job wrapper, Slurm or the ledger.
"""

from resihp.executor import _imports

__all__ = ["_imports"]
