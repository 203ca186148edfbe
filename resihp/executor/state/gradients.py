"""Where one rank's gradients add up: one flat float32 buffer, allocated once, zeroed once an iteration.

Parameters lie in the order in which buckets sum them (`resihp.pipeline.program.buckets`), so that a bucket is a stretch
of the buffer and is summed in place, without a copy. Autograd adds to views of it; so do weight gradients that are
computed apart (`weights`), which find theirs as `parameter.main_grad`, megatron's name for it. Parameters of fewer bits
(bfloat16) get a hook that adds each micro-batch's gradient here and drops it: sums are float32 throughout.

Decides nothing about what is summed with whom. Owned by a `State`; filled by backward passes, read by the interpreter
and the optimizer. What an abandoned communication may still write to is never used again (`release`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from resihp.parallelism.ownership import Slice
from resihp.pipeline.program import Bucket


class Gradients:
    """Of `parameters`, which backward passes know, for `masters`, which the optimizer updates; by name, of one shape.

    Both are the same tensors in float32.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], masters: Mapping[str, Tensor]) -> None:
        self._parameters, self._masters = parameters, masters
        self._flat: Tensor | None = None
        self._buckets: Sequence[Bucket] | None = None
        self._views: dict[str, Tensor] = {}
        self._stretches: dict[int, Tensor] = {}
        self._hooks: list[RemovableHandle] = []

    def begin(self, buckets: Sequence[Bucket], rank: int, shares: Mapping[str, Slice]) -> None:
        """All zero, for an iteration that sums `buckets` with others; `shares`: what is held of each parameter."""
        fresh = self._flat is None
        if self._flat is None:
            elements = sum(master.numel() for master in self._masters.values())
            device = next((master.device for master in self._masters.values()), None)
            self._flat = torch.zeros(elements, dtype=torch.float32, device=device)
        else:
            self._flat.zero_()
        if fresh or buckets is not self._buckets:
            self._lay_out(self._flat, summed_in_place(buckets, rank, shares))
            self._buckets = buckets

    def _lay_out(self, flat: Tensor, in_place: Mapping[int, Sequence[str]]) -> None:
        self._unhook()
        taken = [name for names in in_place.values() for name in names]
        reached = 0
        starts: dict[str, int] = {}
        for name in (*taken, *(name for name in self._masters if name not in set(taken))):
            master, parameter = self._masters[name], self._parameters[name]
            starts[name] = reached
            view = flat[reached : reached + master.numel()].view(master.shape)
            reached += master.numel()
            self._views[name] = master.grad = parameter.main_grad = view  # type: ignore[attr-defined]
            if parameter is not master:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(_add_to_main))
        self._stretches = {
            index: flat[starts[names[0]] : starts[names[-1]] + self._masters[names[-1]].numel()]
            for index, names in in_place.items()
        }

    def of(self, name: str) -> Tensor:
        """A parameter's, to be read or written. There is none before the first `begin`."""
        return self._views[name]

    def stretch(self, bucket: int) -> Tensor | None:
        """All of a bucket's gradients, by its index, where they lie; None where they must be copied together."""
        return self._stretches.get(bucket)

    def release(self) -> None:
        """Let go of the buffer: nobody needs it any more, or something may still write to it. `begin` makes another."""
        self._unhook()
        for name in self._views:
            parameter = self._parameters[name]
            parameter.grad = self._masters[name].grad = None
            del parameter.main_grad  # type: ignore[attr-defined]
        self._flat, self._buckets, self._views, self._stretches = None, None, {}, {}

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def summed_in_place(buckets: Sequence[Bucket], rank: int, shares: Mapping[str, Slice]) -> dict[int, tuple[str, ...]]:
    """Parameters of those buckets of a rank that can be summed where gradients add up, in order, by bucket's index.

    In such a bucket each slice is all that the rank holds of its parameter, and is in no other bucket: one that is, is
    offered unreduced to each (`resihp.parallelism.ownership.owner_sets`).
    """
    mine = {index: bucket.slices for index, bucket in enumerate(buckets) if rank in bucket.owners}
    times = Counter(piece for slices in mine.values() for piece in slices)
    return {
        index: tuple(piece.name for piece in slices)
        for index, slices in mine.items()
        if all(times[piece] == 1 and shares[piece.name] == piece for piece in slices)
    }


def _add_to_main(parameter: Tensor) -> None:
    """Hook of a parameter of fewer bits, called when a backward pass is through with it."""
    if parameter.grad is None:  # `weights` has added it already, or will
        return
    parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
    parameter.grad = None
