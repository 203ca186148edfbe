"""A job's first layout, tuned: the grid's groups with a partition, placement and orders of their own. Pure.

Megatron's grid gives every stage equally many layers whatever these cost, and one of the literature's schedules. Where
embedding, head or layers differ, the tuner (`resihp.scheduler.orders.tuner`) finds a faster pipeline for the same
groups. It is taken if the timeline says so and memory suffices. Called by the controller before the first iteration
(`[layout] tune`) and by `resihp plan --tune`.
"""

from __future__ import annotations

import msgspec

from resihp.errors import PlanError
from resihp.parallelism.layout import Layout
from resihp.parallelism.plan import Plan
from resihp.scheduler.cost import memory
from resihp.scheduler.cost.prices import Prices, iteration_seconds
from resihp.scheduler.layouts.groups import SIGNIFICANT
from resihp.scheduler.orders.tuner import Task, Tuned, megatron, tune
from resihp.scheduler.situation import Decision, Situation

EVALUATIONS = 400
LEAST_SHARE = 0.6
"""By how much less may be kept alive each time that a pipeline does not fit; after four times it is given up."""


def tuned(plan: Plan, situation: Situation, *, most_chunks: int = 1, evaluations: int = EVALUATIONS) -> Decision:
    """`plan`, Megatron's grid, or the same groups with a faster pipeline of at most `most_chunks` chunks a stage.

    Replicas are tuned alike. They stay as they are where they do not have equally many micro-batches, or where one
    stage is all there is. Where memory is not known, no stage keeps more alive than the grid's fullest does. W may be
    apart from B, whatever the schedule.
    """
    before_s = iteration_seconds(plan, situation)
    unchanged = Decision(
        plan=plan, seconds=before_s, reason=f"Megatron's grid: predicted {before_s:.4g} {situation.unit}"
    )
    replicas = plan.layout.replicas
    shares = {len(share) for share in plan.assignment}
    stages = len(replicas[0].stages)
    if len(shares) > 1 or stages < 2:
        why = "replicas with unequal shares of the batch" if stages > 1 else "one stage"
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
    after_s = iteration_seconds(after, situation)
    if after_s > before_s * (1 - SIGNIFICANT):
        return msgspec.structs.replace(unchanged, reason=f"{unchanged.reason}; tuning found nothing faster")
    return Decision(
        plan=after,
        seconds=after_s,
        reason=f"tuned: predicted {after_s:.4g} {situation.unit} an iteration, against {before_s:.4g} Megatron's grid",
        alternatives=(("Megatron's grid", before_s),),
    )


def _fitting(plan: Plan, situation: Situation, task: Task, evaluations: int) -> Tuned | None:
    """The fastest pipeline that fits, with ever less alive; None if none does."""
    most = max(megatron(task, max(len(stage.chunks) for stage in plan.layout.replicas[0].stages)).alive)
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
