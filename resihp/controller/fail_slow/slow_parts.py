"""Handle slow parts of iterations other than devices and links: a group's collectives, gradient sums, the wait for
data, and the job as a whole.

These parts cannot be measured apart from training, and no plan avoids them. They are reported, with their cost, until
they end. Slowness that lasts becomes a verdict. A group's collectives wait for the slow devices of the group, and every
rank waits for every other rank, so a slow part is no failure of its own if a cause is known since about the same time.
Called by `slowness`, `slow_links`, `verdict_entries` and `device_verdicts`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from resihp.controller.fail_slow.suspicions import (
    PARTS_OF_ITERATION,
    component,
    dropped,
    ended,
    excess,
    opened,
    possible,
    some,
    speed_of,
)
from resihp.controller.fail_slow.thresholds import (
    MIN_LASTING_ITERATIONS,
    MIN_SEVERE_ITERATIONS,
    MIN_SPEED_CHANGE,
    SAME_CAUSE_ITERATIONS,
    SEVERE_CHANGE,
)
from resihp.controller.state.examinations import Examination, Lasting
from resihp.controller.state.job import Job
from resihp.detector.findings import Finding
from resihp.detector.suspects import Verdicts
from resihp.record.journal import FailureEnded, FailureFound
from resihp.record.state import Slow


def suspected(job: Job, finding: Finding) -> None:
    """Declare a part slow, unless a known failure explains it. Called only while no other suspicion of slowness is
    open. A finding without ranks is about all ranks."""
    finding = _as_share_of_iteration(job, finding)
    ranks = tuple(rank for rank in finding.ranks or job.record.active if rank in job.record.working)
    speed, verdict = speed_of(finding), job.record.slow_parts.get((finding.component, ranks))
    if not ranks:
        dropped(job, finding, "the suspects have no work any more")
    elif verdict is not None and abs(speed / verdict.speed - 1.0) < MIN_SPEED_CHANGE:
        dropped(job, finding, f"known, see failure {verdict.failure}")
    elif (cause := _cause(job, ranks, finding.iteration)) is not None:
        dropped(job, finding, f"failure {cause.failure} explains it")
    else:
        opened(job, finding, ranks)
        ended(job, "slow", "it lasts")
        if verdict is not None:
            _end(job, verdict, max(finding.iteration, verdict.since), f"at {speed:.0%} of the speed from then on")
        _part_failed(job, finding, ranks)


def _cause(job: Job, ranks: Collection[int], iteration: int) -> Slow | None:
    """Return a verdict on a component that is slow since about the same time and may be the reason why these ranks
    wait; None if there is none."""
    record = job.record
    causes = [slow for rank in ranks if (slow := record.slow.get(job.device_of(rank))) is not None]
    causes += [slow for link, slow in record.slow_links.items() if not set(link).isdisjoint(ranks)]
    causes += [record.slow_job] if record.slow_job is not None else []
    return next((slow for slow in causes if abs(slow.since - iteration) <= SAME_CAUSE_ITERATIONS), None)


def _part_failed(job: Job, finding: Finding, ranks: tuple[int, ...]) -> None:
    nodes = {job.members[rank].node for rank in ranks}
    subject = some(ranks) if len(ranks) < len(job.record.active) else "all ranks"
    symptom = {
        "collective": f"the tensor-parallel collectives of {subject} take longer than they should",
        "reduction": f"the sums of gradients of {subject} take longer than they should",
        "data": f"{subject}: the first micro-batch comes later than it should",
    }[finding.component]
    cause = f"{symptom}, {_cost(job, finding)}"
    entry = FailureFound(
        failure=job.record.failures + 1,
        kind="fail-slow",
        component=finding.component,
        cause=cause,
        ranks=ranks,
        node=nodes.pop() if len(nodes) == 1 else None,
        device=None,
        iteration=finding.iteration,
        epoch=job.epoch,
        evidence=finding.evidence,
        detect_s=None,
        noticed_s=0.0,
        failed_s=job.onsets.slow_for_s(finding.iteration, job.now),
        speed=speed_of(finding),
        confidence=finding.confidence,
    )
    job.log(entry)
    lasting, longer = job.inquiry.lasting, excess(job, finding.iteration, (speed_of(finding),))
    explains = longer is None or not longer.mostly_unexplained
    if explains and lasting is not None and abs(lasting.finding.iteration - finding.iteration) <= SAME_CAUSE_ITERATIONS:
        job.inquiry.lasting = None  # this part explains the finding
    where = f"node {entry.node}: " if entry.node is not None else ""
    job.say(
        "warning", f"{where}{cause}, since iteration {finding.iteration}; no plan helps, see resihp history failures"
    )


def explained(job: Job, ranks: Collection[int], since: int, failure: int, *, all_lost: bool = False) -> None:
    """Close the verdicts and findings that a new failure explains. `ranks`: the failure's ranks, slow since iteration
    `since`.

    Closed are verdicts on parts that contain these ranks and the verdict on the job as a whole; the latter stays if
    every device is slower than it was (`all_lost`).
    """
    evidence = f"failure {failure} explains it"
    whole = job.record.slow_job
    if whole is not None and not all_lost and abs(whole.since - since) <= SAME_CAUSE_ITERATIONS:
        _end(job, whole, max(whole.since, since), evidence)
    for (_, part_ranks), slow in list(job.record.slow_parts.items()):
        if abs(slow.since - since) <= SAME_CAUSE_ITERATIONS and not set(part_ranks).isdisjoint(ranks):
            _end(job, slow, max(slow.since, since), evidence)
    waiting = []
    for finding in job.findings:
        about = component(finding)
        part = about in PARTS_OF_ITERATION and not set(finding.ranks or ranks).isdisjoint(ranks)
        if (about == "job" or part) and abs(finding.iteration - since) <= SAME_CAUSE_ITERATIONS:
            dropped(job, finding, evidence)
        else:
            waiting.append(finding)
    job.findings = tuple(waiting)
    lasting = job.inquiry.lasting
    if lasting is not None and abs(lasting.finding.iteration - since) <= SAME_CAUSE_ITERATIONS:
        job.inquiry.lasting = None


# --- the job as a whole ---------------------------------------------------------------------------------------------


def no_device_stands_out(job: Job, finding: Finding, verdicts: Verdicts, done: Examination) -> None:
    """Close a suspicion of the whole job: all devices were measured because iterations take longer, and none stands
    out."""
    if not done.answers:
        ended(job, "unconfirmed", "no device answered", done.probe)
        job.say("notice", "all devices: no longer suspected to be slow, no device answered")
    elif (verdict := _known(job, finding)) is not None:
        ended(job, "dropped", f"known, see failure {verdict.failure}", done.probe)
        job.say(
            "notice", f"all devices: as slow as is known since iteration {verdict.since}, see failure {verdict.failure}"
        )
    elif verdicts.lost:
        evidence = _lost(verdicts)
        ended(job, "slow", evidence, done.probe)
        _job_failed(job, finding, evidence)
    else:
        ended(job, "fine", "every device's probe is fine", done.probe)
        job.say("notice", "all devices: no longer suspected to be slow, every device's probe is fine")
        may_last(job, finding)


def may_last(job: Job, finding: Finding) -> None:
    """Keep a finding that no measurement explains. It becomes a verdict if it lasts (`review`)."""
    job.inquiry.lasting = Lasting(finding=finding, epoch=job.epoch, since=job.furthest)


def all_lost(job: Job, finding: Finding, verdicts: Verdicts) -> None:
    """Declare the job slow in addition to the devices that stand out, because all devices are slower than they were."""
    share = msgspec.structs.replace(finding, change=1.0 / (1.0 - verdicts.lost) - 1.0)
    if _known(job, share) is None:
        opened(job, share)
        ended(job, "slow", _lost(verdicts))
        _job_failed(job, share, _lost(verdicts))


def _lost(verdicts: Verdicts) -> str:
    return f"every device's probe is at {1.0 - verdicts.lost:.0%} of what it was"


def _known(job: Job, finding: Finding) -> Slow | None:
    """Return the existing verdict on the job if it has about the same speed, else None."""
    verdict = job.record.slow_job
    return verdict if verdict is not None and abs(speed_of(finding) / verdict.speed - 1.0) < MIN_SPEED_CHANGE else None


def review(job: Job) -> None:
    """Declare the job slow once an unexplained finding has lasted long enough. If the plan has changed, measure
    again."""
    lasting = job.inquiry.lasting
    if lasting is None or job.record.suspects_slow is not None:
        return
    if lasting.epoch != job.epoch:
        job.inquiry.lasting = None
        job.findings = (lasting.finding, *job.findings)  # the detector reports it only once
        job.say(
            "notice", "job: new plan; all devices are measured again because iterations took longer than they should"
        )
    elif _known(job, lasting.finding) is not None:
        job.inquiry.lasting = None
    elif job.furthest - lasting.since >= (
        MIN_LASTING_ITERATIONS if lasting.finding.change < SEVERE_CHANGE else MIN_SEVERE_ITERATIONS
    ):
        job.inquiry.lasting = None
        opened(job, lasting.finding)
        slow = job.record.slow or job.record.slow_links
        reason = "the known slow devices and links do not explain it" if slow else "every device's probe is fine"
        ended(job, "slow", f"it lasts, for {job.furthest - lasting.since} iterations; {reason}")
        _job_failed(job, lasting.finding, f"{reason}, and it lasts")


def _job_failed(job: Job, finding: Finding, reason: str) -> None:
    speed, former = speed_of(finding), job.record.slow_job
    cost = _cost(job, finding)
    job.log(
        FailureFound(
            failure=job.record.failures + 1,
            kind="fail-slow",
            component="job",
            cause=f"iterations take longer than they should, {cost}, and no device stands out{_transfers(finding)}",
            ranks=(),
            node=None,
            device=None,
            iteration=finding.iteration,
            epoch=job.epoch,
            evidence=f"{reason}; {finding.evidence}",
            detect_s=None,
            noticed_s=0.0,
            failed_s=job.onsets.slow_for_s(finding.iteration, job.now),
            speed=possible(speed),
            confidence=finding.confidence,
        )
    )
    if (
        former is not None
    ):  # only after the new verdict: the end of the last one also ends the loss common to all devices
        _end(job, former, max(finding.iteration, former.since), f"at {speed:.0%} of the speed from then on")
    job.say("warning", f"job: slow since iteration {finding.iteration}, {cost}; {reason}{_transfers(finding)}")


def _transfers(finding: Finding) -> str:
    """Describe the slowdown that all links between nodes have in common; empty if there is none."""
    longer = finding.transfers
    return "" if longer is None else f"; all transfers between nodes take {longer:.1f} times as long"


def _cost(job: Job, finding: Finding) -> str:
    """Return the cost of a slowdown in words: as a share, and in seconds per iteration."""
    more = max(finding.change, 0.0)
    healthy_s = _healthy_s(job, finding) or job.usual_s / (1.0 + more)
    return f"{finding.change:+.0%}, {healthy_s * more:.2g} s per iteration"


def _as_share_of_iteration(job: Job, finding: Finding) -> Finding:
    """Return the finding with a part's change as a share of the measured iteration. The detector gives it as a share of
    the predicted iteration, which may be far off."""
    predicted_s, healthy_s = job.inquiry.healthy_s, _healthy_s(job, finding)
    if not predicted_s or not healthy_s:
        return finding
    return msgspec.structs.replace(finding, change=finding.change * predicted_s / healthy_s)


def _healthy_s(job: Job, finding: Finding) -> float | None:
    """Return the seconds of an iteration before the onset, or the predicted seconds if these are not known."""
    longer = excess(job, finding.iteration, ())
    return job.inquiry.healthy_s if longer is None else longer.healthy_s


# --- as fast as before ----------------------------------------------------------------------------------------------


def recovered(job: Job, finding: Finding) -> None:
    """End the verdict on a part that has recovered, or on the job as a whole if the finding is about the job."""
    if component(finding) == "job":
        job.inquiry.lasting = None
        if job.record.slow_job is not None:
            _end(job, job.record.slow_job, finding.iteration, finding.evidence)
            job.say("notice", f"job: as fast as before, since iteration {finding.iteration}")
        return
    for (part, part_ranks), slow in list(job.record.slow_parts.items()):
        if part == finding.component and not set(part_ranks).isdisjoint(finding.ranks or part_ranks):
            _end(job, slow, finding.iteration, finding.evidence)
            text = f"the {part} of failure {slow.failure} is as fast as before"
            job.say("notice", f"{text}, since iteration {finding.iteration}")


def adopted(job: Job) -> None:
    """End the verdicts on parts that the new plan does not have, because nothing would ever show their end."""
    slow_parts = job.record.slow_parts
    stages = _stages(job) if slow_parts else {}
    for (part, ranks), slow in list(slow_parts.items()):
        if not job.record.working.issuperset(ranks) or not _is_part(part, frozenset(ranks), stages):
            _end(job, slow, max(job.record.committed + 1, slow.since), "new plan: usual times are learned again")


def _stages(job: Job) -> dict[int, tuple[int, tuple[int, ...]]]:
    """Return a map from the first rank of each stage to the stage's index in its replica and the stage's ranks."""
    replicas = job.record.plan.layout.replicas if job.record.plan is not None else ()
    stages = [(index, stage.ranks) for replica in replicas for index, stage in enumerate(replica.stages) if stage.ranks]
    return {ranks[0]: (index, ranks) for index, ranks in stages}


def _is_part(part: str, ranks: frozenset[int], stages: Mapping[int, tuple[int, tuple[int, ...]]]) -> bool:
    """Return whether these ranks include a whole stage that does this kind of work, or waits for it."""
    whole = [
        (index, len(stage_ranks))
        for index, stage_ranks in (stages[rank] for rank in ranks & stages.keys())
        if ranks.issuperset(stage_ranks)
    ]
    if part == "collective":
        return any(size > 1 for _, size in whole)
    return any(index == 0 for index, _ in whole) if part == "data" else bool(whole)


def resume(job: Job) -> None:
    """Adapt the verdicts to the new detector after a take-over, which has to learn the usual times again.

    The new detector will notice the end of a slow job. It cannot notice the end of a slow part, or of a device that is
    slow only now and then, so those verdicts end here.
    """
    if job.record.slow_job is not None:
        job.monitor.job_is_slow()
    intermittent = [slow for slow in job.record.slow.values() if slow.intermittent]
    for slow in (*job.record.slow_parts.values(), *intermittent):
        _end(
            job,
            slow,
            job.record.committed + 1,
            "no longer tracked: a new supervisor has taken over and learns usual times again",
        )


def _end(job: Job, slow: Slow, iteration: int, evidence: str) -> None:
    job.log(FailureEnded(failure=slow.failure, node=None, device=None, iteration=iteration, evidence=evidence))
