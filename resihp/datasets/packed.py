"""Shuffles documents and packs them into micro-batches: a pure function of (seed, iteration)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from resihp.datasets.packing import Piece, Pieces, pack
from resihp.errors import DatasetError
from resihp.parallelism.batch_sizes import BatchSizes, Ramp, RampUp
from resihp.parallelism.workload import MicroBatch


class PieceSource(Protocol):
    """A collection of documents; their lengths are known without reading them."""

    @property
    def lengths(self) -> Sequence[int]:
        """Number of predicted tokens of each document: one less than its number of tokens, since the last one is only a
        label."""
        ...

    def read(self, document: int, start: int, count: int) -> npt.NDArray[np.int64]:
        """Return `count` tokens of a document from token `start` on, shape [count]. Raises DatasetError if they do not
        exist."""
        ...


class PackedDataset:
    """`resihp.Dataset` over the documents of a source. Each epoch uses each piece once, in a new order.

    `micro_batches_per_iteration` is the size of the global batch, and `ramp_up` describes its growth to that size.
    `budget` is the maximum number of tokens in a micro-batch; longer documents are cut. The identifier of a sample is
    epoch * pieces + piece, which is unique in the whole training.
    """

    def __init__(
        self,
        source: PieceSource,
        *,
        budget: int,
        micro_batches_per_iteration: int,
        seed: int = 1234,
        ramp_up: RampUp | None = None,
    ) -> None:
        if budget < 1 or micro_batches_per_iteration < 1:
            raise DatasetError(
                f"data set: budget {budget} and micro-batches {micro_batches_per_iteration} must be at least 1"
            )
        self._source = source
        self._budget = budget
        usual = micro_batches_per_iteration
        self._sizes = BatchSizes(usual) if ramp_up is None else ramp_up.sizes(usual)
        self._seed = seed
        self._pieces = Pieces(source.lengths, budget)
        if not len(self._pieces):
            raise DatasetError("data set: no document with at least two tokens")
        self._starts: list[int] = [0]
        """Number of the first micro-batch of each epoch begun so far, counted over the whole training from 0."""
        self._open_epoch(0)

    def _open_epoch(self, epoch: int) -> None:
        """Start packing an epoch lazily, so that training does not wait until the whole epoch is packed."""
        order = np.random.Generator(np.random.PCG64([self._seed, epoch])).permutation(len(self._pieces))
        self._epoch = epoch
        self._bins: list[tuple[Piece, ...]] = []
        self._packing = pack((self._pieces[int(i)] for i in order), self._budget)

    def _bin(self, number: int) -> tuple[int, tuple[Piece, ...]]:
        """Return (epoch, pieces) of micro-batch `number` of the whole training, counted from 0."""
        if number < self._starts[self._epoch]:
            self._open_epoch(bisect_right(self._starts, number) - 1)
        while True:
            while len(self._bins) <= number - self._starts[self._epoch]:
                packed = next(self._packing, None)
                if packed is None:
                    break
                self._bins.append(packed)
            else:
                return self._epoch, self._bins[number - self._starts[self._epoch]]
            if self._epoch + 1 == len(self._starts):
                self._starts.append(self._starts[self._epoch] + len(self._bins))
            self._open_epoch(self._epoch + 1)

    @property
    def ramp(self) -> Ramp:
        return self._sizes.ramp

    def micro_batches(self, iteration: int) -> tuple[MicroBatch, ...]:
        """Return the global batch of `iteration`, counted from 1."""
        batch = []
        for number in range(self._sizes.before(iteration), self._sizes.before(iteration + 1)):
            epoch, pieces = self._bin(number)
            batch.append(
                MicroBatch(
                    lengths=tuple(piece.length for piece in pieces),
                    samples=tuple(epoch * len(self._pieces) + piece.index for piece in pieces),
                    load=partial(self._load, pieces),
                )
            )
        return tuple(batch)

    def _load(self, pieces: tuple[Piece, ...]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        read = [self._source.read(piece.document, piece.start, piece.length + 1) for piece in pieces]
        return np.concatenate([tokens[:-1] for tokens in read]), np.concatenate([tokens[1:] for tokens in read])
