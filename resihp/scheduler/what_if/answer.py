"""The results of a planner's decision, compared with the state before the failures and with no decision. Pure.

Times come from `resihp.scheduler.cost.prices`, bytes from `resihp.parallelism.transfers`, the cost of the transition
from `resihp.scheduler.transition_cost`. The module decides nothing. Called by `resihp plan`.
"""

from __future__ import annotations

import math

import msgspec

from resihp.errors import LayoutError
from resihp.parallelism.layout import Layout
from resihp.parallelism.parameter_outline import outline
from resihp.parallelism.plan import Plan
from resihp.scheduler import transition_cost
from resihp.scheduler.cost.layout_change import movement, state_bytes
from resihp.scheduler.cost.prices import iteration_seconds
from resihp.scheduler.losses import sole_holders
from resihp.scheduler.situation import Decision, Situation
from resihp.scheduler.what_if.question import Question, parts, situation_of, worst

LOST_SHARE = 0.5
"""Share of the interrupted iteration that is lost in a failure, on average."""


class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    """A plan, its predicted iteration time, and the memory of the rank that needs the most."""

    plan: Plan
    seconds: float
    worst_bytes: int
    worst_rank: int
    worst_parts: str
    """Description of the memory of rank `worst_rank`, by purpose."""


class WhatIfAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The results of a decision: plans before and after, times, and the cost of the transition.

    `unmitigated_s`: iteration time with the old layout after the failures; None if it cannot run. `sole_holders`: ranks
    of the new plan that are the only holders of some state (`resihp.scheduler.losses`). `remarks`: warnings about the
    results.
    """

    before: Outlook
    after: Outlook
    unmitigated_s: float | None
    after_healthy_s: float
    """Iteration time under the new plan if all devices were healthy. If it is less than the time before the failures,
    the first plan was not the best one."""
    cost: transition_cost.Cost
    reason: str
    alternatives: tuple[tuple[str, float], ...]
    remarks: tuple[str, ...]
    sole_holders: dict[int, frozenset[str]]


def answer(question: Question, base: Plan, situation: Situation, decision: Decision) -> WhatIfAnswer:
    """Return the results of a decision. Raises PlanError if it is not a plan for the situation."""
    healthy = situation_of(question, base, (), {}, {})
    before_s = iteration_seconds(base, healthy)
    unchanged_plan = base if not situation.lost.intersection(base.layout.active) else None
    unmitigated_s = None if unchanged_plan is None else iteration_seconds(unchanged_plan, situation)
    remarks: list[str] = []
    before = _outlook(question, base, before_s)
    after = _outlook(question, decision.plan, decision.seconds)
    limit = question.hardware.memory_bytes
    for moment, outlook in (("before anything fails", before), ("after the failures", after)):
        if situation.memory_bytes is None and outlook.worst_bytes > limit and not remarks:
            more = "" if question.sequence_parallel else "; --sequence-parallel would need less"
            remarks.append(
                f"rank {outlook.worst_rank} needs {outlook.worst_bytes / 1e9:.1f} GB {moment}, its device has "
                f"{limit / 1e9:.1f} GB: memory is not checked{more}; it needs {outlook.worst_parts}"
            )
    lost_s = LOST_SHARE * before_s if unchanged_plan is None else 0.0
    rates = msgspec.structs.replace(transition_cost.DEFAULT_RATES, byte_s=1 / question.hardware.between_bytes_per_s)
    inside = question.hardware.between_bytes_per_s / question.hardware.inside_bytes_per_s
    try:
        work = movement(situation, decision.plan.layout, inside_weight=inside)
    except LayoutError as error:
        total, most = state_bytes(question.model, decision.plan.layout)
        work = transition_cost.Movement(total_bytes=total, busiest_bytes=most)
        remarks.append(f"{error}: all state has to come from the last checkpoint; its loss is not part of the cost")
    cost = transition_cost.NO_COST if _same(decision.plan, base) else transition_cost.cost(work, rates, lost_s=lost_s)
    return WhatIfAnswer(
        before=before,
        after=after,
        unmitigated_s=unmitigated_s,
        after_healthy_s=iteration_seconds(decision.plan, healthy),
        cost=cost,
        reason=decision.reason,
        alternatives=decision.alternatives,
        remarks=tuple(remarks),
        sole_holders=sole_holders(decision.plan.layout, outline(question.model)),
    )


def as_json(answer: WhatIfAnswer, planning_s: float) -> dict[str, object]:
    """Return the output of `resihp plan --json`. Infinite and undefined times become null."""
    plan = answer.after.plan
    return {
        "schema": 1,
        "planning_seconds": planning_s,
        "before": {"iteration_seconds": answer.before.seconds, "layout": layout_json(answer.before.plan.layout)},
        "after": {
            "iteration_seconds": answer.after.seconds,
            "layout": layout_json(plan.layout),
            "micro_batches": [len(share) for share in plan.assignment],
            "migrations": [
                {"micro_batch": m.micro_batch, "virtual_stage": m.virtual_stage, "replica": m.replica}
                for m in plan.migrations
            ],
        },
        "unmitigated_seconds": answer.unmitigated_s,
        "transition": {"seconds": answer.cost.seconds, "bytes": answer.cost.total_bytes},
        "sole_holders": [*answer.sole_holders],
        "alternatives": [
            {"name": name, "iteration_seconds": seconds if math.isfinite(seconds) else None}
            for name, seconds in answer.alternatives
        ],
        "reason": answer.reason,
    }


def layout_json(layout: Layout) -> dict[str, object]:
    """Return the ranks and layers of each stage of each replica; `chunks` instead of `layers` if a stage has several.

    Layers are given as first and last layer.
    """
    return {
        "replicas": [
            [
                {"ranks": list(stage.ranks)}
                | (
                    {"layers": list(stage.chunks[0])}
                    if len(stage.chunks) == 1
                    else {"chunks": [list(chunk) for chunk in stage.chunks]}
                )
                for stage in replica.stages
            ]
            for replica in layout.replicas
        ],
        "standby": list(layout.standby),
    }


def _same(plan: Plan, base: Plan) -> bool:
    """Return whether all ranks do the same work under both plans."""
    standby = msgspec.structs.replace(plan.layout, standby=base.layout.standby)
    return msgspec.structs.replace(plan, epoch=base.epoch, layout=standby) == base


def _outlook(question: Question, plan: Plan, seconds: float) -> Outlook:
    need, rank = worst(question, plan)
    return Outlook(
        plan=plan, seconds=seconds, worst_bytes=need, worst_rank=-rank, worst_parts=parts(question, plan, -rank)
    )
