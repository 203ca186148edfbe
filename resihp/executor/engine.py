"""The engine of one rank: takes the rank's place in a plan, computes iterations, steps. Decides nothing.

Life of an engine, called by `resihp.executor.trainer` and `resihp.executor.supervised`::

    adopt(plan, rank, base) -> connect(...) -> move(...) -> begin(epoch) -> [run(...) -> step(outcome)] ...
       ^___________________ a new plan, after a failure or a decision; disconnect() first ________________|

A transition is a transaction: between `adopt` and `begin`, the present and the next state exist side by side, and a
failure leaves the present state unchanged. `run` computes the gradients of an iteration and agrees on the step with
other ranks. Only `step` changes parameters, and it needs no other rank. If a failure occurs before the step, the
gradients are not dropped until the next `run`, so that this rank can still complete a step that other ranks took.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from megatron.core.transformer import TransformerConfig

from resihp.detector.observation import Floats
from resihp.errors import CommunicatorError, DatasetError, ResihpError
from resihp.executor import backends, devices
from resihp.executor.communicators import Communicators
from resihp.executor.compute.batches import Batches, fingerprint
from resihp.executor.compute.channels import gathered
from resihp.executor.compute.interpreter import Interpreter, timed
from resihp.executor.compute.iteration import Iteration, Observer, Prepared
from resihp.executor.compute.rotary import Rotary
from resihp.executor.compute.stage import PositionEmbedding, model_spec, pass_through, refuse_unhonoured
from resihp.executor.compute.step_agreement import NO_WORK, last_synchronisation, together, validation_loss, workloads
from resihp.executor.compute.stopwatch import Speed, Stopwatch, full_speed, stopwatch_of
from resihp.executor.emulation import Pace, Wires
from resihp.executor.group_store import MeetingPlace
from resihp.executor.preparation import PlanPreparation
from resihp.executor.state import state_transfer
from resihp.executor.state.building import StateBuilder
from resihp.executor.state.optimizer import AdamW
from resihp.executor.state.rank_state import HeldPart, State, extra_bytes
from resihp.executor.tensor_group import TensorGroup
from resihp.parallelism import transfers
from resihp.parallelism.batch_sizes import BatchSizes
from resihp.parallelism.model import ModelSpec
from resihp.parallelism.ownership import ParameterSpec
from resihp.parallelism.plan import Plan
from resihp.parallelism.transfers import Base, Move
from resihp.parallelism.workload import Dataset, Evaluation
from resihp.pipeline.program import GroupSpec
from resihp.protocol.messages import MeetingId, StepOutcome
from resihp.scheduler.cost import device_memory, memory

MEETING_TIMEOUT_S = 10.0
"""Seconds for which ranks wait for each other in a link probe."""

WARM_UP_TOKENS = (32, 64)
"""Numbers of tokens with which a layer is run before a rank joins a job."""

STRICT_ORDER = "RESIHP_STRICT_ORDER"
"""Environment variable: if `1`, gloo follows the strictest form of NCCL's rules (`channels.SingleFile`), for tests."""


