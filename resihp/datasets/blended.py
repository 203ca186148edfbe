"""A weighted mix of data sets: decides from which data set each micro-batch comes. Pure; reads nothing itself.

Created by users from other data sets. Each micro-batch comes from exactly one part, so weights are shares of
micro-batches. They are also shares of tokens if all parts fill their micro-batches to the same budget.
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

ROUND_LENGTH = 10_000
"""Number of micro-batches after which the order of parts repeats. So weights are accurate to 1/`ROUND_LENGTH`."""


class Blended:
    """`resihp.Dataset` that mixes `(weight, data set)` pairs; the weights need not add up to 1.

    The micro-batches of each part are spread evenly over training, in the part's own order, so that all iterations have
    nearly the same mix. The identifier of a sample is its identifier in the part, times the number of parts, plus the
    part's index. `ramp_up` applies to the mix; no part may have a ramp-up.
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
        self._earlier_turns = np.zeros(ROUND_LENGTH, dtype=np.int64)
        """For each turn of a round, the number of earlier turns of the same part in the round."""
        for d in range(len(parts)):
            mine = self._turns == d
            self._earlier_turns[mine] = np.arange(int(mine.sum()))
        usual = micro_batches_per_iteration
        self._batches = BatchSizes(usual) if ramp_up is None else ramp_up.sizes(usual)
        self._newest: list[tuple[int, Sequence[MicroBatch]]] = [(1, part.micro_batches(1)) for part in self._parts]
        """For each part, the last iteration requested from it, with the micro-batches of this iteration."""
        self._sizes = [len(batch) for _, batch in self._newest]
        if any(ramp_of(part) for part in self._parts):
            raise DatasetError("blended data set: a part has a ramp-up; give it to the blend")
        if not all(self._sizes):
            raise DatasetError(f"blended data set: part {self._sizes.index(0)} is empty")

    @property
    def ramp(self) -> Ramp:
        return self._batches.ramp

    def micro_batches(self, iteration: int) -> tuple[MicroBatch, ...]:
        """Return the global batch of `iteration`, counted from 1."""
        first, end = self._batches.before(iteration), self._batches.before(iteration + 1)
        return tuple(self._micro_batch(n) for n in range(first, end))

    def _micro_batch(self, number: int) -> MicroBatch:
        """Return micro-batch `number` of the whole training, counted from 0."""
        rounds, at = divmod(number, ROUND_LENGTH)
        d = int(self._turns[at])
        own, m = divmod(rounds * int(self._quotas[d]) + int(self._earlier_turns[at]), self._sizes[d])
        if self._newest[d][0] != own + 1:
            self._newest[d] = own + 1, self._parts[d].micro_batches(own + 1)
        drawn = self._newest[d][1][m]
        return msgspec.structs.replace(drawn, samples=tuple(s * len(self._parts) + d for s in drawn.samples))


def quotas(weights: Sequence[float]) -> npt.NDArray[np.int64]:
    """Return the number of micro-batches of each part in a round: whole numbers as near to the weights as possible.

    They add up to `ROUND_LENGTH`. Raises DatasetError for weights that are not positive numbers, or are so small that a
    part would get no micro-batch.
    """
    if not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise DatasetError(f"blended data set: weights {list(weights)} must be above 0")
    exact = np.array(weights, dtype=np.float64) / math.fsum(weights) * ROUND_LENGTH
    whole = np.floor(exact).astype(np.int64)
    lacking = ROUND_LENGTH - int(whole.sum())
    whole[np.argsort(whole - exact, kind="stable")[:lacking]] += 1
    if not whole.all():
        smallest = min(weights)
        raise DatasetError(
            f"blended data set: weight {smallest} is less than 1/{ROUND_LENGTH} of all; leave that part out"
        )
    return whole


def turns(quota: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the part of each micro-batch in a round. The micro-batches of each part are spread evenly over the
    round."""
    part_of_turn = np.repeat(np.arange(len(quota)), quota)
    when = np.concatenate([(np.arange(count) + 0.5) / count for count in quota])
    order: npt.NDArray[np.int64] = part_of_turn[np.argsort(when, kind="stable")]
    return order
