"""A decision that is made better for as long as there is time. Pure: trials are counted, the caller has the clock.

Whole layouts are searched (`resihp.scheduler.search`) from what is known to run, and what is found is given its
schedule: at once, within milliseconds, for the planner; then, for as long as somebody can wait, from the planner's
answer (`Anytime`). Called by `resihp.scheduler.planner`, `resihp.scheduler.thinking` and `resihp plan --search`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from resihp.errors import LayoutError
from resihp.parallelism.layout import Layout, Replica, validate
from resihp.parallelism.plan import Plan
from resihp.pipeline.schedules import orders_of
from resihp.scheduler.candidates import TIE, PricedPlan, best_of, candidate, reachable, transition_obstacle
from resihp.scheduler.cost.prices import Prices
from resihp.scheduler.layouts.labels import relabelled
from resihp.scheduler.orders import lanes, refinement
from resihp.scheduler.situation import Decision, Situation

if TYPE_CHECKING:
    from resihp.scheduler.search.annealing import Layouted, Search

MOST_DEVICES = 2048
"""Beyond, a second is over before every damaged replica was looked at, and naming ranks takes longer than that."""
MOST_AT_ONCE = 96
"""Devices up to which something is searched for at once. What fails in a larger job is a small part of it."""
AT_ONCE = 800
"""Changes that are tried then: of 58 random jobs seven of eight came to within 3 % of the best of seven searches of a
second, with 400 three of four."""


def obstacle(situation: Situation, plans: Sequence[PricedPlan]) -> str | None:
    """Why nothing is searched for at once from these; None where something is."""
    if len(situation.available) > MOST_AT_ONCE:
        return f"{len(situation.available)} devices are more than a search gets round to at once"
    return _obstacle(situation, [one.plan for one in plans])


def at_once(situation: Situation, plans: Sequence[PricedPlan]) -> PricedPlan | None:
    """What a short search finds from the best of these, or without any; None where nothing is faster, or none may be
    looked for."""
    if obstacle(situation, plans) is not None:
        return None
    search = _search(situation, [one.plan for one in plans])
    if search is None:
        return None
    search.run(AT_ONCE)
    found = _found(situation, search, plans)
    below = min((one.seconds for one in plans), default=float("inf"))
    return found if found is not None and found.seconds < below * (1 - TIE) else None


def load(situation: Situation) -> None:
    """Read, or compile, what a search in such a job needs, so that the first one does not wait for it."""
    plan = Plan(epoch=situation.epoch, layout=situation.base, assignment=())
    if _obstacle(situation, [plan]) is None:
        search = _search(situation, [])
        if search is not None:
            search.run(1)
            search.best()


class Anytime:
    """Begins with the instant `decision`; the same seed and number of trials come to the same one."""

    def __init__(self, situation: Situation, decision: Decision, seed: int = 0) -> None:
        self._situation, self._instant, self._prices = situation, decision, Prices(situation)
        self._search: Search | None = None
        self.obstacle = _obstacle(situation, [decision.plan])
        """Why nothing can be searched; None where it can."""
        if self.obstacle is None:
            self._search = _search(situation, [decision.plan], seed)
            if self._search is None:
                self.obstacle = "no replica that has ranks at each stage fits"

    def run(self, trials: int) -> bool:
        """Try so many changes; whether a better layout was found."""
        return self._search is not None and self._search.run(trials)

    def decision(self) -> Decision:
        """The best so far, with orders of its own where these pay; the instant one where nothing is better."""
        if self._search is None:
            return self._instant
        present = PricedPlan("the same layout", self._instant.plan, self._instant.seconds)
        found = [_found(self._situation, self._search, [present])]
        found.append(self._migrated("searched", self._search.best().replicas))
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

    def _migrated(self, name: str, replicas: Sequence[Replica]) -> PricedPlan | None:
        """With micro-batches that pass single stages elsewhere; None where that cannot be."""
        with suppress(LayoutError):
            plain = candidate(name, self._situation, self._prices, [self._prices.priced(one) for one in replicas])
            plain = reachable(self._situation, self._prices, plain)
            found = refinement.migrated(self._situation, plain.plan, self._prices)
            if found.plan.migrations:
                return PricedPlan(f"{name}, with {found.how}", found.plan, found.seconds)
        return None


def _obstacle(situation: Situation, plans: Sequence[Plan]) -> str | None:
    stages = [stage for plan in plans for replica in plan.layout.replicas for stage in replica.stages]
    if situation.memory_bytes is None:
        return "memory is not known, and layouts change as little as they can"
    if situation.chunks > 1 or any(len(stage.chunks) > 1 for stage in stages):
        return "stages have several chunks"
    if len(situation.available) > MOST_DEVICES:
        return f"{len(situation.available)} devices are more than a search gets round to"
    return None


def _search(situation: Situation, plans: Sequence[Plan], seed: int = 0) -> Search | None:
    """From the whole replicas of each plan, or from ranks dealt out anew; None where these do not fit either."""
    from resihp.scheduler.search import annealing  # loads what compiles

    starts = [[one for one in plan.layout.replicas if not one.vacant] for plan in plans]
    search = annealing.Search(situation, [start for start in starts if start], seed)
    return search if search.best().replicas else None


def _found(situation: Situation, search: Search, plans: Sequence[PricedPlan]) -> PricedPlan | None:
    """The best of a search, of ranks that keep the most of what they hold, or one of `plans` where that is as fast in
    orders of its own; None where there is no way to get there."""
    best = search.best()
    same = [
        one
        for one in plans
        if not one.plan.layout.vacant and search.seconds_of(one.plan.layout.replicas) <= best.seconds * (1 + TIE)
    ]
    found = [_planned(situation, one.name, search.priced(one.plan.layout.replicas)) for one in same]
    if not any(found):
        named = search.priced(relabelled(best.replicas, situation))  # for fewer bytes
        found = [_planned(situation, "searched", named)]
        if found[0] is None or named.seconds > best.seconds * (1 + TIE):
            found.append(_planned(situation, "searched", best))
    known = [one for one in found if one is not None]
    return best_of(situation, known) if known else None


def _planned(situation: Situation, name: str, found: Layouted) -> PricedPlan | None:
    """With the orders that were found; None where there is no memory for it, or for getting there."""
    if not found.shares:
        return None
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
    return PricedPlan(name, plan, found.seconds)
