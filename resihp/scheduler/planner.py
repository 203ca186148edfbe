"""Which layout, and which work where: the best plan for what is left of a job, or has come to it. Pure.

Progressive, as the paper has it: groups first, then layers, then micro-batches, each taking up what the one before
could not (`resihp.scheduler.layouts.groups`, `layers`, `shares`). What that gives is compared, by predicted time of an
iteration, with going on without the replicas that lost a rank, with leaving everything as it is, with leaving stages
that lost all their ranks to other replicas (`resihp.scheduler.layouts.vacant_stages`), and where links are slow with
the same stages in other pipelines (`resihp.scheduler.layouts.swap_pipelines`). The best of them goes on downhill
(`resihp.scheduler.descent`). Whether the transition itself is worth its time, and whether all state is still there, is
the caller's question.

Called by the controller whenever ranks went or came.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress

import msgspec

from resihp.errors import LayoutError, PlanError
from resihp.parallelism.layout import Layout, Replica, Stage, validate
from resihp.parallelism.model import ModelSpec
from resihp.parallelism.plan import Plan, spread
from resihp.scheduler import refusal
from resihp.scheduler.cost import memory, transition_memory
from resihp.scheduler.cost.device_memory import NOTHING, Overhead
from resihp.scheduler.cost.prices import Priced, Prices, bytes_to_move
from resihp.scheduler.descent import Descent
from resihp.scheduler.layouts import exhaustive, paper_planner, shares, swap_pipelines, vacant_stages
from resihp.scheduler.layouts.draft import Draft
from resihp.scheduler.layouts.groups import SIGNIFICANT
from resihp.scheduler.layouts.labels import relabelled
from resihp.scheduler.orders import refinement
from resihp.scheduler.orders.lanes import overfull
from resihp.scheduler.situation import Decision, Situation, check

MOST_ROUNDED = 2048
"""Devices up to which a plan is looked at as if it were in effect: what it left idle may improve it further; and up to
which, where the fastest has no room on the way, another is looked for although something runs."""

MOST_RELABELLED = 64
"""Groups that change places so that the old state has room beside the new one."""

TIE = 0.002
"""Relative difference below which two predictions are the same, and what moves the fewest bytes is taken."""


ORDERS_GAIN = 0.06
"""The most that orders of work were seen to gain: what is slower by more before it is not looked at with them."""


class PricedPlan(msgspec.Struct, frozen=True):
    name: str
    plan: Plan
    seconds: float


def first_plan(
    *,
    model: ModelSpec,
    nodes: Mapping[int, str],
    tp: int,
    pp: int,
    micro_batches: int,
    chunks: int = 1,
    schedule: str = "1f1b",
    sequence_parallel: bool = False,
    memory_bytes: int | None = None,
    overhead: Overhead = NOTHING,
    tokens: int = 0,
    epoch: int = 1,
    most: int | None = None,
) -> Plan:
    """Megatron's grid over the ranks of `nodes`, in ascending order; those that do not fill a replica stand by.

    `most`: how many of them it may use, the first ones; all if left out. `overhead`: what of a device's `memory_bytes`
    is not for state and activations. Raises LayoutError for a grid that the model,
    the ranks or the batch do not allow, PlanError if a rank has too little memory.
    """
    ranks = sorted(nodes)
    dp = len(ranks[:most]) // (tp * pp)
    if dp < 1:
        raise LayoutError(f"layout tp={tp} pp={pp}: needs {tp * pp} devices, the job has {len(ranks)}")
    grid = Layout.uniform(tp=tp, pp=pp, dp=dp, layers=model.layers, chunks=chunks)
    layout = Layout(
        tuple(
            Replica(tuple(Stage(tuple(ranks[i] for i in stage.ranks), stage.chunks) for stage in replica.stages))
            for replica in grid.replicas
        ),
        tuple(ranks[dp * tp * pp :]),
    )
    validate(layout, model)
    plan = Plan(
        epoch=epoch,
        layout=layout,
        assignment=spread(micro_batches, dp),
        schedule=schedule,
        sequence_parallel=sequence_parallel,
    )
    if memory_bytes is not None:
        obstacle = memory.obstacle(plan, model, memory_bytes, tokens, overhead=overhead)
        if obstacle:
            raise PlanError(f"{obstacle}; raise --tp or --pp, or make micro-batches shorter")
    return plan


def decide(situation: Situation) -> Decision:
    """The best plan for a situation. Raises PlanError if nothing can run.

    Deterministic, and stable: asked again with its own layout in effect and nothing changed, it answers the same.
    """
    check(situation)
    prices = Prices(situation)
    downhill = Descent(situation, prices)
    first = _first(situation, prices, downhill)
    plain = _best(situation, first)
    chosen = _best(situation, _with_downhill(situation, prices, downhill, first))
    while len(situation.available) <= MOST_ROUNDED:  # each round is faster than the one before, or the last
        after = msgspec.structs.replace(situation, base=chosen.plan.layout, stale=())
        better = _best(after, _with_downhill(after, prices, downhill, _candidates(after, prices)))
        if better.plan.layout == chosen.plan.layout or better.seconds >= chosen.seconds:
            break
        try:
            better = reachable(situation, prices, better)
        except PlanError:
            break
        if better.seconds >= chosen.seconds:
            break  # other ranks, over slower links
        chosen = better
    finalists = [chosen]
    if plain.plan.layout != chosen.plan.layout and plain.seconds < chosen.seconds * (1 + ORDERS_GAIN):
        finalists.append(plain)
    best = _best(situation, [_refined(situation, one, prices) for one in finalists])
    chosen = next(one for one in finalists if one.plan.layout == best.plan.layout)
    others = tuple((one.name, one.seconds) for one in first if one.name != chosen.name)
    against = "".join(f", against {seconds:.4g} {name}" for name, seconds in others)
    return Decision(
        plan=best.plan,
        seconds=best.seconds,
        reason=f"{best.name}: predicted {best.seconds:.4g} {situation.unit} an iteration{against}",
        alternatives=others,
    )


def _refined(situation: Situation, one: PricedPlan, prices: Prices) -> PricedPlan:
    """With orders of its own, or migrations, where these pay."""
    found = refinement.refined(situation, one.plan, one.seconds, prices)
    return PricedPlan(f"{one.name}, with {found.how}" if found.how else one.name, found.plan, found.seconds)


def without_lost_replicas(situation: Situation) -> Decision:
    """The cautious plan: replicas that lost a rank, or the state of one, are given up, and nothing moves.

    Raises PlanError if no replica is left.
    """
    found = _without_lost(situation, Prices(situation))
    reason = f"{found.name}: predicted {found.seconds:.4g} {situation.unit} an iteration"
    return Decision(plan=found.plan, seconds=found.seconds, reason=reason)


def _candidates(situation: Situation, prices: Prices) -> list[PricedPlan]:
    """Everything that can run, at most one of each name. Raises PlanError if there is nothing."""
    makers: list[Callable[[Situation, Prices], PricedPlan]] = [_without_lost]
    if not situation.lost and not situation.base.vacant:
        makers.insert(0, _keep)
    makers += [_progressive]
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


def _first(situation: Situation, prices: Prices, downhill: Descent) -> list[PricedPlan]:
    """All that can run and can be changed to; where nothing can, ranks dealt out anew."""
    try:
        return _reachable(situation, prices, _candidates(situation, prices))
    except PlanError:
        anew = downhill.improved(())
        if anew is None:
            raise
        with suppress(PlanError):
            return [reachable(situation, prices, candidate("dealt out anew", situation, prices, anew))]
        raise


def _with_downhill(
    situation: Situation, prices: Prices, downhill: Descent, candidates: list[PricedPlan]
) -> list[PricedPlan]:
    """With what is downhill from the best of them."""
    best = _best(situation, candidates)
    if best.plan.layout.vacant:
        return candidates
    replicas = downhill.improved(best.plan.layout.replicas)
    if replicas is None:
        return candidates
    with suppress(PlanError):
        better = candidate(f"{best.name}, made better", situation, prices, replicas)
        candidates = [*candidates, reachable(situation, prices, better)]
    return candidates


def _reachable(situation: Situation, prices: Prices, candidates: list[PricedPlan]) -> list[PricedPlan]:
    """Those whose transition every rank has memory for; where the progressive one is none of them, as it is with room
    for the old state beside the new one. Raises PlanError if there are none."""
    found: list[PricedPlan] = []
    obstacles: list[str] = []
    for one in candidates:
        try:
            found.append(reachable(situation, prices, one))
        except LayoutError as error:
            obstacles.append(f"{one.name}: {error}")
    names = {one.name for one in found}
    missed = any(one.name == "progressive" and one.name not in names for one in candidates)
    if missed and (not found or len(situation.available) <= MOST_ROUNDED):
        with suppress(LayoutError):
            found.append(reachable(situation, prices, _progressive(situation, prices, beside=True)))
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
        situation.base,
        set(situation.available).difference(situation.stale),
        plan.layout,
        situation.model,
        situation.memory_bytes,
        zero_1=situation.zero_1,
        overhead=situation.overhead,
    )


def _best(situation: Situation, candidates: list[PricedPlan]) -> PricedPlan:
    """The fastest; of equally fast ones that which moves the fewest bytes, then changes the fewest stages."""
    fastest = min(candidate.seconds for candidate in candidates)
    equal = [candidate for candidate in candidates if candidate.seconds <= fastest * (1 + TIE)]
    if len(equal) == 1:
        return equal[0]
    present = {stage for replica in situation.base.replicas for stage in replica.stages}

    def unrest(candidate: PricedPlan) -> tuple[int, int]:
        layout = candidate.plan.layout
        stages = {stage for replica in layout.replicas for stage in replica.stages}
        return bytes_to_move(situation, layout), len(stages.symmetric_difference(present))

    return min(equal, key=unrest)


def _keep(situation: Situation, prices: Prices) -> PricedPlan:
    return candidate("keep", situation, prices, [prices.priced(replica) for replica in situation.base.replicas])


def _without_lost(situation: Situation, prices: Prices) -> PricedPlan:
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


def _progressive(situation: Situation, prices: Prices, *, beside: bool = False) -> PricedPlan:
    """`beside`: with room for what ranks hold before the change."""
    best = _draft(situation, prices, (), beside)
    while best.weak is not None:  # its ranks may serve better elsewhere
        other = _draft(situation, prices, {*best.given_up, best.weak}, beside)
        if other.seconds >= best.seconds * (1 - SIGNIFICANT):
            break
        best = other
    if not best.pipes:
        raise PlanError("no replica can be put together from the ranks that are left")
    name = "progressive, with room for what is there" if beside else "progressive"
    return candidate(name, situation, prices, [*best.pipes.values()])


def _crossed(candidates: list[PricedPlan], situation: Situation, prices: Prices) -> list[PricedPlan]:
    """The same stages with other neighbours, where slow links join them."""
    found: dict[tuple[Replica, ...], PricedPlan] = {}
    for one in candidates:
        if one.plan.layout.vacant:
            continue  # its micro-batches pass between replicas as it is
        replicas = swap_pipelines.crossed(one.plan.layout.replicas, situation)
        if replicas is not None and replicas not in found:
            name = f"{one.name}, pipelines crossed"
            with suppress(PlanError):  # there is no room for it
                found[replicas] = candidate(name, situation, prices, [prices.priced(replica) for replica in replicas])
    return [*found.values()]


def _draft(situation: Situation, prices: Prices, given_up: Collection[int], beside: bool) -> Draft:
    live = set(situation.available)
    survivors = live.difference(situation.stale)
    held = transition_memory.holdings(situation.base.replicas) if beside else ()
    holds = {rank: own for rank, own in held if rank in survivors} if beside else None
    drafts = [Draft(situation, prices, given_up, beside=holds)]
    stages = [stage for replica in situation.base.replicas for stage in replica.stages]
    if any(live.isdisjoint(stage.ranks) for stage in stages):
        drafts.append(Draft(situation, prices, given_up, vacant_first=False, beside=holds))
    for draft in drafts:
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
