"""The unit of work: a micro-batch of packed documents, with the terms of its cost and a digest of its samples."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import msgspec

from resihp.errors import ConfigurationError, DatasetError
from resihp.parallelism.batch_sizes import Ramp

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

SAMPLE_MODULUS = 1 << 64


class MicroBatch(msgspec.Struct, frozen=True):
    """Documents packed one after the other; attention never crosses from one document into the next.

    `lengths[i]` tokens belong to sample `samples[i]`, an identifier that is unique within the data set. `load` returns
    (tokens, labels), both int64 arrays of shape [sum(lengths)]. It is called only on ranks that need the tokens or
    labels: lengths are known before anything is read.
    """

    lengths: tuple[int, ...]
    samples: tuple[int, ...]
    load: Callable[[], tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]

    @property
    def tokens(self) -> int:
        """Number of tokens: N in the paper's Eq. 1."""
        return sum(self.lengths)

    @property
    def sum_squared_lengths(self) -> int:
        """Sum of the squared lengths of the documents: the sum of l_i squared in the paper's Eq. 1."""
        return sum(length * length for length in self.lengths)


class Dataset(Protocol):
    """Interface of a data set for `resihp.Trainer`.

    `micro_batches` returns the global batch of an iteration. It is pure: equal iterations give equal micro-batches on
    every rank and in every process, whichever replica computes them. The number of micro-batches is constant, or
    follows the ramp-up (`Ramped`).
    """

    def micro_batches(self, iteration: int) -> Sequence[MicroBatch]: ...


@runtime_checkable
class Ramped(Protocol):
    """A `Dataset` with a ramp-up: the number of micro-batches grows during the first iterations."""

    @property
    def ramp(self) -> Ramp:
        """Steps of the ramp-up: (first iteration, micro-batches per iteration); empty without a ramp-up."""
        ...


def ramp_of(dataset: Dataset) -> Ramp:
    """Return the steps of a data set's ramp-up; empty if it has none. Raises DatasetError for malformed steps."""
    if not isinstance(dataset, Ramped):
        return ()
    try:
        return msgspec.convert(dataset.ramp, Ramp)
    except msgspec.ValidationError as error:
        raise DatasetError(
            f"{type(dataset).__name__}.ramp: {error}; it holds a ramp-up's steps, (first iteration, micro-batches) each"
        ) from error


class Evaluation(msgspec.Struct, frozen=True):
    """Evaluation on another data set: the loss over `iterations` batches, every `every` iterations and after the last
    one.

    The batches are `dataset.micro_batches(1)` to `dataset.micro_batches(iterations)` in every evaluation, so that
    losses can be compared. Each batch has as many micro-batches as a global batch of the training. Raises
    ConfigurationError if `every` or `iterations` is below 1.
    """

    dataset: Dataset
    every: int
    iterations: int

    def __post_init__(self) -> None:
        for name, number in (("every", self.every), ("iterations", self.iterations)):
            if number < 1:
                raise ConfigurationError(f"Evaluation: {name}={number}; it is a number of iterations, at least 1")

    def is_due(self, iteration: int, last: int) -> bool:
        """Return whether to evaluate after `iteration`, in a training that ends with iteration `last`."""
        return iteration > 0 and (iteration % self.every == 0 or iteration == last)


def samples_digest(samples: Iterable[int]) -> int:
    """Return an order-independent digest of a multiset of samples: the sum of their 64-bit hashes, modulo 2**64.

    A sample that is used twice changes the sum; it would cancel in an exclusive or.
    """
    total = 0
    for sample in samples:
        total += int.from_bytes(hashlib.blake2b(str(sample).encode(), digest_size=8).digest(), "big")
    return total % SAMPLE_MODULUS
