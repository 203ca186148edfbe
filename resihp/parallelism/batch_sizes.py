"""Number of micro-batches in each iteration: constant, or constant after a ramp-up. Pure.

The module knows neither the contents of the micro-batches nor the replicas that compute them. Data sets ask for the
first micro-batch of an iteration; engines and the controller ask for the number of micro-batches that a plan has to
distribute.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise

import msgspec

from resihp.errors import DatasetError

Ramp = tuple[tuple[int, int], ...]
"""Steps of a ramp-up: (first iteration, micro-batches per iteration from that iteration on). The first step begins at
iteration 1."""


class BatchSizes(msgspec.Struct, frozen=True):
    """Batch size of every iteration, in micro-batches.

    `usual` is the number of micro-batches once the ramp-up is over; `ramp` lists the steps of the ramp-up, and is empty
    if there is none. Raises DatasetError for an invalid ramp-up.
    """

    usual: int
    ramp: Ramp = ()

    def __post_init__(self) -> None:
        firsts, counts = [first for first, _ in self.ramp], [count for _, count in self.ramp]
        if self.usual < 1 or min(counts, default=1) < 1:
            raise DatasetError(f"batch sizes: {min([self.usual, *counts])} micro-batches; at least 1 is needed")
        if self.ramp and (
            firsts[0] != 1
            or counts[-1] != self.usual
            or any(a >= b for steps in (firsts, counts) for a, b in pairwise(steps))
        ):
            raise DatasetError(
                f"batch sizes: steps {list(self.ramp)} must begin at iteration 1, ascend, and end with "
                f"{self.usual} micro-batches"
            )

    def at(self, iteration: int) -> int:
        """Return the number of micro-batches of `iteration`; iterations are counted from 1."""
        if not self.ramp or iteration >= self.ramp[-1][0]:
            return self.usual
        return self.ramp[bisect_right(self.ramp, iteration, key=lambda step: step[0]) - 1][1]

    def before(self, iteration: int) -> int:
        """Return the total number of micro-batches of all iterations before `iteration`."""
        steps = self.ramp or ((1, self.usual),)
        ends = [*(first for first, _ in steps[1:]), iteration]
        return sum(max(0, min(end, iteration) - first) * count for (first, count), end in zip(steps, ends, strict=True))


class RampUp(msgspec.Struct, frozen=True, kw_only=True):
    """Megatron's `--rampup-batch-size START INCREMENT SAMPLES`, counted in micro-batches instead of samples.

    The global batch begins with `start` micro-batches and grows in steps of `increment` to its usual size. The ramp-up
    uses about `micro_batches` micro-batches in all, divided evenly among the increments.
    """

    start: int
    increment: int
    micro_batches: int

    def sizes(self, usual: int) -> BatchSizes:
        """Return the batch sizes that megatron-core's `RampupBatchsizeNumMicroBatchesCalculator` would give.

        `usual` is the number of micro-batches after the ramp-up. Raises DatasetError if the increments do not lead from
        `start` to `usual`.
        """
        if min(self.start, self.increment, self.micro_batches) < 1:
            raise DatasetError(
                f"batch ramp-up: start {self.start}, increment {self.increment} and micro-batches "
                f"{self.micro_batches} must be at least 1"
            )
        if self.start >= usual or (usual - self.start) % self.increment:
            raise DatasetError(
                f"batch ramp-up: from {self.start} micro-batches in steps of {self.increment} an iteration never has "
                f"{usual}; choose a start below {usual}, and an increment that divides the difference"
            )
        step_size = self.micro_batches / ((usual - self.start) // self.increment)
        ramp: list[tuple[int, int]] = []
        iteration, used, count = 1, 0, self.start
        while count < usual:
            count = usual if used > self.micro_batches else self.start + int(used / step_size) * self.increment
            if not ramp or ramp[-1][1] != count:
                ramp.append((iteration, count))
            iteration, used = iteration + 1, used + count
        return BatchSizes(usual, tuple(ramp))
