"""The two synchronisations that end an iteration: gradients over their owners, then what a step needs over all ranks.

After the second one every rank knows that all gradients are reduced everywhere, and holds the same `StepOutcome`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from resihp.errors import DatasetError
from resihp.executor.communicators import Communicators, guarded
from resihp.executor.optimizer import AdamW
from resihp.executor.pipeline import Observer, waiting
from resihp.ownership import OwnerSet, Slice
from resihp.protocol.messages import StepOutcome
from resihp.workload import SAMPLE_MODULUS, MicroBatch, samples_digest

BUCKET_BYTES = 32 << 20
"""Gradients travel in flat buckets of about this size."""


def reduce_gradients(
    sets: Iterable[OwnerSet],
    gradient: Callable[[Slice], Tensor],
    communicators: Communicators,
    observer: Observer,
) -> None:
    """Sum gradients in place over each of this rank's owner sets.

    All buckets are filled before any result is written back: a slice that is in several sets (unequal degrees) must
    be offered unreduced to each. Costs one more copy of the gradients.
    """
    buckets = [
        (communicators.gradients(entry.owners), views)
        for entry in sets
        if len(entry.owners) > 1
        for views in _buckets([gradient(piece) for piece in entry.slices])
    ]
    under_way = []
    if len(buckets) < 2:
        observer.enter("reduce")
    for index, (backend, views) in enumerate(buckets):
        flat = torch.cat([view.reshape(-1) for view in views])
        with guarded("gradient reduction"):
            under_way.append((backend.allreduce([flat]), flat, views))
        if index == 0 and len(buckets) > 1:
            observer.enter("reduce")  # half-way: one bucket is under way, the others are not
    for work, flat, views in under_way:
        with waiting(observer, "gradient reduction"):
            work.wait()
        for view, part in zip(views, flat.split([view.numel() for view in views]), strict=True):
            view.copy_(part.view(view.shape))
        observer.progressed()


def last_synchronisation(
    iteration: int,
    batch: Sequence[MicroBatch],
    computed: Sequence[int],
    loss_sum: float,
    gradients: Iterable[Tensor],
    optimizer: AdamW,
    communicators: Communicators,
    observer: Observer,
) -> StepOutcome:
    """One float64 all-reduce over all active ranks, from which each computes the same outcome.

    `gradients` are the slices that this rank counts (`resihp.ownership.counted`); `computed` the micro-batches of
    `batch` whose loss this rank contributes, with their sum over tokens `loss_sum`. Raises DatasetError when ranks
    were given different data for the iteration.
    """
    squares = sum(float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) ** 2 for gradient in gradients)
    finite = math.isfinite(squares)
    mine = _totals([batch[m] for m in computed])
    sums = torch.tensor(
        [squares if finite else 0.0, 0.0 if finite else 1.0, loss_sum, *mine[:3], *_limbs(mine[3])],
        dtype=torch.float64,
        device="cuda" if torch.cuda.is_available() else "cpu",
    )
    if communicators.world is not None:
        with waiting(observer, "last synchronisation"):
            communicators.world.allreduce([sums]).wait()
    observer.progressed()
    squares, broken, loss_sum, tokens, lengths, samples, *limbs = sums.tolist()
    totals = (int(tokens), int(lengths), int(samples), _joined(limbs))
    expected = _totals(batch)
    if totals != expected:
        raise DatasetError(
            f"iteration {iteration}: ranks computed {totals[0]} tokens of {totals[2]} samples, this rank's data set "
            f"has {expected[0]} of {expected[2]}; micro_batches(iteration) must give every process the same"
        )
    skip = broken > 0 or not math.isfinite(loss_sum)
    norm = math.inf if broken else math.sqrt(squares)
    return StepOutcome(
        iteration=iteration,
        clip=1.0 if skip else optimizer.clip_coefficient(norm),
        skip=skip,
        learning_rate=optimizer.learning_rate(iteration),
        gradient_norm=norm,
        loss=loss_sum / totals[0],
        tokens=totals[0],
        sum_squared_lengths=totals[1],
        samples=totals[2],
        samples_digest=f"{totals[3]:016x}",
    )


def _totals(batch: Sequence[MicroBatch]) -> tuple[int, int, int, int]:
    """(tokens, sum of squared lengths, samples, digest of samples)."""
    return (
        sum(micro_batch.tokens for micro_batch in batch),
        sum(micro_batch.sum_squared_lengths for micro_batch in batch),
        sum(len(micro_batch.samples) for micro_batch in batch),
        samples_digest(sample for micro_batch in batch for sample in micro_batch.samples),
    )


def _limbs(digest: int) -> list[float]:
    """Four limbs of 16 bits: sums over up to 2**37 ranks stay exact in float64."""
    return [float(digest >> shift & 0xFFFF) for shift in (0, 16, 32, 48)]


def _joined(limbs: Sequence[float]) -> int:
    return sum(int(limb) << shift for limb, shift in zip(limbs, (0, 16, 32, 48), strict=True)) % SAMPLE_MODULUS


def _buckets(views: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    filled = 0
    for view in views:
        size = view.numel() * view.element_size()
        if bucket and filled + size > BUCKET_BYTES:
            yield bucket
            bucket, filled = [], 0
        bucket.append(view)
        filled += size
    if bucket:
        yield bucket
