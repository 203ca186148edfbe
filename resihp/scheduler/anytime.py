"""A decision that is made better for as long as there is time. Pure: trials are counted, the caller has the clock.

Whole layouts are searched (`resihp.scheduler.search`) from what is known to run, and what is found is given its
schedule: at once, within milliseconds, for the planner; then, for as long as somebody can wait, from the planner's
answer (`Anytime`). Called by `resihp.scheduler.planner`, `resihp.scheduler.thinking` and `resihp plan --search`; the
supervisor has it loaded beforehand (`load`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from resihp.errors import LayoutError
from resihp.parallelism.layout import Layout, Replica, validate
from resihp.parallelism.model import ModelSpec
from resihp.parallelism.plan import Plan
from resihp.pipeline.schedules import orders_of
from resihp.scheduler.candidates import TIE, PricedPlan, best_of, candidate, reachable, transition_obstacle
from resihp.scheduler.cost.prices import Prices
from resihp.scheduler.cost.profile import layer_units
from resihp.scheduler.layouts import exhaustive
from resihp.scheduler.layouts.labels import relabelled
from resihp.scheduler.orders import lanes, refinement
from resihp.scheduler.situation import Decision, Situation

if TYPE_CHECKING:
    from resihp.scheduler.search.annealing import Layouted, Search

MOST_DEVICES = 2048
"""Beyond, a second is over before every damaged replica was looked at, and naming ranks takes longer than that."""
MOST_AT_ONCE = 96
"""Devices up to which something is searched for at once. What fails in a larger job is a small part of it."""
AT_ONCE = 2400
"""Changes that are tried then: of 111 random jobs 93 % came to within 3 % of the best known, with 1200 85 %, with 3600
96 %."""
AT_ONCE_FEW = 100
"""The same where almost every layout was looked at already (`resihp.scheduler.layouts.exhaustive`)."""
TURN = 100
"""Changes that one of two searches tries before it is the other's turn."""


def obstacle(situation: Situation, plans: Sequence[PricedPlan]) -> str | None:
    """Why nothing is searched for at once from these; None where something is."""
    if len(situation.available) > MOST_AT_ONCE:
        return f"{len(situation.available)} devices are more than a search gets round to at once"
    return _obstacle(situation, [one.plan for one in plans])


def is_thorough(situation: Situation) -> bool:
    """Whether a search at once finds by itself what single changes to the plans it begins with would."""
    return len(situation.available) > exhaustive.MOST_DEVICES and obstacle(situation, []) is None


def at_once(situation: Situation, plans: Sequence[PricedPlan]) -> PricedPlan | None:
    """What a short search finds from the best of these, or without any; None where nothing is faster, or none may be
    looked for."""
    if obstacle(situation, plans) is not None:
        return None
    below = min((one.seconds for one in plans), default=math.inf)
    found: list[PricedPlan] = []
    for beside in (False, True):
        search = _search(situation, [one.plan for one in plans], beside=beside)
        if search is not None:
            search.run(AT_ONCE if len(situation.available) > exhaustive.MOST_DEVICES else AT_ONCE_FEW)
            found += filter(None, (_found(situation, search, plans),))
            if found and found[-1].seconds <= search.seconds * (1 + TIE):
                break  # else memory is in the way: a search of its own among what has room beside what is there
    best = best_of(situation, found) if found else None
    return best if best is not None and best.seconds < below * (1 - TIE) else None


def load() -> None:
    """Read, or compile, all that a search needs, by one of a small job, so that the first real one is not kept waiting.

    Takes a second, or several the first time on a machine.
    """
    model = ModelSpec(layers=4, hidden=64, heads=4, kv_groups=4, ffn_hidden=128, vocab=64, sequence=8)
    case = Situation(
        epoch=1,
        base=Layout.uniform(tp=1, pp=2, dp=2, layers=model.layers),
        available=(0, 1, 2, 3),
        nodes={0: "a", 1: "a", 2: "b", 3: "b"},
        model=model,
        micro_batches=4,
        tp=1,
        pp=2,
        memory_bytes=1 << 40,
        profile=msgspec.structs.replace(layer_units(model), transfer_s=0.1, gradient_s=0.1),
        links={("a", "b"): 0.5},
    )
    at_once(case, [])


