"""Tuning of a layout with equal replicas: the same groups with a better partition, placement and orders. Pure.

Megatron's grid gives every stage the same number of layers, whatever they cost, and a schedule of the literature. If
embedding, head or layers differ in cost, the tuner (`resihp.scheduler.orders.tuner`) finds a faster pipeline for the
same groups. The result is used if the timeline confirms it and memory suffices. Called by the controller before the
first iteration and, with measured times, after some iterations (`[layout] tune`), and by `resihp plan --tune`.
"""

from __future__ import annotations

import msgspec

from resihp.errors import PlanError
from resihp.parallelism.layout import Layout
from resihp.parallelism.plan import Plan
from resihp.scheduler.cost import memory
from resihp.scheduler.cost.prices import Prices, after_backward_s, iteration_seconds
from resihp.scheduler.layouts.groups import SIGNIFICANT_GAIN
from resihp.scheduler.orders.tuner import Task, Tuned, megatron, tune
from resihp.scheduler.situation import Decision, Situation

TUNING_EVALUATIONS = 400
MAX_PLAYED_REPLICAS = 8
"""Maximum number of replicas for which each replica is played; in a larger job one of the equal replicas is played."""
ALIVE_REDUCTION = 0.6
"""Factor by which the allowed live activations shrink each time that a pipeline does not fit; after four times tuning
is given up."""


def tuned(
    plan: Plan,
    situation: Situation,
    *,
    most_chunks: int = 1,
    evaluations: int = TUNING_EVALUATIONS,
    name: str = "Megatron's grid",
) -> Decision:
    """Return `plan`, or the same groups with a faster pipeline of at most `most_chunks` chunks a stage.

    `name` names `plan` in the reason; `evaluations` is the number of orders to make and play. All replicas are tuned in
    the same way. The plan is unchanged if its replicas differ, if their shares of micro-batches differ, or if there is
    only one stage. If memory is unknown, no stage keeps more activations alive than the fullest stage of the initial
    grid. W may be separate from B, whatever the schedule.
    """
    replicas = plan.layout.replicas
    shares = {len(share) for share in plan.assignment}
    stages = len(replicas[0].stages)
    are_equal = len({tuple((stage.tp, stage.chunks) for stage in replica.stages) for replica in replicas}) == 1
    before_s = _seconds(plan, situation) if are_equal and len(shares) == 1 else iteration_seconds(plan, situation)
    unchanged = Decision(plan=plan, seconds=before_s, reason=f"{name}: predicted {before_s:.4g} {situation.unit}")
    if not are_equal or plan.layout.vacant or len(shares) > 1 or stages < 2:
        cause = (
            "one stage"
            if stages < 2
            else "replicas with unequal shares of the batch"
            if are_equal
            else "unequal replicas"
        )
        return msgspec.structs.replace(unchanged, reason=f"{unchanged.reason}; {cause}: nothing to tune")
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
    pipeline = _fitting(plan, situation, task, evaluations)
    if pipeline is None:
        return msgspec.structs.replace(unchanged, reason=f"{unchanged.reason}; nothing else fits memory")
    after = _of(plan, pipeline)
    after_s = _seconds(after, situation)
    if after_s > before_s * (1 - SIGNIFICANT_GAIN):
        return msgspec.structs.replace(unchanged, reason=f"{unchanged.reason}; tuning found nothing faster")
    return Decision(
        plan=after,
        seconds=after_s,
        reason=f"tuned: predicted {after_s:.4g} {situation.unit} per iteration, versus {before_s:.4g} ({name})",
        alternatives=((name, before_s),),
    )


def _seconds(plan: Plan, situation: Situation) -> float:
    """Return the predicted time of an iteration; of many equal replicas, only the first is played."""
    replicas = plan.layout.replicas
    if situation.speeds or situation.links or plan.migrations or len(replicas) <= MAX_PLAYED_REPLICAS:
        return iteration_seconds(plan, situation)
    index_of = {m: i for i, m in enumerate(plan.assignment[0])}
    orders = tuple(
        tuple(msgspec.structs.replace(p, micro_batch=index_of[p.micro_batch]) for p in order)
        for order in (plan.orders[0] if plan.orders else ())
    )
    single_replica = msgspec.structs.replace(
        plan, layout=Layout(replicas[:1]), assignment=(tuple(index_of.values()),), orders=(orders,) if orders else ()
    )
    after_s = after_backward_s(replicas, situation) - after_backward_s(replicas[:1], situation)
    return iteration_seconds(single_replica, situation) + after_s


def _fitting(plan: Plan, situation: Situation, task: Task, evaluations: int) -> Tuned | None:
    """Return the fastest pipeline that fits into memory, trying ever fewer live activations; None if no pipeline
    fits."""
    max_alive = max(megatron(task, situation.chunks).alive)
    if situation.memory_bytes is not None:
        max_micro_batches = memory.most_alive(
            plan.layout.replicas[0],
            situation.model,
            situation.room_bytes,
            situation.tokens,
            sequence_parallel=situation.sequence_parallel,
            state_bytes=situation.state_bytes_of(len(plan.layout.replicas)),
        )
        max_alive = min(
            count * len(stage.layers)
            for count, stage in zip(max_micro_batches, plan.layout.replicas[0].stages, strict=True)
        )
    for _ in range(4):
        try:
            pipeline = tune(
                msgspec.structs.replace(task, most_alive=(max_alive,) * task.stages), evaluations=evaluations
            )
        except PlanError:
            return None
        if situation.memory_bytes is None or not memory.obstacle(
            _of(plan, pipeline),
            situation.model,
            situation.memory_bytes,
            situation.tokens,
            state_bytes=situation.state_bytes_of(len(plan.layout.replicas)),
            overhead=situation.overhead,
        ):
            return pipeline
        max_alive = ALIVE_REDUCTION * max(pipeline.alive)
    return None


def _of(plan: Plan, pipeline: Tuned) -> Plan:
    """Return the plan with all replicas in the form of the tuned pipeline."""
    replicas = tuple(pipeline.replica([stage.ranks for stage in replica.stages]) for replica in plan.layout.replicas)
    return msgspec.structs.replace(
        plan,
        layout=Layout(replicas, plan.layout.standby),
        orders=tuple(pipeline.orders_for(share) for share in plan.assignment),
    )
