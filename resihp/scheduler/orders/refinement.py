"""The schedule of a plan whose layout stands: orders of work for what the failure touched, and micro-batches that pass
single stages elsewhere. Pure.

A layout is chosen by what its replicas take in the order of the job's schedule. That order is made for equal stages and
links without delay; where these are not, another warm-up, another place for W (under zero-bubble) and other turns may
take less (`resihp.scheduler.orders.warm_up`), and so may the paper's migration of single stages
(`resihp.scheduler.orders.migration`). Either is taken only if the timeline says that it is significantly faster, and if
memory is known to suffice. Called by `resihp.scheduler.planner`
and `anytime`.
"""

from __future__ import annotations

import msgspec

from resihp.errors import PlanError
from resihp.parallelism.plan import Plan
from resihp.pipeline.schedules import orders_of
from resihp.scheduler.cost import memory
from resihp.scheduler.cost.prices import Prices, after_backward_s, iteration_seconds
from resihp.scheduler.layouts.groups import SIGNIFICANT
from resihp.scheduler.orders import migration
from resihp.scheduler.orders.warm_up import adapted
from resihp.scheduler.situation import Situation

MOST_CHUNKS = 1000
"""Of all micro-batches: larger plans keep their schedule. Orders are part of a plan, and take milliseconds to play."""
MOST_CHUNKS_EVEN = 100
"""The same where links are as they should be and W stays with B: then there is little to be gained."""
EVALUATIONS = 24
"""Orders that are played for one replica."""


class Refined(msgspec.Struct, frozen=True):
    plan: Plan
    seconds: float
    how: str
    """What was changed, in words; empty for nothing."""


def refined(situation: Situation, plan: Plan, seconds: float, prices: Prices, *, thorough: bool = False) -> Refined:
    """The same layout with a faster schedule, or as it was. `thorough`: also where little is to be gained for the time
    that it takes to find it."""
    if plan.migrations:
        return Refined(plan, seconds, "")  # and so it has orders of its own
    shared = zip(plan.layout.replicas, plan.assignment, strict=True)
    chunks = sum(len(replica.virtual_stages) * len(share) for replica, share in shared)
    most = MOST_CHUNKS if thorough or situation.links or situation.schedule == "zero-bubble" else MOST_CHUNKS_EVEN
    if situation.memory_bytes is None or chunks > most:
        return Refined(plan, seconds, "")
    alike = {tuple((stage.tp, stage.chunks) for stage in replica.stages) for replica in plan.layout.replicas}
    degrees = {stage.tp for replica in plan.layout.replicas for stage in replica.stages}
    if not (situation.speeds or situation.links) and len(alike) == len(degrees) == 1:
        return Refined(plan, seconds, "")  # the schedule was made for it
    best = Refined(plan, seconds, "")
    for change in (_reordered, _migrated):
        try:
            found = change(situation, plan, prices)
        except PlanError:
            continue
        if found.seconds < best.seconds * (1 - SIGNIFICANT):
            best = found
    return best


def _reordered(situation: Situation, plan: Plan, prices: Prices) -> Refined:
    """With orders of their own for the replicas that are done last, one after the other."""
    replicas = plan.layout.replicas
    orders = list(orders_of(plan))
    priced = [prices.priced(replica) for replica in replicas]
    ends = [prices.seconds(one, len(share), len(replicas)) for one, share in zip(priced, plan.assignment, strict=True)]
    left = set(range(len(replicas)))
    while left:
        last = max(range(len(ends)), key=lambda d: (ends[d], -d))
        if last not in left:
            break
        left.discard(last)
        room = memory.most_alive(
            replicas[last],
            situation.model,
            situation.room_bytes,
            situation.tokens,
            sequence_parallel=situation.sequence_parallel,
            state_bytes=situation.state_bytes_of(len(replicas)),
        )
        if min(room) < 1:
            break
        found = adapted(
            priced[last],
            plan.assignment[last],
            schedule=situation.schedule,
            split=situation.schedule == "zero-bubble",
            most_alive=room,
            evaluations=EVALUATIONS,
        )
        if found.seconds >= ends[last]:
            break
        orders[last], ends[last] = found.orders, found.seconds
    changed = msgspec.structs.replace(plan, orders=tuple(orders))
    return Refined(changed, max(ends) + after_backward_s(replicas, situation), "orders of their own")


def _migrated(situation: Situation, plan: Plan, prices: Prices) -> Refined:
    """With single stages of some micro-batches elsewhere, where other replicas hold the same layers."""
    nothing = Refined(plan, float("inf"), "")
    spans = [{stage.chunks for stage in replica.stages} for replica in plan.layout.replicas]
    if situation.chunks > 1 or not any(a & b for i, a in enumerate(spans) for b in spans[:i]):
        return nothing
    changed = migration.migrate(plan, situation)
    assert situation.memory_bytes is not None
    if not changed.migrations or memory.obstacle(
        changed,
        situation.model,
        situation.memory_bytes,
        situation.tokens,
        state_bytes=situation.state_bytes_of(len(changed.layout.replicas)),
        overhead=situation.overhead,
    ):
        return nothing
    seconds = iteration_seconds(changed, situation)
    return Refined(changed, seconds, "micro-batches that pass single stages elsewhere")
