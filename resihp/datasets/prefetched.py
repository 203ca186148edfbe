"""Reads the data of the next iteration in a thread during the current one. Changes no batch, only the time of reading.

Users wrap a data set in `Prefetched`. It assumes that a rank needs the same micro-batches, by their index in the global
batch, as in the previous iteration. After a change of plan, this is wrong once: some micro-batches are read in vain,
and others are read on demand, as without this class.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

import msgspec
import numpy as np
import numpy.typing as npt

from resihp.parallelism.batch_sizes import Ramp
from resihp.parallelism.workload import Dataset, MicroBatch, ramp_of

Arrays = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""Tokens and labels of a micro-batch."""


class Prefetched:
    """`resihp.Dataset` that wraps another data set. Its micro-batches must be loadable from another thread.

    The wrapped data set is asked for one iteration ahead, never by two threads at the same time. An exception of the
    data set, including one in the thread, is raised when the batch or its data are requested.
    """

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._asking = threading.Lock()
        self._ahead: _Ahead | None = None
        self._loaded: list[int] = []
        """Indices of micro-batches loaded so far in the iteration returned last, in order of loading."""

    @property
    def ramp(self) -> Ramp:
        return ramp_of(self._dataset)

    def micro_batches(self, iteration: int) -> tuple[MicroBatch, ...]:
        """Return the global batch of `iteration`, and start reading the next one."""
        ahead, read = self._ahead, dict[int, Future[Arrays]]()
        if ahead is not None and ahead.iteration == iteration:
            batch, read = ahead.batch.result(), ahead.read
        else:
            if ahead is not None:
                ahead.stale = True
            with self._asking:
                batch = self._dataset.micro_batches(iteration)
        self._ahead = _Ahead(self._dataset, self._asking, iteration + 1, self._loaded)
        self._loaded = []
        return tuple(
            msgspec.structs.replace(micro_batch, load=partial(_load, micro_batch, m, read.get(m), self._loaded))
            for m, micro_batch in enumerate(batch)
        )


class _Ahead:
    """The next iteration, and the micro-batches being read for it."""

    def __init__(self, dataset: Dataset, asking: threading.Lock, iteration: int, wanted: Sequence[int]) -> None:
        self.iteration = iteration
        self.batch: Future[Sequence[MicroBatch]] = Future()
        self.read: dict[int, Future[Arrays]] = {m: Future() for m in wanted}
        self.stale = False
        """Whether another iteration was requested instead, so that the remaining micro-batches need not be read."""
        self._dataset, self._asking = dataset, asking
        threading.Thread(target=self._run, name=f"read iteration {iteration}", daemon=True).start()

    def _run(self) -> None:
        try:
            with self._asking:
                batch = self._dataset.micro_batches(self.iteration)
        except BaseException as error:  # noqa: BLE001 raised where the batch is requested
            self.batch.set_exception(error)
            return
        self.batch.set_result(batch)
        for m, future in self.read.items():
            if self.stale:
                return
            try:
                future.set_result(batch[m].load())
            except BaseException as error:  # noqa: BLE001 raised where the data are requested
                future.set_exception(error)


def _load(micro_batch: MicroBatch, m: int, read: Future[Arrays] | None, loaded: list[int]) -> Arrays:
    if m not in loaded:
        loaded.append(m)
    return micro_batch.load() if read is None else read.result()
