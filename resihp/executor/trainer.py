"""The training loop that users call: it follows a supervisor's plans under an agent, and trains plainly without one.

`Trainer` owns the sequence of steps in a worker (plan, communicators, iterations, step, report, park). `engine.Engine`
computes an iteration, and `protocol.client` talks to the supervisor. The trainer makes no decisions about failures.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec
import torch
from megatron.core.transformer import TransformerConfig

from resihp.detector.observation import CHUNKS, pack
from resihp.errors import CheckpointError, CommunicatorError, LayoutError, ResihpError
from resihp.executor import devices, emulation, probe, versions
from resihp.executor.compute.device_waits import DeviceWaits, DeviceWatch, mark_on
from resihp.executor.compute.rotary import Rotary
from resihp.executor.compute.stage import PositionEmbedding
from resihp.executor.config_support import Layers, ignored, layers_message, refuse_layers
from resihp.executor.engine import Engine
from resihp.executor.group_store import AgentRendezvous, Store, TorchRendezvous
from resihp.executor.state import checkpoint
from resihp.executor.state.optimizer import AdamW
from resihp.executor.tensor_group import dist
from resihp.faults import Fault, Phase
from resihp.parallelism.layout import Layout
from resihp.parallelism.plan import Plan, spread
from resihp.parallelism.transfers import Base
from resihp.parallelism.workload import Dataset, Evaluation
from resihp.protocol import client as agent
from resihp.protocol import messages as m
from resihp.worker import checkpoints

COMMUNICATION_TIMEOUT_S = 1800.0
"""Time limit of collectives in the back end. The supervisor detects hangs much sooner, and wakes the blocked ranks."""


class Trainer:
    """Trains a GPT-like model of megatron-core layers under any layout that the job has.

    ==================  =====================================================================================
    `config`            megatron-core's TransformerConfig; a setting that is not supported raises ModelError
    `vocab_size`        number of tokens; tables are padded to a multiple of `make_vocab_size_divisible_by`
    `dataset`           `resihp.Dataset`: `micro_batches(iteration)`, pure
    `optimizer`         `resihp.AdamW(...)`
    `evaluation`        `resihp.Evaluation(dataset, every, iterations)` for a validation loss; None: no evaluation
    `sequence`          length of the longest document; positions restart with each document
    `layers`            "local": megatron-core's own; "transformer_engine" raises a ModelError with the reason
    `tp`, `pp`, ...     the layout without `resihp run` (plain python or torchrun); ignored under `resihp run`
    `checkpoint_*`      checkpoints without `resihp run`; ignored under `resihp run`
    `share_embeddings_and_output_weights`, `position_embedding`, `rotary_base`, `rotary_percent`, `rope_scaling`,
    `rope_scaling_factor`, `seq_len_interpolation_factor`: as in megatron-core's GPTModel
    ==================  =====================================================================================
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        vocab_size: int,
        dataset: Dataset,
        optimizer: AdamW,
        sequence: int,
        seed: int = 1234,
        position_embedding: PositionEmbedding = "rope",
        rotary_base: int = 10000,
        rotary_percent: float = 1.0,
        rope_scaling: bool = False,
        rope_scaling_factor: float = 8.0,
        seq_len_interpolation_factor: float | None = None,
        share_embeddings_and_output_weights: bool = False,
        make_vocab_size_divisible_by: int = 128,
        layers: Layers = "local",
        evaluation: Evaluation | None = None,
        tp: int = 1,
        pp: int = 1,
        schedule: str = "1f1b",
        virtual_stages: int = 1,
        sequence_parallel: bool = False,
        checkpoint_every: int = 0,
        checkpoint_folder: str | os.PathLike[str] = "checkpoints",
        resume: bool = False,
    ) -> None:
        self._client = agent.attach()
        refuse_layers(layers)
        if "OMP_NUM_THREADS" not in os.environ or self._client is not None:
            torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", "1"))))
        self._tp, self._pp, self._chunks = tp, pp, virtual_stages
        self._schedule, self._sequence_parallel = schedule, sequence_parallel
        if self._client is not None:
            start = self._client.start
            checkpoint_every, checkpoint_folder, resume = start.checkpoint_every, start.checkpoint_folder, start.resume
        self._save_every, self._folder, self._resume = checkpoint_every, Path(checkpoint_folder), resume
        self.engine = Engine(
            config,
            vocab_size=vocab_size,
            dataset=dataset,
            optimizer=optimizer,
            seed=seed,
            sequence=sequence,
            position_embedding=position_embedding,
            rotary=Rotary(
                rotary_base=rotary_base,
                rotary_percent=rotary_percent,
                rope_scaling=rope_scaling,
                rope_scaling_factor=rope_scaling_factor,
                seq_len_interpolation_factor=seq_len_interpolation_factor,
            ),
            tied=share_embeddings_and_output_weights,
            vocab_multiple=make_vocab_size_divisible_by,
            evaluation=evaluation,
        )
        self.engine.wires = emulation.wires_of(os.environ, self.engine.device)
        self.engine.pace = emulation.pace_of(os.environ, self.engine.model, self.engine.device)
        self._print_notices(config)

    def _print_notices(self, config: TransformerConfig) -> None:
        """Print which speed is emulated, and on rank 0 which settings are ignored."""
        if self.engine.pace is not None:
            print(f"{emulation.LAYER_MS} is set: sleeps in every chunk, to emulate a device of that speed", flush=True)
        rank = int(os.environ.get("RANK", "0")) if self._client is None else self._client.start.rank
        if rank:
            return
        meaningless = ignored(config)
        if meaningless:
            print(f"transformer config: ignored: {', '.join(meaningless)}", flush=True)
        message = layers_message(config)
        if message:
            print(message, flush=True)

    def train(self, iterations: int) -> None:
        """Train up to and including iteration `iterations`, from the newest checkpoint when resuming.

        Raises a `UsageError` before any communicator is built if the job cannot run as configured. Raises
        torch.OutOfMemoryError with a note about the expected memory.
        """
        try:
            self._train(iterations)
        except torch.OutOfMemoryError as error:
            error.add_note(self.engine.memory_expected())
            raise

    def _train(self, iterations: int) -> None:
        resume_folder = checkpoints.newest_complete(self._folder) if self._resume else None
        resume_from = checkpoints.iteration_of(resume_folder) if resume_folder else 0
        if self._client is not None:
            with self._client.deaf():
                _Supervised(
                    self._client, self.engine, resume_folder, resume_from, iterations, self._folder, self._save_every
                ).run()
        else:
            self._train_alone(resume_folder, resume_from, iterations)

    def _train_alone(self, resume_folder: Path | None, resume_from: int, iterations: int) -> None:
        """Train without an agent: under torchrun, or as a single process."""
        rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        if world % (self._tp * self._pp):
            raise LayoutError(f"tp={self._tp} pp={self._pp} does not divide the {world} processes that were started")
        layout = Layout.uniform(
            tp=self._tp,
            pp=self._pp,
            dp=world // (self._tp * self._pp),
            layers=self.engine.model.layers,
            chunks=self._chunks,
        )
        plan = Plan(
            epoch=1,
            layout=layout,
            assignment=spread(self.engine.batch_sizes.at(resume_from + 1), len(layout.replicas)),
            schedule=self._schedule,
            sequence_parallel=self._sequence_parallel,
        )
        self.engine.adopt(plan, rank)
        if resume_folder is not None:
            checkpoint.load(self.engine, resume_folder)
        rendezvous = TorchRendezvous(_torchrun_store(world))
        self.engine.connect(plan, rank, rendezvous, COMMUNICATION_TIMEOUT_S)
        observer = _NoObserver()
        evaluation = self.engine.evaluation
        for iteration in range(resume_from + 1, iterations + 1):
            began = time.perf_counter()
            outcome = self.engine.run(plan, iteration, observer)
            self.engine.step(outcome)
            if rank == 0:
                print(
                    f"iteration {iteration}/{iterations} | loss {outcome.loss:.6f} | "
                    f"grad norm {outcome.gradient_norm:.4f} | {time.perf_counter() - began:.3f} s",
                    flush=True,
                )
            if checkpoints.is_due(self._save_every, iteration, iterations):
                self._save_alone(plan, rank, iteration)
            if evaluation is not None and evaluation.is_due(iteration, iterations):
                loss, _ = self.engine.evaluate(plan, observer)
                if rank == 0:
                    print(f"iteration {iteration}/{iterations} | validation loss {loss:.6f}", flush=True)
            if outcome.pause and iteration < iterations:
                plan = self._resized(plan, rank, iteration + 1, rendezvous)
        self.engine.disconnect()

    def _resized(self, plan: Plan, rank: int, iteration: int, rendezvous: TorchRendezvous) -> Plan:
        """Switch to a plan with the same layout and the larger number of micro-batches that begins with `iteration`."""
        engine, base = self.engine, Base(epoch=plan.epoch, layout=plan.layout, survivors=plan.layout.active)
        plan = msgspec.structs.replace(plan.dealing(engine.batch_sizes.at(iteration)), epoch=plan.epoch + 1)
        engine.disconnect()
        engine.adopt(plan, rank, base)
        engine.connect(plan, rank, rendezvous, COMMUNICATION_TIMEOUT_S)
        engine.move(plan, _NoObserver(), iteration - 1, engine.updates)
        engine.begin(plan.epoch)
        return plan

    def _save_alone(self, plan: Plan, rank: int, iteration: int) -> None:
        folder = checkpoints.folder_of(self._folder, iteration)
        writers = plan.layout.model_copy(0).ranks
        part = checkpoint.save_part(self.engine, plan, folder) if rank in writers else None
        parts = self.engine.gather(part)
        if rank == 0:
            written = [(str(file), int(size)) for file, size in (p for p in parts if p is not None)]
            layout = plan.layout.describe()
            checkpoints.write_manifest(folder, iteration, written, self.engine.fingerprint, layout=layout)


