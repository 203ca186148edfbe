"""Add second copies (mirrors) to a plan for state that only one stage holds, as far as standby ranks can hold them.

Decides which ranks may hold a mirror; `resihp.scheduler.layouts.mirrors` decides which layers they hold. Called with
each new plan, and by `replan_policy` and `ahead`.
"""

from __future__ import annotations

from collections.abc import Mapping

from resihp.controller.state.job import Job
from resihp.errors import LayoutError
from resihp.parallelism.plan import Plan
from resihp.scheduler.layouts import mirrors
from resihp.scheduler.situation import Situation


def mirrored(job: Job, plan: Plan, situation: Situation, *, checked: bool = False) -> Plan:
    """Return the plan with mirrors for layers that only one stage holds, as far as standby ranks can hold copies.

    A device that is slow, or that failed a probe because of its speed, may hold a copy. Plans of other planners than
    resihp's own get no mirrors, because they serve as comparison. `checked`: whether the plan without mirrors has
    passed the checker. Raises PlanError if that plan cannot be carried out.
    """
    candidates = [rank for rank in plan.layout.standby if can_hold_copies(job, rank, situation.speeds)]
    protected = mirrors.with_mirrors(plan, situation, candidates)
    if protected is not plan:
        try:
            job.dependencies.check(protected)
            return protected
        except LayoutError as error:
            job.say("warning", f"state that only one rank holds gets no copy: {error}; training goes on without")
    if not checked:
        job.dependencies.check(plan)
    return plan


def can_hold_copies(job: Job, rank: int, speeds: Mapping[int, float]) -> bool:
    """Return whether a rank may hold part of a mirror.

    It may under resihp's own planner, once its device is measured, unless its process is stopped, its device did not
    answer its last probe, or its node is about to leave.
    """
    member = job.members[rank]
    return (
        job.settings.planner == "resihp"
        and member.ready
        and rank not in job.unmeasured
        and member.node not in job.vacating
        and job.device_of(rank) not in job.record.unanswered
        and speeds.get(rank, 1.0) > 0
    )


def layers_at_risk(job: Job) -> frozenset[int]:
    """Return the layers that only one stage of the plan in effect holds."""
    plan = job.record.plan
    return frozenset() if plan is None else mirrors.layers_held_once(plan.layout)
