"""A mix of data sets by weights: which micro-batch comes from which of them. Pure, reads nothing.

Users build it; it asks its parts, which are data sets like any other. A micro-batch comes from one part, so weights are
shares of micro-batches: of tokens, where all parts fill theirs to the same budget.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from resihp.errors import DatasetError
from resihp.parallelism.batch_sizes import BatchSizes, Ramp, RampUp
from resihp.parallelism.workload import Dataset, MicroBatch, ramp_of

ROUND = 10_000
"""Micro-batches after which the order of parts repeats: weights are kept to one in so many."""


class Blended:
    """`resihp.Dataset` over `(weight, data set)` pairs; weights need not add up to 1.

    The micro-batches of each part lie evenly over the training, in the part's own order, so that each iteration has
    nearly the same mix. A sample's identifier is its part's times the number of parts, plus the part's place.
    `ramp_up` is of the blend: its parts have none.
    """

    def __init__(
        self,
        parts: Sequence[tuple[float, Dataset]],
        *,
        micro_batches_per_iteration: int,
        ramp_up: RampUp | None = None,
    ) -> None:
        if micro_batches_per_iteration < 1 or not parts:
            raise DatasetError(
                f"blended data set: {len(parts)} parts and {micro_batches_per_iteration} micro-batches; "
                "both must be at least 1"
            )
        self._parts = [part for _, part in parts]
        self._quotas = quotas([weight for weight, _ in parts])
        self._turns = turns(self._quotas)
        self._earlier = np.zeros(ROUND, dtype=np.int64)
        """How often the same part had its turn before, in the same round."""
        for d in range(len(parts)):
            mine = self._turns == d
            self._earlier[mine] = np.arange(int(mine.sum()))
        usual = micro_batches_per_iteration
        self._batches = BatchSizes(usual) if ramp_up is None else ramp_up.sizes(usual)
        self._asked: list[tuple[int, Sequence[MicroBatch]]] = [(1, part.micro_batches(1)) for part in self._parts]
        """The iteration that each part was asked for last."""
        self._sizes = [len(batch) for _, batch in self._asked]
        if any(ramp_of(part) for part in self._parts):
            raise DatasetError("blended data set: a part has a ramp-up; give it to the blend")
        if not all(self._sizes):
            raise DatasetError(f"blended data set: part {self._sizes.index(0)} is empty")

    @property
    def ramp(self) -> Ramp:
        return self._batches.ramp

    def micro_batches(self, iteration: int) -> tuple[MicroBatch, ...]:
        """The global batch of `iteration`, counted from 1."""
        first, end = self._batches.before(iteration), self._batches.before(iteration + 1)
        return tuple(self._micro_batch(n) for n in range(first, end))

    def _micro_batch(self, number: int) -> MicroBatch:
        """The `number`th since the beginning, counted from 0."""
        rounds, at = divmod(number, ROUND)
        d = int(self._turns[at])
        own, m = divmod(rounds * int(self._quotas[d]) + int(self._earlier[at]), self._sizes[d])
        if self._asked[d][0] != own + 1:
            self._asked[d] = own + 1, self._parts[d].micro_batches(own + 1)
        found = self._asked[d][1][m]
        return msgspec.structs.replace(found, samples=tuple(s * len(self._parts) + d for s in found.samples))


def quotas(weights: Sequence[float]) -> npt.NDArray[np.int64]:
    """How many micro-batches of a round come from each part: what adds up and is nearest to the weights.

    Raises DatasetError for weights that are no shares, or so small that a part would have none.
    """
    if not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise DatasetError(f"blended data set: weights {list(weights)} must be above 0")
    exact = np.array(weights, dtype=np.float64) / math.fsum(weights) * ROUND
    whole = np.floor(exact).astype(np.int64)
    lacking = ROUND - int(whole.sum())
    whole[np.argsort(whole - exact, kind="stable")[:lacking]] += 1
    if not whole.all():
        least = min(weights)
        raise DatasetError(f"blended data set: weight {least} is less than 1/{ROUND} of all; leave that part out")
    return whole


def turns(quota: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Whose turn each micro-batch of a round is: those of each part lie evenly over the round."""
    whose = np.repeat(np.arange(len(quota)), quota)
    when = np.concatenate([(np.arange(count) + 0.5) / count for count in quota])
    order: npt.NDArray[np.int64] = whose[np.argsort(when, kind="stable")]
    return order
