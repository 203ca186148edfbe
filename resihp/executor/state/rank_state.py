"""What one rank holds of the model: its place's parameters, their optimizer state, and which iteration they are of.

While a transition is under way a rank has two of these: the one in effect and the next one beside it. Tensors that stay
are shared between the two, so that the second costs only what is new; neither is ever changed through the other before
the next one is in effect. Owned by `resihp.executor.engine`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor, nn

from resihp.executor.compute.stage import StageModule
from resihp.executor.state import parameters
from resihp.executor.state.gradients import Gradients
from resihp.executor.state.optimizer import AdamWState
from resihp.parallelism.layout import LayerSpan
from resihp.parallelism.ownership import ParameterSpec, Slice, share
from resihp.parallelism.plan import Plan
from resihp.pipeline.program import Bucket


class HeldPart(msgspec.Struct, frozen=True):
    """A place as far as it decides what is held: which layers, which tables, which share of them."""

    chunks: tuple[LayerSpan, ...]
    first: bool
    last: bool
    t: int
    tp: int

    @classmethod
    def of(cls, plan: Plan, rank: int) -> HeldPart | None:
        """What `rank` holds under `plan`; None for a rank without work."""
        place = plan.layout.place(rank)
        if place is None:
            return None
        replica = plan.layout.replicas[place.replica]
        order, stage = replica.virtual_stages, replica.stages[place.stage]
        return cls(stage.chunks, order[0][0] == place.stage, order[-1][0] == place.stage, place.t, stage.tp)


@dataclass
class State:
    """One holding, filled. `epoch` is that of the plan for which it was made."""

    epoch: int
    holding: HeldPart
    stage: StageModule
    optimizer: AdamWState
    specs: Mapping[str, ParameterSpec]
    """Of the parameters held, by name."""
    sequence_parallel: bool = False
    stepped: int = 0
    """Last iteration whose step these parameters have taken."""
    ready: int | None = None
    """Iteration whose gradients are all reduced on this rank and still held."""
    gradients: Gradients = field(init=False)

    def __post_init__(self) -> None:
        self.gradients = Gradients(dict(self.stage.named_parameters()), self.optimizer.parameters)

    def derive(self) -> None:
        """Round what the optimizer updates (masters, float32) into what passes compute with, where these differ.

        To be called after every change of the masters: where these are the same bits, the parameters are, too.
        """
        named = dict(self.stage.named_parameters())
        pairs = [(named[name], master) for name, master in self.optimizer.parameters.items()]
        derived = [pair for pair in pairs if pair[0] is not pair[1]]
        if derived:
            with torch.no_grad():
                torch._foreach_copy_([parameter for parameter, _ in derived], [master for _, master in derived])

    def begin(self, buckets: Sequence[Bucket], rank: int) -> None:
        """Gradients are zero and nothing is ready, for an iteration whose gradients are summed in `buckets`."""
        if self.ready is not None and self.ready > self.stepped:
            self.gradients.release()  # nobody stepped: what was given up then may still be written to them
        self.ready = None
        self.gradients.begin(buckets, rank, {name: self.share(spec) for name, spec in self.specs.items()})

    def let_spent_gradients_go(self) -> None:
        """Their memory is needed; those whose step may still be taken stay."""
        if self.ready != self.stepped + 1:
            self.gradients.release()

    def share(self, spec: ParameterSpec) -> Slice:
        return share(spec, self.holding.t, self.holding.tp)

    def tensors(self, spec: ParameterSpec, piece: Slice) -> dict[str, Tensor]:
        """Views of a slice's state by kind ("value", "exp_avg", "exp_avg_sq"), which may be written to."""
        return {kind: self._view(tensor, spec, piece) for kind, tensor in self.optimizer.tensors(spec.name).items()}

    def gradient(self, piece: Slice) -> Tensor:
        """View of a slice's gradient; zeros where nothing was computed (a replica without micro-batches)."""
        return self._view(self.gradients.of(piece.name), self.specs[piece.name], piece)

    def _view(self, tensor: Tensor, spec: ParameterSpec, piece: Slice) -> Tensor:
        return parameters.view(tensor, spec, self.holding.t, self.holding.tp, piece)

    def storages(self) -> Iterator[Tensor]:
        """Every tensor of the state but gradients, once: these come with the first iteration."""
        for name, parameter in self.stage.named_parameters():
            tensors = self.optimizer.tensors(name)
            yield from tensors.values()
            if parameter.dtype != tensors["value"].dtype:
                yield parameter


def masters_of(stage: StageModule, held: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """What the optimizer is to update: parameters in float32, themselves where they are, else those already `held`."""
    found: dict[str, nn.Parameter] = {}
    for name, parameter in stage.named_parameters():
        if parameter.dtype == torch.float32:
            found[name] = parameter
        elif name in held:
            found[name] = held[name]
        else:
            found[name] = nn.Parameter(torch.empty_like(parameter, dtype=torch.float32), requires_grad=False)
    return found


def extra_bytes(old: State | None, new: State | None) -> int:
    """What holding both costs beyond the larger of the two: each tensor counted once."""
    sizes = {tensor.data_ptr(): tensor.nbytes for state in (old, new) if state for tensor in state.storages()}
    alone = [sum(tensor.nbytes for tensor in state.storages()) for state in (old, new) if state]
    return sum(sizes.values()) - max(alone, default=0)
