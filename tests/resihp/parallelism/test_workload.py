"""Micro-batches and how their samples are recognised afterwards."""

from __future__ import annotations

import random

import numpy as np
import pytest

from resihp.parallelism.workload import SAMPLE_MODULUS, MicroBatch, samples_digest


def never() -> tuple[np.ndarray, np.ndarray]:
    raise AssertionError("lengths are known before anything is read")


def test_costs_are_known_without_loading() -> None:
    micro_batch = MicroBatch(lengths=(3, 5, 8), samples=(10, 11, 12), load=never)
    assert micro_batch.tokens == 16
    assert micro_batch.sum_squared_lengths == 9 + 25 + 64


def test_digest_does_not_depend_on_order() -> None:
    samples = list(range(200))
    shuffled = random.Random(1).sample(samples, len(samples))
    assert samples_digest(samples) == samples_digest(shuffled)


def test_digests_of_parts_add_up_to_the_digest_of_the_whole() -> None:
    parts = (range(0, 70), range(70, 71), range(71, 200))
    assert sum(map(samples_digest, parts)) % SAMPLE_MODULUS == samples_digest(range(200))


@pytest.mark.parametrize("changed", [[0, 1, 2, 2], [0, 1, 1, 1], [0, 1], [0, 1, 2, 3], [0, 1, 3], [0, 1, 2, 2, 2]])
def test_a_missing_doubled_or_other_sample_shows(changed: list[int]) -> None:
    assert samples_digest(changed) != samples_digest([0, 1, 2])


def test_a_sample_used_twice_does_not_cancel() -> None:
    assert samples_digest([5, 5]) != samples_digest([])
    assert samples_digest([5, 5]) != samples_digest([6, 6])


def test_digest_fits_64_bits_and_never_changes() -> None:
    assert samples_digest([]) == 0
    assert samples_digest([1, 2, 3]) == 0xB1157A00440334E3
    assert all(0 <= samples_digest(range(n)) < SAMPLE_MODULUS for n in range(50))