class Engine:
    """The engine of one rank; its life is described in the module's header. `sequence` is the length of the longest
    document in tokens.

    `seed` determines the initial parameters. `vocab_multiple` pads the vocabulary tables to a multiple. `tied` shares
    the embedding with the head. `pace` emulates a device's speed. Raises ModelError for a configuration with
    unsupported settings, DatasetError for an empty data set.
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
        rotary: Rotary = Rotary(),  # noqa: B008 frozen
        tied: bool = False,
        vocab_multiple: int = 1,
        pace: Pace | None = None,
        evaluation: Evaluation | None = None,
    ) -> None:
        refuse_unhonoured(config)
        rotary.refuse_invalid(config)
        self._config, self._settings, self._seed = config, optimizer, seed
        self._positions: tuple[PositionEmbedding, Rotary] = (position_embedding, rotary)
        self._back_end = backends.chosen()
        self.device = self._back_end.device
        self.model: ModelSpec = self._model_spec(vocab_size, sequence, tied=tied, vocab_multiple=vocab_multiple)
        self._overhead = device_memory.overhead(self.device.type, self._back_end.name)
        devices.refuse_precision(self.device, config.params_dtype)
        self._builder = StateBuilder(config, self.model, optimizer, seed, self._positions, self._back_end)
        self._batches = Batches(dataset, sequence)
        self.batch_sizes: BatchSizes = self._batches.sizes
        """Number of micro-batches of each iteration, according to the data set."""
        self.evaluation: Evaluation | None = evaluation
        self._preparation = PlanPreparation(
            self.model, self._builder.specs, self.batch_sizes, evaluation, self._batches.longest, self._overhead
        )
        self._held_out = None if evaluation is None else Batches(evaluation.dataset, sequence, self._batches)
        self.fingerprint: str = self._fingerprint()
        """Digest of settings of model and optimizer, the data's first iteration, library versions and back end."""
        self.speed: Speed = full_speed
        """Returns the relative speed of this device under an injected fault."""
        self.pace: Pace | None = pace
        self.wires: Wires | None = None
        """Emulated links between nodes; None if none are emulated."""
        self._measured: tuple[Stopwatch, Floats] = Stopwatch(), np.zeros((2, 0))
        """Stopwatch and workload of the last `run`, read only on demand, once the following step has started."""
        self.rank = -1
        self.plan: Plan | None = None
        """The last plan that was adopted; in effect after `begin`. None before the first."""
        self.state: State | None = None
        """State under the layout in effect; None on standby."""
        self.next: State | None = None
        """State under the plan in preparation; the same object as `state` if nothing changes. None if this rank has no
        work under that plan, or if no plan is in preparation."""
        self.acknowledged: int | None = None
        """Epoch of the plan in preparation, once the state in `next` is complete; otherwise None."""
        self._moves: tuple[Move, ...] = ()
        self._communicators: Communicators | None = None
        self._probe_communicators: Communicators | None = None
        """Communicators of a link probe in progress; otherwise None."""
        self._differed: int | None = None
        """Last iteration in which sums indicated that ranks had different data; None if there was none."""
        self._strict = os.environ.get(STRICT_ORDER) == "1"

    def _fingerprint(self) -> str:
        evaluation, held_out = self.evaluation, self._held_out
        return fingerprint(
            self._config,
            self.model,
            self._positions,
            self._settings,
            self._seed,
            self._batches.first,
            (self._back_end.name, self.device.type),
            None
            if evaluation is None or held_out is None
            else (evaluation.every, evaluation.iterations, held_out.first),
        )

    def _model_spec(self, vocab: int, sequence: int, *, tied: bool, vocab_multiple: int) -> ModelSpec:
        """Return the planner's description of the model as computed on this device."""
        return model_spec(
            self._config,
            vocab,
            sequence,
            tied=tied,
            vocab_multiple=vocab_multiple,
            position_embedding=self._positions[0],
            device=self.device.type,
        )

    def warm(self) -> None:
        """Compile GPU functions now, on a temporary layer. Otherwise a joining rank would compile them in its first
        iteration, while all other ranks wait.

        Two numbers of tokens make the compiled code valid for any number. Tensor parallelism changes widths, so
        functions may still be compiled on first use. Does nothing on a CPU. Not yet run on a GPU.
        """
        if self.device.type == "cuda":
            self._pass_through_a_layer()

    def _pass_through_a_layer(self) -> None:
        with torch.device("meta"):
            layer = self._builder.module(HeldPart(((0, 0),), False, False, 0, 1), TensorGroup(), False)
        counts = sorted({min(n, self.model.sequence) for n in WARM_UP_TOKENS})
        pass_through(layer.to_empty(device=self.device), self.device, counts)

    @property
    def measured(self) -> Floats:
        """Measurements of the primitives of the last `run`, with the rows of `resihp.detector.observation.CHUNKS`."""
        stopwatch, workload = self._measured
        return np.vstack([stopwatch.read(), workload])

    @property
    def reduced_s(self) -> float:
        """Seconds from the beginning of the last `run` until all its gradients were reduced."""
        return self._measured[0].reduced_s()

    @property
    def back_end(self) -> str:
        """Name of the communicators' back end."""
        return self._back_end.name

    @property
    def specs(self) -> tuple[ParameterSpec, ...]:
        """All parameters of the model: names, shapes and cut axes. They do not depend on the plan."""
        return self._builder.specs[False]

    @property
    def stepped(self) -> int:
        """Last iteration included in this rank's state, by a step or by loading a checkpoint; 0 without state."""
        return self.state.stepped if self.state else 0

    @property
    def ready(self) -> int | None:
        """Iteration of the reduced gradients in this rank's memory; None if there are none."""
        return self.state.ready if self.state else None

    @property
    def holds(self) -> tuple[int, ...]:
        """Epochs for which this rank has state: that of the plan in effect, and that of an acknowledged next plan."""
        epochs = [self.state.epoch] if self.state else []
        if self.acknowledged is not None and self.next is not None and self.acknowledged not in epochs:
            epochs.append(self.acknowledged)
        return tuple(epochs)

    # --- a place in a plan ------------------------------------------------------------------------------------

    def prepare(self, plan: Plan, rank: int) -> Prepared:
        """Derive programs, groups and buckets from a plan, and check them. Raises LayoutError or PlanError."""
        return self._preparation.prepare(plan, rank)

    def check(
        self,
        plan: Plan,
        rank: int,
        base: Base | None,
        nodes: Mapping[int, str],
        memory_bytes: int | None,
        iteration: int = 1,
    ) -> None:
        """Raise PlanError or LayoutError if this rank cannot carry out a plan from `iteration` on."""
        self._preparation.check(plan, rank, base, nodes, memory_bytes, iteration)

    def adopt(self, plan: Plan, rank: int, base: Base | None = None, nodes: Mapping[int, str] | None = None) -> None:
        """Take `rank`'s place in `plan`: build the state that the plan needs on this rank, beside its present state.

        Without a `base`, no rank has stepped yet: initial parameters are drawn, and the plan takes effect at once.
        """
        assert self._communicators is None, "disconnect first"
        self.prepare(plan, rank)
        if base is not None and self.acknowledged == base.epoch:
            self.begin(base.epoch)  # the acknowledged plan took effect, but `Begin` did not arrive here
        if base is None or rank not in base.survivors:
            self.state = None
        self.plan, self.rank = plan, rank
        self.next, self.acknowledged = None, None
        self._moves = () if base is None else transfers.moves(base, plan.layout, self.specs, nodes or {})
        holding = HeldPart.of(plan, rank)
        if holding is not None:
            self.next = self._builder.build(plan, holding, self.state)
        if base is None:
            if self.next is not None:
                self._builder.draw(self.next)
            self.begin(plan.epoch)

    def connect(
        self,
        plan: Plan,
        rank: int,
        rendezvous: MeetingPlace,
        timeout_s: float,
        called_off: Callable[[], bool] = lambda: False,
    ) -> None:
        """Build all communicators of `plan` that include this rank, and those for moving state.

        Raises CommunicatorError if a peer does not arrive within `timeout_s`, after `wake`, or if `called_off` returns
        True.
        """
        self.disconnect()
        prepared = self.prepare(plan, rank)
        moving = state_transfer.groups_for(self._moves, prepared.memberships)
        wanted = dict.fromkeys((*prepared.memberships, *moving.values()))
        self._communicators = communicators = Communicators(
            MeetingId(epoch=plan.epoch),
            rank,
            tuple(wanted),
            timeout_s,
            self._back_end,
            strict=self._strict,
            wires=self.wires,
        )
        if not communicators.wanted:
            return
        self._back_end.free_cached_memory()
        try:
            if called_off():  # `wake` may have been called before there was a communicator
                raise CommunicatorError(f"epoch {plan.epoch}: called off")
            communicators.open(rendezvous)
        except BaseException:
            self.disconnect()
            raise

    @contextmanager
    def meet(
        self,
        meeting: MeetingId,
        memberships: Sequence[GroupSpec],
        rank: int,
        rendezvous: MeetingPlace,
        patience_s: float | None = None,
        called_off: Callable[[], bool] = lambda: False,
    ) -> Iterator[Communicators]:
        """Build communicators beside those of the plan, for a link probe, and close them at the end of the block.

        Meanwhile, none of their ranks may use the plan's communicators: all ranks are parked, or all are between the
        same two iterations. `patience_s` is the time limit for the arrival of peers, `MEETING_TIMEOUT_S` by default.
        Raises CommunicatorError if a peer does not arrive in time, after `wake`, or if `called_off` returns True.
        """
        patience_s = MEETING_TIMEOUT_S if patience_s is None else patience_s
        self._probe_communicators = communicators = Communicators(
            meeting, rank, memberships, MEETING_TIMEOUT_S, self._back_end, patience_s=patience_s, wires=self.wires
        )
        try:
            if called_off():  # `wake` may have been called before there was a communicator
                raise CommunicatorError(f"{meeting}: called off")
            communicators.open(rendezvous)
            yield communicators
        finally:
            self._probe_communicators = None
            communicators.close()

    def move(self, plan: Plan, observer: Observer, stepped: int, updates: int) -> int:
        """Receive the state of iteration `stepped` that this rank lacks under the adopted plan, and send the state that
        others lack. Return the number of bytes received.

        From now on the rank has both states, until `begin`. Raises CommunicatorError.
        """
        assert self._communicators is not None, "connect first"
        received = state_transfer.move_state(
            self._moves,
            state_transfer.groups_for(self._moves, self.prepare(plan, self.rank).memberships),
            self.rank,
            self.state,
            self.next,
            self._builder.by_name,
            self._communicators,
            observer,
            self.device,
        )
        if self.next is not None:
            self.next.stepped = stepped
            self.next.optimizer.resume(updates)
            self.next.derive()
        self.acknowledged = plan.epoch
        return received

    def memory_expected(self) -> str:
        """Return a description of the memory that this rank was expected to use under its plan, for an out-of-memory
        error."""
        if self.plan is None:
            return f"rank {self.rank}: no plan yet, so no memory of its device was expected to be in use"
        return memory.expected(self.plan, self.rank, self.model, self._batches.longest, self._overhead)

    @property
    def extra_bytes(self) -> int:
        """Bytes that the present and the next state together need beyond the larger of the two."""
        return extra_bytes(self.state, self.next)

    def begin(self, epoch: int) -> None:
        """Put the plan of `epoch` into effect, and release the state that it does not need; on standby, all state."""
        if self.next is not None or self.state is None or self.state.epoch != epoch:
            if self.state is not None and self.state is not self.next:
                self.state.gradients.release()
            self.state = self.next
        self.next, self.acknowledged = None, None
        self._moves = ()
        if self.state is not None:
            self.state.epoch = epoch
        if self._communicators is not None:
            self._communicators.release(state_transfer.STATE_GROUP_PREFIX)

    def disconnect(self) -> None:
        """Release all communicators. Safe at any time, in the rank's own thread."""
        if self.state is not None:
            self.state.stage.tp_group.bind(None)
        if self._communicators is not None:
            self._communicators.close()
            self._communicators = None

    def wake(self) -> None:
        """Make every wait of this rank raise CommunicatorError. Any thread."""
        for communicators in (self._probe_communicators, self._communicators):
            if communicators is not None:
                communicators.wake()

    # --- an iteration -----------------------------------------------------------------------------------------

    def workload(self, iteration: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the number of tokens and the sum of squared lengths of each micro-batch, without loading data. Raises
        DatasetError."""
        batch = self._batches.of(iteration)
        return tuple(micro_batch.tokens for micro_batch in batch), tuple(
            micro_batch.sum_squared_lengths for micro_batch in batch
        )

    def run(
        self,
        plan: Plan,
        iteration: int,
        observer: Observer,
        pause: Callable[[], bool] = lambda: False,
        saving: Callable[[], bool] = lambda: False,
        save: Callable[[], bool] = lambda: False,
    ) -> StepOutcome:
        """Compute this rank's share of an iteration, and agree with all other ranks on the step, without taking it.

        The callbacks are called at the end of the iteration. `pause` returns whether this rank was ordered to park
        after the iteration. (All ranks also pause if the next iteration has another number of micro-batches.) `saving`
        returns whether this rank is still writing a checkpoint. `save` returns whether it was ordered to write a
        checkpoint now. Raises CommunicatorError after the loss of a peer or after `wake`; the iteration can then be run
        again after `disconnect`, `adopt` and `connect`. Raises errors of the data set.
        """
        stopwatch = stopwatch_of(self.device, self.speed)
        self._preparation.check_number(plan, iteration)
        state, it = self._iteration(self.prepare(plan, self.rank), iteration, self._batches, observer)
        if iteration != state.stepped + 1:
            raise ResihpError(f"rank {self.rank}: holds the state of iteration {state.stepped}, cannot run {iteration}")
        state.begin(it.prepared.buckets, self.rank)
        interpreter = Interpreter(it, state, stopwatch, self.pace)
        try:
            with timed(state, it, stopwatch):
                interpreter.run()
        except BaseException:
            state.gradients.release()  # an abandoned sum may still write to them
            raise
        stopwatch.reduced()
        self._measured = stopwatch, interpreter.workload()
        state.ready = iteration
        with self._retry_after_abort(iteration):
            stops = pause() or self.batch_sizes.at(iteration + 1) != plan.micro_batches
            return last_synchronisation(
                it, state, interpreter.loss_sum, self._settings, pause=stops, saving=saving(), save=save()
            )

    def evaluate(self, plan: Plan, observer: Observer) -> tuple[float, int]:
        """Return the mean loss of the present weights over the evaluation data set, and its number of tokens.

        Changes no state. Ranks synchronise only by one sum at the end, so a rank may begin a global batch while others
        still compute the previous one. Raises the same errors as `run`, and can be repeated in the same way.
        """
        self.prepare(plan, self.rank)
        assert self.evaluation is not None
        assert self._held_out is not None
        evaluates = self._preparation.evaluates
        assert evaluates is not None
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        own = whole = NO_WORK
        for number in range(1, self.evaluation.iterations + 1):
            state, it = self._iteration(evaluates, number, self._held_out, observer)
            stopwatch = stopwatch_of(self.device, self.speed)
            interpreter = Interpreter(it, state, stopwatch, self.pace)
            with timed(state, it, stopwatch):
                interpreter.run()
            loss_sum += interpreter.loss_sum
            mine, batch = workloads(it, state)
            own, whole = together(own, mine), together(whole, batch)
        with self._retry_after_abort(state.stepped + 1):
            return validation_loss(it, state, loss_sum, own, whole)

    def _iteration(
        self, prepared: Prepared, number: int, batches: Batches, observer: Observer
    ) -> tuple[State, Iteration]:
        """Return this rank's state, and its work on global batch `number`. Raises CommunicatorError, DatasetError."""
        state, communicators = self.state, self._communicators
        if state is None or communicators is None:
            raise CommunicatorError(f"rank {self.rank}: not connected")
        place = prepared.plan.layout.place(self.rank)
        assert place is not None
        return state, Iteration(
            number=number,
            rank=self.rank,
            place=(place.replica, place.stage),
            prepared=prepared,
            batch=batches.of(number),
            vocab=self.model.vocab,
            communicators=communicators,
            observer=observer,
            device=self.device,
            learns=batches is not self._held_out,
        )

    @contextmanager
    def _retry_after_abort(self, iteration: int) -> Iterator[None]:
        """Handle a DatasetError of the last sum, which may contain anything if another rank aborted it.

        The first DatasetError of an iteration is raised as CommunicatorError, so that the iteration is repeated. A
        second one in the repeated iteration is raised as DatasetError.
        """
        try:
            yield
            self._differed = None
        except DatasetError as error:
            if not self._back_end.aborts or self._differed == iteration:
                raise
            self._differed = iteration
            raise CommunicatorError(f"iteration {iteration}: {error}") from error

    def step(self, outcome: StepOutcome) -> None:
        """Take the step that all ranks agreed on. Needs no communicator and no other rank."""
        state = self.state
        if state is None or state.ready != outcome.iteration or outcome.iteration != state.stepped + 1:
            raise ResihpError(
                f"rank {self.rank}: cannot take step {outcome.iteration} after {self.stepped} "
                f"with gradients of {self.ready}"
            )
        if not outcome.skip:
            weight_decay = self._settings.weight_decay_of(outcome.iteration)
            state.optimizer.apply(outcome.clip, outcome.learning_rate, weight_decay)
            state.derive()
        state.stepped = outcome.iteration

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all active ranks, in the order of `plan.layout.active`. msgpack must be able to encode
        them."""
        communicators = self._communicators
        if communicators is None or communicators.world is None:
            return [value]
        return gathered(value, communicators.world, self.device)

    @property
    def updates(self) -> int:
        """Number of optimizer updates so far; skipped iterations do not count."""
        return self.state.optimizer.updates if self.state else 0

    def resume(self, iteration: int, updates: int) -> None:
        """Continue after `iteration` with `updates` optimizer updates. Call this when all tensors have been filled."""
        assert self.state is not None
        self.state.stepped, self.state.ready = iteration, None
        self.state.optimizer.resume(updates)
        self.state.derive()
