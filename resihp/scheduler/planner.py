"""Which layout, and which work where: the best plan for what is left of a job, or has come to it. Pure.

Everything that can run and can be changed to (`resihp.scheduler.candidates`) is compared by predicted time of an
iteration, then searched on from within milliseconds (`resihp.scheduler.anytime`). Where nothing can be searched, the
best is looked at again as if it were in effect, and gets orders of its own (`resihp.scheduler.orders.refinement`).
Whether the transition itself is worth its time, and whether all state is still there, is the caller's question.

Called by the controller whenever ranks went or came.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from resihp.errors import LayoutError, PlanError
from resihp.parallelism.layout import Layout, Replica, Stage, validate
from resihp.parallelism.model import ModelSpec
from resihp.parallelism.plan import Plan, spread
from resihp.scheduler import anytime
from resihp.scheduler.candidates import (
    MOST_ROUNDED,
    PricedPlan,
    all_reachable,
    best_of,
    reachable,
    runnable,
    without_lost,
)
from resihp.scheduler.cost import memory
from resihp.scheduler.cost.device_memory import NOTHING, Overhead
from resihp.scheduler.cost.prices import Prices
from resihp.scheduler.orders import refinement
from resihp.scheduler.situation import Decision, Situation, check


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


def decide(situation: Situation, *, search: bool = True, enough: float = 0.0) -> Decision:
    """The best plan for a situation. Raises PlanError if nothing can run.

    `search`: whether a better one may be searched for, which loads what that needs. `enough`: without a search, a plan
    that takes no longer than this is not made better. Deterministic. Asked again with its own layout in effect and
    nothing changed, it answers the same or better.
    """
    check(situation)
    prices = Prices(situation)
    thorough = search and anytime.is_thorough(situation)
    try:
        plans = runnable(situation, prices, improve=not thorough)
        first = all_reachable(situation, prices, plans, improve=not thorough)
    except PlanError:
        dealt_anew = anytime.at_once(situation, []) if search else None
        if dealt_anew is None and thorough:
            return decide(situation, search=False)
        if dealt_anew is None:
            raise
        first, chosen = [], dealt_anew
    else:
        chosen = best_of(situation, first)
        if search and anytime.obstacle(situation, first) is None:
            found = anytime.at_once(situation, first)
            chosen = chosen if found is None else best_of(situation, [chosen, found])
        elif thorough:
            return decide(situation, search=False)
        elif chosen.seconds > enough:
            chosen = _refined(situation, _rounded(situation, prices, chosen), prices)
    others = tuple((one.name, one.seconds) for one in first if not chosen.name.startswith(one.name))
    against = "".join(f", against {seconds:.4g} {name}" for name, seconds in others)
    return Decision(
        plan=chosen.plan,
        seconds=chosen.seconds,
        reason=f"{chosen.name}: predicted {chosen.seconds:.4g} {situation.unit} an iteration{against}",
        alternatives=others,
    )


def _rounded(situation: Situation, prices: Prices, chosen: PricedPlan) -> PricedPlan:
    """Better by what it left idle, as long as there is something."""
    while len(situation.available) <= MOST_ROUNDED:  # each round is faster than the one before, or the last
        after = msgspec.structs.replace(situation, base=chosen.plan.layout, stale=())
        better = best_of(after, runnable(after, prices))
        if better.plan.layout == chosen.plan.layout or better.seconds >= chosen.seconds:
            break
        try:
            better = reachable(situation, prices, better)
        except PlanError:
            break
        if better.seconds >= chosen.seconds:
            break  # other ranks, over slower links
        chosen = better
    return chosen


def _refined(situation: Situation, one: PricedPlan, prices: Prices) -> PricedPlan:
    """With orders of its own, or migrations, where these pay."""
    found = refinement.refined(situation, one.plan, one.seconds, prices)
    return PricedPlan(f"{one.name}, with {found.how}" if found.how else one.name, found.plan, found.seconds)


def without_lost_replicas(situation: Situation) -> Decision:
    """The cautious plan: replicas that lost a rank, or the state of one, are given up, and nothing moves.

    Raises PlanError if no replica is left.
    """
    found = without_lost(situation, Prices(situation))
    reason = f"{found.name}: predicted {found.seconds:.4g} {situation.unit} an iteration"
    return Decision(plan=found.plan, seconds=found.seconds, reason=reason)
