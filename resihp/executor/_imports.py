"""Imports megatron-core the way a worker needs it. Imported first by the package, so that all others just import.

megatron-core decorates dozens of functions with `torch.compile` while it is imported, which loads the compiler: half
of its import time, for kernels that are used on GPUs alone. During this import it only remembers what to compile, and
does so when a worker first calls such a function (fused SwiGLU, bias and dropout) on a GPU.

This import runs in the fork server, where nothing may ask for a GPU: that starts CUDA, and a process that is forked
later cannot use it (torch: "Cannot re-initialize CUDA in forked subprocess"). megatron-core does ask, through
`torch.utils.cpp_extension`, where CUDA's compiler is installed; Transformer Engine does as well. So
`torch.cuda.is_available` answers no until the import is done.
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
    raise ImportError(f"{refusal}; {torch_versions.WAY_OUT}")

_compile, _is_available = torch.compile, torch.cuda.is_available
_cpp_extension = logging.getLogger("torch.utils.cpp_extension")


def compiled_on_gpus(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """In place of `torch.compile`: as it is on a processor's tensors, compiled at the first call with a GPU's."""
    if function is None:
        return functools.partial(compiled_on_gpus, **options)
    compiled: Callable[..., Any] | None = None

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        nonlocal compiled
        on_gpu = any(isinstance(a, torch.Tensor) and a.is_cuda for a in (*arguments, *keywords.values()))
        if not on_gpu or torch.compiler.is_compiling():  # then it becomes part of what is being compiled
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
    _cpp_extension.disabled = True  # it would warn "No CUDA runtime is found", though there may well be one
    import torch.utils.cpp_extension

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
    torch.compile, torch.cuda.is_available, _cpp_extension.disabled = _compile, _is_available, False

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
