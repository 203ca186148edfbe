"""Builds the modules and the state of a rank's place in a plan. Decides nothing.

A new state is built beside the present one, and shares the tensors that stay. Never moves state between ranks
(`state_transfer`), and never puts a state into effect. Called by `resihp.executor.engine`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from megatron.core.transformer import TransformerConfig

from resihp.executor.backends import BackEnd
from resihp.executor.compute.rotary import Rotary
from resihp.executor.compute.stage import PositionEmbedding, StageModule
from resihp.executor.state import parameters, state_transfer
from resihp.executor.state.optimizer import AdamW, AdamWState
from resihp.executor.state.rank_state import HeldPart, State, masters_of
from resihp.executor.tensor_group import TensorGroup
from resihp.parallelism import ownership
from resihp.parallelism.model import ModelSpec
from resihp.parallelism.ownership import ParameterSpec
from resihp.parallelism.plan import Plan


class StateBuilder:
    """Builds parts of one model for one device. `positions` is the kind of position embedding, with rotary settings."""

    def __init__(
        self,
        config: TransformerConfig,
        model: ModelSpec,
        settings: AdamW,
        seed: int,
        positions: tuple[PositionEmbedding, Rotary],
        back_end: BackEnd,
    ) -> None:
        self._config, self._model, self._settings, self._seed = config, model, settings, seed
        self._positions = positions
        self._back_end = back_end
        self.device: torch.device = back_end.device
        """Device on which new tensors are created."""
        self.specs = {parallel: self._read_specs(parallel) for parallel in (False, True)}
        """All parameters of the model; key True: with sequence parallelism."""
        self.by_name: dict[str, ParameterSpec] = {spec.name: spec for spec in self.specs[False]}

    def _read_specs(self, sequence_parallel: bool) -> tuple[ParameterSpec, ...]:
        with torch.device("meta"):
            whole = self.module(HeldPart(((0, 0),), True, True, 0, 1), TensorGroup(), sequence_parallel)
        return parameters.specs_of(
            whole, self._config.num_layers, tied=self._model.tied_embeddings, sequence_parallel=sequence_parallel
        )

    def build(self, plan: Plan, holding: HeldPart, old: State | None) -> State:
        """Build the state of a place beside the present one. Tensors that stay are shared; `old` is returned if nothing
        changes.

        Nothing is built on the host: new tensors are created on the device without values, in memory released by
        gradients that no step needs any more.
        """
        parallel = plan.sequence_parallel and holding.tp > 1
        if old is not None and (old.holding, old.sequence_parallel) == (holding, parallel):
            return old
        if old is not None:
            old.release_used_gradients()
        with torch.device("meta"):
            stage = self.module(holding, TensorGroup(holding.tp, holding.t), plan.sequence_parallel)
        specs = {name: self.by_name[name] for name, _ in stage.named_parameters()}
        kept = [
            name
            for name, spec in specs.items()
            if old is not None and name in old.specs and old.share(spec) == ownership.share(spec, holding.t, holding.tp)
        ]
        kept_parameters = {} if old is None else {name: old.stage.get_parameter(name) for name in kept}
        masters = {} if old is None else {name: old.optimizer.parameters[name] for name in kept}
        parameters.place(stage, kept_parameters, self.device)
        optimizer = AdamWState(self._settings, masters_of(stage, masters), old.optimizer if old else None)
        new = State(plan.epoch, holding, stage, optimizer, specs, parallel)
        if old is not None:
            state_transfer.copy_kept(old, new)
        return new

    def draw(self, state: State) -> None:
        """Draw the initial values in several threads, each parameter from its own name; they do not depend on the
        layout."""
        t, tp = state.holding.t, state.holding.tp

        def draw(name: str) -> None:
            spec = self.by_name[name]
            whole = parameters.draw(spec, self._config, self._seed, self._model)
            parameters.fill(state.optimizer.parameters[name], spec, t, tp, whole)

        with ThreadPoolExecutor(parameters.DRAWING_THREADS, initializer=self._back_end.enter_thread) as threads:
            for _ in threads.map(draw, state.optimizer.parameters):
                pass
        state.derive()

    def module(self, holding: HeldPart, group: TensorGroup, sequence_parallel: bool) -> StageModule:
        """Return a part of the model as a module, on the current default device of torch."""
        position_embedding, rotary = self._positions
        return StageModule(
            self._config,
            self._model,
            holding.chunks,
            holding.first,
            holding.last,
            group,
            position_embedding=position_embedding,
            rotary=rotary,
            sequence_parallel=sequence_parallel,
        )
