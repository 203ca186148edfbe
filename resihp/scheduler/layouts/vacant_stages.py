"""Stages that lost all their ranks stay in the layout without any; other replicas do their work. Pure.

Nothing needs to move, and no replica is given up; but at such a stage the others have more to do, so that it may get
fewer layers. That is what is left where ranks cannot be put together anew, tight memory above all: a pipeline of fewer
stages has no room for the model. What passes elsewhere is dealt out evenly (`Plan.dealing`); where nothing else runs at
all, the paper's rule (`resihp.scheduler.layouts.paper_planner`) is asked, too.

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

MOST_REPLICAS = 64
"""Above, there are always others to give up a replica for: what passes elsewhere is worked out for each micro-batch."""


def may_help(situation: Situation) -> bool:
    """Whether a stage of a pipeline has nobody left, and other replicas may hold its layers."""
    replicas, live = situation.base.replicas, set(situation.available).difference(situation.stale)
    if situation.memory_bytes is None or not 1 < len(replicas) <= MOST_REPLICAS:
        return False  # guests need room for their activations
    return any(
        len(replica.stages) > 1 and live.isdisjoint(stage.ranks) for replica in replicas for stage in replica.stages
    )


def best(situation: Situation, below: float = math.inf) -> tuple[Plan, float]:
    """The fastest plan that leaves stages without ranks, and its predicted time: looked for only where it could take
    less than `below`. Raises PlanError if none can run."""
    groups = paper_planner.exclude(situation, len(situation.base.replicas))
    found: list[tuple[float, int, Plan]] = []
    for spans in dict.fromkeys(_partitions(situation, groups)):
        if _hoped(situation, groups, spans) < below:
            with suppress(LayoutError):
                plan = _dealt(situation, groups, spans)
                found.append((iteration_seconds(plan, situation), len(found), plan))
    if not found and math.isinf(below):
        decision = paper_planner.progressive(situation)
        found.append((decision.seconds, 0, decision.plan))
    if not found:
        raise PlanError("stages that lost all their ranks would take longer where other replicas do their work")
    seconds, _, plan = min(found)
    return plan, seconds


def _hoped(situation: Situation, groups: Groups, chunks: tuple[tuple[LayerSpan, ...], ...]) -> float:
    """Seconds that an iteration would take if the ranks that hold a stage shared its work evenly, and one micro-batch's
    way through the other layers were all that is lost to ramps, as under 1F1B."""
    replicas = range(len(situation.base.replicas))
    paces = [sum(situation.speed(groups[d, s]) for d in replicas) for s in range(len(chunks))]
    work = []
    for held in chunks:
        times = [situation.times.span(first, last) for first, last in held]
        work.append(sum(one.f + one.b + one.w for one in times))
    if not all(paces):
        return math.inf
    last = max(range(len(chunks)), key=lambda s: work[s] / paces[s])
    widest = max(situation.speed(groups[d, last]) for d in replicas)
    return situation.micro_batches * work[last] / paces[last] + (sum(work) - work[last]) / widest


def _partitions(situation: Situation, groups: Groups) -> Iterator[tuple[tuple[LayerSpan, ...], ...]]:
    """Chunks of each stage: as they are, and in proportion to what all replicas together have at a stage."""
    cuts = {tuple(stage.chunks for stage in replica.stages) for replica in situation.base.replicas}
    if len(cuts) == 1:
        yield from cuts
    stages = {len(cut) for cut in cuts}
    if len(stages) > 1:
        return
    (depth,) = stages
    held = [[groups[d, s] for d in range(len(situation.base.replicas)) if groups[d, s]] for s in range(depth)]
    if not all(held):
        return
    speeds = [sum(situation.speed(ranks) for ranks in there) for there in held]
    fewest = min(len(there) for there in held)  # that share state
    limits = [
        min(paper_planner.capacity(situation, s, depth, len(ranks), fewest) for ranks in there)
        for s, there in enumerate(held)
    ]
    if not all(speeds):
        return
    with suppress(PlanError):
        counts = paper_planner.proportional(situation.model.layers, speeds, least=situation.chunks, limits=limits)
        yield paper_planner.spans(counts, situation.chunks)


def _dealt(situation: Situation, groups: Groups, chunks: tuple[tuple[LayerSpan, ...], ...]) -> Plan:
    """Replicas that have somebody left, with these chunks. Raises LayoutError for what cannot run, or has no room."""
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
