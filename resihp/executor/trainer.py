"""The training loop that users call: under an agent it follows plans, without one it trains plainly.

`Trainer` owns the order of things in a worker (plan, communicators, iterations, step, report, park); how an iteration
is computed is `engine.Engine`'s, how to talk to the supervisor `protocol.client`'s. It decides nothing about failures.
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
from resihp.executor.compute.device_waits import Asking, DeviceWaits, mark_on
from resihp.executor.compute.rotary import Rotary
from resihp.executor.compute.stage import PositionEmbedding
from resihp.executor.config_support import Layers, ignored, layers_told, refuse_layers
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
"""Collectives are not timed out by the back end: the supervisor notices hangs sooner, and wakes who is blocked."""


class Trainer:
    """Trains a GPT-like model of megatron-core layers under whatever layout the job has.

    ==================  =====================================================================================
    `config`            megatron-core's TransformerConfig; a field that is not honoured raises ModelError
    `vocab_size`        of the tokens; tables are padded to a multiple of `make_vocab_size_divisible_by`
    `dataset`           `resihp.Dataset`: `micro_batches(iteration)`, pure
    `optimizer`         `resihp.AdamW(...)`
    `evaluation`        `resihp.Evaluation(dataset, every, iterations)`, for a validation loss; None: there is none
    `sequence`          longest document; positions restart with each document
    `layers`            "local": megatron-core's own; "transformer_engine" raises ModelError saying why
    `tp`, `pp`, ...     the layout without `resihp run` (plain python or torchrun); with it, the job's is used
    `checkpoint_*`      likewise: without `resihp run` only
    `share_embeddings_and_output_weights`, `position_embedding`, `rotary_base`, `rotary_percent`, `rope_scaling`,
    `rope_scaling_factor`, `seq_len_interpolation_factor`: as of megatron-core's GPTModel
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
        self._every, self._folder, self._resume = checkpoint_every, Path(checkpoint_folder), resume
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
        self._say_what_is_odd(config)

    def _say_what_is_odd(self, config: TransformerConfig) -> None:
        """In the log: what is emulated, and once in a job, what is ignored."""
        if self.engine.pace is not None:
            print(f"{emulation.LAYER_MS} is set: sleeps in every chunk, to emulate a device of that speed", flush=True)
        rank = int(os.environ.get("RANK", "0")) if self._client is None else self._client.start.rank
        if rank:
            return
        meaningless = ignored(config)
        if meaningless:
            print(f"transformer config: ignored: {', '.join(meaningless)}", flush=True)
        told = layers_told(config)
        if told:
            print(told, flush=True)

    def train(self, iterations: int) -> None:
        """Train up to and including iteration `iterations`, from the newest checkpoint when resuming.

        Raises a `UsageError` before any communicator is built when the job cannot run as it is; torch.OutOfMemoryError
        with a note of what was expected.
        """
        try:
            self._train(iterations)
        except torch.OutOfMemoryError as error:
            error.add_note(self.engine.memory_expected())
            raise

    def _train(self, iterations: int) -> None:
        found = checkpoints.newest_complete(self._folder) if self._resume else None
        resume_from = checkpoints.iteration_of(found) if found else 0
        if self._client is not None:
            with self._client.deaf():
                _Supervised(self._client, self.engine, found, resume_from, iterations, self._folder, self._every).run()
        else:
            self._train_alone(found, resume_from, iterations)

    def _train_alone(self, found: Path | None, resume_from: int, iterations: int) -> None:
        """Without an agent: torchrun's environment, or a single process."""
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
        if found is not None:
            checkpoint.load(self.engine, found)
        rendezvous = TorchRendezvous(_torchrun_store(world))
        self.engine.connect(plan, rank, rendezvous, COMMUNICATION_TIMEOUT_S)
        observer = _Silent()
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
            if checkpoints.is_due(self._every, iteration, iterations):
                self._save_alone(plan, rank, iteration)
            if evaluation is not None and evaluation.is_due(iteration, iterations):
                loss, _ = self.engine.evaluate(plan, observer)
                if rank == 0:
                    print(f"iteration {iteration}/{iterations} | validation loss {loss:.6f}", flush=True)
            if outcome.pause and iteration < iterations:
                plan = self._resized(plan, rank, iteration + 1, rendezvous)
        self.engine.disconnect()

    def _resized(self, plan: Plan, rank: int, iteration: int, rendezvous: TorchRendezvous) -> Plan:
        """From `iteration` on there are more micro-batches: the same layout, for so many."""
        engine, held = self.engine, Base(epoch=plan.epoch, layout=plan.layout, survivors=plan.layout.active)
        plan = msgspec.structs.replace(plan.dealing(engine.batch_sizes.at(iteration)), epoch=plan.epoch + 1)
        engine.disconnect()
        engine.adopt(plan, rank, held)
        engine.connect(plan, rank, rendezvous, COMMUNICATION_TIMEOUT_S)
        engine.move(plan, _Silent(), iteration - 1, engine.updates)
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


