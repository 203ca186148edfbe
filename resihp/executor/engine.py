"""One rank's share of training: takes its place in a plan, computes iterations, steps. Follows; decides nothing.

Life of an engine, driven by `resihp.executor.trainer`::

    adopt(plan, rank) -> connect(...) -> [run(plan, i, observer) -> step(outcome)] ... -> disconnect()
       ^_____________________________ a new plan, after a failure or a decision ____________________|

`run` computes an iteration's gradients and agrees on the step; only `step` changes parameters, and needs nobody else.
Gradients are kept until the next `run`, so that a step which others took before a failure can still be finished.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import msgspec
import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from resihp.errors import CommunicatorError, DatasetError, LayoutError, ResihpError
from resihp.executor import parameters
from resihp.executor.communicators import Communicators, Directory, Store, guarded
from resihp.executor.honoured import describe
from resihp.executor.optimizer import AdamW, AdamWState
from resihp.executor.pipeline import Interpreter, Observer
from resihp.executor.stage import PositionEmbedding, StageModule, model_spec, refuse_unhonoured
from resihp.executor.synchronisation import last_synchronisation, reduce_gradients
from resihp.executor.tensor_group import TensorGroup
from resihp.layout import LayerSpan
from resihp.model import ModelSpec
from resihp.ownership import OwnerSet, ParameterSpec, Slice, counted, owner_sets
from resihp.pipeline.schedules import one_forward_one_backward
from resihp.plan import Plan
from resihp.protocol.messages import StepOutcome
from resihp.workload import Dataset, MicroBatch, samples_digest


class Holding(msgspec.Struct, frozen=True):
    """What a place holds: as long as it stays the same, so does the rank's state."""

    chunks: tuple[LayerSpan, ...]
    first: bool
    last: bool
    t: int
    tp: int


def holding(plan: Plan, rank: int) -> Holding | None:
    """What `rank` holds under `plan`, None for a standby. Raises LayoutError for what the schedule cannot run."""
    place = plan.layout.place(rank)
    if place is None:
        return None
    replica = plan.layout.replicas[place.replica]
    stage = replica.stages[place.stage]
    if len(stage.chunks) > 1:
        raise LayoutError(f"replica {place.replica} stage {place.stage}: {plan.schedule} runs one chunk, not several")
    return Holding(stage.chunks, place.stage == 0, place.stage == len(replica.stages) - 1, place.t, stage.tp)


