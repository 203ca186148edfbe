"""A decision that is made better for as long as there is time. Pure: trials are counted, the caller has the clock.

The instant plan (`resihp.scheduler.planner`) is the first answer; then whole layouts are searched
(`resihp.scheduler.search`), and what is found is given its schedule (`resihp.scheduler.orders.refinement`).
Called by `resihp plan --search`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import msgspec

from resihp.errors import LayoutError
from resihp.parallelism.layout import Layout, Replica, validate
from resihp.parallelism.plan import Plan
from resihp.pipeline.schedules import orders_of
from resihp.scheduler.cost.prices import Prices, iteration_seconds
from resihp.scheduler.layouts.labels import relabelled
from resihp.scheduler.orders import lanes, refinement
from resihp.scheduler.planner import TIE, PricedPlan, candidate, reachable, transition_obstacle
from resihp.scheduler.search.annealing import Layouted, Search
from resihp.scheduler.situation import Decision, Situation

MOST_DEVICES = 2048
"""Beyond, a second is over before every damaged replica was looked at, and naming ranks takes longer than that."""


class Anytime:
    """Begins with the instant `decision`; the same seed and number of trials come to the same one."""

    def __init__(self, situation: Situation, decision: Decision, seed: int = 0) -> None:
        self._situation, self._instant, self._prices = situation, decision, Prices(situation)
        self._search: Search | None = None
        self.obstacle = _obstacle(situation, decision)
        """Why nothing can be searched; None where it can."""
        if self.obstacle is None:
            self._search = Search(situation, [_whole(decision)], seed)

    def run(self, trials: int) -> bool:
        """Try so many changes; whether a better layout was found."""
        return self._search is not None and self._search.run(trials)

    def decision(self) -> Decision:
        """The best so far, with orders of its own where these pay; the instant one where nothing is better."""
        if self._search is None:
            return self._instant
        best = self._search.best()
        named = self._search.priced(relabelled(best.replicas, self._situation))
        same = {*best.replicas} == {*self._instant.plan.layout.replicas}
        name = "the same layout" if same else "searched"
        found = [self._planned(name, named)]  # for fewer bytes
        if found[0] is None or named.seconds > best.seconds * (1 + TIE):
            found.append(self._planned(name, best))
        found.append(self._migrated("searched", best.replicas))
        found.append(self._migrated("the same layout", self._instant.plan.layout.replicas))
        chosen = min((one for one in found if one is not None), key=lambda one: one.seconds, default=None)
        seconds, unit = self._instant.seconds, self._situation.unit
        if chosen is None or chosen.seconds >= seconds * (1 - TIE):
            return self._instant
        return Decision(
            plan=chosen.plan,
            seconds=chosen.seconds,
            reason=f"{chosen.name}: predicted {chosen.seconds:.4g} {unit} an iteration, against {seconds:.4g} at once",
            alternatives=(("at once", seconds), *self._instant.alternatives),
        )

    def _planned(self, name: str, found: Layouted) -> PricedPlan | None:
        """With the orders that were found; None where there is no memory for it, or for getting there."""
        if not found.shares:
            return None
        situation = self._situation
        used = {rank for replica in found.replicas for rank in replica.ranks}
        plan = Plan(
            epoch=situation.epoch,
            layout=Layout(found.replicas, tuple(sorted(set(situation.available).difference(used)))),
            assignment=found.shares,
            schedule=situation.schedule,
            sequence_parallel=situation.sequence_parallel,
        )
        validate(plan.layout, situation.model)
        if any(found.orders):
            textbook = orders_of(plan)
            orders = tuple(own or other for own, other in zip(found.orders, textbook, strict=True))
            plan, name = msgspec.structs.replace(plan, orders=orders), f"{name}, with orders of their own"
        if lanes.overfull(plan, situation) or transition_obstacle(situation, plan):
            return None
        return PricedPlan(name, plan, iteration_seconds(plan, situation))

    def _migrated(self, name: str, replicas: Sequence[Replica]) -> PricedPlan | None:
        """With micro-batches that pass single stages elsewhere; None where that cannot be."""
        with suppress(LayoutError):
            plain = candidate(name, self._situation, self._prices, [self._prices.priced(one) for one in replicas])
            plain = reachable(self._situation, self._prices, plain)
            found = refinement.migrated(self._situation, plain.plan, self._prices)
            if found.plan.migrations:
                return PricedPlan(f"{name}, with {found.how}", found.plan, found.seconds)
        return None


def _obstacle(situation: Situation, decision: Decision) -> str | None:
    stages = [stage for replica in decision.plan.layout.replicas for stage in replica.stages]
    if situation.memory_bytes is None:
        return "memory is not known, and layouts change as little as they can"
    if situation.chunks > 1 or any(len(stage.chunks) > 1 for stage in stages):
        return "stages have several chunks"
    if len(situation.available) > MOST_DEVICES:
        return f"{len(situation.available)} devices are more than a search gets round to"
    return None if _whole(decision) else "in each replica a stage has no ranks"


def _whole(decision: Decision) -> list[Replica]:
    """Replicas with ranks at every stage: what is searched for has no other ones."""
    return [one for one in decision.plan.layout.replicas if all(stage.ranks for stage in one.stages)]
