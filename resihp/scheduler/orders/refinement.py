"""Refines the schedule of a plan with a fixed layout, where a failure affected it. Pure.

The refinement changes the order of work of stages, and lets micro-batches pass single stages in other replicas. Layouts
are chosen by the time of their replicas under the job's schedule, which is made for equal stages and for links without
delay. For unequal stages, another warm-up, another place for W (under zero-bubble) or other turns may take less time
(`resihp.scheduler.orders.warm_up`), and so may the paper's migration (`resihp.scheduler.orders.migration`). A change is
made only if it is significantly faster on the timeline, and if memory is known to suffice. Called by
`resihp.scheduler.planner`; `anytime` uses only the migrations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from resihp.errors import PlanError
from resihp.parallelism.layout import Stage
from resihp.parallelism.plan import Order, Plan
from resihp.pipeline.schedules import orders_of
from resihp.scheduler.cost import memory
from resihp.scheduler.cost.prices import Priced, Prices, after_backward_s, iteration_seconds
from resihp.scheduler.layouts.groups import SIGNIFICANT_GAIN
from resihp.scheduler.orders import migration
from resihp.scheduler.orders.warm_up import adapted
from resihp.scheduler.orders.warm_up_depths import deepened, order
from resihp.scheduler.situation import Situation

MAX_CHUNKS = 1000
"""Maximum number of chunks of all micro-batches. Larger plans keep their schedule: orders are part of a plan, and take
milliseconds to play."""
MAX_CHUNKS_EVEN_LINKS = 100
"""Maximum number of chunks for migrations if no link is slow and W is not separate from B: there is little to gain."""
MAX_EVALUATIONS = 24
"""Maximum number of orders that are played for one replica."""


class Refined(msgspec.Struct, frozen=True):
    plan: Plan
    seconds: float
    how: str
    """Description of the change; empty if nothing changed."""


def refined(situation: Situation, plan: Plan, seconds: float, prices: Prices, *, thorough: bool = False) -> Refined:
    """Return the same layout with a faster schedule, or the plan unchanged.

    `thorough`: whether to search even where the gain is small for the time of the search.
    """
    if plan.migrations:
        return Refined(plan, seconds, "")  # a plan with migrations has orders of its own
    chunks = _chunks(plan)
    if situation.memory_bytes is None or chunks > MAX_CHUNKS:
        return Refined(plan, seconds, "")
    shapes = {tuple((stage.tp, stage.chunks) for stage in replica.stages) for replica in plan.layout.replicas}
    degrees = {stage.tp for replica in plan.layout.replicas for stage in replica.stages}
    if not (situation.speeds or situation.links) and len(shapes) == len(degrees) == 1:
        return Refined(plan, seconds, "")  # the schedule was made for it
    best = Refined(plan, seconds, "")
    for change in _changes(situation, plan, chunks, thorough=thorough):
        try:
            refined_plan = change(situation, plan, prices)
        except PlanError:
            continue
        if refined_plan.seconds < best.seconds * (1 - SIGNIFICANT_GAIN):
            best = refined_plan
    return best


def _changes(
    situation: Situation, plan: Plan, chunks: int, *, thorough: bool
) -> list[Callable[[Situation, Plan, Prices], Refined]]:
    """Return the functions that change the schedule and are worth trying, see `refined`."""
    plain = situation.schedule != "zero-bubble" and all(len(stage.chunks) == 1 for stage in _stages(plan))
    changes: list[Callable[[Situation, Plan, Prices], Refined]] = [_deepened] if plain else []
    if thorough or situation.links or not plain:
        changes.append(_reordered)
    if thorough or situation.links or situation.schedule == "zero-bubble" or chunks <= MAX_CHUNKS_EVEN_LINKS:
        changes.append(migrated)
    return changes


def _chunks(plan: Plan) -> int:
    shared = zip(plan.layout.replicas, plan.assignment, strict=True)
    return sum(len(replica.virtual_stages) * len(share) for replica, share in shared)


def _stages(plan: Plan) -> list[Stage]:
    return [stage for replica in plan.layout.replicas for stage in replica.stages]


Found = tuple[tuple[Order, ...], float]
"""Orders of a replica's stages, and the seconds that they take."""


def _deepened(situation: Situation, plan: Plan, prices: Prices) -> Refined:
    """Return the plan with deeper warm-ups for the replicas that finish last; their orders remain 1F1B."""
    depths_of: dict[object, tuple[tuple[int, ...], float]] = {}

    def make(priced: Priced, share: Sequence[int], room: Sequence[float]) -> Found:
        key = priced.shape, priced.late, len(share), tuple(room)
        if key not in depths_of:
            depths_of[key] = deepened(priced, len(share), room)
        depths, seconds = depths_of[key]
        return tuple(order(depth, share) for depth in depths), seconds

    return _last_ones(situation, plan, prices, make, "deeper warm-ups")


def _reordered(situation: Situation, plan: Plan, prices: Prices) -> Refined:
    """Return the plan with orders of their own for the replicas that finish last."""

    def make(priced: Priced, share: Sequence[int], room: Sequence[float]) -> Found:
        adapted_orders = adapted(
            priced,
            share,
            schedule=situation.schedule,
            split=situation.schedule == "zero-bubble",
            most_alive=room,
            evaluations=MAX_EVALUATIONS,
        )
        return adapted_orders.orders, adapted_orders.seconds

    return _last_ones(situation, plan, prices, make, "orders of their own")


def _last_ones(
    situation: Situation,
    plan: Plan,
    prices: Prices,
    make: Callable[[Priced, Sequence[int], Sequence[float]], Found],
    how: str,
) -> Refined:
    """Change the orders of the replica that finishes last, and repeat this for the next replica that finishes last, as
    long as it helps."""
    replicas = plan.layout.replicas
    orders = list(orders_of(plan))
    priced = [prices.priced(replica) for replica in replicas]
    ends = [
        prices.seconds(priced_replica, len(share), len(replicas))
        for priced_replica, share in zip(priced, plan.assignment, strict=True)
    ]
    unchanged = set(range(len(replicas)))
    while unchanged:
        last = max(range(len(ends)), key=lambda d: (ends[d], -d))
        if last not in unchanged:
            break
        unchanged.discard(last)
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
        replica_orders, seconds = make(priced[last], plan.assignment[last], room)
        if seconds >= ends[last]:
            break
        orders[last], ends[last] = replica_orders, seconds
    changed = msgspec.structs.replace(plan, orders=tuple(orders))
    return Refined(changed, max(ends) + after_backward_s(replicas, situation), how)


def migrated(situation: Situation, plan: Plan, prices: Prices) -> Refined:
    """Return the plan with some micro-batches passing single stages in other replicas that hold the same layers.

    If there is no such plan, return the plan unchanged, with an infinite time.
    """
    unchanged = Refined(plan, float("inf"), "")
    if _chunks(plan) > MAX_CHUNKS:
        return unchanged
    spans = [{stage.chunks for stage in replica.stages} for replica in plan.layout.replicas]
    if situation.chunks > 1 or not any(a & b for i, a in enumerate(spans) for b in spans[:i]):
        return unchanged
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
        return unchanged
    seconds = iteration_seconds(changed, situation)
    return Refined(changed, seconds, "micro-batches that pass single stages elsewhere")
