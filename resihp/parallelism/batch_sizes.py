"""How many micro-batches each iteration has: a number that stays, after a ramp-up where there is one. Pure.

Says nothing about what is in them, nor who computes them. Asked by data sets for where an iteration begins, by engines
and by the controller for which number a plan has to deal.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise

import msgspec

from resihp.errors import DatasetError

Ramp = tuple[tuple[int, int], ...]
"""(first iteration, micro-batches of it and of those after it) of each step, from iteration 1 on."""


class BatchSizes(msgspec.Struct, frozen=True):
    """`usual`: micro-batches of an iteration once the ramp is over. Raises DatasetError for a ramp that is none."""

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
        """Micro-batches of an iteration, counted from 1."""
        if not self.ramp or iteration >= self.ramp[-1][0]:
            return self.usual
        return self.ramp[bisect_right(self.ramp, iteration, key=lambda step: step[0]) - 1][1]

    def before(self, iteration: int) -> int:
        """Micro-batches of all iterations before this one."""
        steps = self.ramp or ((1, self.usual),)
        ends = [*(first for first, _ in steps[1:]), iteration]
        return sum(max(0, min(end, iteration) - first) * count for (first, count), end in zip(steps, ends, strict=True))


class RampUp(msgspec.Struct, frozen=True, kw_only=True):
    """Megatron's `--rampup-batch-size START INCREMENT SAMPLES`, counted in micro-batches, not in samples.

    The global batch begins with `start` micro-batches and grows by `increment` each time that its share of the first
    `micro_batches` of the training has been used, until it has its usual size.
    """

    start: int
    increment: int
    micro_batches: int

    def sizes(self, usual: int) -> BatchSizes:
        """As megatron-core's `RampupBatchsizeNumMicroBatchesCalculator` has them.

        Raises DatasetError for a ramp-up that does not add up.
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
        each = self.micro_batches / ((usual - self.start) // self.increment)
        ramp: list[tuple[int, int]] = []
        iteration, used, count = 1, 0, self.start
        while count < usual:
            count = usual if used > self.micro_batches else self.start + int(used / each) * self.increment
            if not ramp or ramp[-1][1] != count:
                ramp.append((iteration, count))
            iteration, used = iteration + 1, used + count
        return BatchSizes(usual, tuple(ramp))
