"""The buffer of one rank's gradient sums: flat, float32, allocated once, zeroed before each iteration.

Parameters are laid out in the order in which buckets reduce them (`resihp.pipeline.program.buckets`). So a bucket is a
contiguous range of the buffer and is reduced in place, without a copy. Autograd adds to views of the buffer. Weight
gradients that are computed separately (`weights`) are added to the same views, which they find as
`parameter.main_grad`, megatron's name. Parameters of lower precision (bfloat16) get a hook that adds the gradient of
each micro-batch to the buffer and then drops it, so that all sums are float32.

Does not decide which ranks reduce together. Owned by a `State`; written by backward passes, read by the interpreter and
the optimizer. If abandoned communication may still write to the memory, it is never used again (`release`).
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
    """The gradients of `parameters`, used in backward passes, and of `masters`, updated by the optimizer; both by name.

    The two tensors of a name have the same shape; they are the same object if the parameter is float32.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], masters: Mapping[str, Tensor]) -> None:
        self._parameters, self._masters = parameters, masters
        self._flat: Tensor | None = None
        self._buckets: Sequence[Bucket] | None = None
        self._views: dict[str, Tensor] = {}
        self._stretches: dict[int, Tensor] = {}
        self._hooks: list[RemovableHandle] = []

    def begin(self, buckets: Sequence[Bucket], rank: int, shares: Mapping[str, Slice]) -> None:
        """Zero all gradients for an iteration that reduces `buckets`. `shares` is this rank's slice of each
        parameter."""
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
        """Return a parameter's gradient, for reading or writing. Only valid after the first `begin`."""
        return self._views[name]

    def stretch(self, bucket: int) -> Tensor | None:
        """Return all gradients of the bucket with this index as one view; None if they must be copied together
        instead."""
        return self._stretches.get(bucket)

    def release(self) -> None:
        """Release the buffer, which is no longer needed or may still be written to. `begin` allocates a new one."""
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
    """Return the parameters of each bucket that this rank can reduce in place, in their order, by bucket index.

    In such a bucket, each slice is the rank's whole share of its parameter and is in no other bucket. A slice in
    several buckets needs its unreduced value in each (`resihp.parallelism.ownership.owner_sets`).
    """
    mine = {index: bucket.slices for index, bucket in enumerate(buckets) if rank in bucket.owners}
    times = Counter(piece for slices in mine.values() for piece in slices)
    return {
        index: tuple(piece.name for piece in slices)
        for index, slices in mine.items()
        if all(times[piece] == 1 and shares[piece.name] == piece for piece in slices)
    }


def _add_to_main(parameter: Tensor) -> None:
    """Add a low-precision gradient to its sum. A hook, called when a backward pass has finished with the parameter."""
    if parameter.grad is None:  # `weights` has added it or will add it
        return
    parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
    parameter.grad = None
