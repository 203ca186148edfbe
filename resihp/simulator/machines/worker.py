"""One simulated worker process: its true state, its life and death, and the dispatch of its orders.

Starts, declares its model, sends messages, freezes and dies. Never trains itself: training, transitions, probes and
injected faults are separate objects, which it owns. Called by `world`, which delivers orders and signals.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from resihp.controller import interface as api
from resihp.parallelism.plan import Plan
from resihp.parallelism.transfers import Base
from resihp.protocol import messages as m
from resihp.simulator.holdings import Holding
from resihp.simulator.invariants.violations import expect
from resihp.simulator.machines.faults import WorkerFaults
from resihp.simulator.machines.probes import WorkerProbes
from resihp.simulator.machines.sim_node import SimNode
from resihp.simulator.machines.training import WorkerTraining
from resihp.simulator.machines.transition import WorkerTransition
from resihp.simulator.scenarios.scenario import NEVER_S, SIGKILL, Fate

if TYPE_CHECKING:
    from resihp.simulator.world import World


class Worker:
    """The true state of one worker process: its computations, steps and slices."""

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
        self.base: Base | None = None
        self.held: dict[int, Holding] = {}
        """State of the worker, by the epoch of its layout. There are two entries between `Ready` and `Begin`."""
        self.nodes: dict[int, str] = {}
        self.pause_asked, self.save_asked = 0, False
        self.pausing = False
        """Whether the worker has stopped between two iterations because some rank was ordered to."""
        self.plan: Plan | None = None
        self.active = False
        self.stepped = world.scenario.resume_from
        self.outcome: m.StepOutcome | None = None
        self.reduced: m.StepOutcome | None = None
        """Outcome of the last synchronisation of iteration stepped + 1, once this rank has it; otherwise None."""
        self.ready = False
        self.primitives = 0
        self.progress_at = 0.0
        self.activity: Any = "starting"
        self.waits: tuple[Any, ...] | None = None
        self.raised = False
        self.fenced = False
        self.status: int | None = None
        self.gone = False
        """Whether the process is dead and its connections are closed."""
        self.answered_at = 0.0
        self.ordered_at = 0.0
        self.shown = -1
        self.shown_at = 0.0
        """Time since which the controller knows the number of primitives in `shown`."""
        self.forgets = False
        """Whether the worker loses its state when it parks next."""
        self.steps: deque[m.Stepped] = deque(maxlen=4096)
        self.said: dict[type, m.WorkerMessage] = {}
        """Messages that the agent stores for a new supervisor: the last of each kind except steps, which are in
        `steps`."""
        self.halted = False
        self.injected = False
        self.stumbles = ""  # error that the script raises before it declares; empty for none
        self.died_with_node = False
        self.faults = WorkerFaults(self)
        self.probes = WorkerProbes(self)
        self.training = WorkerTraining(self)
        self.transition = WorkerTransition(self)

    # time

    def later(self, delay: float, function: Callable[..., None], *arguments: Any) -> None:
        """Call `function` after `delay` seconds, unless the process dies or its generation changes first."""
        self.world.at(delay, self.proceed, self.generation, function, arguments)

    def proceed(self, generation: int | None, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """Call `function` unless the process is dead or its generation has changed. If it is frozen, call it after the
        thaw."""
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
            self.proceed(generation, function, arguments)

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
        world.network.up(
            self.node,
            api.WorkerSpawned(rank=self.rank, node=self.node.name, device=self.device, pid=1000 + self.rank),
        )
        world.disturbances.happens("join" if self.joins else "spawn", self.rank)
        self.later(world.rng.uniform(0.5, 2.5), self.declare)

    @property
    def fate(self) -> Fate:
        """The scenario's outcome for a process that joins later: it joins, refuses, dies or hangs, for example.

        A process of the first start is always `fine`.
        """
        if not self.joins:
            return "fine"
        scenario = self.world.scenario
        number = self.rank - scenario.nodes * scenario.gpus_per_node
        return scenario.fates[max(0, min(number, len(scenario.fates) - 1))]

    def declare(self) -> None:
        scenario, world = self.world.scenario, self.world
        fate = self.fate
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
                resume_folder=f"iteration-{scenario.resume_from}" if scenario.resume_from else "",
                fingerprint="other" if fate == "odd" else "same",
                ramp=scenario.ramp,
                evaluates=scenario.evaluate_every > 0,
            )
        )
        world.disturbances.happens("joined" if self.joins else "declare", self.rank)

    def say(self, message: m.WorkerMessage) -> None:
        if isinstance(message, m.Stepped):
            self.steps.append(message)
        elif not isinstance(message, m.Workload):
            self.said[type(message)] = message
        self.world.network.up(self.node, api.WorkerSaid(rank=self.rank, message=message))

    def die(self, status: int, closes_connections: bool = True) -> None:
        """End the process. Without `closes_connections`, its peers do not notice."""
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
            self.world.network.up(self.node, api.WorkerExited(rank=self.rank, status=status))
        self.gone = closes_connections
        if closes_connections:
            self.world.collectives.peers_notice(self)

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
        self.proceed(None, self._obey, (order,))

    def _obey(self, order: m.WorkerOrder) -> None:
        if self.halted or self.raised:
            return
        match order:
            case m.Park(after_iteration=True):
                self.transition.pause(order)
            case m.Park():
                if order.epoch > self.seen:
                    self.seen = order.epoch
                    self.transition.let_go(order.epoch)
            case m.Propose():
                self.transition.propose(order)
            case m.Go():
                if order.epoch >= self.seen:
                    self.transition.go(order)
            case m.Begin():
                if order.epoch >= self.seen:
                    self.transition.begin_plan(order)
            case m.FaultGo():
                self.faults.fault_go(order)
            case m.Save():
                expect(self.waits is None and self.reduced is None, f"rank {self.rank}: saves while it trains")
                rng = self.world.rng
                self.later(rng.choice([0.01, rng.uniform(0, 1.0), rng.uniform(0, 4.0)]), self.training.save, order)
            case m.SaveNext():
                self.save_asked = True
            case m.Probe():
                self.probes.obey(order)
            case m.Slow():
                pass
            case m.Halt():
                self.halted = True
                self.generation += 1
                self.activity = "idle"
                self.later(self.world.rng.uniform(0.0, 0.5), self.die, 0)
            case _:
                raise AssertionError(f"the controller does not send {order}")

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
            self.later(0.001, self.transition.park, self.pause_asked)
