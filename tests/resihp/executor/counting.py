"""Counts what cannot be seen on a machine without a GPU: what is allocated where, and what would wait for a device."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocated(TorchDispatchMode):
    """While entered: bytes of all new storages, by type of device; an upper bound of the peak.

    `bytes_beside`: those that were allocated, on whatever device, while `beside` said that something else was there."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.bytes_beside = 0
        self.beside: Callable[[], bool] = lambda: False

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {_storage(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and _storage(tensor) not in known:
                self.bytes[tensor.device.type] += tensor.untyped_storage().nbytes()
                self.bytes_beside += tensor.untyped_storage().nbytes() if self.beside() else 0
        return result


class LiveBytes(TorchDispatchMode):
    """While entered: bytes of new storages that are alive at once, and `peak`, the most of them so far."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {_storage(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and _storage(tensor) not in known and _storage(tensor) not in self.live:
                storage = tensor.untyped_storage()
                self.live[_storage(tensor)] = storage.nbytes()
                weakref.finalize(storage, self.live.pop, _storage(tensor), None)
        self.peak = max(self.peak, sum(self.live.values()))
        return result


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


READ = {
    *("item", "tolist", "numpy", "cpu", "__float__", "__int__", "__bool__", "__index__", "__contains__"),
    *("nonzero", "masked_select", "unique", "equal", "allclose", "bincount"),
}
"""What cannot answer before the device has done all that it was given."""


class HostWaits(TorchFunctionMode):
    """While entered: calls that would hold the host until a GPU is done, by name. Looks at what is asked, whatever the
    device: values that are read, and copies to a device from memory that is not pinned."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        name = getattr(func, "__name__", "")
        moved = any(isinstance(argument, torch.device | str) for argument in (*args[1:], options.get("device")))
        if (
            name in READ
            or (name == "to" and moved and not options.get("non_blocking"))
            or (name in ("tensor", "as_tensor") and options.get("device") is not None)
            or (name == "__getitem__" and _masks(args[1]))
        ):
            self.calls[name] += 1
        return func(*args, **options)


def _masks(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, torch.Tensor) and part.dtype == torch.bool for part in parts)


class HiddenReads(TorchDispatchMode):
    """While entered: operations whose result the host needs, by name, also where torch itself calls them.

    `HostWaits` sees what is called from Python; a number that is read there comes by here as well, and counts there.
    """

    OPERATIONS = ("nonzero", "masked_select", "repeat_interleave", "_unique2", "is_nonzero", "equal", "bincount")

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in self.OPERATIONS or name == "_local_scalar_dense":
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


class BackEndCalls:
    """Counts what is asked of a back end, and of the work that it gives: `made` by kind, `waits` by what waits.

    Over NCCL, `settle` waits for the device, and so does every wait that is given a time.
    """

    def __init__(self, back_end: Any, work: type[Any]) -> None:
        self.made: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        connect, sit_out, settle, wait = back_end.connect, back_end.sit_out, back_end.settle, work.wait

        def counted_connect(store: Any, index: int, size: int, timeout: Any, role: Any) -> Any:
            self.made["from nothing" if role.parent is None else "split"] += 1
            return connect(store, index, size, timeout, role)

        def counted_sit_out(*arguments: Any) -> None:
            self.made["sat out"] += 1
            sit_out(*arguments)

        def counted_settle() -> None:
            self.waits["settle"] += 1
            settle()

        def counted_wait(asked: Any, timeout: Any = None) -> Any:
            self.waits["timed wait"] += timeout is not None
            return wait(asked, timeout)

        back_end.connect, back_end.sit_out, back_end.settle = counted_connect, counted_sit_out, counted_settle
        work.wait = counted_wait
