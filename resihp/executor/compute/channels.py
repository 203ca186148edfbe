"""One communicator, and its work in progress. No wait continues after the rank is woken.

`SingleFile` is the strict mode for tests: it imposes the strictest form of NCCL's rules on gloo. Created by
`communicators`, used by all code that communicates; decides nothing.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec
import torch
from torch import Tensor

from resihp.errors import CommunicatorError
from resihp.executor.backends import BackEnd, Gloo
from resihp.executor.tensor_group import Backend, dist, guarded

Wire = Callable[[], float]
"""Returns the present duration in seconds of a transfer over an emulated link, from the time when both ends have begun
it."""

_POLL_INTERVAL = timedelta(seconds=0.1)
_TIMED_OUT = "Operation timed out"


class PendingWork:
    """A collective or a pipeline transfer in progress.

    `work` is the back end's own object. It is None if later work is already ordered behind it (NCCL's synchronous
    calls). `timed` means that a wait may be given a timeout (`BackEnd.timed_waits`).
    """

    def __init__(self, work: Any, woken: Callable[[], bool], *, timed: bool = True) -> None:
        self._work = work
        self._woken = woken
        self._timed = timed
        self._finish: Callable[[], object] | None = None

    def then(self, finish: Callable[[], object]) -> None:
        """Set a function that the waiting thread calls when the work is done."""
        self._finish = finish

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the work. Raises CommunicatorError if the rank has been woken, RuntimeError for errors of the back
        end.

        Shutting down gloo's sockets wakes the threads that wait in them, except one in the middle of a message, which
        gloo forgets (transport/tcp/pair.cc, signalException). So a wait checks periodically whether the rank was woken.
        NCCL's wait orders streams and does not block, with or without `timeout`, and returns normally after an abort.
        So this method also checks at the end whether the rank was woken.
        """
        if self._work is None:
            done = True
        elif self._timed:
            done = self._waited(timeout)
        else:
            done = bool(self._work.wait())
        if self._woken():
            raise CommunicatorError("woken; received data are invalid")
        if self._finish is not None:
            self._finish()
            self._finish = None
        return done

    def _waited(self, timeout: timedelta | None) -> bool:
        limit = None if timeout is None else time.monotonic() + timeout.total_seconds()
        while True:
            try:
                return bool(self._work.wait(_POLL_INTERVAL))
            except RuntimeError as error:
                if _TIMED_OUT not in str(error) or (limit is not None and time.monotonic() > limit):
                    raise
            if self._woken():
                raise CommunicatorError("woken in the middle of a message")

    def is_completed(self) -> bool:
        return self._work is None or bool(self._work.is_completed())


class SingleFile:
    """The strictest form of NCCL's rules, for tests: one thread carries out all communication of a rank, in order.

    gloo runs communicators concurrently and so tolerates orders that deadlock elsewhere. Here, each communication waits
    until all earlier ones of the rank are done at both ends. Enabled by RESIHP_STRICT_ORDER=1.
    """

    def __init__(self) -> None:
        self._due: queue.SimpleQueue[_Deferred | None] = queue.SimpleQueue()
        threading.Thread(target=self._carry_out, name="resihp-strict", daemon=True).start()

    def begin(
        self, operation: Callable[[], Any], woken: Callable[[], bool], wire: Wire | None = None, *, timed: bool = True
    ) -> PendingWork:
        deferred = _Deferred(operation, woken, wire, timed=timed)
        self._due.put(deferred)
        return PendingWork(deferred, woken)

    def close(self) -> None:
        self._due.put(None)

    def _carry_out(self) -> None:
        while (deferred := self._due.get()) is not None:
            deferred.carry_out()


class _Deferred:
    """Replaces the work object of a back end until the communication begins."""

    def __init__(
        self, operation: Callable[[], Any], woken: Callable[[], bool], wire: Wire | None, *, timed: bool
    ) -> None:
        self._operation, self._woken, self._wire, self._timed = operation, woken, wire, timed
        self._done = threading.Event()
        self._error: Exception | None = None

    def carry_out(self) -> None:
        try:
            PendingWork(self._operation(), self._woken, timed=self._timed).wait()
            if self._wire is not None:
                time.sleep(self._wire())
        except (CommunicatorError, RuntimeError) as error:
            self._error = error
        self._done.set()

    def wait(self, timeout: timedelta) -> bool:
        if not self._done.wait(timeout.total_seconds()):
            raise RuntimeError(_TIMED_OUT)
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._done.is_set()


