"""The iterations of a simulated worker: forward, backward, sums, step, evaluation and checkpoint.

Plays an iteration as a sequence of calls on the virtual clock until the step is taken, then begins the next iteration.
Never decides about the end of training. Called by `worker`, and by the transition, which ends with the first iteration
of a plan.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from resihp.protocol import messages as m
from resihp.simulator import holdings
from resihp.simulator.invariants.violations import expect

if TYPE_CHECKING:
    from resihp.simulator.machines.worker import Worker


class WorkerTraining:
    """The iterations of one worker under its plan."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.world = worker, worker.world
        self.assessed = 0
        """Last iteration with an evaluation that must not be repeated."""
        self.iteration_began = 0.0

    def begin(self, slower: float = 1.0) -> None:
        worker = self.worker
        interval, done = self.world.scenario.evaluate_every, worker.stepped >= self.world.scenario.iterations
        due = interval and worker.stepped > self.assessed and (done or worker.stepped % interval == 0)
        if due and (done or not self.is_to_pause(slower)):
            worker.activity = "compute"
            worker.faults.enter_phase("forward", self.evaluate, slower)
        else:
            self.train(slower)

    def evaluate(self, slower: float) -> None:
        worker = self.worker
        worker.work(1, "compute")
        enter, key = self.world.collectives.enter, ("evaluation", worker.epoch, worker.stepped)
        worker.later(self.part_s(0.2) * slower, enter, worker, key, functools.partial(self.evaluated, slower))

    def evaluated(self, slower: float) -> None:
        worker = self.worker
        worker.work(1, "compute")
        loss = self.world.collectives.validation_loss(worker.stepped)
        worker.say(m.Evaluated(epoch=worker.epoch, iteration=worker.stepped, loss=loss, tokens=4096))
        self.train(slower)

    def is_to_pause(self, slower: float) -> bool:
        """Return whether the worker must stop after the last step. `slower` above 1 marks the first iteration of a
        plan."""
        outcome = self.worker.outcome
        return outcome is not None and outcome.pause and outcome.iteration == self.worker.stepped and not slower > 1

    def train(self, slower: float) -> None:
        worker = self.worker
        scenario, world = self.world.scenario, self.world
        if worker.stepped >= scenario.iterations:
            worker.activity = "idle"
            worker.say(m.Finished(iteration=worker.stepped))
            world.disturbances.happens("finished", worker.rank)
        if self.is_to_pause(slower):
            worker.pausing = True
            worker.activity = "idle"
            if worker.pause_asked > worker.epoch:
                worker.later(
                    world.rng.choice([0.001, world.rng.uniform(0, 0.3)]), worker.transition.park, worker.pause_asked
                )
            return
        if worker.stepped >= scenario.iterations:
            return
        worker.ready, worker.reduced = False, None
        self.iteration_began = world.now
        worker.activity = "compute"
        assert worker.plan is not None
        dealt, due = worker.plan.micro_batches, scenario.batch_sizes.at(worker.stepped + 1)
        expect(
            dealt == due, f"rank {worker.rank}: iteration {worker.stepped + 1} needs {due} micro-batches, dealt {dealt}"
        )
        if worker.rank == world.active_ranks(worker.plan)[0]:
            work = (512,) * due
            worker.say(m.Workload(epoch=worker.epoch, iteration=worker.stepped + 1, tokens=work, squares=work))
        worker.faults.enter_phase("forward", self.forward, slower)

    def forward(self, slower: float) -> None:
        worker = self.worker
        worker.work(2, "compute")
        worker.later(self.part_s(0.3) * slower, worker.faults.enter_phase, "backward", self.backward, slower)

    def backward(self, slower: float) -> None:
        worker = self.worker
        worker.work(2, "compute")
        worker.later(self.part_s(0.6) * slower, worker.faults.enter_phase, "reduce", self.reduce)

    def reduce(self) -> None:
        worker = self.worker
        assert worker.plan is not None
        collectives = self.world.collectives
        place = collectives.places(worker.plan)[worker.rank]
        worker.work(1, "communication")
        collectives.enter(worker, ("reduce", worker.epoch, worker.stepped + 1, place), self.gradients_reduced)

    def gradients_reduced(self) -> None:
        worker = self.worker
        worker.work(1, "communication")
        worker.ready = True
        enter, key = self.world.collectives.enter, ("sync", worker.epoch, worker.stepped + 1)
        worker.later(self.part_s(0.05), enter, worker, key, self.synchronised)

    def synchronised(self) -> None:
        worker = self.worker
        worker.work(1, "compute")
        worker.reduced = self.world.collectives.outcome_of(worker.plan, worker.stepped + 1)
        self.world.disturbances.happens("sync", worker.rank)
        worker.faults.enter_phase("step", self.step)

    def step(self) -> None:
        self.worker.later(self.world.rng.choice([0.001, self.part_s(0.05), self.part_s(0.5)]), self.stepped_now)

    def stepped_now(self) -> None:
        worker = self.worker
        scenario = self.world.scenario
        assert worker.reduced is not None
        assert worker.plan is not None
        save = worker.reduced.save
        self.take_step(worker.reduced)
        worker.reduced = None
        interval, last = scenario.checkpoint_every, worker.stepped == scenario.iterations
        due = save or (interval and (worker.stepped % interval == 0 or last))
        worker.save_asked = worker.save_asked and not save
        if due and worker.rank in worker.plan.layout.model_copy(0).ranks:
            worker.activity = "checkpoint"
            worker.later(self.world.rng.uniform(0.1, 1.0), self.checkpoint)
        else:
            worker.probes.meet()

    def take_step(self, outcome: m.StepOutcome, reports: bool = True) -> None:
        worker = self.worker
        world = self.world
        worker.stepped, worker.outcome = outcome.iteration, outcome
        basis = worker.epoch if worker.epoch in worker.held else max(worker.held)
        worker.held[basis] = holdings.after(worker.held[basis], outcome)
        worker.work(1, worker.activity)
        world.rules.has_stepped(worker, outcome)
        if reports:
            seconds = world.now - self.iteration_began
            worker.say(m.Stepped(epoch=worker.epoch, outcome=outcome, seconds=seconds, compute_s=seconds / 2))
        world.disturbances.happens("step", worker.rank)

    def checkpoint(self) -> None:
        self.write_part(self.worker.epoch)
        self.worker.probes.meet()

    def write_part(self, epoch: int) -> None:
        worker = self.worker
        folder, file = f"iteration-{worker.held[epoch].iteration}", f"epoch-{epoch}-rank-{worker.rank}"
        self.world.stopping.write(worker, epoch, folder, file)
        worker.say(
            m.CheckpointPart(
                epoch=epoch, iteration=worker.held[epoch].iteration, folder=folder, file=file, bytes=100, seconds=0.5
            )
        )

    def save(self, order: m.Save) -> None:
        """Write the state under the layout of an epoch, after taking the committed step if necessary."""
        worker = self.worker
        holding = worker.held.get(order.epoch)
        if holding is None:
            return
        if holding.iteration == order.finish.iteration - 1 and worker.ready and worker.stepped == holding.iteration:
            worker.held[order.epoch] = holdings.after(holding, order.finish)
            worker.stepped, worker.outcome = order.finish.iteration, order.finish
        if worker.held[order.epoch].iteration == order.finish.iteration:
            self.write_part(order.epoch)

    def part_s(self, share: float) -> float:
        """Draw the duration in seconds of a part of an iteration."""
        return self.world.scenario.iteration_s * share * self.world.rng.uniform(0.7, 1.3)
