"""Imports megatron-core in the way that a worker needs. The package imports this module before any other.

During its import, megatron-core decorates dozens of functions with `torch.compile`, which loads the compiler. This
takes half of the import time, for kernels that are used only on GPUs. This module replaces the decorator: it only
records the function, which is compiled when a worker first calls it with a GPU tensor (fused SwiGLU, bias and dropout).

The import runs in the fork server, where no code may query a GPU: a query starts CUDA, and a process forked later could
not use CUDA (torch: "Cannot re-initialize CUDA in forked subprocess"). Both megatron-core and Transformer Engine use
`torch.utils.cpp_extension` to find CUDA's compiler, which queries GPUs. So `torch.cuda.is_available` returns False
during the import.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from resihp.worker import torch_versions

if refusal := torch_versions.refusal(torch.__version__):
    raise ImportError(f"{refusal}; {torch_versions.UPGRADE_COMMAND}")

_compile, _is_available = torch.compile, torch.cuda.is_available
_cpp_extension = logging.getLogger("torch.utils.cpp_extension")


def compiled_on_gpus(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Replace `torch.compile`: run the function uncompiled on CPU tensors; compile it at the first call with a GPU
    tensor."""
    if function is None:
        return functools.partial(compiled_on_gpus, **options)
    compiled: Callable[..., Any] | None = None

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        nonlocal compiled
        on_gpu = any(isinstance(a, torch.Tensor) and a.is_cuda for a in (*arguments, *keywords.values()))
        if not on_gpu or torch.compiler.is_compiling():  # an outer compilation includes the function
            return function(*arguments, **keywords)
        if compiled is None:
            compiled = _compile(function, **options)
        return compiled(*arguments, **keywords)

    return call


def _no_gpu() -> bool:
    return False


try:
    torch.compile = compiled_on_gpus  # type: ignore[assignment]
    torch.cuda.is_available = _no_gpu
    _cpp_extension.disabled = True  # otherwise it warns "No CUDA runtime is found"
    import torch.utils.cpp_extension

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about apex and Transformer Engine, which are not used
        import megatron.core.models.common.embeddings.language_model_embedding
        import megatron.core.models.common.embeddings.rotary_pos_embedding
        import megatron.core.models.gpt.gpt_layer_specs
        import megatron.core.transformer.transformer_layer  # noqa: F401

        # Takes half a second. Otherwise each process imports it for its first optimizer, during a transition.
        import torch._dynamo
        from megatron.core.tensor_parallel import random as megatron_random
finally:
    torch.compile, torch.cuda.is_available, _cpp_extension.disabled = _compile, _is_available, False

from resihp.executor.tensor_group import patch_megatron  # noqa: E402

patch_megatron()


class GlobalRandomTracker:
    """Replaces megatron's random state tracker, which accepts only registered states and calls torch.cuda.

    No supported layer draws random numbers in a forward pass (dropout is refused). If a layer forks the random state
    anyway, as the embedding does under sequence parallelism, it uses the global generator, which is restored
    afterwards. This works for any device without a query, which would start CUDA in the fork server.
    """

    def is_initialized(self) -> bool:
        return True

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        with torch.random.fork_rng(devices=[]):
            yield


def use_global_random_state() -> None:
    """Replace megatron's tracker in this process. The import alone does not: a script with a loop of its own is forked
    from a process that has imported this module, and seeds megatron's tracker."""
    megatron_random._CUDA_RNG_STATE_TRACKER = GlobalRandomTracker()
    megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
