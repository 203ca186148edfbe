"""Imports megatron-core the way a worker needs it. Imported first by the package, so that all others just import.

megatron-core decorates dozens of functions with `torch.compile` while it is imported, which loads the compiler: half
of its import time, for kernels that a fork server on the CPU never uses. During this import it is the identity.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def _uncompiled(function: Callable[..., Any] | None = None, **_: Any) -> Any:
    return function if function is not None else (lambda decorated: decorated)


_compile = torch.compile
try:
    torch.compile = _uncompiled  # type: ignore[assignment]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about apex and Transformer Engine, which we do not need
        import megatron.core.models.common.embeddings.language_model_embedding
        import megatron.core.models.common.embeddings.rotary_pos_embedding
        import megatron.core.models.gpt.gpt_layer_specs
        import megatron.core.transformer.transformer_layer  # noqa: F401

        # Half a second, which the first optimizer of every process would take otherwise, in the middle of a transition.
        import torch._dynamo
        from megatron.core.tensor_parallel import random as megatron_random
finally:
    torch.compile = _compile

from resihp.executor.tensor_group import teach_megatron  # noqa: E402

teach_megatron()


class GlobalRandomTracker:
    """In place of megatron's random state tracker, which knows only states that somebody gave it, and calls torch.cuda.

    Nothing that we honour draws random numbers in a forward pass (dropout is refused); a layer that forks the state
    all the same, as the embedding under sequence parallelism does, gets the global generator, put back afterwards. On
    any device, so that nobody has to ask for one here: that would start CUDA in the fork server.
    """

    def is_initialized(self) -> bool:
        return True

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        with torch.random.fork_rng(devices=[]):
            yield


megatron_random._CUDA_RNG_STATE_TRACKER = GlobalRandomTracker()
megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
