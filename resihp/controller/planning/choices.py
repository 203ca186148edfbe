"""Price a chosen plan, and adjust a plan's standby ranks and micro-batches.

Never chooses a plan. Called by `first_plan`, `next_plan` and `retuning`.
"""

from __future__ import annotations

import math

import msgspec

from resihp.controller.planning.situations import ranks_kept_out
from resihp.controller.state.job import Job
from resihp.parallelism.layout import Layout
from resihp.parallelism.plan import Plan
from resihp.record.journal import OtherPlan
from resihp.scheduler.cost.layout_change import movement
from resihp.scheduler.cost.prices import iteration_seconds
from resihp.scheduler.situation import Decision, Situation
from resihp.scheduler.transition_cost import Movement


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """A plan for a situation, the reason for it, and its predicted effect.

    `predicted`: time of an iteration under this plan, in the situation's unit. `present`: time of an iteration under
    the plan in effect, in the same unit; None if no plan is in effect or that plan cannot run.
    """

    plan: Plan
    situation: Situation
    reason: str = ""
    predicted: float | None = None
    present: float | None = None
    kept_out: tuple[int, ...] = ()
    """Ranks of the plan that must not get work."""
    considered: tuple[OtherPlan, ...] = ()
    """Other possible plans, with their predicted times."""

    @property
    def movement(self) -> Movement:
        """The movement of state that the change to this plan requires. Raises LayoutError with the name of any state
        that no rank holds."""
        return movement(self.situation, self.plan.layout)


def priced(
    job: Job,
    plan: Plan,
    situation: Situation,
    reason: str = "",
    predicted: float | None = None,
    decision: Decision | None = None,
) -> Choice:
    """Return the plan with its predicted times. `predicted`: the time of an iteration, if known already. `decision`:
    the planner's comparison with other plans, if there was one."""
    others = () if decision is None else decision.alternatives
    return Choice(
        plan=plan,
        reason=reason,
        predicted=_price(plan, situation) if predicted is None or plan.mirrors else predicted,
        present=present(job, situation),
        situation=situation,
        kept_out=tuple(sorted(ranks_kept_out(job, set(plan.layout.standby).intersection(situation.available)))),
        considered=tuple(OtherPlan(name=name, predicted=s) for name, s in others if math.isfinite(s)),
    )


def present(job: Job, situation: Situation) -> float | None:
    """Return the predicted time of an iteration under the plan in effect, with the present number of micro-batches;
    None if that plan cannot run."""
    plan = job.record.plan
    if plan is None or situation.micro_batches < len(plan.layout.replicas) - len(plan.mirrors):
        return None
    return _price(with_micro_batches(plan, situation.micro_batches), situation)


def _price(plan: Plan, situation: Situation) -> float | None:
    """Return the predicted time of an iteration; None if the plan has work for a rank that is gone or stopped."""
    if not set(situation.available).difference(situation.stale).issuperset(plan.layout.active):
        return None
    seconds = iteration_seconds(plan, situation)
    return seconds if math.isfinite(seconds) else None


def with_standby(plan: Plan, ranks: set[int]) -> Plan:
    """Return the plan with `ranks` as additional standby ranks."""
    if not ranks:
        return plan
    layout = plan.layout
    standby = tuple(sorted({*layout.standby, *ranks}))
    return msgspec.structs.replace(plan, layout=Layout(layout.replicas, standby))


def with_micro_batches(plan: Plan, micro_batches: int) -> Plan:
    """Return the plan with even shares of another number of micro-batches. Raises LayoutError if a replica would get
    none."""
    if plan.micro_batches == micro_batches:
        return plan
    return plan.dealing(micro_batches)
