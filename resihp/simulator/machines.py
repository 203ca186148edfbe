"""The simulated machines: agents with their connections, workers that train, park, resume and die. The ground truth.

A `Worker` behaves as `resihp.protocol.client` and the trainer promise. Every choice that they leave open (when, in
which order, before or after) is drawn from the seed. Its assertions about orders are the conditions for a safe step.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from resihp.controller import interface as api
from resihp.faults import Fault
from resihp.parallelism.plan import Plan
from resihp.parallelism.transfers import Base
from resihp.protocol import messages as m
from resihp.simulator import holdings
from resihp.simulator.holdings import Holding
from resihp.simulator.invariants.violations import expect
from resihp.simulator.scenarios.scenario import NEVER_S, SIGKILL

if TYPE_CHECKING:
    from resihp.simulator.world import World


@dataclass(eq=False)
class SimNode:
    """One agent and its connection, first in, first out in each direction."""

    name: str
    ranks: list[int]
    devices: int
    alive: bool = True
    dropped: bool = False
    silent: bool = False
    frozen: bool = False
    up: deque[api.AnyEvent] = field(default_factory=deque)
    down: deque[tuple[int, m.WorkerOrder | int]] = field(default_factory=deque)
    up_at: float = 0.0
    down_at: float = 0.0
    owed_up: int = 0
    owed_down: int = 0
    silent_since: float = NEVER_S
    silences: int = 0
    last_delivered: float = 0.0
    last_beat: float = 0.0
    loss_reported: bool = False
    arrived: bool = True
    """Its agent has connected to a supervisor, or is about to for the first time."""
    joined: bool = False
    """The present supervisor has its inventory."""
    ended: dict[int, int] = field(default_factory=dict)
    epoch: int = 0
    """Newest epoch in any order that arrived."""


class Worker:
    """The true state of one process: its computations, steps and holdings."""

    assessed = 0
    """Last iteration whose evaluation must not be repeated."""

    slow = False
    """Whether its device was slow in its last measurement."""

    def __init__(self, world: World, rank: int, node: SimNode, device: int, joins: bool = False) -> None:
        self.world, self.rank, self.node, self.device, self.joins = world, rank, node, device, joins
        self.spawned = False
        self.alive = True
        self.died_at = NEVER_S
        self.state = "S"
        self.frozen: Literal["", "stop", "mute", "hang"] = ""
        self.frozen_at = 0.0
        self.frozen_until = 0.0
        self.thawed_at = -NEVER_S
        self.deferred: list[tuple[int | None, Callable[..., None], tuple[Any, ...]]] = []
        self.generation = 0
        self.seen = 0
        self.epoch = 0
        self.proposed: Plan | None = None
        self.base: Base | None = None
        self.held: dict[int, Holding] = {}
        """State by the epoch of its layout; two of them between `Ready` and `Begin`."""
        self.upcoming = 0
        self.nodes: dict[int, str] = {}
        self.pause_asked, self.save_asked = 0, False
        self.pausing = False
        """Stopped between two iterations, because some rank was asked to."""
        self.plan: Plan | None = None
        self.active = False
        self.stepped = world.scenario.resume_from
        self.outcome: m.StepOutcome | None = None
        self.reduced: m.StepOutcome | None = None
        """Result of the last synchronisation of iteration stepped + 1, once this rank has it."""
        self.ready = False
        self.primitives = 0
        self.progress_at = 0.0
        self.activity: Any = "starting"
        self.iteration_began = 0.0
        self.armed = {fault.id: fault for fault in world.scenario.faults}
        self.held_by: int | None = None
        self.resume: tuple[Callable[..., None], tuple[Any, ...]] | None = None
        self.waits: tuple[Any, ...] | None = None
        self.raised = False
        self.fenced = False
        self.status: int | None = None
        self.gone = False
        """Dead, with its connections closed."""
        self.answered_at = 0.0
        self.ordered_at = 0.0
        self.shown = -1
        self.shown_at = 0.0
        """Number of primitives that the controller knows of, and since when."""
        self.objections = 0
        self.forgets = False
        """Loses its state when it parks."""
        self.steps: deque[m.Stepped] = deque(maxlen=4096)
        self.said: dict[type, m.WorkerMessage] = {}
        """Messages that its agent keeps for another supervisor: steps, and the last of each other report."""
        self.announced: list[m.Probe] = []
        """Probes of links, announced for the end of an iteration."""
        self.halted = False
        self.injected = False
        self.stumbles = ""  # error that it raises instead of declaring
        self.died_with_node = False

    # time

    def later(self, delay: float, function: Callable[..., None], *arguments: Any) -> None:
        """Call `function` after `delay`, unless the process dies or receives a new order first."""
        self.world.at(delay, self._go_on, self.generation, function, arguments)

    def _go_on(self, generation: int | None, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if not self.alive or (generation is not None and generation != self.generation):
            return
        if self.frozen:
            self.deferred.append((generation, function, arguments))
        else:
            function(*arguments)

    def freeze(self, kind: Literal["stop", "mute", "hang"], seconds: float) -> None:
        if not self.alive or not self.spawned:
            return
        if not self.frozen or kind == "stop":
            self.frozen, self.frozen_at = kind, self.world.now if not self.frozen else self.frozen_at
            self.state = {"stop": "T", "mute": "R", "hang": "R"}[kind]
        self.frozen_until = max(self.frozen_until, self.world.now + seconds)
        if seconds < NEVER_S:
            self.world.at(seconds, self.thaw)

    def thaw(self) -> None:
        if not self.alive or not self.frozen or self.world.now < self.frozen_until:
            return
        self.frozen, self.state, self.thawed_at = "", "S", self.world.now
        deferred, self.deferred = self.deferred, []
        for generation, function, arguments in deferred:
            self._go_on(generation, function, arguments)

    def work(self, chunks: int, activity: str) -> None:
        self.primitives += chunks
        self.progress_at = self.world.now
        self.activity = activity

    # life and death

    def start(self) -> None:
        if not self.node.alive or not self.alive:
            return
        self.spawned = True
        world = self.world
        world.up(
            self.node,
            api.WorkerSpawned(rank=self.rank, node=self.node.name, device=self.device, pid=1000 + self.rank),
        )
        world.happens("join" if self.joins else "spawn", self.rank)
        self.later(world.rng.uniform(0.5, 2.5), self.declare)

    def declare(self) -> None:
        scenario, world = self.world.scenario, self.world
        fate = world.fate_of(self)
        if scenario.early_exit is not None:
            self.die(scenario.early_exit)
            return
        if scenario.refuses == self.rank or fate == "refuses":
            self.say(m.Refuse(reason="the data set is empty; choose another"))
            self.later(0.1, self.die, 2)
            return
        if fate == "dies":
            self.die(world.rng.choice([1, -SIGKILL, 0]))
            return
        if fate == "raises":
            self.throw("ImportError: no such module")
            return
        if fate == "hangs":
            return
        if self.stumbles:
            self.throw(self.stumbles)
            return
        model = scenario.model
        if scenario.odd_declare == self.rank:
            model = msgspec.structs.replace(model, hidden=model.hidden * 2)
        self.activity = "idle"
        self.say(
            m.Declare(
                model=model,
                micro_batches=scenario.micro_batches,
                iterations=scenario.iterations,
                resume_from=scenario.resume_from if not self.joins else world.rng.randint(0, scenario.iterations),
                fingerprint="other" if fate == "odd" else "same",
                ramp=scenario.ramp,
                evaluates=scenario.evaluate_every > 0,
            )
        )
        world.happens("joined" if self.joins else "declare", self.rank)

    def say(self, message: m.WorkerMessage) -> None:
        if isinstance(message, m.Stepped):
            self.steps.append(message)
        elif not isinstance(message, m.Workload):
            self.said[type(message)] = message
        self.world.up(self.node, api.WorkerSaid(rank=self.rank, message=message))

    def die(self, status: int, closes_connections: bool = True) -> None:
        """End the process. Without `closes_connections` its peers do not notice."""
        if not self.alive:
            return
        self.alive = False
        self.died_at = self.world.now
        self.status = status
        self.generation += 1
        self.deferred.clear()
        if self.node.alive:
            if self.spawned:
                self.node.ended[self.rank] = status
            self.world.up(self.node, api.WorkerExited(rank=self.rank, status=status))
        self.gone = closes_connections
        if closes_connections:
            self.world.peers_notice(self)

    def throw(self, error: str) -> None:
        if self.alive and self.spawned and not self.raised:
            self.raised = True
            self.generation += 1
            self.say(m.Raised(iteration=self.stepped + 1, error=error, traceback=f"Traceback\n{error}"))
            self.later(self.world.rng.uniform(0.0, 0.2), self.die, 1)

    # orders

    def hear(self, order: m.WorkerOrder) -> None:
        self.node.epoch = max(
            self.node.epoch, order.plan.epoch if isinstance(order, m.Propose) else getattr(order, "epoch", 0)
        )
        if isinstance(order, m.Park | m.Begin):
            for kind in (m.Stuck, m.Finished, m.Ready, m.Parked, m.Confirm):
                self.said.pop(kind, None)
        elif isinstance(order, m.FaultGo):
            self.said.pop(m.FaultDue, None)
        self._go_on(None, self._obey, (order,))

    def _obey(self, order: m.WorkerOrder) -> None:
        rng = self.world.rng
        if self.halted or self.raised:
            return
        match order:
            case m.Park(after_iteration=True):
                if order.epoch > self.seen:
                    self.pause_asked = max(order.epoch, self.pause_asked)
                    if self.pausing or not self.active:
                        self.later(rng.choice([0.001, rng.uniform(0, 0.3)]), self.park, order.epoch)
            case m.Park():
                if order.epoch > self.seen:
                    self.seen = order.epoch
                    self._let_go(order.epoch)
            case m.Propose():
                if order.plan.epoch >= self.seen:
                    self.seen = order.plan.epoch
                    self.proposed, self.base, self.nodes = order.plan, order.base, order.nodes
                    self.settle(order.base)
                    self.later(rng.uniform(0.0, 0.05), self.confirm, order.plan)
            case m.Go():
                if order.epoch >= self.seen:
                    self.go(order)
            case m.Begin():
                if order.epoch >= self.seen:
                    self.begin_plan(order)
            case m.FaultGo():
                self.fault_go(order)
            case m.Save():
                expect(self.waits is None and self.reduced is None, f"rank {self.rank}: saves while it trains")
                self.later(rng.choice([0.01, rng.uniform(0, 1.0), rng.uniform(0, 4.0)]), self.save, order)
            case m.SaveNext():
                self.save_asked = True
            case m.Probe() if order.after_iteration is not None:
                self.announced.append(order)
                if self.activity in ("parked", "idle"):
                    self.decline()
            case m.Probe():
                self.later(rng.choice([0.01, rng.uniform(0, 0.5)]), self.measure, order)
            case m.Slow():
                pass
            case m.Halt():
                self.halted = True
                self.generation += 1
                self.activity = "idle"
                self.later(rng.uniform(0.0, 0.5), self.die, 0)
            case _:
                raise AssertionError(f"the controller does not send {order}")

    def measure(self, order: m.Probe) -> None:
        rng, unfit = self.world.rng, self.world.scenario.unfit
        if rng.random() < unfit / 4:
            return
        bad = self.slow = rng.random() < (0.9 if self.slow else unfit)  # most slow devices stay slow
        flops = rng.uniform(0.2, 0.8) if bad else rng.uniform(0.97, 1.03)
        memory_bytes = 1.0
        if self.world.scenario.noise and self.world.record.plan is not None:
            disturbed = rng.random() < self.world.scenario.noise
            memory_bytes = rng.uniform(0.54, 0.8) if disturbed else rng.uniform(0.9, 1.0)
        peers = [pair[pair[0] == self.rank] for round_ in order.pairs for pair in round_ if self.rank in pair]
        self.say(
            m.Probed(
                probe=order.probe,
                speed=m.Speed(flops=flops, memory_bytes=memory_bytes),
                transfers=tuple(m.Transfer(peer=peer, seconds=rng.uniform(0.9, 1.1)) for peer in peers),
                seconds=0.1,
                error="the device fails" if rng.random() < unfit / 4 else "",
                shared=self.world.scenario.shared,
            )
        )

    def decline(self) -> None:
        for order in self.announced:
            self.say(m.Probed(probe=order.probe, missed="does not train now"))
        self.announced.clear()

    def meet(self) -> None:
        """Between two iterations: measure an announced link, and wait for its peer, perhaps in vain."""
        due = [order for order in self.announced if (order.after_iteration or 0) <= self.stepped]
        if not due:
            self.begin()
            return
        order = due[0]
        self.announced.remove(order)
        assert self.outcome is not None
        if order.after_iteration != self.stepped or self.outcome.pause:
            self.say(m.Probed(probe=order.probe, missed="order received too late"))
            self.meet()
            return
        self.activity = "communication"
        self.world.come(self, order)

    def met(self, order: m.Probe, came: bool) -> None:
        """Report the measured links, or that a peer did not come."""
        self.world.measuring[order.probe].pop(self.rank, None)
        peers = [a + b - self.rank for round_ in order.pairs for a, b in round_ if self.rank in (a, b)]
        share = 3.0 if self.world.rng.random() < self.world.scenario.unfit else 1.0
        transfers = tuple(m.Transfer(peer=peer, seconds=share * self.world.rng.uniform(0.9, 1.1)) for peer in peers)
        result: dict[str, Any] = {"transfers": transfers} if came else {"missed": "not all came in time"}
        self.say(m.Probed(probe=order.probe, seconds=0.1, shared=self.world.scenario.shared, **result))
        self.meet()

    def _let_go(self, epoch: int) -> None:
        """Park: a step that has begun is either taken or not begun at all; gradients stay."""
        rng = self.world.rng
        self.generation += 1
        self.waits = self.resume = None
        self.held_by = None
        self.pausing = False
        if self.reduced is not None and rng.random() < 0.5:
            self.take_step(self.reduced, reports=self.world.scenario.seed % 3 != 1)
        self.reduced = None
        self.activity = "parked"
        delay_s = rng.choice([0.001, 0.01, rng.uniform(0, 0.3), rng.uniform(0, 2.0)])
        self.later(delay_s, self.enter_phase, "park", self.park, epoch)

    def park(self, epoch: int) -> None:
        self.activity = "parked"
        self.decline()
        if self.forgets:
            self.held, self.ready, self.forgets = {}, False, False
        self.say(
            m.Parked(
                epoch=epoch,
                holds=tuple(sorted(self.held)),
                stepped=self.stepped,
                outcome=self.outcome,
                ready=self.ready,
            )
        )
        self.world.happens("parked", self.rank)

    def confirm(self, plan: Plan) -> None:
        scenario = self.world.scenario
        if plan.epoch <= scenario.agrees_up_to:
            self.say(m.Confirm(epoch=plan.epoch, digest=plan.digest))
        elif scenario.objects == self.rank and self.objections < scenario.objections:
            self.objections += 1
            self.say(m.Object(epoch=plan.epoch, reason="too little memory"))
        else:
            differs = scenario.other_digest == self.rank and self.objections < scenario.objections
            self.objections += differs
            self.say(m.Confirm(epoch=plan.epoch, digest="0" * 64 if differs else plan.digest))

    def settle(self, base: Base | None) -> None:
        """Keep the holding of a proposal's base; the other one is obsolete."""
        if base is None:
            kept: dict[int, Holding] = {}
        else:
            kept = {epoch: holding for epoch, holding in self.held.items() if epoch == base.epoch}
        for epoch in self.held.keys() - kept.keys():
            self.world.rules.freed(self, epoch, None if base is None else base.epoch)
        self.held = kept

    def go(self, go: m.Go) -> None:
        """Finish the step on the old holding, then build the new one beside it and transfer state."""
        world, base, plan = self.world, self.base, self.proposed
        expect(plan is not None and plan.epoch == go.epoch, f"rank {self.rank}: go to an epoch it never confirmed")
        assert plan is not None
        self.seen = self.epoch = go.epoch
        self.upcoming = go.next_iteration
        self.plan = plan
        self.generation += 1
        self.active = self.rank in world.active_ranks(plan)
        self.pausing, self.pause_asked, self.reduced = False, 0, None
        if base is None:
            self.held = {}
            self.stepped, self.outcome = world.scenario.resume_from, None
        elif self.rank not in base.survivors:
            self.held.pop(base.epoch, None)
        else:
            expect(base.epoch in self.held, f"rank {self.rank}: holds {list(self.held)}, asked for {base.epoch}")
            self.finish(go)
        self.ready = False
        self.activity = "communication"
        self.later(world.rng.uniform(0.01, 0.3), self.enter_phase, "groups", self.build)

    def finish(self, go: m.Go) -> None:
        """Take the step that counts, given the state of the iteration before and its gradients."""
        if go.finish is not None:
            done = go.finish.iteration
            if self.stepped == done:
                same = self.outcome is None or self.outcome == go.finish
                expect(same, f"rank {self.rank}: told to finish {done} with another outcome than it took")
            else:
                expect(self.stepped == done - 1, f"rank {self.rank}: at {self.stepped}, told to finish {done}")
                expect(self.ready, f"rank {self.rank}: told to finish {done} without reduced gradients")
                self.take_step(go.finish, reports=self.world.scenario.seed % 3 != 0)
        expect(
            go.next_iteration == self.stepped + 1,
            f"rank {self.rank}: is after {self.stepped}, told to begin {go.next_iteration}",
        )

    def build(self) -> None:
        self.world.enter(self, ("build", self.epoch), self.built)

    def built(self) -> None:
        self.work(1, "communication")
        self.later(self.world.rng.uniform(0.0, 0.1), self.enter_phase, "transfer", self.transfer)

    def transfer(self) -> None:
        chunks = self.world.rng.choice([0, 0, 1, 3])
        self.world.enter(self, ("transfer", self.epoch), functools.partial(self.receive, chunks))

    def receive(self, chunks: int) -> None:
        """Receive one chunk after the other; each is a sign of life."""
        self.work(1, "communication")
        if chunks:
            self.later(self.world.scenario.chunk_s * self.world.rng.random(), self.receive, chunks - 1)
        else:
            self.acknowledge()

    def acknowledge(self) -> None:
        rng, world = self.world.rng, self.world
        assert self.plan is not None
        moved = 0
        if self.active:
            self.held[self.epoch], moved = world.assemble(self)
            self.stepped = self.held[self.epoch].iteration
            if self.outcome is not None and self.outcome.iteration != self.stepped:
                self.outcome = None
        self.say(
            m.Ready(
                epoch=self.epoch,
                groups_s=rng.uniform(0, 1),
                state_s=rng.uniform(0, 1),
                bytes_received=moved,
                extra_bytes=moved // 2,
            )
        )
        self.world.happens("ready", self.rank)

    def begin_plan(self, order: m.Begin) -> None:
        """Put the plan into effect: release everything that it does not need."""
        epoch = order.epoch
        if epoch != self.epoch or self.plan is None or self.plan.epoch != epoch:
            return
        self.seen = epoch
        for old in self.held.keys() - {epoch}:
            self.world.rules.freed(self, old, epoch)
        self.held = {epoch: self.held[epoch]} if self.active else {}
        if not self.active:
            self.activity = "idle"
            return
        self.assessed = order.evaluated
        self.world.happens("resumed", self.rank)
        self.work(1, "communication")
        self.later(self.world.rng.uniform(0, 0.01), self.enter_phase, "resume", self.begin, 2.0)

    # an iteration

    def begin(self, slower: float = 1.0) -> None:
        interval, done = self.world.scenario.evaluate_every, self.stepped >= self.world.scenario.iterations
        due = interval and self.stepped > self.assessed and (done or self.stepped % interval == 0)
        if due and (done or not self.is_to_pause(slower)):
            self.activity = "compute"
            self.enter_phase("forward", self.evaluate, slower)
        else:
            self.train(slower)

    def evaluate(self, slower: float) -> None:
        self.work(1, "compute")
        meeting = ("evaluation", self.epoch, self.stepped)
        self.later(self._part(0.2) * slower, self.world.enter, self, meeting, functools.partial(self.evaluated, slower))

    def evaluated(self, slower: float) -> None:
        self.work(1, "compute")
        loss = self.world.validation_loss(self.stepped)
        self.say(m.Evaluated(epoch=self.epoch, iteration=self.stepped, loss=loss, tokens=4096))
        self.train(slower)

    def is_to_pause(self, slower: float) -> bool:
        """Return whether the last step was the one to stop after; `slower` > 1: first iteration of a plan."""
        outcome = self.outcome
        return outcome is not None and outcome.pause and outcome.iteration == self.stepped and not slower > 1

    def train(self, slower: float) -> None:
        scenario, world = self.world.scenario, self.world
        if self.stepped >= scenario.iterations:
            self.activity = "idle"
            self.say(m.Finished(iteration=self.stepped))
            world.happens("finished", self.rank)
        if self.is_to_pause(slower):
            self.pausing = True
            self.activity = "idle"
            if self.pause_asked > self.epoch:
                self.later(world.rng.choice([0.001, world.rng.uniform(0, 0.3)]), self.park, self.pause_asked)
            return
        if self.stepped >= scenario.iterations:
            return
        self.ready, self.reduced = False, None
        self.iteration_began = world.now
        self.activity = "compute"
        assert self.plan is not None
        dealt, due = self.plan.micro_batches, scenario.batch_sizes.at(self.stepped + 1)
        expect(dealt == due, f"rank {self.rank}: iteration {self.stepped + 1} needs {due} micro-batches, dealt {dealt}")
        if self.rank == world.active_ranks(self.plan)[0]:
            work = (512,) * due
            self.say(m.Workload(epoch=self.epoch, iteration=self.stepped + 1, tokens=work, squares=work))
        self.enter_phase("forward", self.forward, slower)

    def forward(self, slower: float) -> None:
        self.work(2, "compute")
        self.later(self._part(0.3) * slower, self.enter_phase, "backward", self.backward, slower)

    def backward(self, slower: float) -> None:
        self.work(2, "compute")
        self.later(self._part(0.6) * slower, self.enter_phase, "reduce", self.reduce)

    def reduce(self) -> None:
        assert self.plan is not None
        place = self.world.places(self.plan)[self.rank]
        self.work(1, "communication")
        self.world.enter(self, ("reduce", self.epoch, self.stepped + 1, place), self.gradients_reduced)

    def gradients_reduced(self) -> None:
        self.work(1, "communication")
        self.ready = True
        self.later(self._part(0.05), self.world.enter, self, ("sync", self.epoch, self.stepped + 1), self.synchronised)

    def synchronised(self) -> None:
        self.work(1, "compute")
        self.reduced = self.world.outcome_of(self.plan, self.stepped + 1)
        self.world.happens("sync", self.rank)
        self.enter_phase("step", self.step)

    def step(self) -> None:
        self.later(self.world.rng.choice([0.001, self._part(0.05), self._part(0.5)]), self.stepped_now)

    def stepped_now(self) -> None:
        scenario = self.world.scenario
        assert self.reduced is not None
        assert self.plan is not None
        save = self.reduced.save
        self.take_step(self.reduced)
        self.reduced = None
        interval, last = scenario.checkpoint_every, self.stepped == scenario.iterations
        due = save or (interval and (self.stepped % interval == 0 or last))
        self.save_asked = self.save_asked and not save
        if due and self.rank in self.plan.layout.model_copy(0).ranks:
            self.activity = "checkpoint"
            self.later(self.world.rng.uniform(0.1, 1.0), self.checkpoint)
        else:
            self.meet()

    def take_step(self, outcome: m.StepOutcome, reports: bool = True) -> None:
        world = self.world
        self.stepped, self.outcome = outcome.iteration, outcome
        basis = self.epoch if self.epoch in self.held else max(self.held)
        self.held[basis] = holdings.after(self.held[basis], outcome)
        self.work(1, self.activity)
        world.rules.has_stepped(self, outcome)
        if reports:
            seconds = world.now - self.iteration_began
            self.say(m.Stepped(epoch=self.epoch, outcome=outcome, seconds=seconds, compute_s=seconds / 2))
        world.happens("step", self.rank)

    def checkpoint(self) -> None:
        self.write_part(self.epoch)
        self.meet()

    def write_part(self, epoch: int) -> None:
        folder, file = f"iteration-{self.held[epoch].iteration}", f"epoch-{epoch}-rank-{self.rank}"
        self.world.stopping.write(self, epoch, folder, file)
        self.say(
            m.CheckpointPart(
                epoch=epoch, iteration=self.held[epoch].iteration, folder=folder, file=file, bytes=100, seconds=0.5
            )
        )

    def save(self, order: m.Save) -> None:
        """Write the state of an epoch, once it has taken the step that counts."""
        holding = self.held.get(order.epoch)
        if holding is None:
            return
        if holding.iteration == order.finish.iteration - 1 and self.ready and self.stepped == holding.iteration:
            self.held[order.epoch] = holdings.after(holding, order.finish)
            self.stepped, self.outcome = order.finish.iteration, order.finish
        if self.held[order.epoch].iteration == order.finish.iteration:
            self.write_part(order.epoch)

    def _part(self, share: float) -> float:
        return self.world.scenario.iteration_s * share * self.world.rng.uniform(0.7, 1.3)

    def stuck(self, error: str) -> None:
        """Report a failed transfer."""
        if self.waits is None:
            return
        self.generation += 1
        self.waits = None
        self.activity = "communication"
        self.say(m.Stuck(epoch=self.epoch, error=error))
        self.pausing = True
        if self.pause_asked > self.epoch:
            self.later(0.001, self.park, self.pause_asked)

    # faults on purpose

    def enter_phase(self, phase: str, function: Callable[..., None], *arguments: Any) -> None:
        for fault in self.armed.values():
            coming = self.upcoming if phase in ("groups", "transfer", "resume") else self.stepped + 1
            if fault.iteration == coming and fault.phase == phase and self._concerns(fault):
                self.held_by, self.resume = fault.id, (self.enter_phase, (phase, function, *arguments))
                self.say(m.FaultDue(fault=fault.id))
                return
        function(*arguments)

    def _concerns(self, fault: Fault) -> bool:
        """Return whether this rank is the target, or stands in for a target without work."""
        active = self.world.active_ranks(self.plan) if self.plan is not None else ()
        if fault.rank is not None:
            return fault.rank == self.rank or fault.rank not in active
        return fault.node == self.node.name or not any(self.world.workers[r].node.name == fault.node for r in active)

    def fault_go(self, order: m.FaultGo) -> None:
        fault = self.armed.pop(order.fault, None)
        if fault is None:
            return
        if order.fire and fault.kind == "hang":
            self.injected = True
            self.freeze("hang", NEVER_S)
        elif order.fire and fault.kind == "raise":
            self.injected = True
            self.throw("injected by resihp")
        elif not order.fire and self.held_by == order.fault and self.resume is not None:
            self.held_by = None
            (function, arguments), self.resume = self.resume, None
            function(*arguments)


@dataclass
class Meeting:
    """One collective: the ranks that have come, and whether it is over."""

    come: dict[int, Callable[[], None]] = field(default_factory=dict)
    over: bool = False
    over_at: float = 0.0
    pending: set[int] = field(default_factory=set)
    broken: bool = False
