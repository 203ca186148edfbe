"""The state of one rank: parameters, optimizer state, and the iteration that both belong to.

During a transition, a rank has two states: the one in effect, and the next one beside it. They share the tensors that
stay, so that the second state costs only its new tensors. No shared tensor changes before the next state is in effect.
Owned by `resihp.executor.engine`; decides nothing.
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
    """The part of the model on one rank: layers, embedding and head, and tensor-parallel share."""

    chunks: tuple[LayerSpan, ...]
    first: bool
    last: bool
    t: int
    tp: int

    @classmethod
    def of(cls, plan: Plan, rank: int) -> HeldPart | None:
        """Return the part of `rank` under `plan`; None for a rank without work."""
        place = plan.layout.place(rank)
        if place is None:
            return None
        replica = plan.layout.replicas[place.replica]
        order, stage = replica.virtual_stages, replica.stages[place.stage]
        return cls(stage.chunks, order[0][0] == place.stage, order[-1][0] == place.stage, place.t, stage.tp)


@dataclass
class State:
    """The parameters and optimizer state of one rank's part of the model. `epoch` is that of the plan it was built
    for."""

    epoch: int
    holding: HeldPart
    stage: StageModule
    optimizer: AdamWState
    specs: Mapping[str, ParameterSpec]
    """Specifications of this rank's parameters, by name."""
    sequence_parallel: bool = False
    stepped: int = 0
    """Last iteration with a step included in these parameters; 0 for none."""
    ready: int | None = None
    """Iteration of the reduced gradients in this rank's memory; None if there are none."""
    gradients: Gradients = field(init=False)

    def __post_init__(self) -> None:
        self.gradients = Gradients(dict(self.stage.named_parameters()), self.optimizer.parameters)

    def derive(self) -> None:
        """Round the optimizer's float32 parameters (masters) to the parameters used in forward and backward passes.

        A float32 parameter is its own master and needs no rounding. Call this after every change of the masters: equal
        masters then give equal parameters, bit for bit.
        """
        named = dict(self.stage.named_parameters())
        pairs = [(named[name], master) for name, master in self.optimizer.parameters.items()]
        derived = [pair for pair in pairs if pair[0] is not pair[1]]
        if derived:
            with torch.no_grad():
                torch._foreach_copy_([parameter for parameter, _ in derived], [master for _, master in derived])

    def begin(self, buckets: Sequence[Bucket], rank: int) -> None:
        """Reset the gradients for an iteration that reduces them in `buckets`; `ready` becomes None."""
        if self.ready is not None and self.ready > self.stepped:
            self.gradients.release()  # the step was never taken, and abandoned sums may still write to them
        self.ready = None
        self.gradients.begin(buckets, rank, {name: self.share(spec) for name, spec in self.specs.items()})

    def release_used_gradients(self) -> None:
        """Release the memory of gradients, unless their step may still be taken."""
        if self.ready != self.stepped + 1:
            self.gradients.release()

    def share(self, spec: ParameterSpec) -> Slice:
        return share(spec, self.holding.t, self.holding.tp)

    def tensors(self, spec: ParameterSpec, piece: Slice) -> dict[str, Tensor]:
        """Return writable views of a slice's state by kind ("value", "exp_avg", "exp_avg_sq")."""
        return {kind: self._view(tensor, spec, piece) for kind, tensor in self.optimizer.tensors(spec.name).items()}

    def gradient(self, piece: Slice) -> Tensor:
        """Return a view of a slice's gradient; zeros if nothing was computed (a replica without micro-batches)."""
        return self._view(self.gradients.of(piece.name), self.specs[piece.name], piece)

    def _view(self, tensor: Tensor, spec: ParameterSpec, piece: Slice) -> Tensor:
        return parameters.view(tensor, spec, self.holding.t, self.holding.tp, piece)

    def storages(self) -> Iterator[Tensor]:
        """Yield each tensor of the state once, except gradients, which are allocated by the first iteration."""
        for name, parameter in self.stage.named_parameters():
            tensors = self.optimizer.tensors(name)
            yield from tensors.values()
            if parameter.dtype != tensors["value"].dtype:
                yield parameter


def masters_of(stage: StageModule, existing: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return the optimizer's float32 parameters by name: the stage's own ones if they are float32, otherwise those in
    `existing`, otherwise new ones."""
    masters: dict[str, nn.Parameter] = {}
    for name, parameter in stage.named_parameters():
        if parameter.dtype == torch.float32:
            masters[name] = parameter
        elif name in existing:
            masters[name] = existing[name]
        else:
            masters[name] = nn.Parameter(torch.empty_like(parameter, dtype=torch.float32), requires_grad=False)
    return masters


def extra_bytes(old: State | None, new: State | None) -> int:
    """Return the bytes that both states together need beyond the larger one. Each tensor is counted once."""
    sizes = {tensor.data_ptr(): tensor.nbytes for state in (old, new) if state for tensor in state.storages()}
    alone = [sum(tensor.nbytes for tensor in state.storages()) for state in (old, new) if state]
    return sum(sizes.values()) - max(alone, default=0)
