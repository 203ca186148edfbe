"""Keeps stages that lost all their ranks in the layout, as vacant stages; other replicas do their work. Pure.

No state needs to move, and no replica is given up. The other replicas have more work at such a stage, so the stage may
get fewer layers. This option remains where ranks cannot be regrouped, above all with tight memory, if a pipeline of
fewer stages has no room for the model. The passes through a vacant stage are distributed evenly over the replicas that
hold its layers (`Plan.dealing`). If nothing else can run at all, the paper's rule
(`resihp.scheduler.layouts.paper_planner`) is tried as well.

Called by `resihp.scheduler.planner`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress

from resihp.errors import LayoutError, PlanError
from resihp.parallelism.layout import LayerSpan, Layout, Replica, Stage, validate
from resihp.parallelism.plan import Plan
from resihp.pipeline.schedules import greedy, orders_of
from resihp.scheduler.cost.prices import costs, iteration_seconds, transfers
from resihp.scheduler.layouts import paper_planner
from resihp.scheduler.layouts.paper_planner import Groups
from resihp.scheduler.orders.lanes import overfull
from resihp.scheduler.orders.migration import with_orders
from resihp.scheduler.situation import Situation

MAX_REPLICAS = 64
"""Maximum number of replicas. In a larger job, there are always enough other replicas to give up one; and migrations
are planned for each micro-batch, which takes time."""


def may_help(situation: Situation) -> bool:
    """Return whether some stage of a pipeline has no live rank while other replicas may hold its layers."""
    replicas, live = situation.base.replicas, set(situation.available).difference(situation.stale)
    if situation.memory_bytes is None or not 1 < len(replicas) <= MAX_REPLICAS:
        return False  # other replicas need room for the activations
    return any(
        len(replica.stages) > 1 and live.isdisjoint(stage.ranks) for replica in replicas for stage in replica.stages
    )


def best(situation: Situation, below: float = math.inf) -> tuple[Plan, float]:
    """Return the fastest plan with vacant stages, and its predicted time.

    Plans that cannot take less than `below` are not considered. Raises PlanError if no plan can run.
    """
    groups = paper_planner.exclude(situation, len(situation.base.replicas))
    plans: list[tuple[float, int, Plan]] = []
    for spans in dict.fromkeys(_partitions(situation, groups)):
        if _hoped(situation, groups, spans) < below:
            with suppress(LayoutError):
                plan = _dealt(situation, groups, spans)
                plans.append((iteration_seconds(plan, situation), len(plans), plan))
    if not plans and math.isinf(below):
        decision = paper_planner.progressive(situation)
        plans.append((decision.seconds, 0, decision.plan))
    if not plans:
        raise PlanError("no plan is faster in which other replicas do the work of stages that lost all their ranks")
    seconds, _, plan = min(plans)
    return plan, seconds


def _hoped(situation: Situation, groups: Groups, chunks: tuple[tuple[LayerSpan, ...], ...]) -> float:
    """Return a lower bound of an iteration's time.

    It assumes that the ranks that hold a stage share its work evenly, and that ramps cost only one micro-batch's pass
    through the other layers, as under 1F1B.
    """
    replicas = range(len(situation.base.replicas))
    paces = [sum(situation.speed(groups[d, s]) for d in replicas) for s in range(len(chunks))]
    work = []
    for stage_chunks in chunks:
        times = [situation.times.span(first, last) for first, last in stage_chunks]
        work.append(sum(chunk_times.f + chunk_times.b + chunk_times.w for chunk_times in times))
    if not all(paces):
        return math.inf
    last = max(range(len(chunks)), key=lambda s: work[s] / paces[s])
    fastest = max(situation.speed(groups[d, last]) for d in replicas)
    return situation.micro_batches * work[last] / paces[last] + (sum(work) - work[last]) / fastest


def _partitions(situation: Situation, groups: Groups) -> Iterator[tuple[tuple[LayerSpan, ...], ...]]:
    """Yield the chunks of each stage: the present ones, then chunks in proportion to the speed of all replicas' ranks
    there."""
    cuts = {tuple(stage.chunks for stage in replica.stages) for replica in situation.base.replicas}
    if len(cuts) == 1:
        yield from cuts
    stages = {len(cut) for cut in cuts}
    if len(stages) > 1:
        return
    (depth,) = stages
    groups_of_stage = [
        [groups[d, s] for d in range(len(situation.base.replicas)) if groups[d, s]] for s in range(depth)
    ]
    if not all(groups_of_stage):
        return
    speeds = [sum(situation.speed(ranks) for ranks in stage_groups) for stage_groups in groups_of_stage]
    fewest = min(len(stage_groups) for stage_groups in groups_of_stage)  # the number of replicas that share state
    limits = [
        min(paper_planner.capacity(situation, s, depth, len(ranks), fewest) for ranks in stage_groups)
        for s, stage_groups in enumerate(groups_of_stage)
    ]
    if not all(speeds):
        return
    with suppress(PlanError):
        counts = paper_planner.proportional(situation.model.layers, speeds, least=situation.chunks, limits=limits)
        yield paper_planner.spans(counts, situation.chunks)


def _dealt(situation: Situation, groups: Groups, chunks: tuple[tuple[LayerSpan, ...], ...]) -> Plan:
    """Return the plan with these groups and chunks, in which replicas without live ranks are left out.

    Raises LayoutError if the plan cannot run or does not fit into memory.
    """
    replicas = [
        Replica(tuple(Stage(groups[d, s], chunks[s]) for s in range(len(chunks))))
        for d in range(len(situation.base.replicas))
    ]
    kept = tuple(replica for replica in replicas if replica.ranks)
    used = {rank for replica in kept for rank in replica.ranks}
    layout = Layout(kept, tuple(sorted(set(situation.available).difference(used))))
    if not layout.vacant:
        raise PlanError("no stage has lost all its ranks")
    validate(layout, situation.model)
    plan = Plan(
        epoch=situation.epoch,
        layout=layout,
        assignment=(),
        schedule=situation.schedule,
        sequence_parallel=situation.sequence_parallel,
    ).dealing(situation.micro_batches)
    split = situation.schedule == "zero-bubble"
    seconds = costs(plan, situation, orders_of(plan))
    plan = with_orders(plan, greedy(plan, seconds, transfers(plan, situation), split=split))
    obstacle = overfull(plan, situation)
    if obstacle:
        raise PlanError(obstacle)
    return plan
