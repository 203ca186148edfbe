"""The unit of work: a micro-batch of packed documents, its cost terms, and a digest to identify its samples."""

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
    """Documents packed one after the other; attention never crosses from one into the next.

    `lengths[i]` tokens belong to sample `samples[i]`, an identifier that is unique within the data set. `load`
    returns (tokens, labels), both int64 arrays of shape [sum(lengths)], and is called only on ranks that need them:
    lengths are known before anything is read.
    """

    lengths: tuple[int, ...]
    samples: tuple[int, ...]
    load: Callable[[], tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]

    @property
    def tokens(self) -> int:
        """Number of tokens, N in the paper's Eq. 1."""
        return sum(self.lengths)

    @property
    def sum_squared_lengths(self) -> int:
        """Sum of l_i squared in the paper's Eq. 1."""
        return sum(length * length for length in self.lengths)


class Dataset(Protocol):
    """Interface of a data set for `resihp.Trainer`.

    `micro_batches` is pure: equal iterations give equal micro-batches on every rank and in every process, whichever
    replica computes them. It returns the global batch: the same number of micro-batches every time, or the number that
    the ramp-up prescribes (`Ramped`).
    """

    def micro_batches(self, iteration: int) -> Sequence[MicroBatch]: ...


@runtime_checkable
class Ramped(Protocol):
    """A `Dataset` that declares a ramp-up: its iterations do not all have the same number of micro-batches."""

    @property
    def ramp(self) -> Ramp:
        """(first iteration, micro-batches) of each step; empty for none."""
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
    """Evaluation on another data set: every `every` iterations, and after the last, the loss over `iterations` batches.

    These are the global batches `dataset.micro_batches(1)` to `(iterations)`, the same each time, so that losses can be
    compared; each has as many micro-batches as a batch of the training. Raises ConfigurationError for numbers below 1.
    """

    dataset: Dataset
    every: int
    iterations: int

    def __post_init__(self) -> None:
        for name, number in (("every", self.every), ("iterations", self.iterations)):
            if number < 1:
                raise ConfigurationError(f"Evaluation: {name}={number}; it is a number of iterations, at least 1")

    def is_due(self, iteration: int, last: int) -> bool:
        """Return whether the weights of `iteration` are evaluated in a training whose last iteration is `last`."""
        return iteration > 0 and (iteration % self.every == 0 or iteration == last)


def samples_digest(samples: Iterable[int]) -> int:
    """Return an order-independent digest of a multiset of samples: the sum of their 64-bit hashes, modulo 2**64.

    A sum is used and not an exclusive or, so that a sample used twice changes the result.
    """
    total = 0
    for sample in samples:
        total += int.from_bytes(hashlib.blake2b(str(sample).encode(), digest_size=8).digest(), "big")
    return total % SAMPLE_MODULUS
