"""The last synchronisation of an iteration, by which all ranks agree on the step, and the one of an evaluation.

After the last synchronisation of an iteration, every rank knows that gradients are reduced on all ranks, and all ranks
have the same `StepOutcome`. After the synchronisation of an evaluation, every rank knows the loss. Called by the
engine; never takes the step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from resihp.errors import DatasetError
from resihp.executor.compute.interpreter import computed_micro_batches, reports_loss
from resihp.executor.compute.iteration import Iteration, waiting
from resihp.executor.compute.staging import staged
from resihp.executor.state.optimizer import AdamW
from resihp.executor.state.rank_state import State
from resihp.parallelism.workload import SAMPLE_MODULUS, MicroBatch, samples_digest
from resihp.protocol.messages import StepOutcome

Totals = tuple[int, int, int, int]
"""Number of tokens, sum of squared lengths, number of samples, and digest of samples."""
NO_WORK: Totals = (0, 0, 0, 0)


def last_synchronisation(
    it: Iteration, state: State, own_loss: Tensor, settings: AdamW, *, pause: bool, saving: bool, save: bool
) -> StepOutcome:
    """Compute the outcome of the step by one float64 all-reduce. The outcome is equal on all active ranks.

    `own_loss` is the sum of the loss over the tokens of the micro-batches that this rank computed to their end; it is
    not used if another rank reports these micro-batches. `pause` means that this rank was asked to park after the
    iteration; if any rank was, all park. `saving` means that this rank is still writing a checkpoint; if any rank is,
    no rank begins another. `save` means that this rank was ordered to write a checkpoint of this iteration. Raises
    DatasetError if ranks had different data for the iteration, or appear to have had: after an abort by a peer, a sum
    can contain anything.

    The host waits for the device twice: for this rank's own share and for the sums. A rank that was woken before the
    sum contributes nothing: an abort may have made its gradients invalid, and the sum may still succeed.
    """
    reports = reports_loss(state)
    mine, expected = workloads(it, state)
    contribution = [0.0, 0.0, float(pause), float(saving), float(save), 0.0, *mine[:3], *_limbs(mine[3])]
    sums = staged(torch.tensor(contribution, dtype=torch.float64), it.device)
    own_squares = _sum_of_squares([state.gradient(piece) for piece in it.prepared.counted], it.device)
    finite = own_squares.isfinite()
    sums[0], sums[1] = own_squares.where(finite, 0.0), ~finite
    if reports:
        sums[5] = own_loss
    squares, broken, pauses, savers, saves, loss_sum, *summed_totals = _summed(it, sums, "last synchronisation")
    totals = _agreed(f"iteration {it.number}", summed_totals, expected, (squares, broken, pauses, savers, saves))
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
    """Return the mean loss over the tokens of an evaluation with last global batch `it`, and the number of tokens.

    Uses one all-reduce. `own_loss` and `own` are the sums over the micro-batches that this rank computed to their end;
    they are not used if another rank reports them. `expected` has the totals over all micro-batches. Raises
    DatasetError if ranks had different data.
    """
    sums = staged(torch.tensor([0.0, *own[:3], *_limbs(own[3])], dtype=torch.float64), it.device)
    if reports_loss(state):
        sums[0] = own_loss
    loss_sum, *summed_totals = _summed(it, sums, "sum of an evaluation")
    tokens = _agreed("evaluation", summed_totals, expected)[0]
    return loss_sum / tokens, tokens


def workloads(it: Iteration, state: State) -> tuple[Totals, Totals]:
    """Return the totals of the micro-batches that this rank reports, and the totals of the whole global batch."""
    mine = [it.batch[m] for m in computed_micro_batches(it.program, state)] if reports_loss(state) else []
    return _totals(mine), _totals(it.batch)


def together(first: Totals, second: Totals) -> Totals:
    """Add the totals of two sets of micro-batches."""
    tokens, squares, samples, digest = (a + b for a, b in zip(first, second, strict=True))
    return tokens, squares, samples, digest % SAMPLE_MODULUS


def _summed(it: Iteration, sums: Tensor, activity: str) -> list[float]:
    """Return the sums over all active ranks."""
    it.communicators.settle()
    if it.communicators.world is not None:
        with waiting(it.observer, activity):
            it.communicators.world.allreduce([sums]).wait()
    it.observer.progressed()
    totals: list[float] = sums.tolist()
    it.communicators.check_awake()  # after an abort the device continues with an invalid sum
    return totals


def _agreed(subject: str, sums: Sequence[float], expected: Totals, other_sums: Sequence[float] = ()) -> Totals:
    """Return the totals over all ranks. Raises DatasetError if they differ from those of this rank's data set, or if a
    sum is not finite."""
    if not all(map(math.isfinite, (*sums, *other_sums))):
        raise DatasetError(f"{subject}: per-rank data statistics are not finite")
    tokens, squares, samples, *limbs = sums
    totals = (int(tokens), int(squares), int(samples), _joined(limbs))
    if totals != expected:
        raise DatasetError(
            f"{subject}: ranks computed {totals[0]} tokens of {totals[2]} samples, this rank's data set "
            f"has {expected[0]} of {expected[2]}; micro_batches(iteration) must give every process the same"
        )
    return totals


def _sum_of_squares(gradients: list[Tensor], device: torch.device) -> Tensor:
    """Return the float64 sum of squares of all elements, on the device, without waiting for the device."""
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
    """Split a digest into four parts of 16 bits, so that sums over up to 2**37 ranks are exact in float64."""
    return [float(digest >> shift & 0xFFFF) for shift in (0, 16, 32, 48)]


def _joined(limbs: Sequence[float]) -> int:
    return sum(int(limb) << shift for limb, shift in zip(limbs, (0, 16, 32, 48), strict=True)) % SAMPLE_MODULUS
