"""Handle suspected links: measure them together with other links of their kind, after an iteration that is announced to
both ends.

A verdict on a link is based on the measurement; times seen in training decide only if there is no other link to compare
with. On shared processors the verdict needs several measurements at different times. Called by `slowness`.
"""

from __future__ import annotations

import math

from resihp.controller import replan_policy
from resihp.controller.fail_slow import slow_parts
from resihp.controller.fail_slow.suspicions import change, dropped, ended, excess, opened, possible, speed_of
from resihp.controller.probing import probe_orders, probe_results
from resihp.controller.state.examinations import Examination
from resihp.controller.state.job import Job
from resihp.detector import probes
from resihp.detector.findings import Finding
from resihp.record.journal import FailureEnded, FailureFound, Outcome
from resihp.record.state import Link

ANNOUNCEMENT_S = 0.5
"""Seconds from the order to the measurement. Orders take milliseconds to arrive."""
MIN_ITERATIONS_AHEAD = 2
"""Smallest number of iterations from the order to the measurement; it matters if iterations are long."""


def suspected(job: Job, finding: Finding, link: Link) -> None:
    """Order a measurement of a suspected link. Called only while no other suspicion of slowness is open."""
    a, b = link
    if link in job.record.slow_links:
        dropped(job, finding, f"{job.where_link(link)}: known, see failure {job.record.slow_links[link].failure}")
        return
    if not _in_use(job, link):
        dropped(job, finding, f"{job.where_link(link)}: not in use any more")
        return
    after = _announced_iteration(job)
    if after is None:
        job.monitor.cleared_link(a, b)
        text = f"{job.where_link(link)}: may be slow, {change(finding)}; training ends before it could be measured"
        dropped(job, finding, text, "unconfirmed")
        job.say("notice", text)
        return
    opened(job, finding, evidence=f"{job.where_link(link)}: slow, {change(finding)}: {finding.evidence}")
    text = f"{job.where_link(link)}: suspected to be slow, {change(finding)}; measuring after iteration {after}"
    job.say("notice", text)
    probe_orders.begin_link(job, finding, after)


def _in_use(job: Job, link: Link) -> bool:
    return all(rank in job.record.working and job.members[rank].alive for rank in link)


def _announced_iteration(job: Job) -> int | None:
    """Return the next iteration that can be announced to both ends in time; None if training ends before it."""
    takes_s = max(job.predicted_s, 1e-3)
    unreported = int(
        (job.now - job.progress_at) / max(job.usual_s, 1e-3)
    )  # reports may be delayed while training goes on
    ahead = max(MIN_ITERATIONS_AHEAD, math.ceil(ANNOUNCEMENT_S / takes_s))
    after = job.furthest + unreported + ahead
    return after if after < job.record.goal else None


def measured(job: Job, done: Examination, finding: Finding, link: Link) -> None:
    """Decide about a link, once its ends and the reference links have answered or their time is over."""
    judged = probe_results.conclude_link(job, done, link)
    if not job.training:
        _clear(job, link, "unconfirmed", "a new plan is about to take effect", done.probe)
    elif judged is None:
        reasons = [answer.missed for rank, answer in sorted(done.answers.items()) if rank in link and answer.missed]
        why = f"it was not measured: {next(iter(reasons), 'no answer')}"
        _clear(job, link, "unconfirmed", why, done.probe)
    elif judged.speed is None:
        evidence = f"measured, but there is {judged.evidence}; {finding.evidence}"
        _declare_slow(job, finding, link, speed_of(finding), evidence, done.probe)
    elif judged.slow:
        looks = (*done.slow_looks, judged)
        verdict = probes.judge_link_again(looks, shared=any(answer.shared for answer in done.answers.values()))
        if verdict is None:
            _look_again(job, done, finding, link, looks)
        else:
            speed = judged.speed if verdict.speed is None else verdict.speed
            _declare_slow(job, finding, link, speed, f"{verdict.evidence}; {finding.evidence}", done.probe)
    else:
        _clear(job, link, "fine", judged.evidence, done.probe)


def _look_again(
    job: Job, done: Examination, finding: Finding, link: Link, looks: tuple[probes.JudgedLink, ...]
) -> None:
    after = _announced_iteration(job)
    if after is not None and job.may_interrupt and _in_use(job, link):
        probe_orders.begin_link(job, finding, after, looks)
        return
    why = "training ends before it could be measured again" if after is None else "it could not be measured again"
    count = "1 look" if len(looks) == 1 else f"{len(looks)} looks"
    _clear(job, link, "unconfirmed", f"slow in {count}, {why}", done.probe)


def _clear(job: Job, link: Link, outcome: Outcome, why: str, probe: int) -> None:
    job.monitor.cleared_link(*link)
    ended(job, outcome, why, probe)
    job.say("notice", f"{job.where_link(link)}: no longer suspected to be slow, {why}")


def _declare_slow(job: Job, finding: Finding, link: Link, speed: float, evidence: str, probe: int) -> None:
    a, b = link
    speed = possible(speed)
    nodes = f"{job.members[a].node}-{job.members[b].node}"
    longer = excess(job, finding.iteration, (speed,))
    mostly_unexplained = longer is not None and longer.mostly_unexplained
    accounts_for = "" if longer is None else longer.explanation(speed)
    injected = job.slow_since.get(_nodes(job, link))
    since_s = None if injected is None else job.now - injected
    ended(job, "slow", f"{job.where_link(link)}: is slow", probe)
    entry = FailureFound(
        failure=job.record.failures + 1,
        kind="fail-slow",
        component="link",
        cause=f"the link from rank {a} to rank {b} ({nodes}) works at {speed:.0%} of its speed"
        f"{f', which {accounts_for}' if mostly_unexplained else ''}",
        ranks=(a, b),
        node=job.members[a].node,
        device=None,
        iteration=finding.iteration,
        epoch=job.epoch,
        evidence=f"{evidence}; {accounts_for}" if accounts_for and not mostly_unexplained else evidence,
        detect_s=since_s,
        noticed_s=0.0,
        failed_s=job.onsets.slow_for_s(finding.iteration, job.now, since_s),
        speed=speed,
        confidence=finding.confidence,
        link=link,
    )
    job.log(entry)
    if longer is not None and mostly_unexplained:
        job.say("warning", longer.unexplained())
    job.say("warning", f"{job.where_link(link)}: slow since iteration {finding.iteration}, at {speed:.0%}")
    if not mostly_unexplained:
        slow_parts.explained(job, link, finding.iteration, entry.failure)
    reason = f"{job.where_link(link)} is slow"
    replan_policy.consider(job, reason, finding.iteration, failure=entry.failure, device=link)


def _nodes(job: Job, link: Link) -> tuple[str, str]:
    """Return the two nodes that a link joins, in alphabetical order."""
    a, b = (job.members[rank].node for rank in link)
    return min(a, b), max(a, b)


def recovered(job: Job, finding: Finding, link: Link) -> None:
    """End the verdict on a link that works at its former speed again. Without a verdict nothing happens."""
    if link not in job.record.slow_links:
        return
    failure = job.record.slow_links[link].failure
    job.log(
        FailureEnded(failure=failure, node=None, device=None, iteration=finding.iteration, evidence=finding.evidence),
    )
    text = f"{job.where_link(link)} is as fast as before"
    job.say("notice", f"{text}, since iteration {finding.iteration}")
    replan_policy.consider(job, text, finding.iteration, device=link)
