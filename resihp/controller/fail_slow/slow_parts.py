"""What is slow and no device: collectives of a group, sums of gradients, the wait for data, and the job as a whole.

None of them can be measured apart from training, nor planned around: they are told, with what they cost, until they
end. What lasts is a verdict. A group's collectives wait for a slow device of it, and everybody for everybody: they are
no failure of their own while what explains them is known since about the same time. Called by `slowness` and
`slow_devices`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from resihp.controller.fail_slow.suspicions import (
    OTHER,
    PARTS,
    SAME,
    component,
    dropped,
    ended,
    excess,
    opened,
    possible,
    some,
    speed_of,
)
from resihp.controller.state.examinations import Examination, Lasting
from resihp.controller.state.job import Job
from resihp.detector.findings import Finding
from resihp.detector.suspects import Verdicts
from resihp.record.journal import FailureEnded, FailureFound
from resihp.record.state import Slow

LASTS = 20
"""Iterations for which all have to be slower than before, though every device is well, to be told as such."""
GRAVE, SOON = 1.0, 5
"""Where iterations take twice as long, and more, so many iterations are enough."""


def suspected(job: Job, finding: Finding) -> None:
    """What a group does together, or waits for, takes longer; nothing else is being looked into. Of nobody in
    particular: all do."""
    finding = _of_what_iterations_take(job, finding)
    ranks = tuple(rank for rank in finding.ranks or job.record.active if rank in job.record.working)
    speed, known = speed_of(finding), job.record.slow_parts.get((finding.component, ranks))
    if not ranks:
        dropped(job, finding, "whoever was suspected has no work any more")
    elif known is not None and abs(speed / known.speed - 1.0) < OTHER:
        dropped(job, finding, f"known, see failure {known.failure}")
    elif (cause := _cause(job, ranks, finding.iteration)) is not None:
        dropped(job, finding, f"failure {cause.failure} explains it")
    else:
        opened(job, finding, ranks)
        ended(job, "slow", "it lasts")
        if known is not None:
            _end(job, known, max(finding.iteration, known.since), f"at {speed:.0%} of the speed from then on")
        _part_failed(job, finding, ranks)


def _cause(job: Job, ranks: Collection[int], iteration: int) -> Slow | None:
    """What is slow since about then, and may be why these wait."""
    record = job.record
    causes = [slow for rank in ranks if (slow := record.slow.get(job.device_of(rank))) is not None]
    causes += [slow for link, slow in record.slow_links.items() if not set(link).isdisjoint(ranks)]
    causes += [record.slow_job] if record.slow_job is not None else []
    return next((slow for slow in causes if abs(slow.since - iteration) <= SAME), None)


def _part_failed(job: Job, finding: Finding, ranks: tuple[int, ...]) -> None:
    nodes = {job.members[rank].node for rank in ranks}
    who = some(ranks) if len(ranks) < len(job.record.active) else "all ranks"
    what = {
        "collective": f"the tensor-parallel collectives of {who} take longer than they should",
        "reduction": f"the sums of gradients of {who} take longer than they should",
        "data": f"{who}: the first micro-batch comes later than it should",
    }[finding.component]
    cause = f"{what}, {_cost(job, finding)}"
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
    explains = longer is None or not longer.left
    if explains and lasting is not None and abs(lasting.finding.iteration - finding.iteration) <= SAME:
        job.inquiry.lasting = None  # this is why
    where = f"node {entry.node}: " if entry.node is not None else ""
    job.say(
        "warning", f"{where}{cause}, since iteration {finding.iteration}; no plan helps, see resihp history failures"
    )


def explained(job: Job, ranks: Collection[int], since: int, failure: int, *, all_lost: bool = False) -> None:
    """These are slow since then: what is told, or waits to be, of the whole that they are part of is their doing, but
    not what all have lost (`all_lost`)."""
    told = f"failure {failure} explains it"
    whole = job.record.slow_job
    if whole is not None and not all_lost and abs(whole.since - since) <= SAME:
        _end(job, whole, max(whole.since, since), told)
    for (_, of), slow in list(job.record.slow_parts.items()):
        if abs(slow.since - since) <= SAME and not set(of).isdisjoint(ranks):
            _end(job, slow, max(slow.since, since), told)
    waiting = []
    for finding in job.findings:
        about = component(finding)
        part = about in PARTS and not set(finding.ranks or ranks).isdisjoint(ranks)
        if (about == "job" or part) and abs(finding.iteration - since) <= SAME:
            dropped(job, finding, told)
        else:
            waiting.append(finding)
    job.findings = tuple(waiting)
    lasting = job.inquiry.lasting
    if lasting is not None and abs(lasting.finding.iteration - since) <= SAME:
        job.inquiry.lasting = None


# --- the job as a whole ---------------------------------------------------------------------------------------------


def nobody_stands_out(job: Job, finding: Finding, verdicts: Verdicts, done: Examination) -> None:
    """Everybody was measured, for iterations take longer, and nobody can be blamed."""
    if not done.answers:
        ended(job, "unconfirmed", "nobody answered", done.probe)
        job.say("notice", "all devices: no longer suspected to be slow, nobody answered")
    elif (known := _known(job, finding)) is not None:
        ended(job, "dropped", f"known, see failure {known.failure}", done.probe)
        job.say(
            "notice", f"all devices: as slow as is known since iteration {known.since}, see failure {known.failure}"
        )
    elif verdicts.lost:
        told = _lost(verdicts)
        ended(job, "slow", told, done.probe)
        _job_failed(job, finding, told)
    else:
        ended(job, "fine", "every device's probe is fine", done.probe)
        job.say("notice", "all devices: no longer suspected to be slow, every device's probe is fine")
        may_last(job, finding)


def may_last(job: Job, finding: Finding) -> None:
    """Nothing that was measured explains it: it is told if it lasts."""
    job.inquiry.lasting = Lasting(finding=finding, epoch=job.epoch, since=job.furthest)


def all_lost(job: Job, finding: Finding, verdicts: Verdicts) -> None:
    """Beside those who stand out, and were convicted, all are slower than they were: that is told as well."""
    share = msgspec.structs.replace(finding, change=1.0 / (1.0 - verdicts.lost) - 1.0)
    if _known(job, share) is None:
        opened(job, share)
        ended(job, "slow", _lost(verdicts))
        _job_failed(job, share, _lost(verdicts))


def _lost(verdicts: Verdicts) -> str:
    return f"every device's probe is at {1.0 - verdicts.lost:.0%} of what it was"


def _known(job: Job, finding: Finding) -> Slow | None:
    """The job's verdict, if this is no other speed."""
    known = job.record.slow_job
    return known if known is not None and abs(speed_of(finding) / known.speed - 1.0) < OTHER else None


