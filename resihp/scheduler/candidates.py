"""Everything that can run on what is left of a job, or has come to it, and can be changed to. Pure.

Progressive, as the paper has it: groups first, then layers, then micro-batches, each taking up what the one before
could not (`resihp.scheduler.layouts.groups`, `layers`, `shares`); going on without the replicas that lost a rank;
leaving everything as it is; leaving stages that lost all their ranks to other replicas
(`resihp.scheduler.layouts.vacant_stages`); and where links are slow the same stages in other pipelines
(`resihp.scheduler.layouts.swap_pipelines`). Called by `resihp.scheduler.planner` and `resihp.scheduler.anytime`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress

import msgspec

from resihp.errors import LayoutError, PlanError
from resihp.parallelism.layout import Layout, Replica, validate
from resihp.parallelism.plan import Plan
from resihp.scheduler import refusal
from resihp.scheduler.cost import transition_memory
from resihp.scheduler.cost.held_state import holdings
from resihp.scheduler.cost.prices import Priced, Prices, bytes_to_move
from resihp.scheduler.layouts import exhaustive, paper_planner, shares, swap_pipelines, vacant_stages
from resihp.scheduler.layouts.draft import Draft
from resihp.scheduler.layouts.groups import SIGNIFICANT
from resihp.scheduler.layouts.labels import relabelled
from resihp.scheduler.orders.lanes import overfull
from resihp.scheduler.situation import Situation

MOST_ROUNDED = 2048
"""Devices up to which, where the fastest has no room on the way, another is looked for although something runs."""

MOST_RELABELLED = 64
"""Groups that change places so that the old state has room beside the new one."""

SAFETY_SHARE = 0.02
"""How much longer an iteration may take where all state has holders on two nodes: the loss of the last one costs all
that was trained since the last checkpoint."""

TIE = 0.002
"""Relative difference below which two predictions are the same, and what moves the fewest bytes is taken."""


class PricedPlan(msgspec.Struct, frozen=True):
    name: str
    plan: Plan
    seconds: float


def runnable(situation: Situation, prices: Prices, *, improve: bool = True) -> list[PricedPlan]:
    """Everything that can run, at most one of each name. Raises PlanError if there is nothing.

    `improve`: whether the progressive one is made better by single changes, which a search does faster and better.
    """
    makers: list[Callable[[Situation, Prices], PricedPlan]] = [without_lost]
    if not situation.lost and not situation.base.vacant:
        makers.insert(0, _keep)
    makers += [lambda situation, prices: _progressive(situation, prices, improve=improve)]
    found: list[PricedPlan] = []
    obstacles: list[str] = []

    def attempt(make: Callable[[Situation, Prices], PricedPlan]) -> None:
        try:
            found.append(make(situation, prices))
        except LayoutError as error:
            obstacles.append(str(error))

    for make in makers:
        attempt(make)
    if situation.memory_bytes is not None and {one.name for one in found} <= {"progressive"}:
        attempt(_one_partition)
    below = min((candidate.seconds for candidate in found), default=math.inf)
    try:
        anew = exhaustive.replicas(situation, prices, below)
        if anew is not None:
            found.append(candidate("anew", situation, prices, anew))
    except LayoutError as error:
        obstacles.append(str(error))
    if vacant_stages.may_help(situation):
        below = min((candidate.seconds for candidate in found), default=math.inf)
        attempt(lambda *_: PricedPlan("lost stages passed elsewhere", *vacant_stages.best(situation, below)))
    if situation.links:
        found += _crossed(found, situation, prices)
    if not found:
        ranks = situation.available
        tried = "; ".join(dict.fromkeys(obstacles))
        raise PlanError(f"nothing can run on {len(ranks)} ranks: {refusal.reason(situation)}; tried: {tried}")
    return found


def all_reachable(
    situation: Situation, prices: Prices, plans: list[PricedPlan], *, improve: bool = True
) -> list[PricedPlan]:
    """Those whose transition every rank has memory for; where the progressive one is none of them, as it is with room
    for the old state beside the new one. `improve` as for `runnable`. Raises PlanError if there are none."""
    found: list[PricedPlan] = []
    obstacles: list[str] = []
    for one in plans:
        try:
            found.append(reachable(situation, prices, one))
        except LayoutError as error:
            obstacles.append(f"{one.name}: {error}")
    names = {one.name for one in found}
    missed = any(one.name == "progressive" and one.name not in names for one in plans)
    if missed and (not found or len(situation.available) <= MOST_ROUNDED):
        with suppress(LayoutError):
            found.append(reachable(situation, prices, _progressive(situation, prices, beside=True, improve=improve)))
    if not found:
        raise PlanError(f"nothing can be changed to: {'; '.join(dict.fromkeys(obstacles))}")
    return found


def reachable(situation: Situation, prices: Prices, one: PricedPlan) -> PricedPlan:
    """A plan whose transition every rank has memory for: this one, or the same with ranks that keep more of what they
    hold. Raises PlanError if there is none."""
    obstacle = transition_obstacle(situation, one.plan)
    if obstacle is None:
        return one
    if not one.plan.migrations and not one.plan.layout.vacant:
        labelled = _relabelled(situation, one.plan.layout.replicas)
        if labelled != one.plan.layout.replicas:
            other = candidate(one.name, situation, prices, [prices.priced(replica) for replica in labelled])
            if transition_obstacle(situation, other.plan) is None:
                return other
    raise PlanError(obstacle)


def _relabelled(situation: Situation, replicas: tuple[Replica, ...]) -> tuple[Replica, ...]:
    """With ranks that keep more of what they hold, in those that are not as they were: these are few, or none do."""
    before = {id(replica) for replica in situation.base.replicas}
    changed = [d for d, replica in enumerate(replicas) if id(replica) not in before]
    if sum(len(replicas[d].stages) for d in changed) > MOST_RELABELLED:
        return replicas
    busy = {rank for replica in replicas if id(replica) in before for rank in replica.ranks}
    others = tuple(rank for rank in situation.available if rank not in busy)
    found = relabelled([replicas[d] for d in changed], msgspec.structs.replace(situation, available=others))
    anew = dict(zip(changed, found, strict=True))
    return tuple(anew.get(d, replica) for d, replica in enumerate(replicas))


def transition_obstacle(situation: Situation, plan: Plan) -> str | None:
    """Which rank has no room for its state to come beside that of before; None where all have."""
    if situation.memory_bytes is None or situation.fresh:
        return None
    return transition_memory.obstacle(
        situation.holding,
        set(situation.available).difference(situation.stale),
        plan.layout,
        situation.model,
        situation.memory_bytes,
        zero_1=situation.zero_1,
        overhead=situation.overhead,
    )


def best_of(situation: Situation, plans: list[PricedPlan]) -> PricedPlan:
    """Return the fastest plan, or one that takes up to `SAFETY_SHARE` longer and keeps all state on two nodes.

    Of equally fast ones that whose state has more than one holder, then that which moves the fewest bytes, then changes
    the fewest stages.
    """
    fastest = min(one.seconds for one in plans)
    if len(plans) > 1:
        near = [one for one in plans if one.seconds <= fastest * (1 + SAFETY_SHARE)]
        safe = [one for one in near if is_held_on_two_nodes(one.plan.layout, situation.nodes)]
        plans = safe or plans
        fastest = min(one.seconds for one in plans)
    equal = [one for one in plans if one.seconds <= fastest * (1 + TIE)]
    if len(equal) == 1:
        return equal[0]
    present = {stage for replica in situation.base.replicas for stage in replica.stages}

    def unrest(one: PricedPlan) -> tuple[bool, int, int]:
        layout = one.plan.layout
        stages = {stage for replica in layout.replicas for stage in replica.stages}
        return layout.whole < 2, bytes_to_move(situation, layout), len(stages.symmetric_difference(present))

    return min(equal, key=unrest)


def is_held_on_two_nodes(layout: Layout, nodes: Mapping[int, str]) -> bool:
    """Return whether every layer's state outlives the loss of any one node.

    It does where no node has a rank of each stage that holds the layer.
    """
    in_common: dict[int, set[str]] = {}
    """Nodes that have a part of every copy of a layer, by layer."""
    for replica in layout.replicas:
        for stage in replica.stages:
            where = {nodes[rank] for rank in stage.ranks}
            for layer in stage.layers if where else ():
                in_common[layer] = in_common.get(layer, where) & where
        if not replica.vacant and not any(in_common.values()):
            return True  # it holds every layer
    return bool(in_common) and not any(in_common.values())


def _keep(situation: Situation, prices: Prices) -> PricedPlan:
    return candidate("keep", situation, prices, [prices.priced(replica) for replica in situation.base.replicas])


def without_lost(situation: Situation, prices: Prices) -> PricedPlan:
    gone = situation.lost.union(situation.stale)
    left = situation.base.without(gone).replicas
    if not left:
        raise PlanError(f"every replica has lost a rank: {sorted(gone) or 'some have stages without ranks'}")
    return candidate("without lost replicas", situation, prices, [prices.priced(replica) for replica in left])


def _one_partition(situation: Situation, prices: Prices) -> PricedPlan:
    """Layers as the paper repartitions them, the same for all replicas: with tight memory, at times the best there is
    where no replica goes on as it was."""
    replicas = paper_planner.progressive(situation, paper_planner.STEPS[:2]).plan.layout.replicas
    return candidate("one partition for all", situation, prices, [prices.priced(replica) for replica in replicas])


def _progressive(situation: Situation, prices: Prices, *, beside: bool = False, improve: bool = True) -> PricedPlan:
    """`beside`: with room for what ranks hold before the change."""
    best = _draft(situation, prices, (), beside, improve)
    while best.weak is not None:  # its ranks may serve better elsewhere
        other = _draft(situation, prices, {*best.given_up, best.weak}, beside, improve)
        if other.seconds >= best.seconds * (1 - SIGNIFICANT):
            break
        best = other
    if not best.pipes:
        raise PlanError("no replica can be put together from the ranks that are left")
    name = "progressive, with room for what is there" if beside else "progressive"
    return candidate(name, situation, prices, [*best.pipes.values()])


def _crossed(plans: list[PricedPlan], situation: Situation, prices: Prices) -> list[PricedPlan]:
    """The same stages with other neighbours, where slow links join them."""
    found: dict[tuple[Replica, ...], PricedPlan] = {}
    for one in plans:
        if one.plan.layout.vacant:
            continue  # its micro-batches pass between replicas as it is
        replicas = swap_pipelines.crossed(one.plan.layout.replicas, situation)
        if replicas is not None and replicas not in found:
            name = f"{one.name}, pipelines crossed"
            with suppress(PlanError):  # there is no room for it
                found[replicas] = candidate(name, situation, prices, [prices.priced(replica) for replica in replicas])
    return [*found.values()]


def _draft(situation: Situation, prices: Prices, given_up: Collection[int], beside: bool, improve: bool) -> Draft:
    live = set(situation.available)
    survivors = live.difference(situation.stale)
    held = holdings(situation.holding.replicas) if beside else ()
    holds = {rank: own for rank, own in held if rank in survivors} if beside else None
    drafts = [Draft(situation, prices, given_up, beside=holds)]
    stages = [stage for replica in situation.base.replicas for stage in replica.stages]
    if any(live.isdisjoint(stage.ranks) for stage in stages):
        drafts.append(Draft(situation, prices, given_up, vacant_first=False, beside=holds))
    for draft in drafts if improve else ():
        draft.improve()
    return min(drafts, key=lambda draft: draft.seconds)


def candidate(name: str, situation: Situation, prices: Prices, replicas: list[Priced]) -> PricedPlan:
    """A plan of these replicas; everybody else stands by. Raises PlanError if memory forbids it."""
    if situation.micro_batches < len(replicas):
        raise PlanError(f"{situation.micro_batches} micro-batches an iteration cannot feed {len(replicas)} replicas")
    counts, seconds = prices.iteration(replicas)
    used = {rank for priced in replicas for rank in priced.replica.ranks}
    layout = Layout(
        tuple(priced.replica for priced in replicas), tuple(sorted(set(situation.available).difference(used)))
    )
    validate(layout, situation.model)
    plan = Plan(
        epoch=situation.epoch,
        layout=layout,
        assignment=shares.contiguous(counts),
        schedule=situation.schedule,
        sequence_parallel=situation.sequence_parallel,
    )
    if math.isinf(seconds):
        raise PlanError(_obstacle(plan, situation))
    return PricedPlan(name, plan, seconds)


def _obstacle(plan: Plan, situation: Situation) -> str:
    """Why a plan takes for ever."""
    lacking = overfull(plan, situation)
    if lacking is not None:
        return lacking
    stopped = [rank for rank in plan.layout.active if not situation.speeds.get(rank, 1.0)]
    return f"ranks {stopped} have work and speed 0"
