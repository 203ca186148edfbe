"""The tensor-parallel group as megatron-core's layers see it: one object for a stage's life, whatever is behind it.

Layers keep the group they are built with, communicators live for one epoch. So layers get this object, which tells
size and rank before any communicator exists, and passes collectives on to the one that is bound at the moment. It
also keeps the time spent waiting for peers apart from computation: a rank that waits is a victim, not a culprit.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from resihp.errors import CommunicatorError

dist: Any = torch.distributed
"""torch's own stubs lack most of what is used of it here."""

Backend = Any
"""torch's ProcessGroupGloo or ProcessGroupNCCL; their type stubs differ between versions."""

NO_PEERS_FAULT = (torch.OutOfMemoryError, torch.AcceleratorError)
"""RuntimeErrors of the script and of the device; of all others that a back end raises, a peer is the reason."""
OUT_OF_MEMORY = ("out of memory", "ALLOC_FAILED")
"""Texts of libraries that take memory of the device themselves: NCCL for communicators, cuBLAS for its workspaces."""


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether the device had no memory left for what failed."""
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in OUT_OF_MEMORY)


class TensorGroup:
    """Stands in for a `torch.distributed.ProcessGroup` in megatron-core's layers and in `torch.distributed` calls."""

    def __init__(self, size: int = 1, rank: int = 0) -> None:
        self._size = size
        self._rank = rank
        self._backend: Any = None
        self.waited_s = 0.0
        """Seconds spent in collectives since the group was made."""
        self.on_wait: Callable[[bool], None] = _ignore
        """Called with True before and False after each wait."""
        self.on_start: Callable[[], None] = nobody
        """Called when a collective is about to start: own work up to here is done."""

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def bind(self, backend: Any) -> None:
        """Use this communicator (`channels.Channel`) from now on; None when it is gone."""
        self._backend = backend

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> TimedWork | None:
        """What `torch.distributed.all_reduce(..., group=self)` calls. Raises CommunicatorError.

        A synchronous call is one wait from its beginning, and returns nothing: NCCL has ordered behind it, when it
        returns, whatever comes; others are waited for.
        """
        if getattr(options, "asyncOp", True):
            return self._start(tensors[0], lambda backend: backend.allreduce(tensors, options))
        backend = self._connected()
        self.on_start()
        with self.waiting():
            backend.allreduce(tensors, options).wait()
        return None

    def start_all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> TimedWork:
        """Begin to reduce in place."""
        options = dist.AllreduceOptions()
        options.reduceOp = op
        return self._start(tensor, lambda backend: backend.allreduce([tensor], options))

    def start_all_gather(self, tensor: torch.Tensor) -> TimedWork:
        """Begin to concatenate all ranks' tensors, of equal shapes, along their first dimension."""
        gathered = tensor.new_empty((self._size * tensor.shape[0], *tensor.shape[1:]))
        part = tensor.contiguous()
        return self._start(gathered, lambda channel: channel.all_gather(gathered, part))

    def start_reduce_scatter(self, tensor: torch.Tensor) -> TimedWork:
        """Begin to sum over all ranks, of which each gets its own equal part of the first dimension."""
        if tensor.shape[0] % self._size:
            raise ValueError(f"tensor-parallel group: {tensor.shape[0]} rows cannot be cut for {self._size} ranks")
        own = tensor.new_empty((tensor.shape[0] // self._size, *tensor.shape[1:]))
        whole = tensor.contiguous()
        return self._start(own, lambda channel: channel.reduce_scatter(own, whole))

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """Reduce in place and wait; nothing to do for a group of one. Raises CommunicatorError."""
        if self._size > 1:
            self.start_all_reduce(tensor, op).wait()

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """All ranks' tensors, one after the other. For a group of one the tensor itself. Raises CommunicatorError."""
        return tensor if self._size == 1 else self.start_all_gather(tensor).result()

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of the sum. For a group of one the tensor itself. Raises CommunicatorError."""
        return tensor if self._size == 1 else self.start_reduce_scatter(tensor).result()

    def _start(self, result: torch.Tensor, begin: Callable[[Any], Any]) -> TimedWork:
        backend = self._connected()
        self.on_start()
        with guarded("tensor-parallel group"):
            return TimedWork(self, begin(backend), result)

    def _connected(self) -> Any:
        if self._backend is None:
            raise CommunicatorError("tensor-parallel group: no communicator is connected")
        return self._backend

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait for peers, which is told and timed. What fails raises CommunicatorError."""
        self.on_wait(True)
        began = time.perf_counter()
        try:
            with guarded("tensor-parallel group"):
                yield
        finally:
            self.waited_s += time.perf_counter() - began
            self.on_wait(False)


class TimedWork:
    """A collective under way, whose wait is timed and whose failure is a CommunicatorError."""

    def __init__(self, group: TensorGroup, work: Any, result: torch.Tensor) -> None:
        self._group = group
        self._work = work
        self._result = result

    def wait(self, timeout: timedelta | None = None) -> bool:
        with self._group.waiting():
            return bool(self._work.wait() if timeout is None else self._work.wait(timeout))

    def result(self) -> torch.Tensor:
        """Wait for it, and give what came out."""
        self.wait()
        return self._result

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


@contextmanager
def guarded(what: str) -> Iterator[None]:
    """Turn a back end's errors, which are RuntimeErrors of its own, into CommunicatorError.

    Raises torch.OutOfMemoryError for one that says the device is full: NCCL takes memory of its own for communicators.
    No peer can change that, and another plan with the same ranks would fail as well.
    """
    try:
        yield
    except NO_PEERS_FAULT:
        raise
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise torch.OutOfMemoryError(f"{what}: {error}") from error
        raise CommunicatorError(f"{what}: {error}") from error


def _ignore(waits: bool) -> None:
    """Nobody watches."""


def nobody() -> None:
    """Nobody measures."""


def teach_megatron() -> None:
    """Make megatron-core believe a `TensorGroup`; for any other group nothing changes.

    It asks a group for size and rank only once torch.distributed has a default group, and otherwise takes it for a
    group of one, or for none at all. We have no default group: communicators are made by name for each epoch. Its
    collectives along the sequence allocate on CUDA or in a global buffer, whatever the tensor's device.
    """
    for module in [module for name, module in sys.modules.items() if name.startswith("megatron.core.")]:
        for name, answer in _ANSWERS.items():
            asked = getattr(module, name, None)
            if asked is not None and not hasattr(asked, "resihp"):
                setattr(module, name, _answered(asked, answer))


_ANSWERS: dict[str, Callable[..., Any]] = {
    "get_pg_size": lambda group, *_: group.size(),
    "get_pg_rank": lambda group, *_: group.rank(),
    "get_tensor_model_parallel_group_if_none": lambda group, *_: group,
    "_gather_along_first_dim": lambda group, tensor, *_: group.all_gather(tensor),
    "_reduce_scatter_along_first_dim": lambda group, tensor, *_: group.reduce_scatter(tensor),
}
"""By function of megatron's: what to answer instead, given the TensorGroup among its arguments, and all of them."""


def _answered(asked: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(asked)
    def ask(*arguments: Any, **keywords: Any) -> Any:
        for argument in (*arguments, *keywords.values()):
            if isinstance(argument, TensorGroup):
                return answer(argument, *arguments)
        return asked(*arguments, **keywords)

    ask.resihp = True  # type: ignore[attr-defined]
    return ask
