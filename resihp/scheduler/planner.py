"""The best layout and division of work for the available devices, after a loss or a gain of devices. Pure.

The planner compares all plans that can run and to which a transition is possible (`resihp.scheduler.candidates`) by the
predicted time of an iteration. A search of milliseconds then improves the best plan (`resihp.scheduler.anytime`). If no
search is possible, the planner replans as if the best plan were in effect, and gives the result orders of its own
(`resihp.scheduler.orders.refinement`). It never decides whether the transition is worth its cost, and never checks
whether all state still exists: the caller does.

Called by the controller whenever ranks were lost or joined.
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
    MAX_REPLANNED_DEVICES,
    PricedPlan,
    all_reachable,
    best_of,
    reachable,
    runnable,
    without_lost,
)
from resihp.scheduler.cost import memory
from resihp.scheduler.cost.device_memory import NO_OVERHEAD, Overhead
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
    overhead: Overhead = NO_OVERHEAD,
    tokens: int = 0,
    epoch: int = 1,
    most: int | None = None,
) -> Plan:
    """Return Megatron's grid over the ranks of `nodes`, in ascending order; ranks that do not fill a replica are on
    standby.

    `most`: maximum number of ranks to use, counted from the first; None for all. `overhead`: the part of a device's
    `memory_bytes` that is not available for state and activations. Raises LayoutError if the model, the ranks or the
    batch do not allow the grid, PlanError if a rank has too little memory.
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
    """Return the best plan for a situation. Raises PlanError if nothing can run.

    `search`: whether the planner may search for a better plan, which loads the code of the search. `enough`: without a
    search, a plan is not improved if its iteration takes at most this long. Deterministic. If only the layout in effect
    changes, to the layout of the result, another call returns the same plan or a better one.
    """
    check(situation)
    prices = Prices(situation)
    thorough = search and anytime.is_thorough(situation)
    try:
        runnable_plans = runnable(situation, prices, improve=not thorough)
        reachable_plans = all_reachable(situation, prices, runnable_plans, improve=not thorough)
    except PlanError:
        searched = anytime.at_once(situation, []) if search else None
        if searched is None and thorough:
            return decide(situation, search=False)
        if searched is None:
            raise
        reachable_plans, chosen = [], searched
    else:
        chosen = best_of(situation, reachable_plans)
        if search and anytime.obstacle(situation, reachable_plans) is None:
            improved = anytime.at_once(situation, reachable_plans)
            chosen = chosen if improved is None else best_of(situation, [chosen, improved])
        elif thorough:
            return decide(situation, search=False)
        elif chosen.seconds > enough:
            chosen = _refined(situation, _rounded(situation, prices, chosen), prices)
    alternatives = tuple((plan.name, plan.seconds) for plan in reachable_plans if not chosen.name.startswith(plan.name))
    comparison = "".join(f", versus {seconds:.4g} ({name})" for name, seconds in alternatives)
    return Decision(
        plan=chosen.plan,
        seconds=chosen.seconds,
        reason=f"{chosen.name}: predicted {chosen.seconds:.4g} {situation.unit} per iteration{comparison}",
        alternatives=alternatives,
    )


def _rounded(situation: Situation, prices: Prices, chosen: PricedPlan) -> PricedPlan:
    """Replan as if the chosen layout were in effect, and repeat this as long as its idle devices make another layout
    faster."""
    while len(situation.available) <= MAX_REPLANNED_DEVICES:  # each round but the last is faster
        after = msgspec.structs.replace(situation, base=chosen.plan.layout, stale=())
        better = best_of(after, runnable(after, prices))
        if better.plan.layout == chosen.plan.layout or better.seconds >= chosen.seconds:
            break
        try:
            better = reachable(situation, prices, better)
        except PlanError:
            break
        if better.seconds >= chosen.seconds:
            break  # other ranks are connected by slower links
        chosen = better
    return chosen


def _refined(situation: Situation, plan: PricedPlan, prices: Prices) -> PricedPlan:
    """Return the plan with orders of its own or with migrations, if they pay."""
    better = refinement.refined(situation, plan.plan, plan.seconds, prices)
    return PricedPlan(f"{plan.name}, with {better.how}" if better.how else plan.name, better.plan, better.seconds)


def without_lost_replicas(situation: Situation) -> Decision:
    """Return the cautious plan: replicas with a lost rank, or with a rank that lost its state, are given up; no state
    moves.

    Raises PlanError if no replica is left.
    """
    plan = without_lost(situation, Prices(situation))
    reason = f"{plan.name}: predicted {plan.seconds:.4g} {situation.unit} per iteration"
    return Decision(plan=plan.plan, seconds=plan.seconds, reason=reason)