def review(job: Job) -> None:
    """What nobody could be blamed for, and lasts."""
    lasting = job.inquiry.lasting
    if lasting is None or job.record.suspects_slow is not None:
        return
    if lasting.epoch != job.epoch:
        job.inquiry.lasting = None
        job.findings = (lasting.finding, *job.findings)  # the detector does not tell it twice
        job.say("notice", "job: another plan; all are measured again, for iterations took longer than they should")
    elif _known(job, lasting.finding) is not None:
        job.inquiry.lasting = None
    elif job.furthest - lasting.since >= (LASTS if lasting.finding.change < GRAVE else SOON):
        job.inquiry.lasting = None
        opened(job, lasting.finding)
        slow = job.record.slow or job.record.slow_links
        told = "what is known to be slow does not explain it" if slow else "every device's probe is fine"
        ended(job, "slow", f"it lasts, for {job.furthest - lasting.since} iterations; {told}")
        _job_failed(job, lasting.finding, f"{told}, and it lasts")


def _job_failed(job: Job, finding: Finding, told: str) -> None:
    speed, known = speed_of(finding), job.record.slow_job
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
            evidence=f"{told}; {finding.evidence}",
            detect_s=None,
            noticed_s=0.0,
            failed_s=job.onsets.slow_for_s(finding.iteration, job.now),
            speed=possible(speed),
            confidence=finding.confidence,
        )
    )
    if known is not None:  # once there is another: with the last verdict ends what all are known to have lost
        _end(job, known, max(finding.iteration, known.since), f"at {speed:.0%} of the speed from then on")
    job.say("warning", f"job: slow since iteration {finding.iteration}, {cost}; {told}{_transfers(finding)}")