class _Silent:
    """Observer of an iteration that nobody watches."""

    def enter(self, phase: Phase) -> None: ...
    def progressed(self) -> None: ...
    def communicating(self, waits: bool) -> None: ...


class _Supervised:
    """One worker under a supervisor: takes orders, and is the observer of its own iterations."""

    def __init__(
        self,
        client: agent.AgentClient,
        engine: Engine,
        found: Path | None,
        resume_from: int,
        iterations: int,
        folder: Path,
        every: int,
    ) -> None:
        self._client = client
        self._engine = engine
        self._rank = client.start.rank
        self._rendezvous = AgentRendezvous(client.attend)
        self._found = found
        self._resume_from = resume_from
        self._iterations = iterations
        self._folder = folder
        self._every = every
        self._proposal: m.Propose | None = None
        self._plan: Plan | None = None
        """The plan that the rank is to carry out, or carries out."""
        self._go_ahead: m.Go | None = None
        """Acknowledged, and waiting for all others' acknowledgement."""
        self._held: dict[int, Plan] = {}
        """Plans by epoch, of those whose layouts what is held follows."""
        self._outcome: m.StepOutcome | None = None
        """Outcome of the last step this rank took."""
        self._evaluated = 0
        """Last iteration whose evaluation was on record when the plan in effect was: all ranks know of the same one."""
        self._writer = checkpoint.Writer()
        self._saves_told = self._saves_done = 0
        """The order to write a checkpoint that others were told of last, and the last one that was carried out."""
        self._waits = DeviceWaits(lambda: mark_on(engine.device))

    def run(self) -> None:
        client, engine = self._client, self._engine
        client.on_park(engine.wake)
        client.on_beat(Asking(self._waits.under_way).ask)
        engine.speed = client.speed
        if engine.wires is not None:
            engine.wires.speed = client.link_speed
            engine.wires.nodes.update(enumerate(client.start.nodes))
        client.arm(self._absent)
        if client.start.joins:
            probe.examine(engine.device)
            engine.warm()  # before anybody waits for it
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
        """Check a plan and say so; nothing is touched yet."""
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
                stepped=max(engine.stepped, self._resume_from),  # what it has not loaded yet, it can
                outcome=self._outcome,
                ready=engine.ready == engine.stepped + 1,
            )
        )

    def _go(self, go: m.Go) -> None:
        """Build what the plan asks for beside what is held, move state, acknowledge."""
        proposal, client, engine = self._proposal, self._client, self._engine
        if proposal is None or proposal.plan.epoch != go.epoch or client.park_asked(go.epoch):
            return  # overtaken by a newer epoch, whose order to park is next in the queue
        plan = self._plan = proposal.plan
        self._held = {epoch: held for epoch, held in self._held.items() if epoch in engine.holds} | {plan.epoch: plan}
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
        """Complete what is held under the new plan, from peers or from the checkpoint; returns the bytes received."""
        engine = self._engine
        if proposal.base is not None:
            self.enter("transfer")
            self._client.activity = "compute"  # but for its waits
            updates = go.finish.updates if go.finish is not None else engine.updates
            return engine.move(proposal.plan, self, go.next_iteration - 1, updates)
        if engine.state is not None:
            if self._found is not None:
                checkpoint.load(engine, self._found)
            if engine.stepped != go.next_iteration - 1:
                raise CheckpointError(
                    f"rank {self._rank}: holds the state of iteration {engine.stepped}, "
                    f"the plan of epoch {go.epoch} begins at {go.next_iteration}"
                )
        return 0

    def _begin(self, begin: m.Begin) -> None:
        """The plan is in effect: whatever only the layout before it needed may go, and training goes on."""
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
        """Take the step that others took before the failure, with their coefficients."""
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
            if outcome.save or checkpoints.is_due(self._every, iteration, self._iterations):
                self._save(plan, iteration, outcome.saving)
            if outcome.save and not outcome.saving:
                self._saves_done = self._saves_told
            if outcome.pause and iteration < self._iterations:
                return  # all ranks do: the order to park is here already, or on its way
        client.iteration = self._iterations + 1
        self._evaluate(plan, self._iterations)
        client.activity = "idle"
        client.send(m.Finished(iteration=self._iterations))

    def _evaluate(self, plan: Plan, iteration: int) -> None:
        """Where it is due, the loss of the weights after `iteration`: part of the attempt at the one that follows."""
        client, evaluation = self._client, self._engine.evaluation
        if evaluation is None or iteration <= self._evaluated or not evaluation.is_due(iteration, self._iterations):
            return
        client.activity = "compute"
        loss, tokens = self._engine.evaluate(plan, self)
        client.send(m.Evaluated(epoch=plan.epoch, iteration=iteration, loss=loss, tokens=tokens))

    def _answer_probes(self) -> None:
        """Measure the device, and where all are parked the links; whatever goes wrong is an answer, too."""
        while (asked := self._client.due_probe()) is not None:
            with self._activity("compute"):
                self._client.send(probe.measure(asked, self._rank, self._engine, self._rendezvous))

    def _measure_links(self, plan: Plan, outcome: m.StepOutcome) -> None:
        """Measure links at the moment that was announced to both ends; if it is past, or all are about to park, do not.

        Before anything else that some ranks do between two iterations, so that no rank is late for its peer.
        """
        for asked in self._client.due_link_probes(outcome.iteration):
            if asked.after_iteration == outcome.iteration and not outcome.pause:
                with self._activity("communication"):
                    asked_to_park = partial(self._client.park_asked, plan.epoch)
                    answer = probe.measure_links(asked, self._rank, self._engine, self._rendezvous, asked_to_park)
                    self._client.send(answer)
            else:
                self._client.send(m.Probed(probe=asked.probe, missed=f"told of it after iteration {outcome.iteration}"))

    def _decline_link_probes(self) -> None:
        for asked in self._client.due_link_probes():
            self._client.send(m.Probed(probe=asked.probe, missed="does not train now"))

    def _save_parked(self, save: m.Save) -> None:
        """The job is about to end: write what is held under the plan in effect, after the step that counts."""
        engine, plan = self._engine, self._held.get(save.epoch)
        if plan is None or save.epoch not in engine.holds:
            return
        if engine.acknowledged == save.epoch:
            engine.begin(save.epoch)  # it took effect, and we did not hear of it
        self._finish(save.finish)
        if engine.stepped == save.finish.iteration and self._rank in plan.layout.model_copy(save.replica).ranks:
            began = time.perf_counter()
            with self._activity("checkpoint"):
                self._writer.wait()
                folder = checkpoints.folder_of(self._folder, engine.stepped)
                file, size = checkpoint.save_part(engine, plan, folder, save.replica)
            self._written(plan, engine.stepped, file, size, began)

    def _save_asked(self) -> bool:
        """Whether this rank has to tell the others to write a checkpoint of the iteration under way."""
        self._saves_told = self._client.save_number
        return self._saves_told > self._saves_done

    def _save(self, plan: Plan, iteration: int, saving: bool) -> None:
        """Begin to write this rank's part of a checkpoint; training goes on meanwhile, but for the last one.

        Left out by all while `saving`: the one before is still being written somewhere.
        """
        if self._rank not in plan.layout.model_copy(0).ranks:
            return
        last = iteration == self._iterations
        if saving and not last:
            print(f"checkpoint of iteration {iteration}: left out, the one before is still being written", flush=True)
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
        """Whether a fault's target has no work now, so that the first rank to come by stands in for its moment."""
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
    """The store of torchrun, or of plain environment variables; a private one for a single process."""
    if world == 1:
        return dist.HashStore()
    try:
        store, _, _ = next(dist.rendezvous("env://"))
    except ValueError as error:
        raise LayoutError(
            f"WORLD_SIZE={world} without a rendezvous ({error}); start with torchrun or resihp run"
        ) from error
    return store
