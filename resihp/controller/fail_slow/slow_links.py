"""Links under suspicion: measured beside others of their kind, after an iteration that is announced to both ends.

A link's verdict rests on its measurement; what was seen in training is it only where there is nothing to compare with.
Where processors are shared it rests on several, each at a moment of its own. Called by `slowness`.
"""

from __future__ import annotations

import math

from resihp.controller import replan_policy
from resihp.controller.fail_slow import probing, slow_parts
from resihp.controller.fail_slow.suspicions import change, dropped, ended, excess, opened, possible, speed_of
from resihp.controller.state.examinations import Examination
from resihp.controller.state.job import Job
from resihp.detector import probes
from resihp.detector.findings import Finding
from resihp.record.journal import FailureEnded, FailureFound, Outcome
from resihp.record.state import Link

ANNOUNCED_S = 0.5
"""How long ahead ranks are told when to measure a link: orders take milliseconds."""
LEAST_AHEAD = 2
"""Iterations ahead, if these are longer."""


def suspected(job: Job, finding: Finding, link: Link) -> None:
    """Have the link measured; nothing else is going on."""
    a, b = link
    if link in job.record.slow_links:
        dropped(job, finding, f"{job.where_link(link)}: known, see failure {job.record.slow_links[link].failure}")
        return
    if not _in_use(job, link):
        dropped(job, finding, f"{job.where_link(link)}: not in use any more")
        return
    after = _moment(job)
    if after is None:
        job.monitor.cleared_link(a, b)
        told = f"{job.where_link(link)}: may be slow, {change(finding)}; training ends before it could be measured"
        dropped(job, finding, told, "unconfirmed")
        job.say("notice", told)
        return
    opened(job, finding, evidence=f"{job.where_link(link)}: slow, {change(finding)}: {finding.evidence}")
    told = f"{job.where_link(link)}: suspected to be slow, {change(finding)}; measuring after iteration {after}"
    job.say("notice", told)
    probing.begin_link(job, finding, after)


def _in_use(job: Job, link: Link) -> bool:
    return all(rank in job.record.working and job.members[rank].alive for rank in link)


def _moment(job: Job) -> int | None:
    """The next iteration that can be announced; None if training ends before."""
    takes_s = max(job.predicted_s, 1e-3)
    unheard = int((job.now - job.progress_at) / max(job.usual_s, 1e-3))  # reports are held back, while training goes on
    after = job.furthest + unheard + max(LEAST_AHEAD, math.ceil(ANNOUNCED_S / takes_s))
    return after if after < job.record.goal else None


def measured(job: Job, done: Examination, finding: Finding, link: Link) -> None:
    """Its ends and the witnesses have answered, or had the time to."""
    judged = probing.conclude_link(job, done, link)
    if not job.training:
        _acquit(job, link, "unconfirmed", "another plan is on its way", done.probe)
    elif judged is None:
        missed = [answer.missed for rank, answer in sorted(done.answers.items()) if rank in link and answer.missed]
        why = f"it was not measured: {next(iter(missed), 'no answer')}"
        _acquit(job, link, "unconfirmed", why, done.probe)
    elif judged.speed is None:
        told = f"measured, but there is {judged.evidence}; {finding.evidence}"
        _verdict(job, finding, link, speed_of(finding), told, done.probe)
    elif judged.slow:
        looks = (*done.slow_looks, judged)
        sure = probes.judge_link_again(looks, shared=any(answer.shared for answer in done.answers.values()))
        if sure is None:
            _look_again(job, done, finding, link, looks)
        else:
            speed = judged.speed if sure.speed is None else sure.speed
            _verdict(job, finding, link, speed, f"{sure.evidence}; {finding.evidence}", done.probe)
    else:
        _acquit(job, link, "fine", judged.evidence, done.probe)


def _look_again(
    job: Job, done: Examination, finding: Finding, link: Link, looks: tuple[probes.JudgedLink, ...]
) -> None:
    after = _moment(job)
    if after is not None and job.may_interrupt and _in_use(job, link):
        probing.begin_link(job, finding, after, looks)
        return
    why = "training ends before it could be measured again" if after is None else "it could not be measured again"
    many = "1 look" if len(looks) == 1 else f"{len(looks)} looks"
    _acquit(job, link, "unconfirmed", f"slow in {many}, {why}", done.probe)


def _acquit(job: Job, link: Link, outcome: Outcome, why: str, probe: int) -> None:
    job.monitor.cleared_link(*link)
    ended(job, outcome, why, probe)
    job.say("notice", f"{job.where_link(link)}: no longer suspected to be slow, {why}")


def _verdict(job: Job, finding: Finding, link: Link, speed: float, evidence: str, probe: int) -> None:
    a, b = link
    speed = possible(speed)
    nodes = f"{job.members[a].node}-{job.members[b].node}"
    longer = excess(job, finding.iteration, (speed,))
    left = longer is not None and longer.left
    told = "" if longer is None else longer.told(speed)
    injected = job.slow_since.get(_nodes(job, link))
    since_s = None if injected is None else job.now - injected
    ended(job, "slow", f"{job.where_link(link)}: is slow", probe)
    entry = FailureFound(
        failure=job.record.failures + 1,
        kind="fail-slow",
        component="link",
        cause=f"the link from rank {a} to rank {b} ({nodes}) works at {speed:.0%} of its speed"
        f"{f', which {told}' if left else ''}",
        ranks=(a, b),
        node=job.members[a].node,
        device=None,
        iteration=finding.iteration,
        epoch=job.epoch,
        evidence=f"{evidence}; {told}" if told and not left else evidence,
        detect_s=since_s,
        noticed_s=0.0,
        failed_s=job.onsets.slow_for_s(finding.iteration, job.now, since_s),
        speed=speed,
        confidence=finding.confidence,
        link=link,
    )
    job.log(entry)
    if longer is not None and left:
        job.say("warning", longer.unexplained())
    job.say("warning", f"{job.where_link(link)}: slow since iteration {finding.iteration}, at {speed:.0%}")
    if not left:
        slow_parts.explained(job, link, finding.iteration, entry.failure)
    reason = f"{job.where_link(link)} is slow"
    replan_policy.consider(job, reason, finding.iteration, failure=entry.failure, device=link)


def _nodes(job: Job, link: Link) -> tuple[str, str]:
    """That a link between two ranks joins, names ascending."""
    a, b = (job.members[rank].node for rank in link)
    return min(a, b), max(a, b)


def recovered(job: Job, finding: Finding, link: Link) -> None:
    """As fast as before, at work; a suspicion without a verdict just ends."""
    if link not in job.record.slow_links:
        return
    failure = job.record.slow_links[link].failure
    job.log(
        FailureEnded(failure=failure, node=None, device=None, iteration=finding.iteration, evidence=finding.evidence),
    )
    told = f"{job.where_link(link)} is as fast as before"
    job.say("notice", f"{told}, since iteration {finding.iteration}")
    replan_policy.consider(job, told, finding.iteration, device=link)