class Anytime:
    """Begins with the instant `decision`; the same seed and number of trials come to the same one."""

    def __init__(self, situation: Situation, decision: Decision, seed: int = 0) -> None:
        self._situation, self._instant, self._seed = situation, decision, seed
        self._prices = Prices(situation)
        self._searches: list[Search] = []
        """The second one, if there is no way to what the first one found: among what has room beside what is there."""
        self._tried, self._looked_at = 0, math.inf
        self.obstacle = _obstacle(situation, [decision.plan])
        """Why nothing can be searched; None where it can."""
        if self.obstacle is None and not self._add():
            self.obstacle = "no replica that has ranks at each stage fits"

    def _add(self) -> bool:
        found = _search(self._situation, [self._instant.plan], self._seed, beside=bool(self._searches))
        if found is not None:
            self._searches.append(found)
        return found is not None

    def run(self, trials: int) -> bool:
        """Try so many changes; whether a better layout was found."""
        found, until = False, self._tried + (trials if self._searches else 0)
        while self._tried < until:
            first, search = self._searches[0], self._searches[self._tried // TURN % len(self._searches)]
            some = min(until - self._tried, TURN - self._tried % TURN)
            found |= search.run(some)
            self._tried += some
            if self._tried % TURN == 0 and len(self._searches) == 1 and first.seconds < self._looked_at:
                self._looked_at = first.seconds
                if _planned(self._situation, "", first.best()) is None:
                    self._add()
        return found

    def decision(self) -> Decision:
        """The best so far, with orders of its own where these pay; the instant one where nothing is better."""
        if not self._searches:
            return self._instant
        present = PricedPlan("the same layout", self._instant.plan, self._instant.seconds)
        found = [_found(self._situation, search, [present]) for search in self._searches]
        found += (self._migrated("searched", search.best().replicas) for search in self._searches)
        found.append(self._migrated("the same layout", self._instant.plan.layout.replicas))
        chosen = min((one for one in found if one is not None), key=lambda one: one.seconds, default=None)
        seconds, unit = self._instant.seconds, self._situation.unit
        if chosen is None or chosen.seconds >= seconds * (1 - TIE):
            return self._instant
        if best_of(self._situation, [present, chosen]) is present:
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


def _search(situation: Situation, plans: Sequence[Plan], seed: int = 0, *, beside: bool = False) -> Search | None:
    """From the whole replicas of each plan, or from ranks dealt out anew; None where these do not fit either."""
    from resihp.scheduler.search import annealing  # loads what compiles

    starts = [[one for one in plan.layout.replicas if not one.vacant] for plan in plans]
    search = annealing.Search(situation, [start for start in starts if start], seed, beside=beside)
    return search if search.best().replicas else None


def _found(situation: Situation, search: Search, plans: Sequence[PricedPlan]) -> PricedPlan | None:
    """The best of a search to which there is a way, of ranks that keep the most of what they hold, or one of `plans`
    where that is as fast in orders of its own; None where there is a way to none."""
    best = search.best()
    same = [
        one
        for one in plans
        if not one.plan.layout.vacant and search.seconds_of(one.plan.layout.replicas) <= best.seconds * (1 + TIE)
    ]
    found = [_planned(situation, one.name, search.priced(one.plan.layout.replicas)) for one in same]
    for layout in itertools.chain((best,), search.former()):
        if any(found):
            break
        named = search.priced(relabelled(layout.replicas, situation))  # for fewer bytes
        found = [_planned(situation, "searched", named)]
        if not any(found) or named.seconds > layout.seconds * (1 + TIE):
            found.append(_planned(situation, "searched", layout))
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
