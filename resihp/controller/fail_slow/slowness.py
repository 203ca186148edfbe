"""What is slow and still at work: from the detector's finding to a verdict, and to a plan that suits it.

A finding is a suspicion. Its suspects are measured between two iterations, beside a few witnesses; what the probe
confirms is a verdict. A device whose probe is fine, but which is found again, is slow in its training and not in a
matrix product: then what was measured in training is the verdict. A link is measured as well, beside others of its
kind, and its verdict rests on that; what was seen in training is it only where there is nothing to compare with. With a
verdict the planner is asked what it would do; training is interrupted only if that gains enough. Verdicts end when the
detector finds the device as fast as before. Nothing is drained for being slow: the job goes on using it.

All verdicts are on record. Called by the controller with answers to probes, and at the end of each
event; what the detector found, `expectation` has put there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set

import msgspec

from resihp.controller import replan_policy, startup
from resihp.controller.fail_slow import probing, second_looks
from resihp.controller.nodes import joins
from resihp.controller.state import Examination, Job, Member
from resihp.detector import probes
from resihp.detector.findings import Finding
from resihp.protocol import messages as m
from resihp.record.fold import RECOVERED
from resihp.record.journal import FailureEnded, FailureFound, Suspected
from resihp.record.state import Device

UNANSWERED = 1000
"""Probes that the last supervisor may have asked for, and whose answers may still come: their numbers are taken."""
CONFIRMED = RECOVERED
"""A suspect whose probe reaches less than this is confirmed."""
ANNOUNCED_S = 0.5
"""How long ahead ranks are told when to measure a link: orders take milliseconds."""
LEAST_AHEAD = 2
"""Iterations ahead, if these are longer."""


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
    findings, job.findings = job.findings, ()
    for finding in findings:
        if finding.kind == "fail-slow":
            _suspected(job, finding)
        elif finding.kind == "recovered":
            _recovered(job, finding)


def _suspected(job: Job, finding: Finding) -> None:
    change = f"{finding.change:+.0%} since iteration {finding.iteration}"
    if finding.link is not None:
        _link_suspected(job, finding, finding.link)
        return
    suspects = tuple(rank for rank in finding.ranks if rank in job.record.working and job.members[rank].alive)
    if job.record.suspects_slow is not None:
        return  # one suspicion after the other: what it finds may explain this one, too
    if suspects and all(job.device_of(rank) in job.record.slow for rank in suspects):
        return
    where = job.where(suspects[0]) if suspects else "no device stands out"
    job.log(
        Suspected(
            rank=suspects[0] if suspects else None,
            node=job.members[suspects[0]].node if suspects else None,
            evidence=f"slow, {change}: {finding.evidence}",
            kind="slow",
        ),
    )
    job.say("notice", f"{where}: suspected to be slow, {change}; measuring")
    measured = suspects or job.record.active
    probing.begin(job, "suspicion", {*measured, *probing.witnesses(job, measured)}, finding=finding)


def _link_suspected(job: Job, finding: Finding, link: tuple[int, int]) -> None:
    """Have the link measured, once nothing else is going on."""
    a, b = link
    if link in job.record.slow_links or not all(
        rank in job.record.working and job.members[rank].alive for rank in link
    ):
        return
    if job.record.suspects_slow is not None or not job.may_interrupt:
        job.findings += (finding,)  # keeps
        return
    takes_s = max(job.predicted_s, 1e-3)
    unheard = int((job.now - job.progress_at) / max(job.usual_s, 1e-3))  # reports are held back, while training goes on
    after = job.furthest + unheard + max(LEAST_AHEAD, math.ceil(ANNOUNCED_S / takes_s))
    change = f"{finding.change:+.0%} since iteration {finding.iteration}"
    if after >= job.record.goal:
        job.monitor.cleared_link(a, b)
        job.say("notice", f"{job.where_link(link)}: may be slow, {change}; training ends before it could be measured")
        return
    evidence = f"{job.where_link(link)}: slow, {change}: {finding.evidence}"
    job.log(Suspected(rank=None, node=None, evidence=evidence, kind="slow"))  # neither end by itself
    job.say("notice", f"{job.where_link(link)}: suspected to be slow, {change}; measuring after iteration {after}")
    probing.begin_link(job, finding, after)


def _nodes(job: Job, link: tuple[int, int]) -> tuple[str, str]:
    """That a link between two ranks joins, names ascending."""
    a, b = (job.members[rank].node for rank in link)
    return min(a, b), max(a, b)


def _link_measured(job: Job, done: Examination, finding: Finding, link: tuple[int, int]) -> None:
    judged = probing.conclude_link(job, done)
    if not job.training:
        _acquit(job, finding, "another plan is on its way")
    elif judged is None:
        missed = [answer.missed for rank, answer in sorted(done.answers.items()) if rank in link and answer.missed]
        _acquit(job, finding, f"it was not measured: {next(iter(missed), 'no answer')}")
    elif judged.speed is None:
        told = f"measured, but there is {judged.evidence}; {finding.evidence}"
        _link_verdict(job, finding, link, _speed(finding), told)
    elif judged.slow:
        _link_verdict(job, finding, link, judged.speed, f"{judged.evidence}; {finding.evidence}")
    else:
        _acquit(job, finding, judged.evidence)


def concluded(job: Job, done: Examination) -> None:
    """Everybody who was measured has answered, or had the time to."""
    if done.finding is not None and done.finding.link is not None:
        _link_measured(job, done, done.finding, done.finding.link)
        return
    if done.occasion == "start":
        complete = second_looks.after(job, done)
        if complete is not None:
            startup.measured(job, probing.conclude(job, complete))
        return
    unfit = set(job.record.unfit)
    judged = probing.conclude(job, done)
    if done.occasion == "join":
        joins.measured(job, judged)
        return
    if done.occasion == "standby":
        _measured_standby(job, judged, unfit)
        return
    finding = done.finding
    if finding is None:
        return
    if not job.training:
        _acquit(job, finding, "another plan is on its way")
        return
    suspects = [rank for rank in finding.ranks or judged if rank in done.answers and rank in job.record.working]
    suspects = [rank for rank in suspects if job.device_of(rank) not in job.record.slow]
    slow = [rank for rank in suspects if not judged[rank].fit or (judged[rank].speed or 1.0) < CONFIRMED]
    if slow:
        worst = min(slow, key=lambda rank: judged[rank].speed or 0.0)
        told = f"{judged[worst].evidence}; {finding.evidence}"
        speed = job.monitor.speeds().get(worst) or judged[worst].speed or _speed(finding)
        _verdict(job, worst, finding, speed, told)
    elif not suspects:
        _acquit(job, finding, "it did not answer, or has gone" if finding.ranks else "nobody answered")
    elif finding.ranks and suspects[0] in job.acquitted:
        worst = suspects[0]
        speed = job.monitor.speeds().get(worst, _speed(finding))
        _verdict(job, worst, finding, speed, f"{_probe_says(done, judged, worst)}; {finding.evidence}")
    else:
        job.acquitted.update(finding.ranks)
        untried = [rank for rank in suspects if done.answers[rank].untried]
        fine = "its probe is fine" if finding.ranks else "every device's probe is fine"
        _acquit(job, finding, judged[untried[0]].evidence if untried else fine)


def _probe_says(done: Examination, judged: Mapping[int, probes.Judged], rank: int) -> str:
    """Of a suspect that no probe found slow."""
    told = judged[rank].evidence
    return told if done.answers[rank].untried else f"its probe is fine ({told})"


def _acquit(job: Job, finding: Finding, why: str) -> None:
    """A suspicion that came to nothing."""
    suspected = job.record.suspects_slow
    assert suspected is not None
    if finding.link is not None:
        job.monitor.cleared_link(*finding.link)
        who = job.where_link(finding.link)
    else:
        for rank in finding.ranks:
            job.monitor.cleared(rank)
        who = "all devices" if suspected.rank is None else job.where(suspected.rank)
    job.log(msgspec.structs.replace(suspected, evidence=why, cleared=True))
    job.say("notice", f"{who}: no longer suspected to be slow, {why}")


def _verdict(job: Job, rank: int, finding: Finding, speed: float, evidence: str) -> None:
    member = job.members[rank]
    speed = min(max(speed, 0.01), 1.0)
    entry = FailureFound(
        failure=job.record.failures + 1,
        kind="fail-slow",
        component="device",
        cause=f"rank {rank} works at {speed:.0%} of a healthy device's speed",
        ranks=(rank,),
        node=member.node,
        device=member.device,
        iteration=finding.iteration,
        epoch=job.epoch,
        evidence=evidence,
        detect_s=_since_fault(job, rank),
        speed=speed,
        confidence=finding.confidence,
    )
    suspected = job.record.suspects_slow
    if suspected is not None and suspected.rank not in (None, rank):  # else readers would show it so for good
        job.log(msgspec.structs.replace(suspected, evidence=f"rank {rank} is what is slow", cleared=True))
    job.acquitted.discard(rank)
    job.monitor.confirmed(rank, speed)
    job.log(entry)
    job.say("warning", f"{job.where(rank)}: slow since iteration {finding.iteration}, at {speed:.0%} of its speed")
    device = member.node, member.device
    replan_policy.consider(job, f"rank {rank} is slow", finding.iteration, failure=entry.failure, device=device)


def _link_verdict(job: Job, finding: Finding, link: tuple[int, int], speed: float, evidence: str) -> None:
    a, b = link
    speed = min(max(speed, 0.01), 1.0)
    nodes = f"{job.members[a].node}-{job.members[b].node}"
    entry = FailureFound(
        failure=job.record.failures + 1,
        kind="fail-slow",
        component="link",
        cause=f"the link from rank {a} to rank {b} ({nodes}) works at {speed:.0%} of its speed",
        ranks=(a, b),
        node=job.members[a].node,
        device=None,
        iteration=finding.iteration,
        epoch=job.epoch,
        evidence=evidence,
        detect_s=_since_fault(job, _nodes(job, link)),
        speed=speed,
        confidence=finding.confidence,
        link=link,
    )
    job.log(entry)
    job.say("warning", f"{job.where_link(link)}: slow since iteration {finding.iteration}, at {speed:.0%}")
    replan_policy.consider(
        job, f"{job.where_link(link)} is slow", finding.iteration, failure=entry.failure, device=link
    )


def _recovered(job: Job, finding: Finding) -> None:
    """As fast as before, at work; a suspicion without a verdict just ends."""
    if finding.link is not None:
        job.findings = tuple(one for one in job.findings if one.link != finding.link)
    device = next((d for rank in finding.ranks if (d := job.device_of(rank)) in job.record.slow), None)
    if device is not None:
        _device_recovered(job, device, finding.iteration, finding.evidence)
    elif finding.link is not None and finding.link in job.record.slow_links:
        a, b = finding.link
        failure = job.record.slow_links[a, b].failure
        job.log(
            FailureEnded(
                failure=failure, node=None, device=None, iteration=finding.iteration, evidence=finding.evidence
            ),
        )
        told = f"{job.where_link((a, b))} is as fast as before"
        job.say("notice", f"{told}, since iteration {finding.iteration}")
        replan_policy.consider(job, told, finding.iteration, device=(a, b))


def _device_recovered(job: Job, device: tuple[str, int], iteration: int, evidence: str) -> None:
    name = f"node {device[0]} device {device[1]}"
    failure = job.record.slow[device].failure
    job.log(
        FailureEnded(failure=failure, node=device[0], device=device[1], iteration=iteration, evidence=evidence),
    )
    job.say("notice", f"{name}: as fast as before, since iteration {iteration}")
    replan_policy.consider(job, f"{name} is as fast as before", iteration, device=device)


# --- devices that stand by because they are slow --------------------------------------------------------------------


def _measure_standby(job: Job) -> None:
    """Now and then: what stands by is not seen in training."""
    if job.now < job.recheck_at:
        return
    job.recheck_at = job.now + job.settings.recheck_s
    idle = [rank for rank in job.ready if rank not in job.record.working]
    slow = [rank for rank in idle if job.device_of(rank) in job.record.slow.keys() | job.record.unfit]
    busy = {rank for known in job.examinations.values() for rank in known.asked}
    if slow and not busy.intersection(slow):
        probing.begin(job, "standby", slow)


def _measured_standby(job: Job, judged: Mapping[int, probes.Judged], unfit: Set[Device]) -> None:
    """Who stood by, some of them because they were `unfit`, was measured once more."""
    for rank, verdict in judged.items():
        device = job.device_of(rank)
        if not verdict.fit or verdict.speed is None or verdict.speed < CONFIRMED or not job.members[rank].ready:
            continue
        if device in unfit:
            replan_policy.consider_newcomer(job, rank)
        if device in job.record.slow:
            _device_recovered(
                job, device, job.record.committed + 1, f"standing by, its probe is fine: {verdict.evidence}"
            )


def resume(job: Job) -> None:
    """A new supervisor: nobody answers the probes of the last one, and the detector has all to learn again."""
    job.probes = job.record.probes + UNANSWERED
    suspected = job.record.suspects_slow
    if suspected is not None:
        cleared = msgspec.structs.replace(suspected, evidence="not measured: another supervisor leads", cleared=True)
        job.log(cleared)
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


def _speed(finding: Finding) -> float:
    """What the change of time comes to."""
    return 1.0 / (1.0 + max(finding.change, 0.0))


def _since_fault(job: Job, what: int | tuple[str, str]) -> float | None:
    injected = job.slow_since.get(what)
    return None if injected is None else job.now - injected


def probed(job: Job, member: Member, answer: m.Probed) -> None:
    done = probing.probed(job, member.rank, answer)
    if done is not None:
        concluded(job, done)
