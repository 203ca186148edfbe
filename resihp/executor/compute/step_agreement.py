"""The synchronisation that ends an iteration: all ranks agree on the step. The one that ends an evaluation, too.

After the first every rank knows that all gradients are reduced everywhere, and holds the same `StepOutcome`; after the
other it knows the loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from resihp.errors import DatasetError
from resihp.executor.compute.interpreter import computed, speaks
from resihp.executor.compute.iteration import Iteration, waiting
from resihp.executor.compute.staging import staged
from resihp.executor.state.optimizer import AdamW
from resihp.executor.state.rank_state import State
from resihp.parallelism.workload import SAMPLE_MODULUS, MicroBatch, samples_digest
from resihp.protocol.messages import StepOutcome

Totals = tuple[int, int, int, int]
"""Tokens, sum of squared lengths, samples and the digest of samples."""
NOTHING: Totals = (0, 0, 0, 0)


def last_synchronisation(
    it: Iteration, state: State, own_loss: Tensor, settings: AdamW, *, pause: bool, saving: bool, save: bool
) -> StepOutcome:
    """One float64 all-reduce over all active ranks, from which each computes the same outcome.

    `own_loss` is the loss over the tokens of the micro-batches that this rank computed to their end; it does not count
    where another rank speaks for them. `pause`: this rank was asked to park after the iteration: if any was, all do;
    `saving`: it still writes a checkpoint: if any does, none begins another; `save`: it was told to write one of this
    iteration. Raises DatasetError when ranks were given different data for the iteration, or seem to have been: what a
    peer was aborted in can be anything.

    The device is waited for twice, for its own share and for the sums. Who was woken before contributes nothing: what
    an abort made of gradients must not come to count because this sum, begun earlier, still went through.
    """
    speaking = speaks(state)
    mine, expected = workloads(it, state)
    told = [0.0, 0.0, float(pause), float(saving), float(save), 0.0, *mine[:3], *_limbs(mine[3])]
    sums = staged(torch.tensor(told, dtype=torch.float64), it.device)
    own_squares = _sum_of_squares([state.gradient(piece) for piece in it.prepared.counted], it.device)
    finite = own_squares.isfinite()
    sums[0], sums[1] = own_squares.where(finite, 0.0), ~finite
    if speaking:
        sums[5] = own_loss
    squares, broken, pauses, savers, saves, loss_sum, *told_totals = _summed(it, sums, "last synchronisation")
    totals = _agreed(f"iteration {it.number}", told_totals, expected, (squares, broken, pauses, savers, saves))
    skip = broken > 0 or not math.isfinite(loss_sum)
    norm = math.inf if broken else math.sqrt(squares)
    return StepOutcome(
        iteration=it.number,
        clip=1.0 if skip else settings.clip_coefficient(norm),
        skip=skip,
        learning_rate=settings.learning_rate(it.number),
        gradient_norm=norm,
        loss=loss_sum / totals[0],
        tokens=totals[0],
        sum_squared_lengths=totals[1],
        samples=totals[2],
        samples_digest=f"{totals[3]:016x}",
        updates=state.optimizer.updates + (not skip),
        pause=pauses > 0,
        saving=savers > 0,
        save=saves > 0,
    )


def validation_loss(it: Iteration, state: State, own_loss: Tensor, own: Totals, expected: Totals) -> tuple[float, int]:
    """Mean loss over tokens of an evaluation whose last global batch is `it`, and the tokens; by one all-reduce.

    `own_loss` and `own` are of the micro-batches that this rank computed to their end, `expected` of all; neither
    counts where another rank speaks for them. Raises DatasetError when ranks were given different data.
    """
    sums = staged(torch.tensor([0.0, *own[:3], *_limbs(own[3])], dtype=torch.float64), it.device)
    if speaks(state):
        sums[0] = own_loss
    loss_sum, *told_totals = _summed(it, sums, "sum of an evaluation")
    tokens = _agreed("evaluation", told_totals, expected)[0]
    return loss_sum / tokens, tokens


def workloads(it: Iteration, state: State) -> tuple[Totals, Totals]:
    """Of the micro-batches that this rank speaks for, and of the whole global batch."""
    mine = [it.batch[m] for m in computed(it.program, state)] if speaks(state) else []
    return _totals(mine), _totals(it.batch)


def together(one: Totals, other: Totals) -> Totals:
    """Of the micro-batches of both."""
    tokens, squares, samples, digest = (a + b for a, b in zip(one, other, strict=True))
    return tokens, squares, samples, digest % SAMPLE_MODULUS


def _summed(it: Iteration, sums: Tensor, what: str) -> list[float]:
    """Over all active ranks."""
    it.communicators.settle()
    if it.communicators.world is not None:
        with waiting(it.observer, what):
            it.communicators.world.allreduce([sums]).wait()
    it.observer.progressed()
    told: list[float] = sums.tolist()
    it.communicators.check_awake()  # an abort lets the device go on with what is no sum
    return told


def _agreed(what: str, told: Sequence[float], expected: Totals, beside: Sequence[float] = ()) -> Totals:
    """What ranks computed in all. Raises DatasetError where it is not what this rank's data set has, or where that, or
    what came `beside` it, is no number."""
    if not all(map(math.isfinite, (*told, *beside))):
        raise DatasetError(f"{what}: sums over what ranks have told of their data are no numbers")
    tokens, squares, samples, *limbs = told
    totals = (int(tokens), int(squares), int(samples), _joined(limbs))
    if totals != expected:
        raise DatasetError(
            f"{what}: ranks computed {totals[0]} tokens of {totals[2]} samples, this rank's data set "
            f"has {expected[0]} of {expected[2]}; micro_batches(iteration) must give every process the same"
        )
    return totals


def _sum_of_squares(gradients: list[Tensor], device: torch.device) -> Tensor:
    """Over all elements, in float64, on the device: nobody waits for it here."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float64)).square().sum()


def _totals(batch: Sequence[MicroBatch]) -> Totals:
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
