"""A whole job on a virtual clock around the real controller. It plays all events in the order of their times.

Passes each event to the controller, makes the rules check the answer, and carries the answer out. Machines, Slurm and
disturbances are simulated by modules of their own, never here. Called by `harness`, tests and benchmarks.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from resihp.controller import Controller
from resihp.controller import interface as api
from resihp.controller.fail_stop.onsets import MAX_KEPT_COMMITS, Commit
from resihp.controller.interface import Dependencies
from resihp.errors import ProtocolError, ResihpError
from resihp.faults import Fault
from resihp.parallelism.layout import Layout
from resihp.parallelism.ownership import ParameterSpec
from resihp.parallelism.plan import Plan
from resihp.parallelism.transfers import Base, Move, moves
from resihp.protocol import messages as m
from resihp.record.fold import apply
from resihp.record.journal import AnyEntry, CheckpointCommitted, FailureFound, IterationCommitted, PlanDecided
from resihp.record.state import JobRecord
from resihp.settings import Settings
from resihp.simulator.actions import carry_out, number_ranks
from resihp.simulator.allocation import Allocation
from resihp.simulator.disturbances import Disturbances
from resihp.simulator.false_alarms import Wolf
from resihp.simulator.holdings import outline
from resihp.simulator.invariants.violations import Violation, expect
from resihp.simulator.log import log_tail
from resihp.simulator.machines.agents import Agents
from resihp.simulator.machines.collectives import Collectives
from resihp.simulator.machines.network import Network
from resihp.simulator.machines.sim_node import SimNode
from resihp.simulator.machines.worker import Worker
from resihp.simulator.random_planner import RandomChecker, RandomPlanner
from resihp.simulator.rules import Rules
from resihp.simulator.scenarios.scenario import NEVER_S, SIGKILL, SIGTERM, Scenario
from resihp.simulator.stopping import Stopping
from resihp.simulator.thinking import Thinking

TICK_EVENT = api.Tick()
RESERVATION_SEEN_S = 8.0
"""Seconds from the start until Slurm reports a reservation."""


@dataclass
class Result:
    """The outcome of a run, for tests of particular scenarios."""

    exit_code: int
    reason: str
    entries: list[tuple[float, AnyEntry]]
    actions: list[tuple[float, api.AnyAction]]
    events: list[tuple[float, api.AnyEvent | CheckpointCommitted]]
    said: list[str]
    workers_leave: bool
    seconds: float
    dependencies: Dependencies = field(compare=False)

    def all(self, kind: type) -> list[Any]:
        return [entry for _, entry in self.entries if isinstance(entry, kind)]

    def when(self, kind: type) -> list[float]:
        return [at for at, entry in self.entries if isinstance(entry, kind)]

    def orders(self, kind: type) -> list[api.Order]:
        return [a for _, a in self.actions if isinstance(a, api.Order) and isinstance(a.order, kind)]

    @property
    def failures(self) -> list[FailureFound]:
        return self.all(FailureFound)

    @property
    def plans(self) -> list[PlanDecided]:
        return self.all(PlanDecided)


class World:
    """Virtual time, network and machines of one job, with the rules for its controller."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.rng, self.now = random.Random(scenario.seed), 0.0
        self.heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.count = itertools.count()
        self.settings = settings_of(scenario)
        self._moves: dict[tuple[Base, Layout], tuple[Move, ...]] = {}
        self.dependencies = self.own_dependencies()
        self.controller = self.new_controller()
        per = scenario.gpus_per_node
        self.nodes = {
            f"n{i + 1}": SimNode(f"n{i + 1}", list(range(i * per, (i + 1) * per)), per) for i in range(scenario.nodes)
        }
        self.workers = {
            rank: Worker(self, rank, node, d) for node in self.nodes.values() for d, rank in enumerate(node.ranks)
        }
        self.log: list[tuple[float, object]] = []
        self.events: list[tuple[float, api.AnyEvent | CheckpointCommitted]] = []
        self.actions: list[tuple[float, api.AnyAction]] = []
        self.entries: list[tuple[float, AnyEntry]] = []
        self.record = JobRecord()
        """The record of the job, folded from the journal."""
        self.end: api.End | None = None
        self._active: dict[int, tuple[int, ...]] = {}
        self.asked: dict[int, Fault] = {}
        """Injected faults requested by an operator, by their numbers."""
        self.broken_epochs: set[int] = set()
        """Epochs in which a disturbance broke a transfer."""
        self.leaderless = 0
        """Number of supervisors that have died and have not been replaced yet."""
        self.takeovers: list[float] = []
        """Times at which a new supervisor took over."""
        self.network, self.agents = Network(self), Agents(self)
        self.collectives, self.disturbances = Collectives(self), Disturbances(self)
        self.rules, self.allocation = Rules(self), Allocation(self)
        self.stopping, self.thinking = Stopping(self), Thinking(self)

    def own_dependencies(self) -> Dependencies:
        """Return the planner and checker of the simulator, and in some jobs its detector."""
        scenario = self.scenario
        ours = Dependencies(
            planner=RandomPlanner(scenario.seed, scenario.planner_trouble, scenario.planner),
            check=RandomChecker(scenario.seed, scenario.checker_trouble, scenario.planner).check,
            moves=self.moves,
            outline=outline,
        )
        wolf: Any = partial(Wolf, scenario.seed, scenario.slow)
        return dataclasses.replace(ours, monitor=wolf) if scenario.slow else ours

    def new_controller(self) -> Controller:
        return Controller(self.settings, self.dependencies)

    # --- time -----------------------------------------------------------------------------------------------------

    def at(self, delay: float, function: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self.heap, (self.now + delay, next(self.count), function, arguments))

    def run(self) -> Result:
        """Play the job to its end and return the result. Raises Violation."""
        scenario = self.scenario
        self.disturbances.schedule()
        late = dict(scenario.late)
        for node in self.nodes.values():
            node.arrived = node.name not in late
            at = self.rng.uniform(0.0, 1.0) + late.get(node.name, 0.0)
            if at < NEVER_S:
                self.at(at, self.agents.join, node)
        self.at(0.25, self.tick)
        if scenario.unfit:
            self.at(self.rng.uniform(0.0, 8.0), self.remember)
        if scenario.time_left_s is not None:
            self.at(self.rng.uniform(0.0, 2.0), self.feed, api.TimeLeft(seconds=scenario.time_left_s))
        if scenario.reserved_s is not None:
            reserved = api.ReservationAhead(name="maintenance", nodes=("n1", "n2"), seconds=scenario.reserved_s)
            self.at(RESERVATION_SEEN_S, self.feed, reserved)
        heap = self.heap
        try:
            while self.end is None:
                self.now, _, function, arguments = heapq.heappop(heap)
                if self.now > scenario.limit_s:
                    raise Violation(f"the run has not ended after {scenario.limit_s:.0f} s")
                function(*arguments)
            self.after_the_end()
        except (AssertionError, ResihpError, KeyError, IndexError, AttributeError, TypeError, ValueError) as error:
            text = f"{type(error).__name__}: {error}"
            raise Violation(f"seed {scenario.seed} at {self.now:.3f} s: {text}\n{log_tail(self.log)}") from error
        assert self.end is not None
        texts = [action.text for _, action in self.actions if isinstance(action, api.Say)]
        odd = [text for text in texts if ": answered stage " in text]
        if odd:
            raise Violation(f"seed {scenario.seed}: {odd[0]}\n{log_tail(self.log)}")
        return Result(
            self.end.exit_code, self.end.reason, self.entries, self.actions, self.events, texts,
            self.end.workers_leave, self.now, self.dependencies,
        )  # fmt: skip

    def moves(
        self, base: Base, layout: Layout, specs: Sequence[ParameterSpec], nodes: Mapping[int, str]
    ) -> tuple[Move, ...]:
        """Return the moves of a transition, cached for all callers."""
        if (base, layout) not in self._moves:
            self._moves[base, layout] = moves(base, layout, specs, nodes)
        return self._moves[base, layout]

    def tick(self) -> None:
        self.feed(TICK_EVENT)
        self.at(0.25, self.tick)

    # --- supervisors ----------------------------------------------------------------------------------------------

    def lose_supervisor(self, seconds: float) -> None:
        """Kill the supervisor, with all messages that it has not read or sent. Agents and workers keep their state.

        Another supervisor takes over after `seconds`.
        """
        if self.leaderless:
            return
        self.leaderless += 1
        for node in self.nodes.values():
            node.up.clear()
            node.down.clear()
            node.owed_up = node.owed_down = 0
            node.joined = False
        unstarted = [rank for rank, worker in self.workers.items() if worker.joins and not worker.spawned]
        for rank in unstarted:
            if rank in self.rules.turned_away:
                continue
            self.workers[rank].alive = False  # the order to start this worker is lost
            self.workers[rank].node.ranks.remove(rank)
            del self.workers[rank]
            self.rules.known_dead.discard(rank)
        self.rules.requests = dict.fromkeys(self.rules.requests, True)  # the operators have lost their connections
        self.at(seconds, self.take_over)

    def take_over(self) -> None:
        """Start another supervisor, which reads the journal, and reconnect the agents to it."""
        self.leaderless = 0
        self.takeovers.append(self.now)
        self.log.append((self.now, "!!! another supervisor takes over"))
        self.rules.took_over()
        self.stopping.took_over()
        try:
            entries, commits = (entry for _, entry in self.entries), self.commits()
            self.controller = Controller.recover(self.settings, entries, self.dependencies, commits)
        except ProtocolError:  # nothing was in the journal yet
            self.controller = self.new_controller()
        expect(self.controller.job.record == self.record, "a take-over derives another record from the journal")
        for node in self.nodes.values():
            if node.alive and not node.dropped and node.arrived:
                self.at(self.rng.choice([0.0, 0.1, self.rng.uniform(0.0, 4.0)]), self.agents.join_again, node)

    def commits(self) -> list[Commit]:
        """Return the recent commits with their ages, as a supervisor that takes over now would get them."""
        ages = [(at - self.now, entry) for at, entry in self.entries if isinstance(entry, IterationCommitted)]
        return [Commit(entry.outcome.iteration, age, entry.seconds) for age, entry in ages[-MAX_KEPT_COMMITS:]]

    def remember(self) -> None:
        """Pass the nodes' speeds in former jobs, as from the ledger, to the controller."""
        usual = {
            (name, f"host-{name}", ""): m.Speed(flops=self.rng.choice([1.0, 1.0, 2.0]), memory_bytes=1.0)
            for name in sorted(self.nodes)
        }
        self.feed(api.NodesRemembered(usual=usual))

    def active_ranks(self, plan: Plan) -> tuple[int, ...]:
        """Return the ranks with work under a plan."""
        if plan.epoch not in self._active:
            self._active[plan.epoch] = plan.layout.active
        return self._active[plan.epoch]

    # --- the controller -------------------------------------------------------------------------------------------

    def feed(self, event: api.AnyEvent, again: bool = False) -> None:
        """Pass one event to the controller, check its answer and carry it out. `again`: the event is delivered a second
        time."""
        if self.end is not None or self.leaderless:
            return
        rules = self.rules
        self.log.append((self.now, event))
        self.events.append((self.now, event))
        self.stopping.learn(event)
        rules.learn(event, again)
        rules.begin()
        actions = self.controller.handle(event, self.now)
        self.controller.check()
        for action in actions:
            expect(self.end is None, f"{action} after the end")
            self.log.append((self.now, action))
            self.actions.append((self.now, action))
            if isinstance(action, api.StartWorkers) and not action.joins:
                number_ranks(self, action.nodes)
            rules.judge(action)
            self.allocation.judge(action)
            self.stopping.judge(action)
            carry_out(self, action)
        expect(self.controller.job.record == self.record, "the record differs from the fold of the journal")
        rules.settle()
        self.stopping.settle()

    def write(self, entry: AnyEntry) -> None:
        """Append an entry to the journal."""
        self.entries.append((self.now, entry))
        apply(self.record, entry)

    def after_the_end(self) -> None:
        """Check that the controller answers no event after the end."""
        later: list[api.AnyEvent] = [
            TICK_EVENT,
            api.WorkerExited(rank=0, status=-SIGKILL),
            api.AgentLost(node="n1", reason="agent process ended"),
            api.Signalled(signal=SIGTERM),
        ]
        for event in later:
            more = self.controller.handle(event, self.now + 1.0)
            expect(more == [], f"{more} after the end")

    def replay(self) -> None:
        """Check that the same events give the same actions: nothing may depend on a clock, on chance or on the order of
        a set."""
        controller = self.new_controller()
        if self.takeovers:
            return  # several controllers took part
        again: list[tuple[float, api.AnyAction]] = []
        for at, event in self.events:
            if isinstance(event, CheckpointCommitted):
                controller.journaled(event)
            else:
                again += [(at, action) for action in controller.handle(event, at)]
        expect(again == self.actions, "a replay of the events gives other actions")


def settings_of(scenario: Scenario) -> Settings:
    """Return the settings of a simulated job."""
    return Settings(
        job="local-1",
        nodes=scenario.nodes,
        node_names=tuple(f"n{i + 1}" for i in range(scenario.nodes)),
        gpus_per_node=scenario.gpus_per_node,
        tp=scenario.tp,
        pp=scenario.pp,
        faults=scenario.faults,
        checkpoint_every=scenario.checkpoint_every,
        max_restarts=scenario.max_rollbacks,
        start_budget_s=scenario.start_budget_s,
        come_backs=scenario.come_backs,
        slurm=scenario.slurm,
        signal_grace_s=scenario.signal_grace_s,
        on_warning=scenario.on_warning,
        may_requeue=scenario.may_requeue,
        restarts_left=scenario.restarts_left,
        batch_node=scenario.batch_node,
        drains_left=scenario.drains,
        died_before=scenario.died_before,
        on_drain=scenario.on_drain,
        replacements=scenario.replacements,
        spares=scenario.spares,
        least=scenario.least,
        replacement_wait_s=0.0,
        examine=scenario.examine,
        probe_budget_s=5.0,
        observes=scenario.observes,
        **scenario.foresight,
    )