def _transfers(finding: Finding) -> str:
    """What all links between nodes have in common."""
    longer = finding.transfers
    return "" if longer is None else f"; transfers between nodes take {longer:.1f} times as long, all of them"


def _cost(job: Job, finding: Finding) -> str:
    """Of a change of whole iterations."""
    more = max(finding.change, 0.0)
    healthy_s = _healthy_s(job, finding) or job.usual_s / (1.0 + more)
    return f"{finding.change:+.0%}, {healthy_s * more:.2g} s an iteration"


def _of_what_iterations_take(job: Job, finding: Finding) -> Finding:
    """A part's change is a share of what was predicted, which may be far from what iterations take."""
    predicted_s, healthy_s = job.inquiry.healthy_s, _healthy_s(job, finding)
    if not predicted_s or not healthy_s:
        return finding
    return msgspec.structs.replace(finding, change=finding.change * predicted_s / healthy_s)


def _healthy_s(job: Job, finding: Finding) -> float | None:
    """What an iteration took before the onset, else what is predicted for one."""
    longer = excess(job, finding.iteration, ())
    return job.inquiry.healthy_s if longer is None else longer.healthy_s


# --- as fast as before ----------------------------------------------------------------------------------------------


def recovered(job: Job, finding: Finding) -> None:
    """Of a part, or of the job as a whole where nobody is named."""
    if component(finding) == "job":
        job.inquiry.lasting = None
        if job.record.slow_job is not None:
            _end(job, job.record.slow_job, finding.iteration, finding.evidence)
            job.say("notice", f"job: as fast as before, since iteration {finding.iteration}")
        return
    for (part, of), slow in list(job.record.slow_parts.items()):
        if part == finding.component and not set(of).isdisjoint(finding.ranks or of):
            _end(job, slow, finding.iteration, finding.evidence)
            told = f"the {part} of failure {slow.failure} is as fast as before"
            job.say("notice", f"{told}, since iteration {finding.iteration}")


def adopted(job: Job) -> None:
    """Another plan is in effect: of parts that it does not have, nobody will see the end."""
    known = job.record.slow_parts
    stages = _stages(job) if known else {}
    for (part, ranks), slow in list(known.items()):
        if not job.record.working.issuperset(ranks) or not _is_part(part, frozenset(ranks), stages):
            _end(job, slow, max(job.record.committed + 1, slow.since), "another plan: what is usual is learnt anew")


def _stages(job: Job) -> dict[int, tuple[int, tuple[int, ...]]]:
    """By its first rank, which stage of its replica it is, and its ranks."""
    replicas = job.record.plan.layout.replicas if job.record.plan is not None else ()
    stages = [(index, stage.ranks) for replica in replicas for index, stage in enumerate(replica.stages) if stage.ranks]
    return {ranks[0]: (index, ranks) for index, ranks in stages}


def _is_part(part: str, ranks: frozenset[int], stages: Mapping[int, tuple[int, tuple[int, ...]]]) -> bool:
    """Whether a stage lies among these ranks that does this, or waits for it."""
    whole = [(index, len(of)) for index, of in (stages[rank] for rank in ranks & stages.keys()) if ranks.issuperset(of)]
    if part == "collective":
        return any(size > 1 for _, size in whole)
    return any(index == 0 for index, _ in whole) if part == "data" else bool(whole)


def resume(job: Job) -> None:
    """A new supervisor, whose detector learns anew what is usual: it sees the end of the job's, but not of parts', nor
    of what is slow now and then."""
    if job.record.slow_job is not None:
        job.monitor.job_is_slow()
    now_and_then = [slow for slow in job.record.slow.values() if slow.intermittent]
    for slow in (*job.record.slow_parts.values(), *now_and_then):
        _end(job, slow, job.record.committed + 1, "not followed any more: another supervisor leads, and learns anew")


def _end(job: Job, slow: Slow, iteration: int, evidence: str) -> None:
    job.log(FailureEnded(failure=slow.failure, node=None, device=None, iteration=iteration, evidence=evidence))
