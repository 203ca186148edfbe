"""The tensor-parallel group as seen by megatron-core's layers: one object for the whole life of a stage.

Layers store the group given to their constructors, but communicators live for one epoch. So layers get a `TensorGroup`,
which knows size and rank before any communicator exists, and passes collectives on to the communicator bound at the
time. It also measures the time of waits for peers apart from the time of computation: a waiting rank is a victim of a
slow device, not the cause. Used by stages, the interpreter and the engine; decides nothing.
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
"""torch's own stubs lack most of the names used here."""

Backend = Any
"""torch's ProcessGroupGloo or ProcessGroupNCCL, untyped because their type stubs differ between versions."""

LOCAL_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError)
"""RuntimeErrors caused by this rank's script or device. A peer causes every other RuntimeError of a back end."""
OUT_OF_MEMORY_TEXTS = ("out of memory", "ALLOC_FAILED")
"""Error texts of libraries that allocate device memory themselves: NCCL for communicators, cuBLAS for its
workspaces."""


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether an operation failed because the device's memory was full."""
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in OUT_OF_MEMORY_TEXTS)


class TensorGroup:
    """Replaces a `torch.distributed.ProcessGroup` in megatron-core's layers and in calls of `torch.distributed`."""

    def __init__(self, size: int = 1, rank: int = 0) -> None:
        self._size = size
        self._rank = rank
        self._backend: Any = None
        self.waited_s = 0.0
        """Total seconds of waits for collectives since the group was created."""
        self.on_wait: Callable[[bool], None] = _ignore_wait
        """Called with True before and False after each wait."""
        self.on_start: Callable[[], None] = ignore_start
        """Called when a collective is about to start, at which point the rank's own work so far is done."""

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def bind(self, backend: Any) -> None:
        """Use this communicator (`channels.Channel`) from now on; None if there is none."""
        self._backend = backend

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> TimedWork | None:
        """Reduce as `torch.distributed.all_reduce(..., group=self)` requires. Raises CommunicatorError.

        A synchronous call returns nothing, and all of it counts as a wait. When NCCL's call returns, all later work is
        already ordered behind it; with other back ends, this method waits for the result.
        """
        if getattr(options, "asyncOp", True):
            return self._start(tensors[0], lambda backend: backend.allreduce(tensors, options))
        backend = self._connected()
        self.on_start()
        with self.waiting():
            backend.allreduce(tensors, options).wait()
        return None

    def start_all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> TimedWork:
        """Start an all-reduce in place."""
        options = dist.AllreduceOptions()
        options.reduceOp = op
        return self._start(tensor, lambda backend: backend.allreduce([tensor], options))

    def start_all_gather(self, tensor: torch.Tensor) -> TimedWork:
        """Start an all-gather, which concatenates the tensors of all ranks along their first dimension. Shapes must be
        equal."""
        gathered = tensor.new_empty((self._size * tensor.shape[0], *tensor.shape[1:]))
        part = tensor.contiguous()
        return self._start(gathered, lambda channel: channel.all_gather(gathered, part))

    def start_reduce_scatter(self, tensor: torch.Tensor) -> TimedWork:
        """Start a reduce-scatter: sum over all ranks, and give each rank its equal part of the first dimension."""
        if tensor.shape[0] % self._size:
            raise ValueError(f"tensor-parallel group: {tensor.shape[0]} rows cannot be cut for {self._size} ranks")
        own = tensor.new_empty((tensor.shape[0] // self._size, *tensor.shape[1:]))
        whole = tensor.contiguous()
        return self._start(own, lambda channel: channel.reduce_scatter(own, whole))

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """All-reduce in place and wait; does nothing in a group of one rank. Raises CommunicatorError."""
        if self._size > 1:
            self.start_all_reduce(tensor, op).wait()

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the concatenated tensors of all ranks; in a group of one rank the tensor itself. Raises
        CommunicatorError."""
        return tensor if self._size == 1 else self.start_all_gather(tensor).result()

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the sum; in a group of one rank the tensor itself. Raises CommunicatorError."""
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
        """Report and time a wait for peers. A failure in the block is raised as CommunicatorError."""
        self.on_wait(True)
        began = time.perf_counter()
        try:
            with guarded("tensor-parallel group"):
                yield
        finally:
            self.waited_s += time.perf_counter() - began
            self.on_wait(False)


class TimedWork:
    """A collective in progress. Its wait is timed, and its failure is raised as CommunicatorError."""

    def __init__(self, group: TensorGroup, work: Any, result: torch.Tensor) -> None:
        self._group = group
        self._work = work
        self._result = result

    def wait(self, timeout: timedelta | None = None) -> bool:
        with self._group.waiting():
            return bool(self._work.wait() if timeout is None else self._work.wait(timeout))

    def result(self) -> torch.Tensor:
        """Wait for the collective and return its result."""
        self.wait()
        return self._result

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


@contextmanager
def guarded(activity: str) -> Iterator[None]:
    """Raise RuntimeErrors of a back end as CommunicatorError; `activity` begins the message.

    An error that reports full memory is raised as torch.OutOfMemoryError: NCCL allocates memory for communicators, so
    no peer is to blame, and another plan with the same ranks would fail as well.
    """
    try:
        yield
    except LOCAL_ERRORS:
        raise
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise torch.OutOfMemoryError(f"{activity}: {error}") from error
        raise CommunicatorError(f"{activity}: {error}") from error


def _ignore_wait(waits: bool) -> None:
    """Default of `on_wait`: does nothing."""


def ignore_start() -> None:
    """Default of `on_start`: does nothing."""


def patch_megatron() -> None:
    """Make functions of megatron-core accept a `TensorGroup`; for any other group their behaviour does not change.

    These functions use a group's size and rank only if torch.distributed has a default group; otherwise they treat it
    as a group of one rank, or as absent. resihp has no default group: it creates communicators by name for each epoch.
    In addition, megatron's collectives along the sequence allocate on CUDA or in a global buffer, regardless of the
    tensor's device.
    """
    for module in [module for name, module in sys.modules.items() if name.startswith("megatron.core.")]:
        for name, replacement in _REPLACEMENTS.items():
            function = getattr(module, name, None)
            if function is not None and not hasattr(function, "resihp"):
                setattr(module, name, _replaced(function, replacement))


_REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "get_pg_size": lambda group, *_: group.size(),
    "get_pg_rank": lambda group, *_: group.rank(),
    "get_tensor_model_parallel_group_if_none": lambda group, *_: group,
    "_gather_along_first_dim": lambda group, tensor, *_: group.all_gather(tensor),
    "_reduce_scatter_along_first_dim": lambda group, tensor, *_: group.reduce_scatter(tensor),
}
"""Replacement for each patched function of megatron. It gets the TensorGroup found among the arguments, then all
arguments."""


def _replaced(function: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def ask(*arguments: Any, **keywords: Any) -> Any:
        for argument in (*arguments, *keywords.values()):
            if isinstance(argument, TensorGroup):
                return replacement(argument, *arguments)
        return function(*arguments, **keywords)

    ask.resihp = True  # type: ignore[attr-defined]
    return ask