class Channel:
    """One communicator. All its operations are collectives in the back end's own thread; they may continue after a wait
    ends.

    With `strict`, no operation begins before all earlier operations of the rank are done, on any communicator. With an
    emulated `wire`, no operation begins before all earlier operations on this communicator are done.
    """

    def __init__(
        self,
        backend: Backend,
        woken: Callable[[], bool],
        strict: SingleFile | None = None,
        wire: Wire | None = None,
        store: Any = None,
        kind: type[BackEnd] = Gloo,
    ) -> None:
        """`store` is the back end's store, referenced as long as the back end may use it. `kind` is the class of the
        back end."""
        self._kind = kind
        self.store = store
        self._backend: Backend | None = backend
        self._woken = woken
        self._own = SingleFile() if wire is not None and strict is None else None
        self._single_file = strict or self._own
        self._wire = wire

    @property
    def backend(self) -> Backend:
        """The open back end. Raises CommunicatorError after the channel is closed."""
        if self._backend is None:
            raise CommunicatorError("this communicator is closed")
        return self._backend

    @property
    def backend_if_open(self) -> Backend | None:
        """The back end; None after the channel is closed."""
        return self._backend

    def detach(self) -> Backend | None:
        """Close the channel and return its back end, so that the caller can destroy it where a blocking destructor does
        no harm.

        Remaining references to the channel, such as an interpreter in an exception's traceback, keep nothing alive.
        """
        if self._own is not None:
            self._own.close()
        backend, self._backend = self._backend, None
        return backend

    def size(self) -> int:
        return int(self.backend.size())

    def rank(self) -> int:
        return int(self.backend.rank())

    def allreduce(self, tensors: list[Tensor], *options: Any) -> PendingWork:
        return self._begin(lambda: self.backend.allreduce(tensors, *options))

    def all_gather(self, output: Tensor, part: Tensor) -> PendingWork:
        """Gather `part` of every rank into `output`, in the order of ranks. Both must be contiguous."""
        return self._begin(lambda: self.backend._allgather_base(output, part))

    def reduce_scatter(self, output: Tensor, whole: Tensor) -> PendingWork:
        """Sum `whole` over all ranks, and give rank r the r-th equal part in `output`. Both must be contiguous.

        gloo's own implementation (torch 2.13) also sums everything, but its wait cannot check whether the rank was
        woken, so it is not used.
        """
        if self._kind.scatters:
            return self._begin(lambda: self.backend._reduce_scatter_base(output, whole))
        summed = whole.clone()
        own = summed.view(self.size(), -1)[self.rank()]
        transfer = self.allreduce([summed])
        transfer.then(lambda: output.copy_(own.view_as(output)))
        return transfer

    def broadcast(self, tensor: Tensor, root: int = 0) -> PendingWork:
        """Send from the rank with index `root` to the others. Also used between two ranks, since gloo loses interrupted
        sends."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        return self._begin(lambda: self.backend.broadcast([tensor], options))

    def _begin(self, operation: Callable[[], Any]) -> PendingWork:
        if self._single_file is not None:
            return self._single_file.begin(operation, self._woken, self._wire, timed=self._kind.timed_waits)
        return PendingWork(operation(), self._woken, timed=self._kind.timed_waits)


def gathered(value: Any, world: Channel, device: torch.device) -> list[Any]:
    """Return the values of all ranks of `world`, in the order of ranks. msgpack must be able to encode them."""
    encoded = torch.frombuffer(bytearray(msgspec.msgpack.encode(value)), dtype=torch.uint8).to(device)
    with guarded("gather"):
        sizes = torch.empty(world.size(), dtype=torch.int64, device=device)
        world.all_gather(sizes, torch.tensor([len(encoded)], device=device)).wait()
        padded = torch.zeros(int(sizes.max()), dtype=torch.uint8, device=device)
        padded[: len(encoded)] = encoded
        rows = torch.empty(world.size() * len(padded), dtype=torch.uint8, device=device)
        world.all_gather(rows, padded).wait()
    contents = zip(rows.view(world.size(), -1).tolist(), sizes.tolist(), strict=True)
    return [msgspec.msgpack.decode(bytes(row[:size])) for row, size in contents]
