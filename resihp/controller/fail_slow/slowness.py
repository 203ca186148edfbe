"""What is slow and still at work: from the detector's finding to a verdict, and to a plan that suits it.

A finding is a suspicion. Its suspects are measured between two iterations, beside a few witnesses; one suspicion is
looked into at a time, what is found meanwhile joins it or waits. What follows is decided where it belongs:
`slow_devices`, `slow_links`, and `slow_parts` for what nobody can measure. With a verdict the planner is asked what it
would do; training is interrupted only if that gains enough. Verdicts end when the detector finds all as fast as before.
Nothing is drained for being slow: the job goes on using it.

All suspicions and verdicts are on record. Called by the controller with answers to probes, and at the end of each
event; what the detector found, `expectation` has put there.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

import msgspec

from resihp.controller import replan_policy, startup
from resihp.controller.fail_slow import probing, second_looks, slow_devices, slow_links, slow_parts, suspicions
from resihp.controller.nodes import joins
from resihp.controller.state.examinations import Examination
from resihp.controller.state.job import Job
from resihp.controller.state.members import Member
from resihp.detector import probes
from resihp.detector.findings import Finding
from resihp.protocol import messages as m
from resihp.record.fold import RECOVERED
from resihp.record.state import Device

UNANSWERED = 1000
"""Probes that the last supervisor may have asked for, and whose answers may still come: their numbers are taken."""
BUSY_S = 1.0
"""When to try again to measure a device that stands by, where it is being measured, or has no process."""


def review(job: Job) -> None:
    """At the end of each event: act on what the detector found."""
    for overdue in probing.overdue(job):
        concluded(job, overdue)
    if not job.training:
        return  # what was found waits
    if job.profile is not None and not job.links_planned_for:
        job.links_planned_for = True
        replan_policy.consider_links(job)
    _measure_standby(job)
    slow_parts.review(job)
    findings, job.findings = job.findings, ()
    for finding in findings:
        if finding.kind == "fail-slow":
            job.findings += (finding,)
        elif finding.kind == "recovered":
            _recovered(job, finding)
    if job.findings:
        _look_into(job)


def _look_into(job: Job) -> None:
    """Devices first, for they explain most; all of them at once. What has to wait keeps."""
    devices = [finding for finding in job.findings if suspicions.component(finding) == "device"]
    job.findings = tuple(finding for finding in job.findings if suspicions.component(finding) != "device")
    if job.record.suspects_slow is not None:
        devices = [finding for finding in devices if not slow_devices.joined(job, finding)]
    elif devices:
        slow_devices.suspected(job, devices)  # which may explain others
        devices = []
    others, job.findings = job.findings, ()
    waiting = []
    for finding in others:
        if job.record.suspects_slow is not None or (finding.link is not None and not job.may_interrupt):
            waiting.append(finding)
        elif finding.link is not None:
            slow_links.suspected(job, finding, finding.link)
        elif suspicions.component(finding) == "job":
            slow_devices.suspected(job, (finding,))
        else:
            slow_parts.suspected(job, finding)
    job.findings += (*devices, *waiting)


def concluded(job: Job, done: Examination) -> None:
    """Everybody who was measured has answered, or had the time to."""
    if done.link is not None:
        slow_links.measured(job, done, done.findings[0], done.link)
        return
    if done.occasion == "suspicion":
        if not second_looks.suspects_again(job, done):
            slow_devices.measured(job, done)
        return
    complete = second_looks.after(job, done)
    if complete is None:
        return
    unfit = set(job.record.unfit)
    judged = probing.conclude(job, complete)
    if done.occasion == "start":
        startup.measured(job, judged)
    elif done.occasion == "join":
        joins.measured(job, judged)
    else:
        _measured_standby(job, judged, unfit)


def _recovered(job: Job, finding: Finding) -> None:
    """As fast as before, at work; a suspicion without a verdict is over as well."""
    what = suspicions.component(finding)
    waiting = []
    for one in job.findings:
        left = _without(one, finding)
        if left is None:
            suspicions.dropped(job, one, f"over before it was looked into: {finding.evidence}", "passed")
        else:
            waiting.append(left)
    job.findings = tuple(waiting)
    for examination in job.examinations.values():
        if examination.occasion == "suspicion" and examination.link is None:
            examination.findings = [left for one in examination.findings if (left := _without(one, finding))]
    if finding.link is not None:
        slow_links.recovered(job, finding, finding.link)
    elif what == "device":
        slow_devices.recovered(job, finding)
    else:
        slow_parts.recovered(job, finding)


def _without(finding: Finding, well: Finding) -> Finding | None:
    """What is left of a finding when something is as fast as before: fewer suspects, or none."""
    if suspicions.component(finding) != suspicions.component(well) or finding.link != well.link:
        return finding
    ranks = tuple(rank for rank in finding.ranks if rank not in well.ranks)
    if finding.kind != "fail-slow" or not well.ranks or not ranks:
        return None
    return msgspec.structs.replace(finding, ranks=ranks)


# --- devices that stand by because they are slow --------------------------------------------------------------------


def _measure_standby(job: Job) -> None:
    """Measure again what stands by and is due: it is not seen in training."""
    due = _due(job)
    if not due:
        return
    busy = {rank for known in job.examinations.values() for rank in known.asked}
    busy |= {rank for looks in job.rechecks.second_looks.values() for rank in looks.doubted}
    busy |= {*job.record.computing, *job.unmeasured}
    standby = [rank for rank in job.ready if job.device_of(rank) in due and rank not in busy]
    if standby:
        probing.begin(job, "standby", standby)


def _due(job: Job) -> set[Device]:
    """Devices to measure again now: what is slow every `recheck_s` seconds, what a probe set aside soon at first, then
    ever more rarely. A new supervisor waits as long as the last one would have."""
    due: set[Device] = set()
    for device in job.record.unfit:
        times = job.record.unfit_probes.get(device, 1)
        again_in_s = probes.again_in_s(times, job.settings.recheck_s)
        if job.now >= job.rechecks.unfit_at.setdefault(device, job.now + again_in_s):
            job.rechecks.unfit_at[device] = job.now + BUSY_S  # if it cannot be measured now
            due.add(device)
    if job.now >= job.rechecks.slow_at:
        job.rechecks.slow_at = job.now + job.settings.recheck_s
        due.update(job.record.slow.keys() - job.record.unfit)
    return due


def _measured_standby(job: Job, judged: Mapping[int, probes.Judged], unfit: Set[Device]) -> None:
    """Who stood by, some of them because they were `unfit`, was measured once more."""
    for rank, verdict in judged.items():
        device = job.device_of(rank)
        if not verdict.fit or not job.members[rank].ready:
            continue
        if device in unfit and verdict.speed is not None:
            job.say("notice", f"{job.where(rank)}: passes its probe again, available for work")
            replan_policy.consider_newcomer(job, rank, f"rank {rank} passes its probe")
        if device in job.record.slow and verdict.speed is not None and verdict.speed >= RECOVERED:
            evidence = f"standing by, its probe is fine: {verdict.evidence}"
            slow_devices.devices_recovered(job, (device,), job.record.committed + 1, evidence)


def resume(job: Job) -> None:
    """A new supervisor: nobody answers the probes of the last one, and the detector has all to learn again."""
    job.probes = job.record.probes + UNANSWERED
    if job.record.suspects_slow is not None:
        suspicions.ended(job, "unconfirmed", "not measured: another supervisor leads")
    slow_parts.resume(job)
    for rank in job.ready:
        slow = job.record.slow.get(job.device_of(rank))
        if slow is not None:
            job.monitor.confirmed(rank, slow.speed)
    for device, slow in sorted(job.record.slow.items()):
        reason = f"node {device[0]} device {device[1]} is slow"
        replan_policy.consider(job, reason, slow.since, failure=slow.failure, device=device)
    replan_policy.consider_links(job)
    for rank in sorted(job.unmeasured):
        if job.members[rank].ready:
            probing.begin(job, "join", (rank,))


def probed(job: Job, member: Member, answer: m.Probed) -> None:
    done = probing.probed(job, member.rank, answer)
    if done is not None:
        concluded(job, done)