class _NoObserver:
    """Observer that ignores all events, for training without a supervisor."""

    def enter(self, phase: Phase) -> None: ...
    def progressed(self) -> None: ...
    def communicating(self, waits: bool) -> None: ...


class _Supervised:
    """One worker under a supervisor: follows its orders, and observes its own iterations for it."""

    def __init__(
        self,
        client: agent.AgentClient,
        engine: Engine,
        resume_folder: Path | None,
        resume_from: int,
        iterations: int,
        folder: Path,
        checkpoint_every: int,
    ) -> None:
        self._client = client
        self._engine = engine
        self._rank = client.start.rank
        self._rendezvous = AgentRendezvous(client.attend)
        self._resume_folder = resume_folder
        self._resume_from = resume_from
        self._iterations = iterations
        self._folder = folder
        self._save_every = checkpoint_every
        self._proposal: m.Propose | None = None
        self._plan: Plan | None = None
        """The plan that this rank carries out, or is about to."""
        self._go_ahead: m.Go | None = None
        """Order that this rank has acknowledged; it waits for the acknowledgements of all others."""
        self._held: dict[int, Plan] = {}
        """Plans, by epoch, under which this rank holds state."""
        self._outcome: m.StepOutcome | None = None
        """Outcome of the last step this rank took."""
        self._evaluated = 0
        """Last iteration whose evaluation was on record when the plan took effect; the same on all ranks."""
        self._writer = checkpoint.Writer()
        self._save_requested = self._save_completed = 0
        """Number of the checkpoint order that was last passed on to the other ranks, and of the last completed one."""
        self._waits = DeviceWaits(lambda: mark_on(engine.device))

    def run(self) -> None:
        client, engine = self._client, self._engine
        client.on_park(engine.wake)
        client.on_beat(DeviceWatch(self._waits.under_way).ask)
        engine.speed = client.speed
        if engine.wires is not None:
            engine.wires.speed = client.link_speed
            engine.wires.nodes.update(enumerate(client.start.nodes))
        client.arm(self._absent)
        if client.start.joins:
            probe.examine(engine.device)
            engine.warm()  # before other ranks wait for it
        client.declare(
            m.Declare(
                model=engine.model,
                micro_batches=engine.batch_sizes.usual,
                iterations=self._iterations,
                resume_from=self._resume_from,
                fingerprint=engine.fingerprint,
                ramp=engine.batch_sizes.ramp,
                device=engine.device.type,
                back_end=engine.back_end,
                memory_bytes=devices.memory_bytes(engine.device),
                evaluates=engine.evaluation is not None,
                software=versions.software() if devices.is_first() else None,
            )
        )
        while True:
            client.activity = "idle" if self._plan is None else "parked"
            match client.next_order():
                case m.Propose() as proposal:
                    self._consider(proposal)
                case m.Go() as go:
                    self._go(go)
                case m.Begin() as begin:
                    self._begin(begin)
                case m.Park() as park:
                    self._park(park)
                case m.Save() as save:
                    self._save_parked(save)
                case m.Probe():
                    self._answer_probes()
                    self._decline_link_probes()
                case m.Halt():
                    engine.disconnect()
                    return
                case m.Start() | m.FaultGo() | m.Slow() | m.SaveNext() | m.Published():
                    raise ResihpError("agent: sent an order that the training loop never waits for")

    # --- orders -----------------------------------------------------------------------------------------------

    def _consider(self, proposal: m.Propose) -> None:
        """Check a plan and answer; nothing changes yet."""
        plan, start = proposal.plan, self._client.start
        if self._engine.wires is not None:
            self._engine.wires.nodes.update(proposal.nodes)
        try:
            self._engine.check(
                plan, self._rank, proposal.base, proposal.nodes, start.memory_bytes, proposal.next_iteration
            )
        except LayoutError as error:
            self._client.send(m.Object(epoch=plan.epoch, reason=str(error)))
            return
        self._proposal, self._go_ahead = proposal, None
        self._client.send(m.Confirm(epoch=plan.epoch, digest=plan.digest))

    def _park(self, park: m.Park) -> None:
        engine = self._engine
        engine.disconnect()
        self._decline_link_probes()
        try:
            self.enter("park")
        except CommunicatorError:
            return  # overtaken by a newer epoch, whose order to park is next in the queue
        self._client.send(
            m.Parked(
                epoch=park.epoch,
                holds=engine.holds,
                stepped=max(engine.stepped, self._resume_from),  # a checkpoint not yet loaded can still be loaded
                outcome=self._outcome,
                ready=engine.ready == engine.stepped + 1,
            )
        )

    def _go(self, go: m.Go) -> None:
        """Build the new plan's state and communicators beside the present ones, move state, acknowledge."""
        proposal, client, engine = self._proposal, self._client, self._engine
        if proposal is None or proposal.plan.epoch != go.epoch or client.park_asked(go.epoch):
            return  # overtaken by a newer epoch, whose order to park is next in the queue
        plan = self._plan = proposal.plan
        self._held = {epoch: old for epoch, old in self._held.items() if epoch in engine.holds} | {plan.epoch: plan}
        client.epoch, client.iteration = go.epoch, go.next_iteration
        began = time.perf_counter()
        try:
            self._finish(go.finish)
            engine.adopt(plan, self._rank, proposal.base, proposal.nodes)
            built = time.perf_counter()
            client.activity = "communication"
            self.enter("groups")
            asked_to_park = partial(client.park_asked, go.epoch)
            engine.connect(plan, self._rank, self._rendezvous, COMMUNICATION_TIMEOUT_S, asked_to_park)
            connected = time.perf_counter()
            received = self._fetch_state(proposal, go)
            if client.park_asked(go.epoch):
                return
        except CommunicatorError as error:
            self._stuck(go.epoch, error)
            return
        self._go_ahead = go
        client.activity = "parked"
        client.send(
            m.Ready(
                epoch=go.epoch,
                groups_s=connected - built,
                state_s=built - began + time.perf_counter() - connected,
                bytes_received=received,
                extra_bytes=engine.extra_bytes,
            )
        )

    def _fetch_state(self, proposal: m.Propose, go: m.Go) -> int:
        """Complete the state under the new plan, from peers or from the checkpoint; return the bytes received."""
        engine = self._engine
        if proposal.base is not None:
            self.enter("transfer")
            self._client.activity = "compute"  # except while it waits
            updates = go.finish.updates if go.finish is not None else engine.updates
            return engine.move(proposal.plan, self, go.next_iteration - 1, updates)
        if engine.state is not None:
            if self._resume_folder is not None:
                checkpoint.load(engine, self._resume_folder)
            if engine.stepped != go.next_iteration - 1:
                raise CheckpointError(
                    f"rank {self._rank}: holds the state of iteration {engine.stepped}, "
                    f"the plan of epoch {go.epoch} begins at {go.next_iteration}"
                )
        return 0

    def _begin(self, begin: m.Begin) -> None:
        """Put the plan into effect: release state that only the previous layout needed, and train on."""
        go, client = self._go_ahead, self._client
        if go is None or go.epoch != begin.epoch:
            return
        self._go_ahead = None
        assert self._plan is not None
        self._engine.begin(begin.epoch)
        self._evaluated = begin.evaluated
        if client.park_asked(begin.epoch) or self._engine.state is None:
            return
        try:
            self.enter("resume")
            self._iterate(self._plan, go.next_iteration)
        except CommunicatorError as error:
            self._stuck(begin.epoch, error)

    def _stuck(self, epoch: int, error: CommunicatorError) -> None:
        if not self._client.park_asked(epoch):
            self._client.send(m.Stuck(epoch=epoch, error=str(error)))

    def _finish(self, finish: m.StepOutcome | None) -> None:
        """Take the step that other ranks took before the failure, with their coefficients."""
        engine = self._engine
        if finish is not None and engine.stepped == finish.iteration - 1 and engine.ready == finish.iteration:
            engine.step(finish)
            self._outcome = finish

    def _iterate(self, plan: Plan, first: int) -> None:
        client, engine = self._client, self._engine
        for iteration in range(first, self._iterations + 1):
            client.iteration = iteration
            self._answer_probes()
            self._evaluate(plan, iteration - 1)
            self._answer_probes()
            client.activity = "compute"
            began = time.perf_counter()
            if self._rank == plan.layout.active[0]:
                tokens, squares = engine.workload(iteration)
                client.send(m.Workload(epoch=plan.epoch, iteration=iteration, tokens=tokens, squares=squares))
            outcome = engine.run(
                plan,
                iteration,
                self,
                pause=lambda: client.pause_asked(plan.epoch),
                saving=lambda: self._writer.busy,
                save=self._save_asked,
            )
            self.enter("step")
            engine.step(outcome)
            self._outcome = outcome
            measured = engine.measured
            client.send(
                m.Stepped(
                    epoch=plan.epoch,
                    outcome=outcome,
                    seconds=time.perf_counter() - began,
                    compute_s=float(measured[CHUNKS.index("compute")].sum()),
                    reduced_s=engine.reduced_s,
                    chunks=pack(measured),
                )
            )
            self._measure_links(plan, outcome)
            if outcome.save or checkpoints.is_due(self._save_every, iteration, self._iterations):
                self._save(plan, iteration, outcome.saving)
            if outcome.save and not outcome.saving:
                self._save_completed = self._save_requested
            if outcome.pause and iteration < self._iterations:
                return  # all ranks do; the order to park has arrived or is on its way
        client.iteration = self._iterations + 1
        self._evaluate(plan, self._iterations)
        client.activity = "idle"
        client.send(m.Finished(iteration=self._iterations))

    def _evaluate(self, plan: Plan, iteration: int) -> None:
        """Compute the loss of the weights after `iteration`, if due, as part of the attempt at the next iteration."""
        client, evaluation = self._client, self._engine.evaluation
        if evaluation is None or iteration <= self._evaluated or not evaluation.is_due(iteration, self._iterations):
            return
        client.activity = "compute"
        loss, tokens = self._engine.evaluate(plan, self)
        client.send(m.Evaluated(epoch=plan.epoch, iteration=iteration, loss=loss, tokens=tokens))

    def _answer_probes(self) -> None:
        """Measure the device, and the links if all ranks are parked; a failed measurement is also an answer."""
        while (request := self._client.due_probe()) is not None:
            with self._activity("compute"):
                self._client.send(probe.measure(request, self._rank, self._engine, self._rendezvous))

    def _measure_links(self, plan: Plan, outcome: m.StepOutcome) -> None:
        """Measure links at the iteration announced to both ends; skip if it is past or all ranks are about to park.

        This precedes all other work that only some ranks do between two iterations, so that no rank is late.
        """
        for request in self._client.due_link_probes(outcome.iteration):
            if request.after_iteration == outcome.iteration and not outcome.pause:
                with self._activity("communication"):
                    asked_to_park = partial(self._client.park_asked, plan.epoch)
                    answer = probe.measure_links(request, self._rank, self._engine, self._rendezvous, asked_to_park)
                    self._client.send(answer)
            else:
                missed = f"order received after iteration {outcome.iteration}"
                self._client.send(m.Probed(probe=request.probe, missed=missed))

    def _decline_link_probes(self) -> None:
        for request in self._client.due_link_probes():
            self._client.send(m.Probed(probe=request.probe, missed="does not train now"))

    def _save_parked(self, save: m.Save) -> None:
        """Write a checkpoint before the job ends: the state under the plan in effect, after the step that counts."""
        engine, plan = self._engine, self._held.get(save.epoch)
        if plan is None or save.epoch not in engine.holds:
            return
        if engine.acknowledged == save.epoch:
            engine.begin(save.epoch)  # the plan took effect, but its order to begin did not arrive here
        self._finish(save.finish)
        if engine.stepped == save.finish.iteration and self._rank in plan.layout.model_copy(save.replica).ranks:
            began = time.perf_counter()
            with self._activity("checkpoint"):
                self._writer.wait()
                folder = checkpoints.folder_of(self._folder, engine.stepped)
                file, size = checkpoint.save_part(engine, plan, folder, save.replica)
            self._written(plan, engine.stepped, file, size, began)

    def _save_asked(self) -> bool:
        """Return whether this rank must tell the others to write a checkpoint of the current iteration."""
        self._save_requested = self._client.save_number
        return self._save_requested > self._save_completed

    def _save(self, plan: Plan, iteration: int, saving: bool) -> None:
        """Begin to write this rank's part of a checkpoint, while training continues (except after the last iteration).

        While `saving`, the previous checkpoint is still being written by some rank, and all ranks skip this one.
        """
        if self._rank not in plan.layout.model_copy(0).ranks:
            return
        last = iteration == self._iterations
        if saving and not last:
            print(f"checkpoint of iteration {iteration}: skipped, the previous one is still being written", flush=True)
            return
        began = time.perf_counter()
        folder = checkpoints.folder_of(self._folder, iteration)
        with self._activity("checkpoint"):
            self._writer.wait()
            part = checkpoint.part_of(self._engine, plan)
            if last:
                self._written(plan, iteration, part.file, checkpoint.write_part(part, folder), began)
                return
        self._writer.begin(
            part,
            folder,
            lambda size: self._written(plan, iteration, part.file, size, began),
            lambda error: self._written(plan, iteration, part.file, 0, began, error),
        )

    def _written(
        self, plan: Plan, iteration: int, file: str, size: int, began: float, error: Exception | None = None
    ) -> None:
        self._client.send(
            m.CheckpointPart(
                epoch=plan.epoch,
                iteration=iteration,
                folder=str(checkpoints.folder_of(self._folder, iteration)),
                file=file,
                bytes=size,
                seconds=time.perf_counter() - began,
                error="" if error is None else f"{type(error).__name__}: {error}",
            )
        )

    def _absent(self, fault: Fault) -> bool:
        """Return whether a fault's target has no work now, so that the first rank to reach the moment replaces it."""
        if self._plan is None:
            return False
        nodes = self._client.start.nodes
        if fault.rank is not None:
            return self._plan.layout.place(fault.rank) is None
        return not any(fault.hits(rank, nodes[rank]) for rank in self._plan.layout.active if rank < len(nodes))

    # --- observer of the engine -------------------------------------------------------------------------------

    def enter(self, phase: Phase) -> None:
        self._client.faults_at(self._client.iteration, phase)

    def progressed(self) -> None:
        self._client.primitives += 1

    def communicating(self, waits: bool) -> None:
        if waits:
            self._waits.begin()
        else:
            self._waits.end()

    @contextmanager
    def _activity(self, name: agent.Activity) -> Iterator[None]:
        before, self._client.activity = self._client.activity, name
        try:
            yield
        finally:
            self._client.activity = before


def _torchrun_store(world: int) -> Store:
    """Return the store of torchrun or of plain environment variables; a private one for a single process."""
    if world == 1:
        return dist.HashStore()
    try:
        store, _, _ = next(dist.rendezvous("env://"))
    except ValueError as error:
        raise LayoutError(
            f"WORLD_SIZE={world} without a rendezvous ({error}); start with torchrun or resihp run"
        ) from error
    return store