class Engine:
    """See the module. `sequence` is the length of the longest document; `seed` that of the first parameters.

    Raises ModelError for a configuration with settings that are not honoured, DatasetError for an empty data set.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        vocab_size: int,
        dataset: Dataset,
        optimizer: AdamW,
        seed: int,
        sequence: int,
        position_embedding: PositionEmbedding = "rope",
        rotary_base: int = 10000,
    ) -> None:
        refuse_unhonoured(config)
        self._config, self._dataset, self._settings, self._seed = config, dataset, optimizer, seed
        self._positions: tuple[PositionEmbedding, int] = (position_embedding, rotary_base)
        self.model: ModelSpec = model_spec(config, vocab_size, sequence)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        with torch.device("meta"):
            whole = self._module(((0, 0),), True, True, TensorGroup())
        self.specs: tuple[ParameterSpec, ...] = parameters.specs_of(whole, config.num_layers)
        self.micro_batches: int = 0
        """Micro-batches of the global batch, as the data set has them."""
        first = self._batch(1)
        self.micro_batches = len(first)
        self.fingerprint: str = self._fingerprint(first)
        """Digest of model and optimizer settings, the data set's first iteration and library versions."""
        self.stepped = 0
        """Last iteration whose step this rank has taken or loaded."""
        self.ready: int | None = None
        """Iteration whose gradients are all reduced on this rank and still held."""
        self.compute_s = 0.0
        """Seconds that the last `run` spent in forward and backward chunks, without waits for peers."""
        self.plan: Plan | None = None
        self.rank = -1
        self.held: Holding | None = None
        self._stage: StageModule | None = None
        self._state: AdamWState | None = None
        self._communicators: Communicators | None = None
        self._directory = Directory()
        self._named: dict[str, torch.nn.Parameter] = {}
        self._by_name = {spec.name: spec for spec in self.specs}
        self._sets: tuple[OwnerSet, ...] = ()
        self._counted: tuple[Slice, ...] = ()

    # --- a place in a plan ------------------------------------------------------------------------------------

    def adopt(self, plan: Plan, rank: int) -> None:
        """Take `rank`'s place in `plan`; what is held already is kept, a standby rank takes up nothing.

        Raises LayoutError if the place needs state that this rank does not have after the first step.
        """
        assert self._communicators is None, "disconnect first"
        wanted = holding(plan, rank)
        if wanted is not None and wanted != self.held:
            if self.stepped > 0:
                raise LayoutError(
                    f"rank {rank}: holds {self.held}, epoch {plan.epoch} asks for {wanted} at iteration "
                    f"{self.stepped + 1}; state is not moved between ranks"
                )
            self._build(wanted)
        self.plan, self.rank = plan, rank

    def _build(self, held: Holding) -> None:
        """Make the stage and its optimizer state, with first parameters that do not depend on the layout."""
        self.ready = None
        stage = self._module(held.chunks, held.first, held.last, TensorGroup(held.tp, held.t))
        for name, parameter in stage.named_parameters():
            spec = self._by_name[name]
            parameters.fill(parameter, spec, held.t, held.tp, parameters.draw(spec, self._config, self._seed))
        self._stage = stage.to(self.device)
        self._named = dict(self._stage.named_parameters())
        self._state = AdamWState(self._settings, self._named)
        self.held = held

    def _module(self, chunks: tuple[LayerSpan, ...], first: bool, last: bool, group: TensorGroup) -> StageModule:
        position_embedding, rotary_base = self._positions
        return StageModule(
            self._config,
            self.model,
            chunks,
            first,
            last,
            group,
            position_embedding=position_embedding,
            rotary_base=rotary_base,
        )

    def connect(self, plan: Plan, rank: int, store: Store | tuple[str, int], timeout_s: float) -> None:
        """Build all communicators of `plan`; nothing to do for a standby rank.

        `store` is a torch.distributed store, or (host, port) of a TCPStore, that outlives the ranks; it must be
        fresh for each epoch. Raises CommunicatorError when a peer does not come within `timeout_s`, or when woken.
        """
        self.disconnect()
        if plan.layout.place(rank) is None:
            return
        sets = owner_sets(plan.layout, self.specs)
        self._sets = tuple(entry for entry in sets if rank in entry.owners)
        self._counted = counted(plan.layout, self.specs)[rank]
        self._communicators = communicators = Communicators(
            plan, rank, [entry.owners for entry in sets], timeout_s, self._directory
        )
        try:
            communicators.open(store)
        except BaseException:
            self.disconnect()
            raise
        assert self._stage is not None
        self._stage.tp_group.bind(communicators.tensor)

    def disconnect(self) -> None:
        """Let go of all communicators. Safe at any time in the rank's own thread."""
        if self._stage is not None:
            self._stage.tp_group.bind(None)
        if self._communicators is not None:
            self._communicators.close()
            self._communicators = None

    def wake(self) -> None:
        """From another thread: make whatever this rank waits for in `connect` or `run` raise CommunicatorError."""
        communicators = self._communicators
        if communicators is not None:
            communicators.wake()

    # --- an iteration -----------------------------------------------------------------------------------------

    def run(self, plan: Plan, iteration: int, observer: Observer) -> StepOutcome:
        """Compute this rank's share of an iteration, and agree with all others on its step, which is not taken yet.

        Raises CommunicatorError when a peer is lost or `wake` was called; the same iteration can then be run again
        after `disconnect`, `adopt` and `connect`. Raises DatasetError, and whatever the data set itself raises.
        """
        stage, communicators, held = self._stage, self._communicators, self.held
        if stage is None or held is None or communicators is None:
            raise CommunicatorError(f"rank {self.rank}: not connected")
        if iteration != self.stepped + 1:
            raise ResihpError(f"rank {self.rank}: holds the state of iteration {self.stepped}, cannot run {iteration}")
        self.ready = None
        stage.zero_grad(set_to_none=True)
        stage.tp_group.on_wait = observer.communicating
        batch = self._batch(iteration)
        _check_assignment(plan, len(batch))
        place = plan.layout.place(self.rank)
        assert place is not None
        share = plan.assignment[place.replica]
        order = one_forward_one_backward(place.stage, len(plan.layout.replicas[place.replica].stages), share)
        interpreter = Interpreter(
            stage,
            self.model.vocab,
            communicators,
            order,
            batch,
            sum(micro_batch.tokens for micro_batch in batch),
            observer,
            self.device,
        )
        try:
            interpreter.run()
        finally:
            self.compute_s = interpreter.compute_s
        for parameter in stage.parameters():
            if parameter.grad is None:  # a replica without micro-batches
                parameter.grad = torch.zeros_like(parameter)
        reduce_gradients(self._sets, self._gradient, communicators, observer)
        self.ready = iteration
        speaks = held.last and held.t == 0
        return last_synchronisation(
            iteration,
            batch,
            share if speaks else (),
            float(interpreter.loss_sum) if speaks else 0.0,
            (self._gradient(piece) for piece in self._counted),
            self._settings,
            communicators,
            observer,
        )

    def step(self, outcome: StepOutcome) -> None:
        """Take the step that all agreed on. Local: needs no communicator and no peer."""
        if self.ready != outcome.iteration or outcome.iteration != self.stepped + 1:
            raise ResihpError(
                f"rank {self.rank}: cannot take step {outcome.iteration} after {self.stepped} "
                f"with gradients of {self.ready}"
            )
        assert self._state is not None
        if not outcome.skip:
            self._state.apply(outcome.clip, outcome.learning_rate)
        self.stepped = outcome.iteration

    def gather(self, value: Any) -> list[Any]:
        """Every active rank's value, in the order of `plan.layout.active`. Values are what msgpack can carry."""
        communicators = self._communicators
        if communicators is None or communicators.world is None:
            return [value]
        encoded = torch.frombuffer(bytearray(msgspec.msgpack.encode(value)), dtype=torch.uint8).to(self.device)
        world = communicators.world
        with guarded("gather"):
            sizes = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(world.size())]
            world.allgather([sizes], [torch.tensor([len(encoded)], device=self.device)]).wait()
            longest = int(max(int(size) for size in sizes))
            padded = torch.zeros(longest, dtype=torch.uint8, device=self.device)
            padded[: len(encoded)] = encoded
            rows = [torch.zeros_like(padded) for _ in range(world.size())]
            world.allgather([rows], [padded]).wait()
        return [msgspec.msgpack.decode(bytes(row[: int(size)].tolist())) for row, size in zip(rows, sizes, strict=True)]

    # --- state, for checkpoints and transfers -----------------------------------------------------------------

    @property
    def held_specs(self) -> tuple[ParameterSpec, ...]:
        """Specifications of the parameters that this rank holds a part of."""
        return tuple(self._by_name[name] for name in self._named)

    def tensors(self, spec: ParameterSpec, piece: Slice) -> dict[str, Tensor]:
        """Views of a slice's state by kind ("value", "exp_avg", "exp_avg_sq"), which may be written to."""
        assert self._state is not None
        assert self.held is not None
        return {
            kind: parameters.view(tensor, spec, self.held.t, self.held.tp, piece)
            for kind, tensor in self._state.tensors(spec.name).items()
        }

    @property
    def updates(self) -> int:
        """Optimizer updates so far; skipped iterations do not count."""
        return 0 if self._state is None else self._state.updates

    def resume(self, iteration: int, updates: int) -> None:
        """Go on after `iteration`, once all tensors have been filled."""
        self.stepped, self.ready = iteration, None
        if self._state is not None:
            self._state.resume(updates)

    def _gradient(self, piece: Slice) -> Tensor:
        assert self.held is not None
        gradient = self._named[piece.name].grad
        assert gradient is not None
        return parameters.view(gradient, self._by_name[piece.name], self.held.t, self.held.tp, piece)

    # --- data -------------------------------------------------------------------------------------------------

    def _batch(self, iteration: int) -> Sequence[MicroBatch]:
        """The global batch, checked. Raises DatasetError naming the micro-batch at fault."""
        batch = self._dataset.micro_batches(iteration)
        if not batch or (self.micro_batches and len(batch) != self.micro_batches):
            raise DatasetError(
                f"iteration {iteration}: {len(batch)} micro-batches; the data set must give the same number, at "
                f"least one, every time (iteration 1 has {self.micro_batches})"
            )
        for m, micro_batch in enumerate(batch):
            lengths = micro_batch.lengths
            if not lengths or min(lengths) < 1 or max(lengths) > self.model.sequence:
                raise DatasetError(
                    f"iteration {iteration} micro-batch {m}: document lengths {list(lengths)}; each must lie between "
                    f"1 and the sequence length {self.model.sequence}"
                )
            if len(lengths) != len(micro_batch.samples):
                raise DatasetError(
                    f"iteration {iteration} micro-batch {m}: {len(lengths)} lengths, {len(micro_batch.samples)} samples"
                )
        return batch

    def _fingerprint(self, first: Sequence[MicroBatch]) -> str:
        content = {
            "model": msgspec.to_builtins(self.model),
            "config": {
                field.name: describe(getattr(self._config, field.name)) for field in dataclasses.fields(self._config)
            },
            "positions": self._positions,
            "optimizer": dataclasses.asdict(self._settings),
            "seed": self._seed,
            "data": [[*micro_batch.lengths, samples_digest(micro_batch.samples)] for micro_batch in first],
            "versions": [torch.__version__, metadata.version("megatron-core"), metadata.version("resihp")],
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _check_assignment(plan: Plan, micro_batches: int) -> None:
    shares, replicas = len(plan.assignment), len(plan.layout.replicas)
    if sorted(m for share in plan.assignment for m in share) != list(range(micro_batches)):
        raise LayoutError(f"plan of epoch {plan.epoch}: does not assign each of {micro_batches} micro-batches once")
    if shares != replicas:
        raise LayoutError(f"plan of epoch {plan.epoch}: {shares} shares for {replicas} replicas")
