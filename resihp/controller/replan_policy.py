"""Is another plan, or another node, worth it? One policy for what became slower or faster, for what came, and for what
could be asked for.

Decides when to interrupt training although everybody is alive. Which plan is best the scheduler says, whether it is
worth its price `resihp.scheduler.transition_cost`: a slow-down that may pass is borne until it has cost what a change
would, a newcomer is taken in if that pays off before the job ends, and each recent change on account of the same device
makes the next one dearer. Told by `slowness` and `joins`, asked by `replacements` and, after each event, `controller`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import msgspec

from resihp.controller import planning
from resihp.controller.state.job import Job
from resihp.controller.state.transitions import Change
from resihp.errors import LayoutError, NotEnoughDevicesError
from resihp.parallelism.layout import spans
from resihp.parallelism.plan import Plan
from resihp.record.journal import ChangeDecided, ChangeDeclined
from resihp.record.state import Device, Link
from resihp.scheduler import transition_cost
from resihp.scheduler.layouts import mirrors

AGAIN_S = 600.0
"""When a newcomer that was not worth a change is looked at again: recent changes have passed, costs are known better.
It takes the planner, which in the largest jobs takes a while."""

MOST_PROTECTIVE_CHANGES = 4
"""Changes of layout within an hour on account of one device, after which a second copy of state alone is no reason for
another one: a device that comes and goes must not keep training from going on."""


def consider(job: Job, reason: str, since: int, *, device: Device | Link, failure: int | None = None) -> None:
    """Look for another plan, now or as soon as nothing else is under way.

    `since`: first iteration in which things were as they are; `device`: what changed, a device or a link.
    """
    _consider(job, [Change(reason=reason, since=since, failure=failure, device=device)])


def consider_all(job: Job, reason: str, since: int, failures: Mapping[Device | Link, int | None]) -> None:
    """The same of many that became slow together, or well: one question, and they are the cause of its answer."""
    _consider(job, [Change(reason=reason, since=since, failure=one, device=device) for device, one in failures.items()])


def consider_newcomer(job: Job, rank: int, reason: str = "") -> None:
    """Look for a plan that gives a rank work which has none. `reason`: why it could, if it has not just come."""
    told = reason or f"rank {rank} joined"
    _consider(job, [Change(reason=told, since=job.furthest + 1, device=job.device_of(rank), rank=rank)])


def consider_found(job: Job, question: str) -> None:
    """Look at a plan that was found for how things are, by somebody who had the time."""
    assert job.record.plan is not None
    since = job.foresight.since + 1
    _consider(job, [Change(reason="a better plan was found", since=since, device="found", question=question)])


def _consider(job: Job, changes: Sequence[Change]) -> None:
    anew = {change.device for change in changes}
    job.reconsider = [*(one for one in job.reconsider if one.device not in anew), *changes]
    job.reconsider_at = 0.0


def consider_links(job: Job) -> None:
    """Look for a plan that suits slow links, where none has been made for them: what transfers take is known by now."""
    for link, slow in sorted(job.record.slow_links.items()):
        if not job.record.changes.get(link):
            reason = f"{job.where_link(link)} is slow"
            consider(job, reason, slow.since, failure=slow.failure, device=link)


class Replan(msgspec.Struct, frozen=True, kw_only=True):
    """Training is worth interrupting for another plan."""

    reason: str
    failures: tuple[int, ...]
    """Verdicts that it answers to."""
    plan: Plan | None = None
    """The plan, where it is known already; its epoch and who stands by are not."""


def review(job: Job) -> Replan | None:
    """Whether to interrupt training for another plan, by now."""
    if not job.reconsider or job.now < job.reconsider_at or not job.may_interrupt:
        return None
    asked, job.reconsider = [one for one in job.reconsider if _stands(job, one)], []
    if not job.can_still_gain:
        return None
    if not job.settings.observes:
        return _answer(job, asked) if asked else None
    slow, came = ([one for one in asked if (one.rank is None) is which] for which in (True, False))
    if slow:
        _answer(job, slow, only_tell=True)
    return _answer(job, came) if came else None


def _answer(job: Job, asked: list[Change], *, only_tell: bool = False) -> Replan | None:
    """What these changes call for. `only_tell`: what would be done about them, where nothing is."""
    reason = ", ".join(dict.fromkeys(one.reason for one in asked))
    try:
        choice = planning.best_while_running(job, minds_slowness=only_tell or None)
        if _is_in_effect(job, choice.plan):
            job.say("notice", f"{reason}: the plan stays, no other is faster")
            declined(job, reason, "no other is faster", choice, asked)
            return None
        found = weigh(job, choice, asked)
    except (LayoutError, NotEnoughDevicesError) as error:
        job.say("notice", f"{reason}: no other plan: {error}")
        declined(job, reason, f"no other plan: {error}", None, asked)
        return None
    if found.go and only_tell:
        job.say("notice", f"{reason}: another plan {found.reason}; observe mode, the plan stays")
        declined(job, reason, f"observe mode: another {found.reason}", choice, asked)
        return None
    if found.go:
        causes = {one.device for one in asked if not isinstance(one.device, str)}
        links = sorted((a, b) for a, b in causes if isinstance(a, int))
        devices = sorted((node, index) for node, index in causes if isinstance(node, str))
        job.log(
            ChangeDecided(
                reason=found.reason,
                devices=tuple(devices),
                links=tuple(links),
                found=any(one.device == "found" for one in asked),
            )
        )
        failures = tuple(one.failure for one in asked if one.failure is not None)
        return Replan(reason=f"{reason}: {found.reason}", failures=failures)
    job.say("notice", f"{reason}: the plan stays: {found.reason}")
    declined(job, reason, found.reason, choice, asked)
    again_in_s = found.again_in_s
    if again_in_s is None and any(one.rank in choice.plan.computing for one in asked):
        again_in_s = AGAIN_S
    if again_in_s is not None and math.isfinite(again_in_s):
        again_at = job.now + max(again_in_s, job.usual_s)
        job.reconsider_at = min(job.reconsider_at, again_at) if job.reconsider else again_at
        job.reconsider += asked
    return None


def declined(
    job: Job, reason: str, why: str, choice: planning.Choice | None = None, asked: Sequence[Change] = ()
) -> None:
    """Put on record that the plan in effect stays, and what was thought of instead, if anything could be."""
    entry = ChangeDeclined(
        about="plan",
        reason=reason,
        why=why,
        iteration=job.furthest + 1,
        failures=tuple(dict.fromkeys(one.failure for one in asked if one.failure is not None)),
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
    """Whether it still calls for anything: a newcomer may have gone, or have been given work meanwhile, a plan that was
    found may not be for how things are now."""
    if change.question:
        return change.question in job.foresight.answers
    return change.rank is None or (job.members[change.rank].ready and change.rank not in job.record.computing)


def _is_in_effect(job: Job, plan: Plan) -> bool:
    """Whether a plan has the work done as it is done now; more ranks may stand by."""
    now = job.record.plan
    assert now is not None
    same_stages = plan.layout.replicas == now.layout.replicas
    return same_stages and (plan.assignment, plan.migrations, plan.orders) == (
        now.assignment,
        now.migrations,
        now.orders,
    )


def weigh(job: Job, choice: planning.Choice, asked: list[Change]) -> transition_cost.Verdict:
    """Whether a better plan is worth its transition now. Raises LayoutError when state is lost that it needs.

    Where it gives a newcomer work, or where it was found and nothing is slow, what it gains lasts until the job ends;
    else nobody knows how long.
    """
    slow = choice.situation.speeds or choice.situation.links
    found = any(one.question for one in asked) and not slow
    lasts = found or any(one.rank in choice.plan.computing for one in asked)
    cost, left_s = _cost(job, choice), remaining_s(job)
    protection = _protection(job, choice, asked, cost, left_s)
    if protection is not None:
        return protection
    return transition_cost.verdict(
        cost,
        _time(choice.present),
        _time(choice.predicted),
        remaining_s=left_s,
        duration_s=math.inf if lasts else None,
        elapsed_s=max(max(0, job.furthest + 1 - one.since) * job.usual_s for one in asked),
        changes=max(transition_cost.recent(job.changed_at.get(one.device, ()), job.now) for one in asked),
    )


def _protection(
    job: Job, choice: planning.Choice, asked: Sequence[Change], cost: transition_cost.Cost, left_s: float
) -> transition_cost.Verdict | None:
    """Return that a plan is worth its transition because it has a second copy made of state that one rank holds.

    None where it makes none, where less is left to train than the transition takes, or where the same devices have been
    the cause of `MOST_PROTECTIVE_CHANGES` within an hour: then time alone decides. The loss of a last holder costs all
    since the last checkpoint, or all of the training; a transition costs seconds.
    """
    assert job.record.plan is not None
    gained = mirrors.newly_held_twice(job.record.plan.layout, choice.plan.layout)
    changes = max(transition_cost.recent(job.changed_at.get(one.device, ()), job.now) for one in asked)
    if not gained or left_s <= cost.seconds or changes >= MOST_PROTECTIVE_CHANGES:
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
    """Look for a plan that gives state with one holder a second one, where a rank on standby could be it.

    Asked once of each layout in effect and set of ranks that could.
    """
    plan = job.record.plan
    if plan is None or not job.may_interrupt or not (layers := planning.layers_at_risk(job)):
        return
    able = [rank for rank in job.ready if rank not in job.record.working and could_hold_copies(job, rank)]
    question = (plan.layout.replicas, frozenset(able))
    if not able or question == job.foresight.copies_looked_for:
        return
    job.foresight.copies_looked_for = question
    for rank in able:
        consider_newcomer(job, rank, f"only one stage holds {_layers(layers)}")


def could_hold_copies(job: Job, rank: int) -> bool:
    """Return whether a rank without work may hold a copy of state, as far as training tells of its speed."""
    slow = job.record.slow.get(job.device_of(rank))
    return planning.can_hold_copies(job, rank, {} if slow is None else {rank: slow.speed})


def weigh_asking(job: Job, choice: planning.Choice, *, wait_s: float, joining_s: float) -> transition_cost.Verdict:
    """Whether a plan is worth asking for the node that it needs. Raises LayoutError when state is lost."""
    return transition_cost.worth_asking(
        _cost(job, choice),
        _time(choice.present),
        _time(choice.predicted),
        remaining_s=remaining_s(job),
        wait_s=wait_s,
        joining_s=joining_s,
    )


def remaining_s(job: Job) -> float:
    """Of training at the present pace, or until the job's time is up."""
    left_s = (job.record.goal - job.furthest) * job.usual_s
    return left_s if job.deadline is None else max(0.0, min(left_s, job.deadline - job.now))


def _cost(job: Job, choice: planning.Choice) -> transition_cost.Cost:
    return transition_cost.cost(choice.movement, transition_cost.calibrated(job.record.costs))


def _time(predicted: float | None) -> float:
    """Of an iteration under a plan that may not be able to run."""
    return math.inf if predicted is None else predicted


def resume(job: Job) -> None:
    """A new supervisor: when plans were changed is not known to it, only how often; it takes all of them for recent."""
    for what, times in job.record.changes.items():
        job.changed_at[what] = [job.now] * times
