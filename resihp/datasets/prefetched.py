"""Reads the next iteration's data in a thread while this one is computed. Changes no batch, only when it is read.

Users wrap a data set in it. What a rank will need is what it needed last, by the places of micro-batches in the global
batch: after another plan it reads some in vain once, and some when they are asked for, as without it.
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
"""Tokens and labels."""


class Prefetched:
    """`resihp.Dataset` over another, whose micro-batches must be such that a thread can load them.

    It is asked for one iteration ahead, never by two threads at once. What it raises, in the thread too, is raised
    where the batch or its data are asked for.
    """

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._asking = threading.Lock()
        self._ahead: _Ahead | None = None
        self._loaded: list[int] = []
        """Places of the micro-batches that were loaded of the iteration given out last, in that order."""

    @property
    def ramp(self) -> Ramp:
        return ramp_of(self._dataset)

    def micro_batches(self, iteration: int) -> tuple[MicroBatch, ...]:
        """The global batch of `iteration`; begins to read the one after it."""
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
            msgspec.structs.replace(one, load=partial(_load, one, m, read.get(m), self._loaded))
            for m, one in enumerate(batch)
        )


class _Ahead:
    """One iteration, and the micro-batches of it that are being read."""

    def __init__(self, dataset: Dataset, asking: threading.Lock, iteration: int, wanted: Sequence[int]) -> None:
        self.iteration = iteration
        self.batch: Future[Sequence[MicroBatch]] = Future()
        self.read: dict[int, Future[Arrays]] = {m: Future() for m in wanted}
        self.stale = False
        """Set when another iteration was asked for: nobody waits for what is still to be read."""
        self._dataset, self._asking = dataset, asking
        threading.Thread(target=self._run, name=f"read iteration {iteration}", daemon=True).start()

    def _run(self) -> None:
        try:
            with self._asking:
                batch = self._dataset.micro_batches(self.iteration)
        except BaseException as error:  # noqa: BLE001 raised where the batch is asked for
            self.batch.set_exception(error)
            return
        self.batch.set_result(batch)
        for m, future in self.read.items():
            if self.stale:
                return
            try:
                future.set_result(batch[m].load())
            except BaseException as error:  # noqa: BLE001 raised where the data are asked for
                future.set_exception(error)


def _load(one: MicroBatch, m: int, read: Future[Arrays] | None, loaded: list[int]) -> Arrays:
    if m not in loaded:
        loaded.append(m)
    return one.load() if read is None else read.result()
