"""A planner for simulated jobs: fast, deterministic, and likely to choose layouts that no real planner would choose.

Keeps complete replicas, and sometimes replicas that have stages without ranks. Forms more replicas, of random depth and
width, from the remaining ranks. Uses every device that it can, so that each loss and each newcomer changes the layout.
Sometimes finds no plan at all, or a plan that the checker refuses. Used by `world`.
"""

from __future__ import annotations

import random

from resihp.errors import PlanError
from resihp.parallelism.layout import Layout, Replica, Stage, validate
from resihp.parallelism.plan import Plan
from resihp.pipeline import checker
from resihp.scheduler import planner
from resihp.scheduler.situation import Decision, Situation


class RandomPlanner:
    """`trouble` is the probability of finding no plan. `kind` selects the planner: `real`, `wild` (this one), or
    `cautious`, which only drops replicas."""

    def __init__(self, seed: int, trouble: float, kind: str) -> None:
        self.seed, self.trouble, self.kind = seed, trouble, kind

    first_plan = staticmethod(planner.first_plan)

    def decide(self, situation: Situation) -> Decision:
        rng = random.Random(f"{self.seed} {situation.epoch} {situation.available}")
        if rng.random() < self.trouble:
            raise PlanError("the planner found no plan")
        if self.kind == "cautious":
            return self.without_lost_replicas(situation)
        if self.kind == "real":
            return planner.decide(situation)
        available = set(situation.available)
        able = available - set(situation.stale)
        replicas = [r for r in situation.base.replicas if able.issuperset(r.ranks) and not r.vacant]
        if replicas and rng.random() < 0.2:
            replicas.pop(rng.randrange(len(replicas)))
        if rng.random() < 0.4:
            replicas += self._vacated(situation, able, replicas)
        remaining = sorted(available - {rank for replica in replicas for rank in replica.ranks})
        while remaining and len(replicas) < situation.micro_batches:
            replica = self._replica(rng, situation, remaining)
            replicas.append(replica)
            remaining = [rank for rank in remaining if rank not in replica.ranks]
        if not replicas:
            raise PlanError("no rank is left")
        layout = Layout(tuple(replicas), tuple(remaining))
        validate(layout, situation.model)
        return Decision(plan=self._plan(situation, layout), seconds=1.0, reason="a draw")

    def without_lost_replicas(self, situation: Situation) -> Decision:
        lost_ranks = situation.lost | set(situation.stale)
        kept = situation.base.without(lost_ranks).replicas
        if not kept:
            raise PlanError(f"every replica has lost a rank: {sorted(lost_ranks)}")
        used = {rank for replica in kept for rank in replica.ranks}
        layout = Layout(kept, tuple(r for r in situation.available if r not in used))
        return Decision(plan=self._plan(situation, layout), seconds=1.0, reason="the remaining replicas")

    @staticmethod
    def _vacated(situation: Situation, able: set[int], whole: list[Replica]) -> list[Replica]:
        """Return replicas that lost ranks, without the affected stages, if the replicas in `whole` have the layers of
        these stages."""
        whole_layout = Layout(tuple(whole))
        vacated: list[Replica] = []
        for replica in situation.base.replicas:
            stages = [s if s.ranks and able.issuperset(s.ranks) else Stage((), s.chunks) for s in replica.stages]
            candidate = Replica(tuple(stages))
            hosted = all(whole_layout.hosts(span) for stage in stages if not stage.ranks for span in stage.chunks)
            if candidate.vacant and candidate.ranks and hosted and replica not in whole:
                vacated.append(candidate)
        return vacated[: max(0, situation.micro_batches - len(whole))]

    @staticmethod
    def _replica(rng: random.Random, situation: Situation, remaining: list[int]) -> Replica:
        """Return a replica of random depth. Each stage has one or two neighbouring ranks of a node, and at least one
        layer."""
        groups: list[tuple[int, ...]] = []
        ranks = list(remaining)
        depth = min(rng.randint(1, situation.pp + 1), situation.model.layers)
        while ranks and len(groups) < depth:
            first = ranks.pop(0)
            if ranks and situation.nodes[ranks[0]] == situation.nodes[first] and rng.random() < 0.5:
                groups.append((first, ranks.pop(0)))
            else:
                groups.append((first,))
        cuts = sorted(rng.sample(range(1, situation.model.layers), len(groups) - 1))
        bounds = [0, *cuts, situation.model.layers]
        return Replica(tuple(Stage(group, ((bounds[i], bounds[i + 1] - 1),)) for i, group in enumerate(groups)))

    @staticmethod
    def _plan(situation: Situation, layout: Layout) -> Plan:
        return Plan(
            epoch=situation.epoch,
            layout=layout,
            assignment=(),
            schedule=situation.schedule,
        ).dealing(situation.micro_batches)


class RandomChecker:
    """`trouble` is the probability of refusing a plan. Plans of a `wild` planner are not checked otherwise."""

    def __init__(self, seed: int, trouble: float, kind: str) -> None:
        self.seed, self.trouble, self.kind = seed, trouble, kind

    def check(self, plan: Plan) -> None:
        if plan.epoch > 1 and random.Random(f"{self.seed} {plan.digest}").random() < self.trouble:
            raise PlanError("the checker refuses this plan")
        if self.kind != "wild":
            checker.check(plan)
