"""Orders of forward and backward chunks on one stage. Pure; the executor interprets them, the timeline prices them."""

from __future__ import annotations

from typing import Literal

import msgspec


class Primitive(msgspec.Struct, frozen=True):
    """One chunk of work on one stage: F forward, B backward (both input and weight gradients)."""

    kind: Literal["F", "B"]
    micro_batch: int


def one_forward_one_backward(stage: int, stages: int, micro_batches: tuple[int, ...]) -> tuple[Primitive, ...]:
    """1F1B (PipeDream-flush, Megatron's non-interleaved schedule) for `stage` of `stages`.

    Warm-up forwards = min(stages - stage - 1, micro-batches), then one forward and one backward alternate, then the
    remaining backwards.
    """
    warm_up = min(stages - stage - 1, len(micro_batches))
    order = [Primitive("F", m) for m in micro_batches[:warm_up]]
    for done, m in enumerate(micro_batches[warm_up:]):
        order += [Primitive("F", m), Primitive("B", micro_batches[done])]
    order += [Primitive("B", m) for m in micro_batches[len(micro_batches) - warm_up :]]
    return tuple(order)
