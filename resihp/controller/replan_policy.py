"""Decide whether a slower device, a recovered device or a new device justifies another plan or a request for another
node.

Decides when to interrupt training although all ranks are alive. The scheduler decides which plan is best;
`resihp.scheduler.transition_cost` decides whether the plan is worth the cost of the change. A slowdown that may pass is
tolerated until it has cost as much as a change of plan would. A newcomer gets work if that pays off before the job
ends. Each recent change because of one device makes the next change because of the same device more expensive. Notified
by `slowness` and `joins`; called by `replacements` and, after each event, by `controller`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import msgspec

from resihp.controller.planning import copies, next_plan
from resihp.controller.planning.choices import Choice
from resihp.controller.state.job import Job
from resihp.controller.state.transitions import Change
from resihp.errors import LayoutError, NotEnoughDevicesError
from resihp.parallelism.layout import spans
from resihp.parallelism.plan import Plan
from resihp.record.journal import ChangeDecided, ChangeDeclined
from resihp.record.state import Device, Link
from resihp.scheduler import transition_cost
from resihp.scheduler.layouts import mirrors

NEWCOMER_RECHECK_S = 600.0
"""Seconds until a newcomer that was not worth a change of plan is considered again. By then recent changes count for
less, and costs are known better. Considering it takes a planner run, which is slow in the largest jobs."""

MAX_PROTECTIVE_CHANGES = 4
"""Number of changes of layout within an hour because of one device, from which on a second copy of state alone does not
justify another change. Otherwise a device that keeps leaving and returning could keep training from making progress."""


def consider(job: Job, reason: str, since: int, *, device: Device | Link, failure: int | None = None) -> None:
    """Have the planner look for another plan, now or as soon as training may be interrupted.

    `device`: the device or link with another speed; `since`: the first iteration with that speed.
    """
    _consider(job, [Change(reason=reason, since=since, failure=failure, device=device)])


def consider_all(job: Job, reason: str, since: int, failures: Mapping[Device | Link, int | None]) -> None:
    """Have the planner look for another plan because several devices became slow, or recovered, together. The planner
    is asked once for all of them."""
    changes = [
        Change(reason=reason, since=since, failure=failure, device=device) for device, failure in failures.items()
    ]
    _consider(job, changes)


def consider_newcomer(job: Job, rank: int, reason: str = "") -> None:
    """Have the planner look for a plan that gives work to an idle rank. `reason`: why the rank could have work now;
    empty if it has just joined."""
    reason = reason or f"rank {rank} joined"
    _consider(job, [Change(reason=reason, since=job.furthest + 1, device=job.device_of(rank), rank=rank)])


def consider_found(job: Job, question: str) -> None:
    """Have the better plan considered that the planning process found for the present situation."""
    assert job.record.plan is not None
    since = job.plan_cache.since + 1
    _consider(job, [Change(reason="a better plan was found", since=since, device="found", question=question)])


def _consider(job: Job, changes: Sequence[Change]) -> None:
    devices = {change.device for change in changes}
    job.reconsider = [*(change for change in job.reconsider if change.device not in devices), *changes]
    job.reconsider_at = 0.0


def consider_links(job: Job) -> None:
    """Have the planner look for a plan around the slow links that no change of plan has taken into account yet. Called
    once transfer times are known."""
    for link, slow in sorted(job.record.slow_links.items()):
        if not job.record.changes.get(link):
            reason = f"{job.where_link(link)} is slow"
            consider(job, reason, slow.since, failure=slow.failure, device=link)


class Replan(msgspec.Struct, frozen=True, kw_only=True):
    """A decision to interrupt training for another plan."""

    reason: str
    failures: tuple[int, ...]
    """Numbers of the failures that the new plan responds to."""
    plan: Plan | None = None
    """The new plan, if it is known already, apart from its epoch and its standby ranks; None if it is chosen after the
    pause."""


def review(job: Job) -> Replan | None:
    """Decide whether to interrupt training now for another plan; None if not. Called after each event."""
    if not job.reconsider or job.now < job.reconsider_at or not job.may_interrupt:
        return None
    changes, job.reconsider = [change for change in job.reconsider if _stands(job, change)], []
    if not job.can_still_gain:
        return None
    if not job.settings.observes:
        return _answer(job, changes) if changes else None
    slow, newcomers = ([change for change in changes if (change.rank is None) is is_slow] for is_slow in (True, False))
    if slow:
        _answer(job, slow, only_report=True)
    return _answer(job, newcomers) if newcomers else None


def _answer(job: Job, changes: list[Change], *, only_report: bool = False) -> Replan | None:
    """Decide whether these changes justify another plan. `only_report`: log the decision instead of acting on it
    (observe mode)."""
    reason = ", ".join(dict.fromkeys(change.reason for change in changes))
    try:
        choice = next_plan.best_while_running(job, minds_slowness=only_report or None)
        if _is_in_effect(job, choice.plan):
            job.say("notice", f"{reason}: the plan stays, no other is faster")
            declined(job, reason, "no other is faster", choice, changes)
            return None
        verdict = weigh(job, choice, changes)
    except (LayoutError, NotEnoughDevicesError) as error:
        job.say("notice", f"{reason}: no other plan: {error}")
        declined(job, reason, f"no other plan: {error}", None, changes)
        return None
    if verdict.go and only_report:
        job.say("notice", f"{reason}: another plan {verdict.reason}; observe mode, the plan stays")
        declined(job, reason, f"observe mode: another {verdict.reason}", choice, changes)
        return None
    if verdict.go:
        _log_change(job, verdict.reason, changes)
        failures = tuple(change.failure for change in changes if change.failure is not None)
        return Replan(reason=f"{reason}: {verdict.reason}", failures=failures)
    job.say("notice", f"{reason}: the plan stays: {verdict.reason}")
    declined(job, reason, verdict.reason, choice, changes)
    _consider_again(job, changes, choice.plan, verdict.again_in_s)
    return None


def _log_change(job: Job, reason: str, changes: Sequence[Change]) -> None:
    """Journal that these changes interrupt training."""
    causes = {change.device for change in changes if not isinstance(change.device, str)}
    links = sorted((a, b) for a, b in causes if isinstance(a, int))
    devices = sorted((node, index) for node, index in causes if isinstance(node, str))
    job.log(
        ChangeDecided(
            reason=reason,
            devices=tuple(devices),
            links=tuple(links),
            found=any(change.device == "found" for change in changes),
        )
    )


def _consider_again(job: Job, changes: Sequence[Change], plan: Plan, again_in_s: float | None) -> None:
    """Schedule these changes to be considered again, if the passing of time can make the declined plan worthwhile."""
    if again_in_s is None and any(change.rank in plan.computing for change in changes):
        again_in_s = NEWCOMER_RECHECK_S
    if again_in_s is None or not math.isfinite(again_in_s):
        return
    again_at = job.now + max(again_in_s, job.usual_s)
    job.reconsider_at = min(job.reconsider_at, again_at) if job.reconsider else again_at
    job.reconsider += changes


def declined(job: Job, reason: str, why: str, choice: Choice | None = None, changes: Sequence[Change] = ()) -> None:
    """Journal that the plan in effect stays. `choice`: the alternative that was considered, None if there was none."""
    entry = ChangeDeclined(
        about="plan",
        reason=reason,
        why=why,
        iteration=job.furthest + 1,
        failures=tuple(dict.fromkeys(change.failure for change in changes if change.failure is not None)),
    )
    if choice is not None:
        entry = msgspec.structs.replace(
            entry,
            layout=choice.plan.describe(),
            predicted=choice.predicted,
            present=choice.present,
            unit=choice.situation.unit,
            considered=choice.considered,
        )
    job.log(entry)


def _stands(job: Job, change: Change) -> bool:
    """Return whether a change still matters. A newcomer may have left or been given work meanwhile, and a plan found in
    advance may no longer fit the situation."""
    if change.question:
        return change.question in job.plan_cache.answers
    return change.rank is None or (job.members[change.rank].ready and change.rank not in job.record.computing)


def _is_in_effect(job: Job, plan: Plan) -> bool:
    """Return whether a plan distributes work exactly as the plan in effect does. Standby ranks may differ."""
    now = job.record.plan
    assert now is not None
    same_stages = plan.layout.replicas == now.layout.replicas
    return same_stages and (plan.assignment, plan.migrations, plan.orders) == (
        now.assignment,
        now.migrations,
        now.orders,
    )


def weigh(job: Job, choice: Choice, changes: list[Change]) -> transition_cost.Verdict:
    """Decide whether a better plan is worth the cost of the transition now. Raises LayoutError if state that the plan
    needs is lost.

    The gain lasts until the job ends if the plan gives work to a newcomer, or if it was found while nothing is slow.
    Otherwise the duration of the gain is unknown.
    """
    slow = choice.situation.speeds or choice.situation.links
    was_found = any(change.question for change in changes) and not slow
    lasts = was_found or any(change.rank in choice.plan.computing for change in changes)
    cost, left_s = _cost(job, choice), remaining_s(job)
    protection = _protection(job, choice, changes, cost, left_s)
    if protection is not None:
        return protection
    return transition_cost.verdict(
        cost,
        _time(choice.present),
        _time(choice.predicted),
        remaining_s=left_s,
        duration_s=math.inf if lasts else None,
        elapsed_s=max(max(0, job.furthest + 1 - change.since) * job.usual_s for change in changes),
        changes=max(transition_cost.recent(job.changed_at.get(change.device, ()), job.now) for change in changes),
    )


def _protection(
    job: Job, choice: Choice, changes: Sequence[Change], cost: transition_cost.Cost, left_s: float
) -> transition_cost.Verdict | None:
    """Return a positive verdict if a plan makes a second copy of state that only one rank holds, else None.

    Also return None if the transition takes longer than the remaining training, or if the same devices have caused
    `MAX_PROTECTIVE_CHANGES` changes within an hour: in these cases only the gain in time counts. The loss of the only
    holder would cost all progress since the last checkpoint; a transition costs seconds.
    """
    assert job.record.plan is not None
    gained = mirrors.newly_held_twice(job.record.plan.layout, choice.plan.layout)
    recent = max(transition_cost.recent(job.changed_at.get(change.device, ()), job.now) for change in changes)
    if not gained or left_s <= cost.seconds or recent >= MAX_PROTECTIVE_CHANGES:
        return None
    return transition_cost.Verdict(
        go=True,
        reason=f"adds a second copy of {_layers(gained)}, and takes {cost.seconds:.3g} s",
        cost_s=cost.seconds,
        threshold_s=cost.seconds,
        share=0.0,
        horizon_s=left_s,
        gain_s=0.0,
    )


def _layers(layers: Collection[int]) -> str:
    return f"{'layer' if len(layers) == 1 else 'layers'} {spans(sorted(layers))}"


def review_copies(job: Job) -> None:
    """Have the planner look for a plan that makes second copies of state, if only one rank holds that state and a
    standby rank could hold a copy.

    Done once for each combination of the layout in effect and the set of suitable standby ranks.
    """
    plan = job.record.plan
    if plan is None or not job.may_interrupt or not (layers := copies.layers_at_risk(job)):
        return
    candidates = [rank for rank in job.ready if rank not in job.record.working and could_hold_copies(job, rank)]
    question = (plan.layout.replicas, frozenset(candidates))
    if not candidates or question == job.plan_cache.copies_looked_for:
        return
    job.plan_cache.copies_looked_for = question
    for rank in candidates:
        consider_newcomer(job, rank, f"only one stage holds {_layers(layers)}")


def could_hold_copies(job: Job, rank: int) -> bool:
    """Return whether a rank without work may hold a copy of state, judged by its speed in training as far as that is
    known."""
    slow = job.record.slow.get(job.device_of(rank))
    return copies.can_hold_copies(job, rank, {} if slow is None else {rank: slow.speed})


def weigh_asking(job: Job, choice: Choice, *, wait_s: float, joining_s: float) -> transition_cost.Verdict:
    """Decide whether a plan is worth requesting the node that it needs. Raises LayoutError if state is lost."""
    return transition_cost.worth_asking(
        _cost(job, choice),
        _time(choice.present),
        _time(choice.predicted),
        remaining_s=remaining_s(job),
        wait_s=wait_s,
        joining_s=joining_s,
    )


def remaining_s(job: Job) -> float:
    """Return the seconds of training left at the present speed, or until the job's time limit if that comes first."""
    left_s = (job.record.goal - job.furthest) * job.usual_s
    return left_s if job.deadline is None else max(0.0, min(left_s, job.deadline - job.now))


def _cost(job: Job, choice: Choice) -> transition_cost.Cost:
    return transition_cost.cost(choice.movement, transition_cost.calibrated(job.record.costs))


def _time(predicted: float | None) -> float:
    """Return the predicted time of an iteration; infinity for a plan that cannot run."""
    return math.inf if predicted is None else predicted


def resume(job: Job) -> None:
    """Restore the times of past changes after a take-over. The journal holds the number of changes but not their times,
    so all of them count as recent."""
    for occasion, times in job.record.changes.items():
        job.changed_at[occasion] = [job.now] * times
