"""Lets megatron-core's own schedules and model run on a machine without CUDA, for use as an oracle.

Its code names the device literally in schedules, p2p communication and embeddings. `install` answers those calls
with the CPU; it changes torch for the whole process, so only a process that exists for the oracle may call it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

FACTORIES = ("zeros", "ones", "empty", "tensor", "full", "arange")


class _NoStream:
    """A stream or event on which nothing ever waits."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def install() -> None:
    """Answer torch.cuda, Tensor.cuda and device="cuda" with the CPU."""
    cpu = torch.device("cpu")
    answers: dict[str, Any] = {
        "current_device": lambda: cpu,
        "synchronize": lambda *_, **__: None,
        "current_stream": lambda *_, **__: _NoStream(),
        "default_stream": lambda *_, **__: _NoStream(),
        "Stream": _NoStream,
        "Event": _NoStream,
        "stream": lambda _: contextlib.nullcontext(),
        "empty_cache": lambda: None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*arguments: Any, **keywords: Any) -> torch.Tensor:
        if str(keywords.get("device", "")).startswith("cuda"):
            keywords["device"] = "cpu"
        return factory(*arguments, **keywords)

    return make
