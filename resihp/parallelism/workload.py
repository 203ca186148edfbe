"""The unit of work: a micro-batch of packed documents, its cost terms, and how to recognise its samples afterwards."""

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
        """N of the paper's Eq. 1."""
        return sum(self.lengths)

    @property
    def sum_squared_lengths(self) -> int:
        """Sum of l_i squared of the paper's Eq. 1."""
        return sum(length * length for length in self.lengths)


class Dataset(Protocol):
    """What `resihp.Trainer` asks of a data set.

    `micro_batches` is pure: equal iterations give equal micro-batches on every rank, in every process, whoever
    computes them. It returns the global batch, the same number of micro-batches every time, or what its ramp-up says
    (`Ramped`).
    """

    def micro_batches(self, iteration: int) -> Sequence[MicroBatch]: ...


@runtime_checkable
class Ramped(Protocol):
    """A `Dataset` whose iterations do not all have equally many micro-batches, and which says so."""

    @property
    def ramp(self) -> Ramp:
        """(first iteration, micro-batches) of each step; empty for none."""
        ...


def ramp_of(dataset: Dataset) -> Ramp:
    """The steps of a data set's ramp-up; empty where it has none. Raises DatasetError for what are no steps."""
    if not isinstance(dataset, Ramped):
        return ()
    try:
        return msgspec.convert(dataset.ramp, Ramp)
    except msgspec.ValidationError as error:
        raise DatasetError(
            f"{type(dataset).__name__}.ramp: {error}; it holds a ramp-up's steps, (first iteration, micro-batches) each"
        ) from error


class Evaluation(msgspec.Struct, frozen=True):
    """Every `every` iterations, and after the last, the loss over `iterations` global batches of another data set.

    They are `dataset.micro_batches(1)` to `(iterations)`, the same each time, so that losses can be compared; each has
    as many micro-batches as one that is trained on. Raises ConfigurationError for numbers below 1.
    """

    dataset: Dataset
    every: int
    iterations: int

    def __post_init__(self) -> None:
        for name, number in (("every", self.every), ("iterations", self.iterations)):
            if number < 1:
                raise ConfigurationError(f"Evaluation: {name}={number}; it is a number of iterations, at least 1")

    def is_due(self, iteration: int, last: int) -> bool:
        """Whether the weights of `iteration` are evaluated, of a training whose last one is `last`."""
        return iteration > 0 and (iteration % self.every == 0 or iteration == last)


def samples_digest(samples: Iterable[int]) -> int:
    """Order-independent digest of a multiset of samples: the sum of their 64-bit hashes, modulo 2**64.

    A sum, not an exclusive or, so that a sample used twice shows.
    """
    total = 0
    for sample in samples:
        total += int.from_bytes(hashlib.blake2b(str(sample).encode(), digest_size=8).digest(), "big")
    return total % SAMPLE_MODULUS
