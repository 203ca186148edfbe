"""The transition of a simulated worker from one plan to the next: park, confirm, build, transfer, begin.

Carries out the orders of a transition, and frees or receives state. Never chooses a plan. Called by `worker`, and by
training at a pause.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from resihp.parallelism.plan import Plan
from resihp.parallelism.transfers import Base, Move, bytes_of
from resihp.protocol import messages as m
from resihp.simulator.holdings import Holding, bits, drawn, needed, outline
from resihp.simulator.invariants.violations import expect

if TYPE_CHECKING:
    from resihp.simulator.machines.worker import Worker


class WorkerTransition:
    """The transitions of one worker."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.world = worker, worker.world
        self.proposed: Plan | None = None
        self.upcoming = 0
        """First iteration of the plan in preparation."""
        self.objections = 0

    def pause(self, order: m.Park) -> None:
        """Park after the iteration in progress; soon, if there is none."""
        worker, rng = self.worker, self.world.rng
        if order.epoch <= worker.seen:
            return
        worker.pause_asked = max(order.epoch, worker.pause_asked)
        if worker.pausing or not worker.active:
            worker.later(rng.choice([0.001, rng.uniform(0, 0.3)]), self.park, order.epoch)

    def propose(self, order: m.Propose) -> None:
        """Store a proposed plan, and answer after a delay."""
        worker = self.worker
        if order.plan.epoch < worker.seen:
            return
        worker.seen = order.plan.epoch
        self.proposed, worker.base, worker.nodes = order.plan, order.base, order.nodes
        self.settle(order.base)
        worker.later(self.world.rng.uniform(0.0, 0.05), self.confirm, order.plan)

    def let_go(self, epoch: int) -> None:
        """Stop training and park. A step in progress is either taken completely or not at all; gradients stay."""
        worker = self.worker
        rng = self.world.rng
        worker.generation += 1
        worker.waits = worker.faults.resume = None
        worker.faults.held_by = None
        worker.pausing = False
        if worker.reduced is not None and rng.random() < 0.5:
            worker.training.take_step(worker.reduced, reports=self.world.scenario.seed % 3 != 1)
        worker.reduced = None
        worker.activity = "parked"
        delay_s = rng.choice([0.001, 0.01, rng.uniform(0, 0.3), rng.uniform(0, 2.0)])
        worker.later(delay_s, worker.faults.enter_phase, "park", self.park, epoch)

    def park(self, epoch: int) -> None:
        worker = self.worker
        worker.activity = "parked"
        worker.probes.decline()
        if worker.forgets:
            worker.held, worker.ready, worker.forgets = {}, False, False
        worker.say(
            m.Parked(
                epoch=epoch,
                holds=tuple(sorted(worker.held)),
                stepped=worker.stepped,
                outcome=worker.outcome,
                ready=worker.ready,
            )
        )
        self.world.disturbances.happens("parked", worker.rank)

    def confirm(self, plan: Plan) -> None:
        worker = self.worker
        scenario = self.world.scenario
        if plan.epoch <= scenario.agrees_up_to:
            worker.say(m.Confirm(epoch=plan.epoch, digest=plan.digest))
        elif scenario.objects == worker.rank and self.objections < scenario.objections:
            self.objections += 1
            worker.say(m.Object(epoch=plan.epoch, reason="too little memory"))
        else:
            differs = scenario.other_digest == worker.rank and self.objections < scenario.objections
            self.objections += differs
            worker.say(m.Confirm(epoch=plan.epoch, digest="0" * 64 if differs else plan.digest))

    def settle(self, base: Base | None) -> None:
        """Keep only the state of the proposal's base; any other state is obsolete."""
        worker = self.worker
        if base is None:
            kept: dict[int, Holding] = {}
        else:
            kept = {epoch: holding for epoch, holding in worker.held.items() if epoch == base.epoch}
        for epoch in worker.held.keys() - kept.keys():
            self.world.rules.freed(worker, epoch, None if base is None else base.epoch)
        worker.held = kept

    def go(self, go: m.Go) -> None:
        """Complete the committed step on the old state, then build the new state beside it and transfer."""
        worker = self.worker
        world, base, plan = self.world, worker.base, self.proposed
        expect(plan is not None and plan.epoch == go.epoch, f"rank {worker.rank}: go to an epoch it never confirmed")
        assert plan is not None
        worker.seen = worker.epoch = go.epoch
        self.upcoming = go.next_iteration
        worker.plan = plan
        worker.generation += 1
        worker.active = worker.rank in world.active_ranks(plan)
        worker.pausing, worker.pause_asked, worker.reduced = False, 0, None
        if base is None:
            worker.held = {}
            worker.stepped, worker.outcome = go.next_iteration - 1, None
        elif worker.rank not in base.survivors:
            worker.held.pop(base.epoch, None)
        else:
            expect(base.epoch in worker.held, f"rank {worker.rank}: holds {list(worker.held)}, asked for {base.epoch}")
            self.finish(go)
        worker.ready = False
        worker.activity = "communication"
        worker.later(world.rng.uniform(0.01, 0.3), worker.faults.enter_phase, "groups", self.build)

    def finish(self, go: m.Go) -> None:
        """Take the committed step, which requires the state of the iteration before and its gradients."""
        worker = self.worker
        if go.finish is not None:
            done = go.finish.iteration
            if worker.stepped == done:
                same = worker.outcome is None or worker.outcome == go.finish
                expect(same, f"rank {worker.rank}: told to finish {done} with another outcome than it took")
            else:
                expect(worker.stepped == done - 1, f"rank {worker.rank}: at {worker.stepped}, told to finish {done}")
                expect(worker.ready, f"rank {worker.rank}: told to finish {done} without reduced gradients")
                worker.training.take_step(go.finish, reports=self.world.scenario.seed % 3 != 0)
        expect(
            go.next_iteration == worker.stepped + 1,
            f"rank {worker.rank}: is after {worker.stepped}, told to begin {go.next_iteration}",
        )

    def build(self) -> None:
        self.world.collectives.enter(self.worker, ("build", self.worker.epoch), self.built)

    def built(self) -> None:
        worker = self.worker
        worker.work(1, "communication")
        worker.later(self.world.rng.uniform(0.0, 0.1), worker.faults.enter_phase, "transfer", self.transfer)

    def transfer(self) -> None:
        chunks = self.world.rng.choice([0, 0, 1, 3])
        key = ("transfer", self.worker.epoch)
        self.world.collectives.enter(self.worker, key, functools.partial(self.receive, chunks))

    def receive(self, chunks: int) -> None:
        """Receive one chunk after the other; each chunk counts as progress."""
        self.worker.work(1, "communication")
        if chunks:
            self.worker.later(self.world.scenario.chunk_s * self.world.rng.random(), self.receive, chunks - 1)
        else:
            self.acknowledge()

    def acknowledge(self) -> None:
        worker = self.worker
        rng = self.world.rng
        assert worker.plan is not None
        moved = 0
        if worker.active:
            worker.held[worker.epoch], moved = self.assemble()
            worker.stepped = worker.held[worker.epoch].iteration
            if worker.outcome is not None and worker.outcome.iteration != worker.stepped:
                worker.outcome = None
        worker.say(
            m.Ready(
                epoch=worker.epoch,
                groups_s=rng.uniform(0, 1),
                state_s=rng.uniform(0, 1),
                bytes_received=moved,
                extra_bytes=moved // 2,
            )
        )
        self.world.disturbances.happens("ready", worker.rank)

    def assemble(self) -> tuple[Holding, int]:
        """Return the state under the new plan, from own and received slices, and the number of bytes received."""
        worker, rules = self.worker, self.world.rules
        plan, base, model = worker.plan, worker.base, self.world.scenario.model
        assert plan is not None
        need = needed(model, plan.layout)[worker.rank]
        if base is None:
            loaded = rules.values[self.upcoming - 1]
            return Holding(need, loaded.iteration, loaded.value), 0
        specs = {spec.name: spec for spec in outline(model)}
        old = worker.held.get(base.epoch)
        parts = [] if old is None else [Holding(old.slices & need, old.iteration, old.value)]
        received = 0
        for move in self.world.moves(base, plan.layout, outline(model), worker.nodes):
            if move.target == worker.rank:
                parts.append(self._received(move, base))
                received += bytes_of(move, specs)
        whole = 0
        for part in parts:
            expect(not whole & part.slices, f"rank {worker.rank} receives state that it already has")
            whole |= part.slices
        values = {(part.iteration, part.value) for part in parts if part.slices}
        if not rules.given_up(worker):
            expect(whole == need, f"rank {worker.rank} lacks slices of epoch {plan.epoch}")
            expect(len(values) == 1, f"rank {worker.rank} mixes iterations {sorted(i for i, _ in values)}")
        return Holding(whole, *max(values)), received

    def _received(self, move: Move, base: Base) -> Holding:
        """Return the state that this worker receives in one move."""
        worker, rules = self.worker, self.world.rules
        source = self.world.workers[move.source]
        holding = source.held.get(base.epoch)
        if rules.given_up(worker) or rules.given_up(source):
            holding = holding or max(source.held.values(), key=lambda h: h.iteration, default=drawn(0, 0))
        else:
            text = f"rank {source.rank} freed epoch {base.epoch}, which rank {worker.rank} needs"
            expect(holding is not None, text)
        assert holding is not None
        wanted = bits(self.world.scenario.model, move.slices)
        lacks = wanted & ~holding.slices
        expect(not lacks or rules.given_up(source), f"rank {source.rank} lacks state for rank {worker.rank}")
        return Holding(wanted, holding.iteration, holding.value)

    def begin_plan(self, order: m.Begin) -> None:
        """Put the plan into effect: free all state that it does not need."""
        worker = self.worker
        epoch = order.epoch
        if epoch != worker.epoch or worker.plan is None or worker.plan.epoch != epoch:
            return
        worker.seen = epoch
        for old in worker.held.keys() - {epoch}:
            self.world.rules.freed(worker, old, epoch)
        worker.held = {epoch: worker.held[epoch]} if worker.active else {}
        if not worker.active:
            worker.activity = "idle"
            return
        worker.training.assessed = order.evaluated
        self.world.disturbances.happens("resumed", worker.rank)
        worker.work(1, "communication")
        worker.later(self.world.rng.uniform(0, 0.01), worker.faults.enter_phase, "resume", worker.training.begin, 2.0)
