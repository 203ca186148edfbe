"""Choose the next plan of a job after its first: ask the scheduler for a plan and the checker about it.

Decides on the alternative after a plan was refused, and whether the layout in effect can stay. The scheduler decides
which layout is best; the checker decides whether a plan can be carried out. Called by `transition` after ranks are lost
or join, and by `replan_policy`, `tuning` and `ahead` for better plans.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace

import msgspec

from resihp.controller.planning.choices import Choice, priced, with_micro_batches, with_standby
from resihp.controller.planning.copies import mirrored
from resihp.controller.planning.situations import ranks_kept_out, situation_of
from resihp.controller.state.job import Job
from resihp.errors import LayoutError, NotEnoughDevicesError
from resihp.parallelism.layout import Layout, Replica, validate
from resihp.parallelism.plan import Plan
from resihp.parallelism.transfers import Base
from resihp.scheduler.orders.lanes import overfull
from resihp.scheduler.situation import Situation


class Posed(msgspec.Struct, frozen=True, kw_only=True):
    """A question to the scheduler. `situation`: the full situation. `fit`: the situation without the ranks `kept_out`,
    which must not get work."""

    situation: Situation
    fit: Situation
    kept_out: frozenset[int]


def best(job: Job, epoch: int, available: set[int], base: Base | None, *, minds_slowness: bool | None = None) -> Choice:
    """Return the scheduler's plan for the ranks `available`, after it has passed the checker. `minds_slowness`: whether
    the plan takes slow devices into account; by default it does, except in observe mode.

    Raises LayoutError if there is no plan, or if the plan fails the check.
    """
    question = asked(job, epoch, available, base, minds_slowness=minds_slowness)
    situation, unfit = question.situation, set(question.kept_out)
    ready = job.plan_cache.ready(question.fit)
    if ready is not None:
        # the plan was checked as it was answered, unless kept-out ranks are added now
        plan = mirrored(job, with_standby(ready.plan, unfit), situation, checked=not unfit)
        job.plan_cache.searched = ready.plan.layout.replicas if job.settings.search_s else None
        return priced(job, plan, situation, f"{ready.reason}; planned ahead", ready.seconds, ready)
    try:
        decision = job.planner.decide(question.fit)
    except LayoutError:
        if not unfit:
            raise
        unfit = set()
        decision = job.planner.decide(situation)
    plan = mirrored(job, with_standby(decision.plan, unfit), situation)
    return priced(job, plan, situation, decision.reason, decision.seconds, decision)


def asked(job: Job, epoch: int, available: set[int], base: Base | None, *, minds_slowness: bool | None = None) -> Posed:
    """Return the question to the scheduler that `best` asks."""
    counts_slowness = not job.settings.observes if minds_slowness is None else minds_slowness
    unfit = ranks_kept_out(job, available)
    situation = situation_of(job, epoch, available, base, minds_slowness=counts_slowness)
    fit = situation_of(job, epoch, available - unfit, base, minds_slowness=counts_slowness) if unfit else situation
    return Posed(situation=situation, fit=fit, kept_out=frozenset(unfit))


def best_while_running(job: Job, *, minds_slowness: bool | None = None) -> Choice:
    """Return the best plan for all ready ranks, as if training were interrupted now. Raises as `best` does."""
    return best(job, job.epoch + 1, set(job.ready), None, minds_slowness=minds_slowness)


def resized(job: Job, epoch: int, available: set[int], base: Base | None) -> Choice:
    """Return the layout in effect with shares for the present number of micro-batches.

    Raises LayoutError if the layout cannot stay: a rank is gone, a replica would get no micro-batch, memory does not
    suffice, or more than the shares depends on the number of micro-batches.
    """
    assert job.record.plan is not None
    old = job.record.plan.without_mirrors()
    fixed = (old.migrations or old.orders) and not old.layout.vacant
    if fixed or not available.issuperset(old.layout.active):
        raise LayoutError("the plan in effect does not suit another number of micro-batches")
    situation = situation_of(job, epoch, available, base)
    if set(situation.stale).intersection(old.layout.active) or ranks_kept_out(job, available) - set(old.layout.standby):
        raise LayoutError("the plan in effect does not suit the present ranks")
    reason = f"the layout in effect for {situation.micro_batches} micro-batches"
    if old.layout.vacant:
        plan = mirrored(job, _redealt(old, old.layout.replicas, situation), situation)
        return priced(job, plan, situation, reason)
    decision = job.planner.without_lost_replicas(situation)
    plan = mirrored(job, decision.plan, situation)
    return priced(job, plan, situation, reason, decision.seconds)


def tuned(job: Job, epoch: int, available: set[int], base: Base | None, plan: Plan) -> Choice:
    """Complete a tuned plan, made while training went on, now that all ranks have parked. Ranks without work stand by.

    Raises LayoutError if the plan no longer fits: a rank with work is gone or must not work, or the number of
    micro-batches has changed.
    """
    unfit = ranks_kept_out(job, available)
    usable = (available if base is None else available.intersection(base.survivors)) - unfit
    if not usable.issuperset(plan.layout.active) or plan.micro_batches != job.micro_batches:
        raise LayoutError("the tuned plan does not suit the present ranks")
    standby = tuple(sorted(available.difference(plan.layout.active)))
    plan = msgspec.structs.replace(plan, epoch=epoch, layout=Layout(plan.layout.replicas, standby))
    situation = situation_of(job, epoch, available, base)
    plan = mirrored(job, plan, situation)
    choice = priced(job, plan, situation, "layers and orders by measured times")
    if job.tuning.promise is not None:
        job.tuning.promise = replace(job.tuning.promise, epoch=epoch)
    return choice


def cautious(job: Job, epoch: int, available: set[int], base: Base | None) -> Choice:
    """Return the plan in effect once more if possible, else the plan in effect without the replicas that lost a rank.

    Raises NotEnoughDevicesError if no replica is complete, LayoutError if the resulting plan cannot be carried out
    either.
    """
    old = job.record.plan or job.record.first_plan
    assert old is not None
    situation = situation_of(job, epoch, available, base)
    usable = available if base is None else available.intersection(base.survivors)
    if usable.issuperset(old.layout.active):
        standby = tuple(sorted(available - set(old.layout.active)))
        plan = with_micro_batches(old, job.micro_batches)
        plan = msgspec.structs.replace(plan, epoch=epoch, layout=Layout(old.layout.replicas, standby))
        reason = "the plan in effect once more"
    elif old.mirrors and usable.issuperset(old.computing):
        plan = with_micro_batches(old.without_mirrors(), job.micro_batches)
        standby = tuple(sorted(available - set(old.computing)))
        plan = msgspec.structs.replace(plan, epoch=epoch, layout=Layout(plan.layout.replicas, standby))
        reason = "the plan in effect without its mirrors"
    else:
        plan, reason = _without_lost(job, old.without_mirrors(), situation, usable)
    job.dependencies.check(plan)
    return priced(job, plan, situation, reason)


def _without_lost(job: Job, old: Plan, situation: Situation, usable: Collection[int]) -> tuple[Plan, str]:
    """Return `old` without the replicas that lost a rank, and the reason in words. Stages without ranks stay empty if
    other replicas hold their layers. Raises NotEnoughDevicesError."""
    if old.layout.vacant:
        intact = tuple(replica for replica in old.layout.replicas if set(replica.ranks).issubset(usable))
        with suppress(LayoutError):
            return _redealt(old, intact, situation), "without the replicas that lost a rank"
    try:
        decision = job.planner.without_lost_replicas(situation)
    except LayoutError as error:
        raise NotEnoughDevicesError(f"no complete replica is left: {error}") from None
    return decision.plan, decision.reason


def _redealt(plan: Plan, replicas: tuple[Replica, ...], situation: Situation) -> Plan:
    """Return a plan for the situation from these replicas of `plan`, a plan in which some stages have no ranks.

    Raises LayoutError if the replicas do not hold all layers together, or do not have enough memory.
    """
    used = {rank for replica in replicas for rank in replica.ranks}
    layout = Layout(replicas, tuple(sorted(set(situation.available).difference(used))))
    validate(layout, situation.model)
    plan = msgspec.structs.replace(plan, epoch=situation.epoch, layout=layout).dealing(situation.micro_batches)
    obstacle = overfull(plan, situation)
    if obstacle:
        raise LayoutError(obstacle)
    return plan
