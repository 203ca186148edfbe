"""Another plan because devices or links became slower or faster: looked for, weighed, and training paused for it.

Decides when to interrupt training although everybody is alive. Which plan is best the scheduler says, whether it is
worth its price `resihp.scheduler.transition_cost`: a slow-down that may pass is borne until it has cost what a change
would, and each recent change on account of the same device makes the next one dearer. Called by `slowness`.
"""

from __future__ import annotations

import math

from resihp.controller import planning, transition
from resihp.controller.state import Change, Job
from resihp.errors import LayoutError, NotEnoughDevicesError
from resihp.record.journal import ChangeDecided
from resihp.record.state import Device, Link
from resihp.scheduler import transition_cost


def consider(job: Job, reason: str, since: int, *, device: Device | Link, failure: int | None = None) -> None:
    """Look for another plan, now or as soon as nothing else is under way.

    `since`: first iteration in which things were as they are; `device`: what changed, a device or a link.
    """
    job.reconsider = [one for one in job.reconsider if one.device != device]
    job.reconsider.append(Change(reason=reason, since=since, failure=failure, device=device))
    job.reconsider_at = 0.0


def consider_links(job: Job) -> None:
    """Look for a plan that suits slow links, where none has been made for them: what transfers take is known by now."""
    for link, slow in sorted(job.record.slow_links.items()):
        if not job.record.changes.get(link):
            reason = f"{job.where_link(link)} is slow"
            consider(job, reason, slow.since, failure=slow.failure, device=link)


def review(job: Job) -> None:
    """Interrupt training for another plan, if it is worth it by now."""
    if not job.reconsider or job.now < job.reconsider_at:
        return
    if not job.may_interrupt:
        return
    asked, job.reconsider = job.reconsider, []
    if job.record.plan is None or not job.can_still_gain:
        return
    reason = ", ".join(dict.fromkeys(one.reason for one in asked))
    try:
        gain = planning.gain(job)
    except (LayoutError, NotEnoughDevicesError) as error:
        job.say("notice", f"{reason}: no other plan: {error}")
        return
    if (gain.plan.layout, gain.plan.assignment, gain.plan.migrations, gain.plan.orders) == (
        job.record.plan.layout,
        job.record.plan.assignment,
        job.record.plan.migrations,
        job.record.plan.orders,
    ):
        job.say("notice", f"{reason}: the plan stays, no other is faster")
        return
    left_s = (job.record.goal - job.furthest) * job.usual_s
    found = transition_cost.verdict(
        transition_cost.cost(gain.movement, transition_cost.calibrated(job.record.costs)),
        gain.now_s,
        gain.then_s,
        remaining_s=left_s if job.deadline is None else max(0.0, min(left_s, job.deadline - job.now)),
        elapsed_s=max(max(0, job.furthest + 1 - one.since) * job.usual_s for one in asked),
        changes=max(transition_cost.recent(job.changed_at.get(one.device, ()), job.now) for one in asked),
    )
    if found.go:
        causes = {one.device for one in asked}
        links = sorted((a, b) for a, b in causes if isinstance(a, int))
        devices = sorted((node, index) for node, index in causes if isinstance(node, str))
        job.log(ChangeDecided(reason=found.reason, devices=tuple(devices), links=tuple(links)))
        transition.pause(job, f"{reason}: {found.reason}")
        assert job.pause is not None
        job.pause.failures += [one.failure for one in asked if one.failure is not None]
        return
    job.say("notice", f"{reason}: the plan stays: {found.reason}")
    if found.again_in_s is not None and math.isfinite(found.again_in_s):
        job.reconsider = asked
        job.reconsider_at = job.now + max(found.again_in_s, job.usual_s)


def resume(job: Job) -> None:
    """A new supervisor: when plans were changed is not known to it, only how often; it takes all of them for recent."""
    for what, times in job.record.changes.items():
        job.changed_at[what] = [job.now] * times
