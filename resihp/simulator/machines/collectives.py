"""The simulated collectives: which ranks have entered, when each may leave, and the failures when a member dies.

Also computes the outcomes of iterations, which follow from the plan and from requests to pause or save. Never chooses a
plan. Called by the parts of workers; the invariants compare its outcomes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from resihp.parallelism.plan import Plan
from resihp.parallelism.workload import samples_digest
from resihp.protocol import messages as m

if TYPE_CHECKING:
    from resihp.simulator.machines.worker import Worker
    from resihp.simulator.world import World


@dataclass
class Meeting:
    """One collective: the ranks that have entered (`come`), and whether it is over."""

    come: dict[int, Callable[[], None]] = field(default_factory=dict)
    over: bool = False
    over_at: float = 0.0
    pending: set[int] = field(default_factory=set)
    broken: bool = False


class Collectives:
    """The collectives of all epochs."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.pauses: set[tuple[int, int]] = set()
        """(epoch, iteration) of each iteration after which all ranks stop."""
        self.meetings: dict[tuple[Any, ...], Meeting] = {}
        self.cursed: set[tuple[str, int]] = set()
        """(kind, epoch) of collectives that never complete."""
        self.measuring: dict[int, dict[int, int]] = {}
        """Ranks that have entered a link probe, by probe, with the generation of each at that time."""
        self._places: dict[int, dict[int, tuple[int, int]]] = {}
        self._outcomes: dict[tuple[int, int], m.StepOutcome] = {}

    def places(self, plan: Plan) -> dict[int, tuple[int, int]]:
        """Return the place of each rank in its replica. Ranks with equal places reduce their gradients together."""
        if plan.epoch not in self._places:
            shapes = {tuple((stage.tp, stage.chunks) for stage in replica.stages) for replica in plan.layout.replicas}
            self._places[plan.epoch] = {
                rank: (place.stage, place.t) if len(shapes) == 1 else (0, 0) for rank, place in plan.layout.places()
            }
        return self._places[plan.epoch]

    def members(self, key: tuple[Any, ...], plan: Plan) -> tuple[int, ...]:
        """Return the ranks that must enter a collective."""
        if key[0] in ("build", "transfer"):
            return plan.layout.ranks
        if key[0] == "reduce":
            return tuple(rank for rank, place in self.places(plan).items() if place == key[3])
        return self.world.active_ranks(plan)

    def enter(self, worker: Worker, key: tuple[Any, ...], done: Callable[[], None]) -> None:
        """Make `worker` enter the collective `key` and wait; `done` is called when the worker leaves it."""
        world = self.world
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
            meeting.over, meeting.over_at = True, world.now
            if key[0] == "sync":
                batch_changes = world.scenario.batch_sizes.at(worker.stepped + 2) != worker.plan.micro_batches
                if batch_changes or any(world.workers[rank].pause_asked > worker.epoch for rank in members):
                    self.pauses.add(key[1:])
                if any(world.workers[rank].save_asked for rank in members):
                    world.stopping.saves.add(key[1:])
            meeting.pending = set(members)
            slowest = worker.training.part_s(0.3)
            for rank in members:
                peer = world.workers[rank]
                peer.later(world.rng.choice([0.0, 0.001, slowest * world.rng.random()]), self.leave, peer, key)
        elif any(world.workers[rank].gone and rank not in meeting.come for rank in members):
            self.report_broken(worker, "connection closed by peer")

    def leave(self, worker: Worker, key: tuple[Any, ...]) -> None:
        if worker.waits == key:
            worker.waits = None
            meeting = self.meetings[key]
            meeting.pending.discard(worker.rank)
            meeting.come[worker.rank]()

    def report_broken(self, worker: Worker, error: str) -> None:
        """Let a worker notice that its collective is broken, with the probability `Scenario.breaks_loudly`."""
        world = self.world
        if world.rng.random() < world.scenario.breaks_loudly:
            worker.later(
                world.rng.choice([0.0, 0.05, world.rng.uniform(0, 1.0), world.rng.uniform(0, 5.0)]), worker.stuck, error
            )

    def peers_notice(self, dead: Worker) -> None:
        """Break the collectives that wait for a dead rank. Only some of its peers are informed."""
        if dead.plan is None:
            return
        for rank in dead.plan.layout.ranks:
            peer = self.world.workers[rank]
            if not peer.alive or peer.epoch != dead.epoch or peer.waits is None:
                continue
            meeting = self.meetings[peer.waits]
            if dead.rank not in self.members(peer.waits, dead.plan):
                continue
            if meeting.over:
                if self.world.rng.random() < 0.4:  # this rank had not finished its part of the collective
                    peer.generation += 1
                    self.report_broken(peer, "connection closed by peer")
            elif dead.rank not in meeting.come:
                self.report_broken(peer, "connection closed by peer")

    def come(self, worker: Worker, order: m.Probe) -> None:
        """Make a rank enter a link probe. When all its peers have entered as well, they continue."""
        world = self.world
        here = self.measuring.setdefault(order.probe, {})
        here[worker.rank] = worker.generation
        peers = {a + b - worker.rank for round_ in order.pairs for a, b in round_ if worker.rank in (a, b)}
        if peers <= here.keys():
            for rank in sorted(peers | {worker.rank}):
                if here[rank] == world.workers[rank].generation and not world.workers[rank].frozen:
                    world.workers[rank].generation += 1
                    world.workers[rank].later(world.rng.uniform(0.01, 0.1), world.workers[rank].probes.met, order, True)
        else:
            worker.later(2.0, worker.probes.met, order, False)

    def outcome_of(self, plan: Plan | None, iteration: int) -> m.StepOutcome:
        """Return the outcome of an iteration under a plan, equal on all ranks."""
        assert plan is not None
        key = (plan.epoch, iteration)
        if key not in self._outcomes:
            samples = [iteration * 1000 + index for share in plan.assignment for index in share]
            self._outcomes[key] = m.StepOutcome(
                iteration=iteration,
                clip=1.0,
                skip=False,
                learning_rate=1e-3,
                gradient_norm=1.0 + plan.epoch * 1e-9,  # differs between epochs, so that rules detect mixed outcomes
                loss=10.0 / iteration,
                tokens=64 * len(samples),
                sum_squared_lengths=4096 * len(samples),
                samples=len(samples),
                samples_digest=f"{samples_digest(samples):016x}",
                pause=key in self.pauses,
                save=key in self.world.stopping.saves,
            )
        return self._outcomes[key]

    def validation_loss(self, iteration: int) -> float:
        """Return the loss of the weights after an iteration; it does not depend on the plan."""
        return 11.0 / (1 + iteration)
