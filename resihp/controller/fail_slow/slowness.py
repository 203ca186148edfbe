"""Handle slow devices and links: from the detector's finding to a verdict, and to a better plan.

A finding is a suspicion. Its suspects are measured between two iterations, together with a few reference devices. One
suspicion is open at a time; later findings are added to it or wait. `slow_devices` and `device_verdicts` decide about
devices, `slow_links` about links, and `slow_parts` about everything that cannot be measured. After a verdict the
planner is asked for a better plan, and training is interrupted only if that plan gains enough. A verdict ends when the
detector finds normal speed again. No node is drained for being slow: the job continues to use it.

All suspicions and verdicts are in the journal. Called by the controller with answers to probes, and at the end of each
event. `expectation` puts the detector's findings into `job.findings`.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

import msgspec

from resihp.controller import replan_policy, startup
from resihp.controller.fail_slow import device_verdicts, slow_devices, slow_links, slow_parts, suspicions
from resihp.controller.fail_slow.thresholds import RECOVERED_SPEED
from resihp.controller.nodes import joins
from resihp.controller.probing import probe_orders, probe_results, second_looks
from resihp.controller.state.examinations import Examination
from resihp.controller.state.job import Job
from resihp.controller.state.members import Member
from resihp.detector import probes
from resihp.detector.findings import Finding
from resihp.protocol import messages as m
from resihp.record.state import Device

MAX_UNANSWERED_PROBES = 1000
"""Number of probes that the previous supervisor may have ordered and that may still be answered. After a take-over
their numbers are skipped."""
BUSY_RETRY_S = 1.0
"""Seconds until the next attempt to measure a standby device that was busy or had no process."""


def review(job: Job) -> None:
    """Act on the detector's findings and on overdue probes. Called at the end of each event."""
    for overdue in probe_orders.overdue(job):
        concluded(job, overdue)
    if not job.training:
        return  # findings are kept until training continues
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
    """Examine all findings about devices together, because these explain most of the others, then examine the others.
    Findings that have to wait stay in `job.findings`."""
    devices = [finding for finding in job.findings if suspicions.component(finding) == "device"]
    job.findings = tuple(finding for finding in job.findings if suspicions.component(finding) != "device")
    if job.record.suspects_slow is not None:
        devices = [finding for finding in devices if not slow_devices.joined(job, finding)]
    elif devices:
        slow_devices.suspected(job, devices)  # a verdict may explain other findings
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
    """Act on an examination, once all measured ranks have answered or their time is over."""
    if done.link is not None:
        slow_links.measured(job, done, done.findings[0], done.link)
        return
    if done.occasion == "suspicion":
        if not second_looks.suspects_again(job, done):
            device_verdicts.decide(job, done)
        return
    complete = second_looks.after(job, done)
    if complete is None:
        return
    unfit = set(job.record.unfit)
    judged = probe_results.conclude(job, complete)
    if done.occasion == "start":
        startup.measured(job, judged)
    elif done.occasion == "join":
        joins.measured(job, judged)
    else:
        _measured_standby(job, judged, unfit)


def _recovered(job: Job, finding: Finding) -> None:
    """End the verdicts and pending findings about components that work at their former speed again."""
    part = suspicions.component(finding)
    waiting = []
    for pending in job.findings:
        remaining = _without(pending, finding)
        if remaining is None:
            suspicions.dropped(job, pending, f"over before it was looked into: {finding.evidence}", "passed")
        else:
            waiting.append(remaining)
    job.findings = tuple(waiting)
    for examination in job.examinations.values():
        if examination.occasion == "suspicion" and examination.link is None:
            examination.findings = [
                remaining for pending in examination.findings if (remaining := _without(pending, finding)) is not None
            ]
    if finding.link is not None:
        slow_links.recovered(job, finding, finding.link)
    elif part == "device":
        slow_devices.recovered(job, finding)
    else:
        slow_parts.recovered(job, finding)


def _without(finding: Finding, recovery: Finding) -> Finding | None:
    """Return a finding without the suspects that have recovered; None if no suspect remains."""
    if suspicions.component(finding) != suspicions.component(recovery) or finding.link != recovery.link:
        return finding
    ranks = tuple(rank for rank in finding.ranks if rank not in recovery.ranks)
    if finding.kind != "fail-slow" or not recovery.ranks or not ranks:
        return None
    return msgspec.structs.replace(finding, ranks=ranks)


# --- devices that stand by because they are slow --------------------------------------------------------------------


def _measure_standby(job: Job) -> None:
    """Measure the standby devices that are due. They do no training that would show their speed."""
    due = _due(job)
    if not due:
        return
    busy = {rank for examination in job.examinations.values() for rank in examination.asked}
    busy |= {rank for looks in job.rechecks.second_looks.values() for rank in looks.doubted}
    busy |= {*job.record.computing, *job.unmeasured}
    standby = [rank for rank in job.ready if job.device_of(rank) in due and rank not in busy]
    if standby:
        probe_orders.begin(job, "standby", standby)


def _due(job: Job) -> set[Device]:
    """Return the standby devices to measure again now.

    Slow devices are due every `recheck_s` seconds. Unfit devices are due soon at first, then at growing intervals. A
    new supervisor continues with the interval that the previous one had reached.
    """
    due: set[Device] = set()
    for device in job.record.unfit:
        times = job.record.unfit_probes.get(device, 1)
        again_in_s = probes.again_in_s(times, job.settings.recheck_s)
        if job.now >= job.rechecks.unfit_at.setdefault(device, job.now + again_in_s):
            job.rechecks.unfit_at[device] = job.now + BUSY_RETRY_S  # if it cannot be measured now
            due.add(device)
    if job.now >= job.rechecks.slow_at:
        job.rechecks.slow_at = job.now + job.settings.recheck_s
        due.update(job.record.slow.keys() - job.record.unfit)
    return due


def _measured_standby(job: Job, judged: Mapping[int, probes.Judged], unfit: Set[Device]) -> None:
    """Act on new probes of standby devices. `unfit`: devices that stood by because they had failed an earlier probe."""
    for rank, verdict in judged.items():
        device = job.device_of(rank)
        if not verdict.fit or not job.members[rank].ready:
            continue
        if device in unfit and verdict.speed is not None:
            job.say("notice", f"{job.where(rank)}: passes its probe again, available for work")
            replan_policy.consider_newcomer(job, rank, f"rank {rank} passes its probe")
        if device in job.record.slow and verdict.speed is not None and verdict.speed >= RECOVERED_SPEED:
            evidence = f"standing by, its probe is fine: {verdict.evidence}"
            slow_devices.devices_recovered(job, (device,), job.record.committed + 1, evidence)


def resume(job: Job) -> None:
    """Continue after a take-over. The previous supervisor's probes will not be answered, and the detector has to learn
    all healthy times again."""
    job.probes = job.record.probes + MAX_UNANSWERED_PROBES
    if job.record.suspects_slow is not None:
        suspicions.ended(job, "unconfirmed", "not measured: a new supervisor has taken over")
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
            probe_orders.begin(job, "join", (rank,))


def probed(job: Job, member: Member, answer: m.Probed) -> None:
    done = probe_orders.probed(job, member.rank, answer)
    if done is not None:
        concluded(job, done)
