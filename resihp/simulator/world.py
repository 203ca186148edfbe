"""A whole job on a virtual clock around the real controller: time, network, agents, collectives, disturbances."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from resihp.controller import Controller
from resihp.controller import interface as api
from resihp.controller.fail_stop.onsets import MAX_KEPT_COMMITS, Commit
from resihp.controller.interface import Dependencies
from resihp.errors import ProtocolError, ResihpError
from resihp.faults import Fault
from resihp.parallelism.layout import Layout
from resihp.parallelism.ownership import ParameterSpec
from resihp.parallelism.plan import Plan
from resihp.parallelism.transfers import Base, Move, bytes_of, moves
from resihp.parallelism.workload import samples_digest
from resihp.protocol import messages as m
from resihp.record.fold import apply
from resihp.record.journal import AnyEntry, CheckpointCommitted, FailureFound, IterationCommitted, PlanDecided
from resihp.record.state import JobRecord
from resihp.settings import Settings
from resihp.simulator.allocation import Allocation
from resihp.simulator.false_alarms import Wolf
from resihp.simulator.holdings import Holding, bits, drawn, needed, outline
from resihp.simulator.invariants.violations import Violation, expect
from resihp.simulator.log import log_tail
from resihp.simulator.machines.meeting import Meeting
from resihp.simulator.machines.sim_node import SimNode
from resihp.simulator.machines.worker import Worker
from resihp.simulator.random_planner import RandomChecker, RandomPlanner
from resihp.simulator.rules import Rules
from resihp.simulator.scenarios.scenario import NEVER_S, SIGKILL, SIGSTOP, SIGTERM, Disturbance, Fate, Scenario, Trigger
from resihp.simulator.stopping import Stopping
from resihp.simulator.thinking import Thinking

TICK_EVENT = api.Tick()


@dataclass
class Result:
    """The outcome of a run, for directed tests."""

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
    """Virtual time, network, machines, and the rules that must hold."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.rng, self.now = random.Random(scenario.seed), 0.0
        self.heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.count = itertools.count()
        self.settings = Settings(
            job="local-1",
            nodes=scenario.nodes,
            node_names=tuple(f"n{i + 1}" for i in range(scenario.nodes)),
            gpus_per_node=scenario.gpus_per_node,
            tp=scenario.tp,
            pp=scenario.pp,
            faults=scenario.faults,
            checkpoint_every=scenario.checkpoint_every,
            start_budget_s=scenario.start_budget_s,
            come_backs=scenario.come_backs,
            slurm=scenario.slurm,
            signal_grace_s=scenario.signal_grace_s,
            on_warning=scenario.on_warning,
            may_requeue=scenario.may_requeue,
            restarts_left=scenario.restarts_left,
            batch_node=scenario.batch_node,
            drains=scenario.drains,
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
        self.pauses: set[tuple[int, int]] = set()  # (epoch, iteration) after which all ranks stop
        self.meetings: dict[tuple[Any, ...], Meeting] = {}
        self.cursed: set[tuple[str, int]] = set()
        """(kind, epoch) of collectives that never complete."""
        self.occurred: Counter[str] = Counter()
        self.log: list[tuple[float, object]] = []
        self.events: list[tuple[float, api.AnyEvent | CheckpointCommitted]] = []
        self.actions: list[tuple[float, api.AnyAction]] = []
        self.entries: list[tuple[float, AnyEntry]] = []
        self.record = JobRecord()
        """The record that the journal adds up to."""
        self.end: api.End | None = None
        self._places: dict[int, dict[int, tuple[int, int]]] = {}
        self._active: dict[int, tuple[int, ...]] = {}
        self._outcomes: dict[tuple[int, int], m.StepOutcome] = {}
        self.waiting_for: dict[str, list[Disturbance]] = {}
        self.asked: dict[int, Fault] = {}
        """Faults that an operator asked for."""
        self.sent: list[tuple[SimNode, api.AnyEvent]] = []
        """Messages that may be delivered again."""
        self.measuring: dict[int, dict[int, int]] = {}
        """Ranks that have come to measure links, by probe, with their generation at that time."""
        self.broken_epochs: set[int] = set()
        """Epochs in which a transfer was broken on purpose."""
        self.leaderless = 0
        """Number of supervisors that have died and were not replaced yet."""
        self.takeovers: list[float] = []
        """Times at which a supervisor took over."""
        self.rules, self.allocation = Rules(self), Allocation(self)
        self.stopping, self.thinking = Stopping(self), Thinking(self)

    def own_dependencies(self) -> Dependencies:
        """Return a planner and a checker of our own, and in some jobs a detector."""
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
        """Play the job to its end. Raises Violation."""
        scenario = self.scenario
        for disturbance in scenario.disturbances:
            if disturbance.trigger == "time":
                self.at(disturbance.delay, self.disturb, disturbance, 0)
            else:
                self.waiting_for.setdefault(disturbance.trigger, []).append(disturbance)
        late = dict(scenario.late)
        for node in self.nodes.values():
            node.arrived = node.name not in late
            at = self.rng.uniform(0.0, 1.0) + late.get(node.name, 0.0)
            if at < NEVER_S:
                self.at(at, self.join, node)
        self.at(0.25, self.tick)
        if scenario.unfit:
            self.at(self.rng.uniform(0.0, 8.0), self.remember)
        if scenario.time_left_s is not None:
            self.at(self.rng.uniform(0.0, 2.0), self.feed, api.TimeLeft(seconds=scenario.time_left_s))
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
        """Return the moves of a transition, computed once for all callers."""
        if (base, layout) not in self._moves:
            self._moves[base, layout] = moves(base, layout, specs, nodes)
        return self._moves[base, layout]

    def tick(self) -> None:
        self.feed(TICK_EVENT)
        self.at(0.25, self.tick)

    # --- network --------------------------------------------------------------------------------------------------

    def _latency(self) -> float:
        return self.scenario.latency_s * self.rng.random() * (10.0 if self.rng.random() < 0.02 else 1.0)

    def up(self, node: SimNode, event: api.AnyEvent) -> None:
        """Send an event from an agent to the supervisor."""
        if not node.alive or node.dropped or self.leaderless or not (node.joined or isinstance(event, api.AgentJoined)):
            return
        node.up.append(event)
        node.up_at = max(node.up_at, self.now + self._latency())
        self.at(node.up_at - self.now, self.deliver_up, node)
        duplicates = self.scenario.duplicates
        message = event.message if isinstance(event, api.WorkerSaid) else None
        may_repeat = isinstance(event, api.WorkerSaid | api.WorkerExited) and not isinstance(message, m.Raised)
        if duplicates and may_repeat:
            self.sent.append((node, event))
            if self.rng.random() < duplicates:
                self.at(self.rng.choice([0.0, 0.3, 3.0]), self.repeat_up, node, event)

    def repeat_up(self, node: SimNode, event: api.AnyEvent) -> None:
        """Deliver a message once more."""
        if node.alive and not node.dropped and not (node.silent or node.up):
            self.feed(event, again=True)

    def deliver_up(self, node: SimNode) -> None:
        if self.end is not None or not node.up:
            return
        if node.silent:
            node.owed_up += 1
            return
        event = node.up.popleft()
        node.last_delivered = self.now
        self.feed(event)

    def down(self, node: SimNode, rank: int, order: m.WorkerOrder | int) -> None:
        """Send an order, or a signal's number, from the supervisor to a worker."""
        if not node.alive or node.dropped:
            return
        node.down.append((rank, order))
        node.down_at = max(node.down_at, self.now + self._latency())
        self.at(node.down_at - self.now, self.deliver_down, node)

    def deliver_down(self, node: SimNode) -> None:
        if not node.down or not node.alive:
            return
        if node.silent or node.frozen:
            node.owed_down += 1
            return
        rank, order = node.down.popleft()
        worker = self.workers[rank]
        if not worker.alive or not worker.spawned:
            return
        if isinstance(order, int):
            if order == SIGKILL:
                worker.die(-SIGKILL)
            elif order == SIGSTOP:
                worker.freeze("stop", NEVER_S)
            else:
                worker.die(-order)
        else:
            worker.hear(order)

    def hush(self, node: SimNode, seconds: float) -> None:
        """Make the connection carry nothing until the time has passed."""
        if not node.alive:
            return
        node.silences += 1
        if not node.silent:
            node.silent, node.silent_since = True, self.now
        if seconds < NEVER_S:
            self.at(seconds, self.unhush, node)

    def unhush(self, node: SimNode) -> None:
        node.silences -= 1
        if node.silences or not node.silent:
            return
        node.silent, node.silent_since, node.frozen = False, NEVER_S, False
        for i in range(node.owed_up):
            self.at(i * 1e-4, self.deliver_up, node)
        for i in range(node.owed_down):
            self.at(i * 1e-4, self.deliver_down, node)
        node.up_at = max(node.up_at, self.now + node.owed_up * 1e-4)
        node.down_at = max(node.down_at, self.now + node.owed_down * 1e-4)
        node.owed_up = node.owed_down = 0

    # --- agents ---------------------------------------------------------------------------------------------------

    def join(self, node: SimNode) -> None:
        if self.leaderless:
            self.at(0.5, self.join, node)
            return
        if node.joined:  # with another supervisor in the meantime
            return
        node.arrived = node.joined = True
        self.up(node, api.AgentJoined(node=node.name, host=f"host-{node.name}", devices=node.devices, hardware="A"))
        self.at(self.rng.uniform(0.0, 1.0), self.beat, node)
        if node.ranks:
            self.happens("arrive", node.ranks[0])

    def beat(self, node: SimNode) -> None:
        if not node.alive or node.dropped:
            return
        self.at(1.0, self.beat, node)
        if node.frozen:
            return
        beats = []
        for rank in node.ranks:
            worker = self.workers[rank]
            if not worker.spawned or not worker.alive:
                continue
            mute = worker.frozen in ("stop", "mute")
            age = self.now - worker.frozen_at if mute else 0.0
            progress = m.Progress(
                epoch=worker.epoch,
                iteration=worker.stepped + 1,
                primitives=worker.primitives,
                activity="compute" if worker.frozen == "hang" else worker.activity,
            )
            beats.append(m.WorkerBeat(rank=rank, age_s=age + self.rng.random(), state=worker.state, progress=progress))
        self.up(node, api.AgentBeat(node=node.name, beat=m.Beat(workers=tuple(beats))))

    def lose_supervisor(self, seconds: float) -> None:
        """Kill the supervisor, with all its unread and unsent messages; agents and workers keep their knowledge."""
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
            self.workers[rank].alive = False  # the order to start it is lost
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
                self.at(self.rng.choice([0.0, 0.1, self.rng.uniform(0.0, 4.0)]), self.join_again, node)

    def commits(self) -> list[Commit]:
        """Return the recent commits, with their ages, as a supervisor that takes over now has them."""
        ages = [(at - self.now, entry) for at, entry in self.entries if isinstance(entry, IterationCommitted)]
        return [Commit(entry.outcome.iteration, age, entry.seconds) for age, entry in ages[-MAX_KEPT_COMMITS:]]

    def join_again(self, node: SimNode) -> None:
        if node.silent or node.frozen:
            self.at(0.5, self.join_again, node)
            return
        if not node.alive or node.dropped or self.leaderless or node.joined:
            return
        node.joined = True
        running = tuple(
            m.RunningWorker(
                rank=rank,
                device=self.workers[rank].device,
                pid=1000 + rank,
                steps=tuple(self.workers[rank].steps),
                said=tuple(self.workers[rank].said.values()),
            )
            for rank in node.ranks
            if self.workers[rank].spawned and self.workers[rank].alive
        )
        inventory = m.Inventory(workers=running, ended=tuple(node.ended.items()), epoch=node.epoch)
        host, lease = f"host-{node.name}", self.allocation.guests.get(node.name, 0)
        joined = api.AgentJoined(node=node.name, host=host, devices=node.devices, lease=lease, inventory=inventory)
        self.up(node, joined)

    def remember(self) -> None:
        """Feed speeds of former jobs from the ledger to the controller."""
        usual = {
            (name, f"host-{name}", ""): m.Speed(flops=self.rng.choice([1.0, 1.0, 2.0]), memory_bytes=1.0)
            for name in sorted(self.nodes)
        }
        self.feed(api.NodesRemembered(usual=usual))

    def kill_node(self, node: SimNode, announced: bool, closes_connections: bool = True) -> None:
        """Kill a node with everything on it. If `announced`, the agent still reports the end of some of its workers.

        Without `closes_connections` its end is not noticed (the machine or the network lost power).
        """
        if not node.alive:
            return
        if announced:
            for rank in node.ranks:
                if self.workers[rank].spawned and self.workers[rank].alive and self.rng.random() < 0.6:
                    self.workers[rank].died_with_node = True
                    self.workers[rank].die(-SIGKILL)
            self.at(self.rng.uniform(0.0, 0.05), self.kill_node, node, False)
            return
        if not node.silent:
            keep = self.rng.randint(0, len(node.up))
            for _ in range(len(node.up) - keep):
                node.up.pop()
        else:
            node.up.clear()
        node.alive = False
        for rank in node.ranks:
            worker = self.workers[rank]
            if worker.spawned:
                worker.die(-SIGKILL, closes_connections=closes_connections)
            worker.alive = False
        if closes_connections:
            delay = max(node.up_at - self.now, 0.0) + self.rng.choice([0.001, 0.05, self.rng.uniform(0.0, 1.0)])
            self.at(delay, self.agent_lost, node)

    def agent_lost(self, node: SimNode) -> None:
        if not node.loss_reported and self.end is None:
            node.loss_reported = True
            node.up.clear()
            self.feed(api.AgentLost(node=node.name, reason="agent process ended"))

    def freeze_node(self, node: SimNode, seconds: float, kind: Literal["stop", "mute"]) -> None:
        node.frozen = True
        self.hush(node, seconds)
        for rank in node.ranks:
            self.workers[rank].freeze(kind, seconds)

    # --- collectives ----------------------------------------------------------------------------------------------

    def active_ranks(self, plan: Plan) -> tuple[int, ...]:
        if plan.epoch not in self._active:
            self._active[plan.epoch] = plan.layout.active
        return self._active[plan.epoch]

    def places(self, plan: Plan) -> dict[int, tuple[int, int]]:
        if plan.epoch not in self._places:
            shapes = {tuple((stage.tp, stage.chunks) for stage in replica.stages) for replica in plan.layout.replicas}
            self._places[plan.epoch] = {
                rank: (place.stage, place.t) if len(shapes) == 1 else (0, 0) for rank, place in plan.layout.places()
            }
        return self._places[plan.epoch]

    def members(self, key: tuple[Any, ...], plan: Plan) -> tuple[int, ...]:
        if key[0] in ("build", "transfer"):
            return plan.layout.ranks
        if key[0] == "reduce":
            return tuple(rank for rank, place in self.places(plan).items() if place == key[3])
        return self.active_ranks(plan)

    def enter(self, worker: Worker, key: tuple[Any, ...], done: Callable[[], None]) -> None:
        """Let `worker` wait in the collective `key`; `done` is called when it is over for this worker."""
        assert worker.plan is not None
        meeting = self.meetings.setdefault(key, Meeting())
        meeting.come[worker.rank] = done
        worker.waits = key
        worker.activity = "communication"
        if (key[0], worker.epoch) in self.cursed or ("any", worker.epoch) in self.cursed:
            return
        members = self.members(key, worker.plan)
        if meeting.broken:
            self.report_broken(worker, "connection reset by peer")
        elif all(rank in meeting.come for rank in members):
            meeting.over, meeting.over_at = True, self.now
            if key[0] == "sync":
                batch_changes = self.scenario.batch_sizes.at(worker.stepped + 2) != worker.plan.micro_batches
                if batch_changes or any(self.workers[rank].pause_asked > worker.epoch for rank in members):
                    self.pauses.add(key[1:])
                if any(self.workers[rank].save_asked for rank in members):
                    self.stopping.saves.add(key[1:])
            meeting.pending = set(members)
            slowest = worker.training.part_s(0.3)
            for rank in members:
                peer = self.workers[rank]
                peer.later(self.rng.choice([0.0, 0.001, slowest * self.rng.random()]), self.leave, peer, key)
        elif any(self.workers[rank].gone and rank not in meeting.come for rank in members):
            self.report_broken(worker, "connection closed by peer")

    def leave(self, worker: Worker, key: tuple[Any, ...]) -> None:
        if worker.waits == key:
            worker.waits = None
            meeting = self.meetings[key]
            meeting.pending.discard(worker.rank)
            meeting.come[worker.rank]()

    def report_broken(self, worker: Worker, error: str) -> None:
        if self.rng.random() < self.scenario.breaks_loudly:
            worker.later(
                self.rng.choice([0.0, 0.05, self.rng.uniform(0, 1.0), self.rng.uniform(0, 5.0)]), worker.stuck, error
            )

    def peers_notice(self, dead: Worker) -> None:
        """Break the collectives that wait for a dead rank; only some of its peers are told."""
        if dead.plan is None:
            return
        for rank in dead.plan.layout.ranks:
            peer = self.workers[rank]
            if not peer.alive or peer.epoch != dead.epoch or peer.waits is None:
                continue
            meeting = self.meetings[peer.waits]
            if dead.rank not in self.members(peer.waits, dead.plan):
                continue
            if meeting.over:
                if self.rng.random() < 0.4:  # this rank's part of it was not finished
                    peer.generation += 1
                    self.report_broken(peer, "connection closed by peer")
            elif dead.rank not in meeting.come:
                self.report_broken(peer, "connection closed by peer")

    def validation_loss(self, iteration: int) -> float:
        """Return the loss of the weights after an iteration, independent of the plan."""
        return 11.0 / (1 + iteration)

    def outcome_of(self, plan: Plan | None, iteration: int) -> m.StepOutcome:
        assert plan is not None
        key = (plan.epoch, iteration)
        if key not in self._outcomes:
            samples = [iteration * 1000 + index for share in plan.assignment for index in share]
            self._outcomes[key] = m.StepOutcome(
                iteration=iteration,
                clip=1.0,
                skip=False,
                learning_rate=1e-3,
                gradient_norm=1.0 + plan.epoch * 1e-9,  # rounding differs between layouts: mixed outcomes show
                loss=10.0 / iteration,
                tokens=64 * len(samples),
                sum_squared_lengths=4096 * len(samples),
                samples=len(samples),
                samples_digest=f"{samples_digest(samples):016x}",
                pause=key in self.pauses,
                save=key in self.stopping.saves,
            )
        return self._outcomes[key]

    def fate_of(self, worker: Worker) -> Fate:
        """Return the outcome that the scenario sets for a process that joins later: it joins, refuses, dies, hangs.

        A process of the first start is always `fine`.
        """
        if not worker.joins:
            return "fine"
        fates = self.scenario.fates
        number = worker.rank - self.scenario.nodes * self.scenario.gpus_per_node
        return fates[max(0, min(number, len(fates) - 1))]

    def assemble(self, worker: Worker) -> tuple[Holding, int]:
        """Return a rank's holding under its new plan, from its own and the survivors' state, and the bytes received."""
        plan, base, model = worker.plan, worker.base, self.scenario.model
        assert plan is not None
        need = needed(model, plan.layout)[worker.rank]
        if base is None:
            return drawn(need, self.scenario.resume_from), 0
        specs = {spec.name: spec for spec in outline(model)}
        old = worker.held.get(base.epoch)
        parts = [] if old is None else [Holding(old.slices & need, old.iteration, old.value)]
        received = 0
        for move in self.moves(base, plan.layout, outline(model), worker.nodes):
            if move.target != worker.rank:
                continue
            source = self.workers[move.source]
            source_holding = source.held.get(base.epoch)
            if self.rules.given_up(worker) or self.rules.given_up(source):
                source_holding = source_holding or max(
                    source.held.values(), key=lambda h: h.iteration, default=drawn(0, 0)
                )
            else:
                expect(
                    source_holding is not None,
                    f"rank {source.rank} freed epoch {base.epoch}, which rank {worker.rank} needs",
                )
            assert source_holding is not None
            wanted = bits(model, move.slices)
            lacks = wanted & ~source_holding.slices
            expect(not lacks or self.rules.given_up(source), f"rank {source.rank} lacks state for rank {worker.rank}")
            parts.append(Holding(wanted, source_holding.iteration, source_holding.value))
            received += bytes_of(move, specs)
        whole = 0
        for part in parts:
            expect(not whole & part.slices, f"rank {worker.rank} receives state that it already has")
            whole |= part.slices
        values = {(part.iteration, part.value) for part in parts if part.slices}
        if not self.rules.given_up(worker):
            expect(whole == need, f"rank {worker.rank} lacks slices of epoch {plan.epoch}")
            expect(len(values) == 1, f"rank {worker.rank} mixes iterations {sorted(i for i, _ in values)}")
        return Holding(whole, *max(values)), received

    def come(self, worker: Worker, order: m.Probe) -> None:
        """Let a rank wait where links are measured; with its last peer, all that wait for each other go on."""
        here = self.measuring.setdefault(order.probe, {})
        here[worker.rank] = worker.generation
        peers = {a + b - worker.rank for round_ in order.pairs for a, b in round_ if worker.rank in (a, b)}
        if peers <= here.keys():
            for rank in sorted(peers | {worker.rank}):
                if here[rank] == self.workers[rank].generation and not self.workers[rank].frozen:
                    self.workers[rank].generation += 1
                    self.workers[rank].later(self.rng.uniform(0.01, 0.1), self.workers[rank].probes.met, order, True)
        else:
            worker.later(2.0, worker.probes.met, order, False)

    # --- disturbances ---------------------------------------------------------------------------------------------

    def happens(self, trigger: Trigger, rank: int) -> None:
        if trigger not in self.waiting_for:
            return
        self.occurred[trigger] += 1
        for disturbance in self.waiting_for[trigger]:
            if disturbance.nth == self.occurred[trigger]:
                self.at(disturbance.delay, self.disturb, disturbance, rank)

    def disturb(self, disturbance: Disturbance, concerned: int) -> None:
        rank = concerned if disturbance.rank is None else disturbance.rank
        if rank not in self.workers:  # nodes were left out, see `number`
            rank = min(self.workers)
        worker = self.workers[rank]
        node, seconds = worker.node, disturbance.seconds
        self.log.append((self.now, f"!!! {disturbance.kind} rank {rank} node {node.name} for {seconds} s"))
        match disturbance.kind:
            case "kill":
                if worker.spawned:
                    worker.die(disturbance.status)
            case "node":
                self.kill_node(node, announced=False)
            case "agent":
                self.kill_node(node, announced=True)
            case "vanish":
                self.kill_node(node, announced=False, closes_connections=False)
            case "drained":
                self.feed(api.SlurmSees(node=node.name, state="allocated+drain", reason="maintenance"))
                self.at(seconds, self.feed, api.SlurmSees(node=node.name, state="allocated", reason=""))
            case "silent":
                self.hush(node, seconds)
            case "blackout":
                self.freeze_node(node, seconds, "mute")
            case "stop" | "mute" | "hang":
                worker.freeze(disturbance.kind, seconds)
            case "forget":
                worker.forgets = True
            case "broken":
                if worker.alive and worker.active:
                    self.broken_epochs.add(worker.epoch)
                    if worker.waits is not None and not worker.frozen:
                        self.meetings[worker.waits].broken = True
                        worker.stuck("injected: transfer failed")
            case "deadlock":
                if worker.alive and worker.active:
                    self.broken_epochs.add(worker.epoch)
                    self.cursed.add(("any", worker.epoch))
            case "reconnect" if node.joined:
                self.up(
                    node, api.AgentJoined(node=node.name, host=f"host-{node.name}", devices=node.devices, hardware="A")
                )
            case "supervisor":
                self.lose_supervisor(seconds)
            case "raise":
                worker.proceed(None, worker.throw, (f"ValueError: rank {rank} is odd",))
            case "raise_node":
                self.lack_library(node)
            case "raise_all":
                for peer in self.workers.values():
                    if peer.spawned:
                        self.at(self.rng.uniform(0, 0.2), peer.proceed, None, peer.throw, ("ValueError: bad sample",))
            case "signal" | "cancel" | "told" | "checkpoint":
                self.stopping.disturb(disturbance, node)
            case "inject" if not self.leaderless:
                request = len(self.rules.requests)
                self.rules.requests[request] = False
                fault = Fault(id=1000 + request, kind=self.rng.choice(["kill", "stop", "crash"]), rank=rank)
                self.asked[fault.id] = fault
                self.feed(api.InjectAsked(request=request, fault=fault))

    def lack_library(self, node: SimNode) -> None:
        for rank in node.ranks:
            self.workers[rank].stumbles = "ImportError: no module named flash_attn"

    # --- the controller -------------------------------------------------------------------------------------------

    def feed(self, event: api.AnyEvent, again: bool = False) -> None:
        """Give one event to the controller and carry out its actions."""
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
                self.number(action.nodes)
            rules.judge(action)
            self.allocation.judge(action)
            self.stopping.judge(action)
            self.carry_out(action)
        expect(self.controller.job.record == self.record, "the record differs from the fold of the journal")
        rules.settle()
        self.stopping.settle()

    def write(self, entry: AnyEntry) -> None:
        """Append an entry to the journal."""
        self.entries.append((self.now, entry))
        apply(self.record, entry)

    def carry_out(self, action: api.AnyAction) -> None:
        match action:
            case api.Log():
                self.write(action.entry)
            case api.StartWorkers():
                self._start(action)
            case api.Order():
                self._order(action)
            case api.SignalWorker():
                self.down(self.workers[action.rank].node, action.rank, action.signal)
            case api.SignalNode():
                node = self.nodes[action.node]
                if action.signal == SIGKILL:
                    self.at(self._latency(), self.kill_node, node, self.rng.random() < 0.5)
                else:
                    self.at(self._latency(), self.freeze_node, node, NEVER_S, "stop")
            case api.CutConnection():
                node = self.nodes[action.node]
                if self.rng.random() < 0.8:
                    self.hush(node, self.rng.uniform(0.0, 0.5))
                else:
                    self.kill_node(node, announced=False)
            case api.DropNode():
                self.drop(self.nodes[action.node])
            case api.End():
                self.allocation.check_end(action.exit_code)
                self.end = action
            case api.AskWhy():
                self.stopping.answer_why()
            case api.AskTimeLeft():
                expect(self.scenario.slurm, f"{action} without Slurm")
                if self.scenario.time_left_s is not None and self.rng.random() < 0.5:
                    left_s = max(0.0, self.scenario.time_left_s * self.rng.choice([0.5, 1.0, 2.0]) - self.now)
                    self.at(self.rng.uniform(0.0, 2.0), self.feed, api.TimeLeft(seconds=left_s))
            case api.DrainNode() | api.ReleaseNode() | api.AskReplacement() | api.CancelReplacement() | api.WatchNode():
                expect(self.scenario.slurm, f"{action} without Slurm")
                self.allocation.carry_out(action)
            case api.CommitCheckpoint():
                entry = CheckpointCommitted(
                    iteration=action.iteration, folder=action.folder, bytes=0, seconds=action.seconds
                )
                self.write(entry)
                self.events.append((self.now, entry))
                self.controller.journaled(entry)
            case api.Think():
                self.thinking.accept(action)
            case api.Reply() | api.Say() | api.TellScores():
                pass

    def _start(self, action: api.StartWorkers) -> None:
        node = self.nodes[action.node]
        for rank, device in action.workers:
            if rank not in self.workers:
                self.rules.known_dead.discard(rank)
                self.workers[rank] = Worker(self, rank, node, device, joins=True)
                node.ranks.append(rank)
            delay_s = self.rng.uniform(0.05, 0.5)
            fails = None if action.joins else dict(self.scenario.spawns).get(node.name)
            if fails == "refused":
                refusal = api.SpawnRefused(node=node.name, reason="cannot fork", rank=rank)
                self.at(delay_s, self.up, node, refusal)
            elif fails == "hang":
                pass
            elif self.fate_of(self.workers[rank]) == "spawn":
                self.workers[rank].alive = False
                whom = rank if self.rng.random() < 0.7 else None
                refusal = api.SpawnRefused(node=node.name, reason="cannot fork", rank=whom)
                self.at(delay_s, self.up, node, refusal)
            else:
                self.at(delay_s, self.workers[rank].start)

        if not action.joins:
            self.happens("order", action.workers[0][0])

    def _order(self, action: api.Order) -> None:
        for rank in action.ranks:
            worker = self.workers[rank]
            again = isinstance(action.order, m.Park) and (action.order.after_iteration or rank in self.rules.hurried)
            if isinstance(action.order, m.Park | m.Propose | m.Go | m.Begin) and not again:
                worker.ordered_at = self.now
            self.down(worker.node, rank, action.order)
        name = ORDER_TRIGGERS.get(type(action.order))
        if isinstance(action.order, m.Park) and action.order.after_iteration:
            name = "pause"
        if name is not None and self.sent and self.rng.random() < 3 * self.scenario.duplicates:
            for node, event in self.rng.choices(self.sent, k=5):  # old answers confuse when a new one is awaited
                self.at(self.rng.uniform(0.0, 0.1), self.repeat_up, node, event)
        if name is not None:
            self.happens(name, action.ranks[self.rng.randrange(len(action.ranks))])

    def number(self, names: tuple[str, ...]) -> None:
        """Renumber the ranks if nodes were left out before ranks were assigned."""
        if names == tuple(self.workers[rank].node.name for rank in sorted(self.workers)):
            return
        expect(not any(worker.spawned for worker in self.workers.values()), "ranks are assigned again")
        for node in self.nodes.values():
            node.ranks.clear()
        self.workers.clear()
        for rank, name in enumerate(names):
            node = self.nodes[name]
            self.workers[rank] = Worker(self, rank, node, len(node.ranks))
            node.ranks.append(rank)
        self.rules.known_dead.clear()
        self.rules.taking_part = set(self.workers)

    def drop(self, node: SimNode) -> None:
        """Close a node's connection; its processes are cleaned up later, or never."""
        node.dropped = True
        if self.scenario.leaks and node.alive and self.rng.random() < 0.7:
            delay = self.rng.choice([0.0, 0.1, 0.5])
            for number, event in enumerate(node.up):
                self.at(delay + number * 1e-4, self.feed, event)
        node.up.clear()
        if node.alive and self.rng.random() < 0.3:
            self.at(self.rng.uniform(0, 2.0), self.agent_lost, node)
        for rank in node.ranks:
            if node.alive and self.rng.random() < 0.5:
                self.at(self.rng.uniform(0, 10.0), self.workers[rank].die, -SIGKILL)

    def after_the_end(self) -> None:
        """Check that the controller does nothing after the end, whatever event comes."""
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
        """Check that the same events give the same actions: nothing depends on a clock, chance or a set's order."""
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


ORDER_TRIGGERS: dict[type, Trigger] = {
    m.Park: "park",
    m.Propose: "propose",
    m.Go: "go",
    m.Begin: "begin",
    m.Halt: "halt",
    m.Save: "save",
}
