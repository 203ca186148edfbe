"""A layout of like replicas, tuned: the same groups with a partition, placement and orders of their own. Pure.

Megatron's grid gives every stage equally many layers whatever these cost, and one of the literature's schedules. Where
embedding, head or layers differ, the tuner (`resihp.scheduler.orders.tuner`) finds a faster pipeline for the same
groups. It is taken if the timeline says so and memory suffices. Called by the controller before the first iteration
and, with measured times, after some (`[layout] tune`), and by `resihp plan --tune`.
"""

from __future__ import annotations

import msgspec

from resihp.errors import PlanError
from resihp.parallelism.layout import Layout
from resihp.parallelism.plan import Plan
from resihp.scheduler.cost import memory
from resihp.scheduler.cost.prices import Prices, after_backward_s, iteration_seconds
from resihp.scheduler.layouts.groups import SIGNIFICANT
from resihp.scheduler.orders.tuner import Task, Tuned, megatron, tune
from resihp.scheduler.situation import Decision, Situation

EVALUATIONS = 400
FEW = 8
"""Replicas up to which all are played."""
LEAST_SHARE = 0.6
"""By how much less may be kept alive each time that a pipeline does not fit; after four times it is given up."""


def tuned(
    plan: Plan,
    situation: Situation,
    *,
    most_chunks: int = 1,
    evaluations: int = EVALUATIONS,
    name: str = "Megatron's grid",
) -> Decision:
    """`plan`, called `name`, or the same groups with a faster pipeline of at most `most_chunks` chunks a stage.

    Replicas are tuned alike. They stay as they are where they are not alike, do not have equally many micro-batches, or
    where one stage is all there is. Where memory is not known, no stage keeps more alive than the fullest of the grid
    that the job was started with. W may be apart from B, whatever the schedule.
    """
    replicas = plan.layout.replicas
    shares = {len(share) for share in plan.assignment}
    stages = len(replicas[0].stages)
    alike = len({tuple((stage.tp, stage.chunks) for stage in replica.stages) for replica in replicas}) == 1
    before_s = _seconds(plan, situation) if alike and len(shares) == 1 else iteration_seconds(plan, situation)
    unchanged = Decision(plan=plan, seconds=before_s, reason=f"{name}: predicted {before_s:.4g} {situation.unit}")
    if not alike or plan.layout.vacant or len(shares) > 1 or stages < 2:
        why = "one stage" if stages < 2 else "replicas with unequal shares of the batch" if alike else "unlike replicas"
        return msgspec.structs.replace(unchanged, reason=f"{unchanged.reason}; {why}: nothing to tune")
    priced = Prices(situation).priced(replicas[0])
    task = Task(
        profile=situation.times,
        stages=stages,
        micro_batches=shares.pop(),
        speeds=tuple(situation.speed(stage.ranks) for stage in replicas[0].stages),
        late=priced.late,
        most_chunks=most_chunks,
        bound=True,
    )
    found = _fitting(plan, situation, task, evaluations)
    if found is None:
        return msgspec.structs.replace(unchanged, reason=f"{unchanged.reason}; nothing else fits memory")
    after = _of(plan, found)
    after_s = _seconds(after, situation)
    if after_s > before_s * (1 - SIGNIFICANT):
        return msgspec.structs.replace(unchanged, reason=f"{unchanged.reason}; tuning found nothing faster")
    return Decision(
        plan=after,
        seconds=after_s,
        reason=f"tuned: predicted {after_s:.4g} {situation.unit} an iteration, against {before_s:.4g} {name}",
        alternatives=((name, before_s),),
    )


def _seconds(plan: Plan, situation: Situation) -> float:
    """Predicted time of an iteration; of many replicas, which are alike, the first is played for all."""
    replicas = plan.layout.replicas
    if situation.speeds or situation.links or plan.migrations or len(replicas) <= FEW:
        return iteration_seconds(plan, situation)
    at = {m: i for i, m in enumerate(plan.assignment[0])}
    orders = tuple(
        tuple(msgspec.structs.replace(p, micro_batch=at[p.micro_batch]) for p in order)
        for order in (plan.orders[0] if plan.orders else ())
    )
    one = msgspec.structs.replace(
        plan, layout=Layout(replicas[:1]), assignment=(tuple(at.values()),), orders=(orders,) if orders else ()
    )
    after_s = after_backward_s(replicas, situation) - after_backward_s(replicas[:1], situation)
    return iteration_seconds(one, situation) + after_s


def _fitting(plan: Plan, situation: Situation, task: Task, evaluations: int) -> Tuned | None:
    """The fastest pipeline that fits, with ever less alive; None if none does."""
    most = max(megatron(task, situation.chunks).alive)
    if situation.memory_bytes is not None:
        room = memory.most_alive(
            plan.layout.replicas[0],
            situation.model,
            situation.room_bytes,
            situation.tokens,
            sequence_parallel=situation.sequence_parallel,
            state_bytes=situation.state_bytes_of(len(plan.layout.replicas)),
        )
        most = min(count * len(stage.layers) for count, stage in zip(room, plan.layout.replicas[0].stages, strict=True))
    for _ in range(4):
        try:
            found = tune(msgspec.structs.replace(task, most_alive=(most,) * task.stages), evaluations=evaluations)
        except PlanError:
            return None
        if situation.memory_bytes is None or not memory.obstacle(
            _of(plan, found),
            situation.model,
            situation.memory_bytes,
            situation.tokens,
            state_bytes=situation.state_bytes_of(len(plan.layout.replicas)),
            overhead=situation.overhead,
        ):
            return found
        most = LEAST_SHARE * max(found.alive)
    return None


def _of(plan: Plan, found: Tuned) -> Plan:
    """All replicas of a plan as one was tuned."""
    replicas = tuple(found.replica([stage.ranks for stage in replica.stages]) for replica in plan.layout.replicas)
    return msgspec.structs.replace(
        plan,
        layout=Layout(replicas, plan.layout.standby),
        orders=tuple(found.orders_for(share) for share in plan.assignment),
    )
