"""A decision that keeps improving as long as there is time. Pure: trials are counted, and the caller reads the clock.

The search (`resihp.scheduler.search`) starts from layouts that are known to run; the best layout that it finds gets its
orders. The planner runs it for milliseconds, as part of its immediate decision. `Anytime` then continues from that
decision for as long as the caller can wait. Called by `resihp.scheduler.planner`, `resihp.scheduler.thinking` and
`resihp plan --search`; the supervisor calls `load` beforehand.
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
from resihp.scheduler.candidates import TIE_TOLERANCE, PricedPlan, best_of, candidate, reachable, transition_obstacle
from resihp.scheduler.cost.prices import Prices
from resihp.scheduler.cost.profile import layer_units
from resihp.scheduler.layouts import exhaustive
from resihp.scheduler.layouts.labels import relabelled
from resihp.scheduler.orders import lanes, refinement
from resihp.scheduler.situation import Decision, Situation

if TYPE_CHECKING:
    from resihp.scheduler.search.annealing import FoundLayout, Search

MAX_DEVICES = 2048
"""Maximum number of devices of any search. In a larger job, a second is not enough to consider every damaged replica,
and assigning ranks takes even longer."""
MAX_IMMEDIATE_DEVICES = 96
"""Maximum number of devices of an immediate search. In a larger job, a failure affects only a small part."""
IMMEDIATE_TRIALS = 2400
"""Changes that an immediate search tries. With 2400 changes, 93 % of 111 random jobs came within 3 % of the best known
layout; with 1200 changes 85 %, with 3600 changes 96 %."""
IMMEDIATE_TRIALS_SMALL_JOB = 100
"""Changes that an immediate search tries in a job so small that almost every layout was already priced
(`resihp.scheduler.layouts.exhaustive`)."""
TRIALS_PER_TURN = 100
"""Changes that one of two searches tries before the other one continues."""


def obstacle(situation: Situation, plans: Sequence[PricedPlan]) -> str | None:
    """Return why no immediate search can start from these plans; None if one can."""
    if len(situation.available) > MAX_IMMEDIATE_DEVICES:
        return f"{len(situation.available)} devices are too many for an immediate search"
    return _obstacle(situation, [plan.plan for plan in plans])


def is_thorough(situation: Situation) -> bool:
    """Return whether the immediate search runs and covers all single changes to the plans that it starts from."""
    return len(situation.available) > exhaustive.MAX_DEVICES and obstacle(situation, []) is None


def at_once(situation: Situation, plans: Sequence[PricedPlan]) -> PricedPlan | None:
    """Return the result of a short search that starts from `plans`; from newly distributed ranks if `plans` is empty.

    None if the result is not faster than every plan, or if a search is not possible (`obstacle`).
    """
    if obstacle(situation, plans) is not None:
        return None
    fastest_s = min((plan.seconds for plan in plans), default=math.inf)
    results: list[PricedPlan] = []
    for beside in (False, True):
        search = _search(situation, [plan.plan for plan in plans], beside=beside)
        if search is not None:
            search.run(
                IMMEDIATE_TRIALS if len(situation.available) > exhaustive.MAX_DEVICES else IMMEDIATE_TRIALS_SMALL_JOB
            )
            results += filter(None, (_found(situation, search, plans),))
            if results and results[-1].seconds <= search.seconds * (1 + TIE_TOLERANCE):
                break  # otherwise the transition lacks memory: search with room beside the current state
    best = best_of(situation, results) if results else None
    return best if best is not None and best.seconds < fastest_s * (1 - TIE_TOLERANCE) else None


def load() -> None:
    """Load or compile the code of the search by searching for a small job, so that the first real search does not wait.

    Takes a second; several seconds the first time on a machine.
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
    """A search that starts from the immediate `decision`. Equal seeds and numbers of trials give equal results."""

    def __init__(self, situation: Situation, decision: Decision, seed: int = 0) -> None:
        self._situation, self._instant, self._seed = situation, decision, seed
        self._prices = Prices(situation)
        self._searches: list[Search] = []
        """One or two searches. The second one starts if some rank lacks memory for the transition to the first one's
        result; it considers only layouts that leave room for the current state."""
        self._tried, self._looked_at = 0, math.inf
        self.obstacle = _obstacle(situation, [decision.plan])
        """Reason why no search is possible; None if a search is possible."""
        if self.obstacle is None and not self._add():
            self.obstacle = "no replica with ranks at each stage fits"

    def _add(self) -> bool:
        search = _search(self._situation, [self._instant.plan], self._seed, beside=bool(self._searches))
        if search is not None:
            self._searches.append(search)
        return search is not None

    def run(self, trials: int) -> bool:
        """Try `trials` changes. Return whether they led to a better layout."""
        is_better, until = False, self._tried + (trials if self._searches else 0)
        while self._tried < until:
            first, search = self._searches[0], self._searches[self._tried // TRIALS_PER_TURN % len(self._searches)]
            count = min(until - self._tried, TRIALS_PER_TURN - self._tried % TRIALS_PER_TURN)
            is_better |= search.run(count)
            self._tried += count
            if self._tried % TRIALS_PER_TURN == 0 and len(self._searches) == 1 and first.seconds < self._looked_at:
                self._looked_at = first.seconds
                if _planned(self._situation, "", first.best()) is None:
                    self._add()
        return is_better

    def decision(self) -> Decision:
        """Return the best decision so far: the search's layout, with its own orders if they pay, or else the immediate
        decision."""
        if not self._searches:
            return self._instant
        present = PricedPlan("the same layout", self._instant.plan, self._instant.seconds)
        plans = [_found(self._situation, search, [present]) for search in self._searches]
        plans += (self._migrated("searched", search.best().replicas) for search in self._searches)
        plans.append(self._migrated("the same layout", self._instant.plan.layout.replicas))
        chosen = min((plan for plan in plans if plan is not None), key=lambda plan: plan.seconds, default=None)
        seconds, unit = self._instant.seconds, self._situation.unit
        if chosen is None or chosen.seconds >= seconds * (1 - TIE_TOLERANCE):
            return self._instant
        if best_of(self._situation, [present, chosen]) is present:
            return self._instant
        return Decision(
            plan=chosen.plan,
            seconds=chosen.seconds,
            reason=f"{chosen.name}: predicted {chosen.seconds:.4g} {unit} per iteration, "
            f"versus {seconds:.4g} for the immediate decision",
            alternatives=(("at once", seconds), *self._instant.alternatives),
        )

    def _migrated(self, name: str, replicas: Sequence[Replica]) -> PricedPlan | None:
        """Return the plan in which micro-batches pass single stages in other replicas; None if there is no such
        plan."""
        with suppress(LayoutError):
            plain = candidate(
                name, self._situation, self._prices, [self._prices.priced(replica) for replica in replicas]
            )
            plain = reachable(self._situation, self._prices, plain)
            refined = refinement.migrated(self._situation, plain.plan, self._prices)
            if refined.plan.migrations:
                return PricedPlan(f"{name}, with {refined.how}", refined.plan, refined.seconds)
        return None


def _obstacle(situation: Situation, plans: Sequence[Plan]) -> str | None:
    stages = [stage for plan in plans for replica in plan.layout.replicas for stage in replica.stages]
    if situation.memory_bytes is None:
        return "device memory is unknown, so layouts change as little as possible"
    if situation.chunks > 1 or any(len(stage.chunks) > 1 for stage in stages):
        return "stages have several chunks"
    if len(situation.available) > MAX_DEVICES:
        return f"{len(situation.available)} devices are too many for a search"
    return None


def _search(situation: Situation, plans: Sequence[Plan], seed: int = 0, *, beside: bool = False) -> Search | None:
    """Start a search from the replicas without vacant stages of each plan, or from newly distributed ranks.

    None if memory suffices for neither.
    """
    from resihp.scheduler.search import annealing  # loads numba

    starts = [[replica for replica in plan.layout.replicas if not replica.vacant] for plan in plans]
    search = annealing.Search(situation, [start for start in starts if start], seed, beside=beside)
    return search if search.best().replicas else None


def _found(situation: Situation, search: Search, plans: Sequence[PricedPlan]) -> PricedPlan | None:
    """Return the best layout of a search to which a transition is possible, with ranks that keep as much state as
    possible.

    The result may be one of `plans`, if that plan is as fast with orders of its own. None if no transition is possible.
    """
    best = search.best()
    equally_fast = [
        plan
        for plan in plans
        if not plan.plan.layout.vacant
        and search.seconds_of(plan.plan.layout.replicas) <= best.seconds * (1 + TIE_TOLERANCE)
    ]
    results = [_planned(situation, plan.name, search.priced(plan.plan.layout.replicas)) for plan in equally_fast]
    for layout in itertools.chain((best,), search.former()):
        if any(results):
            break
        named = search.priced(relabelled(layout.replicas, situation))  # to move fewer bytes
        results = [_planned(situation, "searched", named)]
        if not any(results) or named.seconds > layout.seconds * (1 + TIE_TOLERANCE):
            results.append(_planned(situation, "searched", layout))
    reachable_plans = [plan for plan in results if plan is not None]
    return best_of(situation, reachable_plans) if reachable_plans else None


def _planned(situation: Situation, name: str, layout: FoundLayout) -> PricedPlan | None:
    """Return the plan of a layout with its orders; None if memory does not suffice for the plan or for the
    transition."""
    if not layout.shares:
        return None
    used = {rank for replica in layout.replicas for rank in replica.ranks}
    plan = Plan(
        epoch=situation.epoch,
        layout=Layout(layout.replicas, tuple(sorted(set(situation.available).difference(used)))),
        assignment=layout.shares,
        schedule=situation.schedule,
        sequence_parallel=situation.sequence_parallel,
    )
    validate(plan.layout, situation.model)
    if any(layout.orders):
        textbook = orders_of(plan)
        orders = tuple(
            own_order or default_order for own_order, default_order in zip(layout.orders, textbook, strict=True)
        )
        plan, name = msgspec.structs.replace(plan, orders=orders), f"{name}, with orders of their own"
    if lanes.overfull(plan, situation) or transition_obstacle(situation, plan):
        return None
    return PricedPlan(name, plan, layout.seconds)
