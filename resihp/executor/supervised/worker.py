"""The training loop of a worker under a supervisor: carries out orders, and measures iterations for the detector.

Determines the sequence of steps (plan, communicators, iterations, step, report, park). `engine.Engine` computes an
iteration, and `protocol.client` communicates with the supervisor. Never decides about failures. Called by
`resihp.executor.trainer`.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

from resihp.detector.observation import CHUNKS, pack
from resihp.errors import CheckpointError, CommunicatorError, LayoutError, ResihpError
from resihp.executor import devices, versions
from resihp.executor.communicators import COMMUNICATION_TIMEOUT_S
from resihp.executor.compute.device_waits import DeviceWaits, DeviceWatch, mark_on
from resihp.executor.engine import Engine
from resihp.executor.group_store import AgentRendezvous
from resihp.executor.state import checkpoint
from resihp.executor.supervised import probe
from resihp.executor.supervised.activities import during
from resihp.executor.supervised.saving import PartSaver
from resihp.faults import Fault, Phase
from resihp.parallelism.plan import Plan
from resihp.protocol import client as agent
from resihp.protocol import messages as m


class SupervisedWorker:
    """One worker under a supervisor: carries out orders, and reports measurements of its iterations."""

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
        self._loads = resume_from
        """Iteration of the state that this rank can load, or draw if it is 0."""
        self._iterations = iterations
        self._saver = PartSaver(client, engine, iterations, folder, checkpoint_every)
        self._proposal: m.Propose | None = None
        self._plan: Plan | None = None
        """The plan that this rank carries out, or is about to; None before the first."""
        self._go_ahead: m.Go | None = None
        """The order that this rank has acknowledged, until `Begin` arrives; otherwise None."""
        self._held: dict[int, Plan] = {}
        """Plans for which this rank has state, by epoch."""
        self._outcome: m.StepOutcome | None = None
        """Outcome of the last step of this rank; None before the first."""
        self._evaluated = 0
        """Last iteration with an evaluation in the journal when the plan took effect; equal on all ranks."""
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
            engine.warm()  # now, since later other ranks would wait for this rank
        client.declare(
            m.Declare(
                model=engine.model,
                micro_batches=engine.batch_sizes.usual,
                iterations=self._iterations,
                resume_from=self._loads,
                resume_folder="" if self._resume_folder is None else str(self._resume_folder),
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
        """Check a proposed plan, and answer with `Confirm` or `Object`. Nothing else changes."""
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
            return  # superseded: an order to park for a newer epoch is next in the queue
        self._client.send(
            m.Parked(
                epoch=park.epoch,
                holds=engine.holds,
                stepped=max(engine.stepped, self._loads),
                outcome=self._outcome,
                ready=engine.ready == engine.stepped + 1,
            )
        )

    def _go(self, go: m.Go) -> None:
        """Build the new plan's state and communicators beside the present ones, move state, and answer with `Ready`."""
        proposal, client, engine = self._proposal, self._client, self._engine
        if proposal is None or proposal.plan.epoch != go.epoch or client.park_asked(go.epoch):
            return  # superseded: an order to park for a newer epoch is next in the queue
        plan = self._plan = proposal.plan
        self._held = {epoch: old for epoch, old in self._held.items() if epoch in engine.holds} | {plan.epoch: plan}
        client.epoch, client.iteration = go.epoch, go.next_iteration
        began = time.perf_counter()
        try:
            if proposal.base is None:
                self._outcome, self._loads = None, go.next_iteration - 1
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
        """Complete the state under the new plan, from other ranks or from the checkpoint. Return the number of bytes
        received."""
        engine = self._engine
        if proposal.base is not None:
            self.enter("transfer")
            self._client.activity = "compute"  # except while it waits
            updates = go.finish.updates if go.finish is not None else engine.updates
            return engine.move(proposal.plan, self, go.next_iteration - 1, updates)
        if engine.state is not None:
            if proposal.checkpoint:
                checkpoint.load(engine, Path(proposal.checkpoint))
            if engine.stepped != go.next_iteration - 1:
                raise CheckpointError(
                    f"rank {self._rank}: holds the state of iteration {engine.stepped}, "
                    f"the plan of epoch {go.epoch} begins at {go.next_iteration}"
                )
        return 0

    def _begin(self, begin: m.Begin) -> None:
        """Put the plan into effect: release the state that only the previous layout needed, and train."""
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
        """Take a step that other ranks took before the failure, with the outcome that they used."""
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
                saving=self._saver.is_busy,
                save=self._saver.is_asked,
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
            self._saver.after_step(plan, iteration, outcome)
            if outcome.pause and iteration < self._iterations:
                return  # all ranks pause; the order to park has arrived or is in flight
        client.iteration = self._iterations + 1
        self._evaluate(plan, self._iterations)
        client.activity = "idle"
        client.send(m.Finished(iteration=self._iterations))

    def _evaluate(self, plan: Plan, iteration: int) -> None:
        """Compute and report the loss of the weights after `iteration`, if an evaluation is due.

        This is part of the attempt at the next iteration.
        """
        client, evaluation = self._client, self._engine.evaluation
        if evaluation is None or iteration <= self._evaluated or not evaluation.is_due(iteration, self._iterations):
            return
        client.activity = "compute"
        loss, tokens = self._engine.evaluate(plan, self)
        client.send(m.Evaluated(epoch=plan.epoch, iteration=iteration, loss=loss, tokens=tokens))

    def _answer_probes(self) -> None:
        """Carry out all pending probes, including links if all ranks are parked. A failed measurement is reported as
        well."""
        while (request := self._client.due_probe()) is not None:
            with during(self._client, "compute"):
                self._client.send(probe.measure(request, self._rank, self._engine, self._rendezvous))

    def _measure_links(self, plan: Plan, outcome: m.StepOutcome) -> None:
        """Carry out the link probes announced for this iteration. Decline if the iteration is past or all ranks are
        about to park.

        This precedes all other work that only some ranks do between two iterations, so that no rank is late.
        """
        for request in self._client.due_link_probes(outcome.iteration):
            if request.after_iteration == outcome.iteration and not outcome.pause:
                with during(self._client, "communication"):
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
        """Write a checkpoint while parked, of the state under the plan in effect, after completing the committed
        step."""
        engine, plan = self._engine, self._held.get(save.epoch)
        if plan is None or save.epoch not in engine.holds:
            return
        if engine.acknowledged == save.epoch:
            engine.begin(save.epoch)  # the plan took effect, but its order to begin did not arrive here
        self._finish(save.finish)
        if engine.stepped == save.finish.iteration and self._rank in plan.layout.model_copy(save.replica).ranks:
            self._saver.save_parked(plan, save.replica)

    def _absent(self, fault: Fault) -> bool:
        """Return whether a fault's target has no work now. If so, the first rank that reaches the fault's phase
        replaces it."""
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
