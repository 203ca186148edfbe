"""The plans that can run on the available devices, and to which a transition is possible within memory. Pure.

The candidates are:

- the progressive plan, as in the paper: first groups, then layers, then micro-batches, each step compensating for the
  imbalance that the previous step left (`resihp.scheduler.layouts.groups`, `layers`, `shares`);
- the present layout without the replicas that lost a rank;
- the present layout unchanged;
- for few devices, the best of all possible layouts (`resihp.scheduler.layouts.exhaustive`);
- the present layout in which other replicas do the work of stages that lost all their ranks
  (`resihp.scheduler.layouts.vacant_stages`);
- if links are slow, the same stages in other pipelines (`resihp.scheduler.layouts.swap_pipelines`).

Called by `resihp.scheduler.planner` and `resihp.scheduler.anytime`.
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
from resihp.scheduler.cost.lacking_state import bytes_to_move
from resihp.scheduler.cost.prices import Priced, Prices
from resihp.scheduler.layouts import exhaustive, paper_planner, shares, swap_pipelines, vacant_stages
from resihp.scheduler.layouts.draft import Draft
from resihp.scheduler.layouts.groups import SIGNIFICANT_GAIN
from resihp.scheduler.layouts.labels import relabelled
from resihp.scheduler.orders.lanes import overfull
from resihp.scheduler.situation import Situation

MAX_REPLANNED_DEVICES = 2048
"""Maximum number of devices for which another progressive plan is made if memory does not suffice for the transition to
the first one, although other plans remain."""

MAX_RELABELLED_GROUPS = 64
"""Maximum number of groups that exchange ranks so that the new state has room beside the old state."""

MAX_SAFETY_SLOWDOWN = 0.02
"""Relative increase of the iteration time that is accepted if all state then has holders on two nodes. Losing the only
holder of some state costs all training since the last checkpoint."""

TIE_TOLERANCE = 0.002
"""Relative difference below which two predictions count as equal; the plan that moves fewer bytes is then preferred."""


class PricedPlan(msgspec.Struct, frozen=True):
    name: str
    plan: Plan
    seconds: float


def runnable(situation: Situation, prices: Prices, *, improve: bool = True) -> list[PricedPlan]:
    """Return every plan that can run, at most one of each name. Raises PlanError if there is none.

    `improve`: whether to improve the progressive plan by single changes. A search, if one follows, does this faster and
    better.
    """
    makers: list[Callable[[Situation, Prices], PricedPlan]] = [without_lost]
    if not situation.lost and not situation.base.vacant:
        makers.insert(0, _keep)
    makers += [lambda situation, prices: _progressive(situation, prices, improve=improve)]
    plans: list[PricedPlan] = []
    obstacles: list[str] = []

    def attempt(make: Callable[[Situation, Prices], PricedPlan]) -> None:
        try:
            plans.append(make(situation, prices))
        except LayoutError as error:
            obstacles.append(str(error))

    for make in makers:
        attempt(make)
    if situation.memory_bytes is not None and {plan.name for plan in plans} <= {"progressive"}:
        attempt(_one_partition)
    fastest_s = min((candidate.seconds for candidate in plans), default=math.inf)
    try:
        rebuilt = exhaustive.replicas(situation, prices, fastest_s)
        if rebuilt is not None:
            plans.append(candidate("anew", situation, prices, rebuilt))
    except LayoutError as error:
        obstacles.append(str(error))
    if vacant_stages.may_help(situation):
        fastest_s = min((candidate.seconds for candidate in plans), default=math.inf)
        attempt(lambda *_: PricedPlan("lost stages passed elsewhere", *vacant_stages.best(situation, fastest_s)))
    if situation.links:
        plans += _crossed(plans, situation, prices)
    if not plans:
        ranks = situation.available
        obstacle_text = "; ".join(dict.fromkeys(obstacles))
        raise PlanError(f"nothing can run on {len(ranks)} ranks: {refusal.reason(situation)}; tried: {obstacle_text}")
    return plans


def all_reachable(
    situation: Situation, prices: Prices, plans: list[PricedPlan], *, improve: bool = True
) -> list[PricedPlan]:
    """Return the plans to which a transition is possible: every rank has memory for it. Raises PlanError if there are
    none.

    If memory does not suffice for the transition to the progressive plan, another progressive plan is made that leaves
    room for the old state. `improve` as for `runnable`.
    """
    reachable_plans: list[PricedPlan] = []
    obstacles: list[str] = []
    for plan in plans:
        try:
            reachable_plans.append(reachable(situation, prices, plan))
        except LayoutError as error:
            obstacles.append(f"{plan.name}: {error}")
    reachable_names = {plan.name for plan in reachable_plans}
    progressive_is_missing = any(plan.name == "progressive" and plan.name not in reachable_names for plan in plans)
    if progressive_is_missing and (not reachable_plans or len(situation.available) <= MAX_REPLANNED_DEVICES):
        with suppress(LayoutError):
            reachable_plans.append(
                reachable(situation, prices, _progressive(situation, prices, beside=True, improve=improve))
            )
    if not reachable_plans:
        raise PlanError(f"no plan can be reached: {'; '.join(dict.fromkeys(obstacles))}")
    return reachable_plans


def reachable(situation: Situation, prices: Prices, plan: PricedPlan) -> PricedPlan:
    """Return the plan, or the plan with ranks exchanged so that they keep more state, if every rank has memory for the
    transition.

    Raises PlanError if memory suffices for neither.
    """
    obstacle = transition_obstacle(situation, plan.plan)
    if obstacle is None:
        return plan
    if not plan.plan.migrations and not plan.plan.layout.vacant:
        relabelled_replicas = _relabelled(situation, plan.plan.layout.replicas)
        if relabelled_replicas != plan.plan.layout.replicas:
            relabelled_plan = candidate(
                plan.name, situation, prices, [prices.priced(replica) for replica in relabelled_replicas]
            )
            if transition_obstacle(situation, relabelled_plan.plan) is None:
                return relabelled_plan
    raise PlanError(obstacle)


def _relabelled(situation: Situation, replicas: tuple[Replica, ...]) -> tuple[Replica, ...]:
    """Return the replicas with ranks exchanged so that they keep more of their state.

    Only ranks of changed replicas are exchanged; none if the changed replicas have too many groups.
    """
    before = {id(replica) for replica in situation.base.replicas}
    changed = [d for d, replica in enumerate(replicas) if id(replica) not in before]
    if sum(len(replicas[d].stages) for d in changed) > MAX_RELABELLED_GROUPS:
        return replicas
    busy = {rank for replica in replicas if id(replica) in before for rank in replica.ranks}
    free_ranks = tuple(rank for rank in situation.available if rank not in busy)
    relabelled_replicas = relabelled(
        [replicas[d] for d in changed], msgspec.structs.replace(situation, available=free_ranks)
    )
    replica_at = dict(zip(changed, relabelled_replicas, strict=True))
    return tuple(replica_at.get(d, replica) for d, replica in enumerate(replicas))


def transition_obstacle(situation: Situation, plan: Plan) -> str | None:
    """Return a message about a rank that has no room for its new state beside the old state; None if every rank has
    room."""
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
    """Return the fastest plan, or a plan that keeps all state on two nodes and is at most `MAX_SAFETY_SLOWDOWN` slower.

    Among equally fast plans, plans with several holders of all state come first, then plans that move fewer bytes, then
    plans that change fewer stages.
    """
    fastest = min(plan.seconds for plan in plans)
    if len(plans) > 1:
        nearly_fastest = [plan for plan in plans if plan.seconds <= fastest * (1 + MAX_SAFETY_SLOWDOWN)]
        safe = [plan for plan in nearly_fastest if is_held_on_two_nodes(plan.plan.layout, situation.nodes)]
        plans = safe or plans
        fastest = min(plan.seconds for plan in plans)
    equally_fast = [plan for plan in plans if plan.seconds <= fastest * (1 + TIE_TOLERANCE)]
    if len(equally_fast) == 1:
        return equally_fast[0]
    present = {stage for replica in situation.base.replicas for stage in replica.stages}

    def disruption(plan: PricedPlan) -> tuple[bool, int, int]:
        layout = plan.plan.layout
        stages = {stage for replica in layout.replicas for stage in replica.stages}
        return layout.whole < 2, bytes_to_move(situation, layout), len(stages.symmetric_difference(present))

    return min(equally_fast, key=disruption)


def is_held_on_two_nodes(layout: Layout, nodes: Mapping[int, str]) -> bool:
    """Return whether every layer's state survives the loss of any one node.

    A layer's state is lost with a node if every stage that holds the layer has a rank on the node.
    """
    in_common: dict[int, set[str]] = {}
    """For each layer, the nodes on which every copy of the layer has a part."""
    for replica in layout.replicas:
        for stage in replica.stages:
            where = {nodes[rank] for rank in stage.ranks}
            for layer in stage.layers if where else ():
                in_common[layer] = in_common.get(layer, where) & where
        if not replica.vacant and not any(in_common.values()):
            return True  # the replica holds every layer
    return bool(in_common) and not any(in_common.values())


def _keep(situation: Situation, prices: Prices) -> PricedPlan:
    return candidate("keep", situation, prices, [prices.priced(replica) for replica in situation.base.replicas])


def without_lost(situation: Situation, prices: Prices) -> PricedPlan:
    lost_ranks = situation.lost.union(situation.stale)
    replicas = situation.base.without(lost_ranks).replicas
    if not replicas:
        raise PlanError(f"every replica has lost a rank: {sorted(lost_ranks) or 'some have stages without ranks'}")
    return candidate("without lost replicas", situation, prices, [prices.priced(replica) for replica in replicas])


def _one_partition(situation: Situation, prices: Prices) -> PricedPlan:
    """Return the plan with the paper's partition of layers, which is the same for all replicas.

    If memory is tight and no replica can go on unchanged, it is sometimes the best plan.
    """
    replicas = paper_planner.progressive(situation, paper_planner.STEP_NAMES[:2]).plan.layout.replicas
    return candidate("one partition for all", situation, prices, [prices.priced(replica) for replica in replicas])


def _progressive(situation: Situation, prices: Prices, *, beside: bool = False, improve: bool = True) -> PricedPlan:
    """Return the progressive plan; with `beside`, it leaves room for the state that ranks hold before the change."""
    best = _draft(situation, prices, (), beside, improve)
    while best.weak is not None:  # the weak replica's ranks may be more useful elsewhere
        draft = _draft(situation, prices, {*best.given_up, best.weak}, beside, improve)
        if draft.seconds >= best.seconds * (1 - SIGNIFICANT_GAIN):
            break
        best = draft
    if not best.pipes:
        raise PlanError("no replica can be formed from the remaining ranks")
    name = "progressive, with room for the current state" if beside else "progressive"
    return candidate(name, situation, prices, [*best.pipes.values()])


def _crossed(plans: list[PricedPlan], situation: Situation, prices: Prices) -> list[PricedPlan]:
    """Return plans with the same stages but other neighbours, if slow links join the present neighbours."""
    plan_of: dict[tuple[Replica, ...], PricedPlan] = {}
    for plan in plans:
        if plan.plan.layout.vacant:
            continue  # its micro-batches already pass between replicas
        replicas = swap_pipelines.crossed(plan.plan.layout.replicas, situation)
        if replicas is not None and replicas not in plan_of:
            name = f"{plan.name}, pipelines crossed"
            with suppress(PlanError):  # no room for it
                plan_of[replicas] = candidate(name, situation, prices, [prices.priced(replica) for replica in replicas])
    return [*plan_of.values()]


def _draft(situation: Situation, prices: Prices, given_up: Collection[int], beside: bool, improve: bool) -> Draft:
    live = set(situation.available)
    survivors = live.difference(situation.stale)
    state_of_rank = holdings(situation.holding.replicas) if beside else ()
    kept_state = {rank: own for rank, own in state_of_rank if rank in survivors} if beside else None
    drafts = [Draft(situation, prices, given_up, beside=kept_state)]
    stages = [stage for replica in situation.base.replicas for stage in replica.stages]
    if any(live.isdisjoint(stage.ranks) for stage in stages):
        drafts.append(Draft(situation, prices, given_up, vacant_first=False, beside=kept_state))
    for draft in drafts if improve else ():
        draft.improve()
    return min(drafts, key=lambda draft: draft.seconds)


def candidate(name: str, situation: Situation, prices: Prices, replicas: list[Priced]) -> PricedPlan:
    """Return the plan of these replicas, with all other ranks on standby. Raises PlanError if memory does not
    suffice."""
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
    """Return the reason why the predicted time of a plan is infinite."""
    memory_obstacle = overfull(plan, situation)
    if memory_obstacle is not None:
        return memory_obstacle
    stopped_ranks = [rank for rank in plan.layout.active if not situation.speeds.get(rank, 1.0)]
    return f"ranks {stopped_ranks} have work and speed 0"
