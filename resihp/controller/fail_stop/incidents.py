"""Collect root causes during a transition, and journal them when its plan is decided or the job ends. Called by the
modules that handle losses, by `transition` and by `endings`."""

from __future__ import annotations

import re

from resihp.controller.fail_stop import own_causes, root_causes, silence
from resihp.controller.fail_stop.onsets import micros
from resihp.controller.state.incidents import Incident
from resihp.controller.state.job import Job
from resihp.controller.state.members import Member
from resihp.controller.state.requests import COINCIDENCE_S
from resihp.record.journal import Diagnosed, FailureFound, WorkerEnded

_RANK = re.compile(r"rank (\d+)\b(?! \()")


def cause_from_outside(job: Job) -> str:
    """Return, in words, the error of the ranks that have just failed because of storage or a service; empty if there is
    none."""
    ranks = sorted({rank for incident in job.incidents for rank in incident.ranks if rank in job.members})
    failed = [rank for rank in ranks if job.members[rank].raised is not None and own_causes.may_pass(job, rank)]
    if not failed:
        return ""
    raised = job.members[failed[0]].raised
    assert raised is not None
    more = f", and {len(failed) - 1} more like it" if len(failed) > 1 else ""
    return f"{job.where(failed[0])} raised {raised.error}{more}"


def mark_dead(job: Job, member: Member, status: int | None) -> None:
    silence.ended(job, member.rank, "lost", member.fenced or "it ended" if status is not None else "its node is lost")
    job.log(WorkerEnded(rank=member.rank, exit=status, epoch=job.epoch))
    if job.transition is not None:
        job.transition.waiting.discard(member.rank)


def log_incidents(job: Job) -> list[int]:
    """Number and journal the root causes of a transition; return the numbers. Broken communication counts as a
    consequence of any loss in the same transition.

    Losses at the time of a signal to agents are not attributed to a node. Once the job is to stop, losses are not
    failures at all.
    """
    numbers = []
    root_causes.explain(job)
    losses = [incident for incident in job.incidents if incident.kind != "communication"]
    broke = [incident.found_at for incident in job.incidents if incident.kind == "communication"]
    if losses and broke:
        _noticed_with(min(losses, key=lambda incident: incident.found_at), min(broke))
    unknown = job.stage == "gathering" and not job.has_declared
    for incident in losses or job.incidents:
        if job.stop_request is not None and incident.found_at >= job.stop_request.first_at - COINCIDENCE_S:
            continue
        if incident.kind == "fail-stop" and job.excused(incident.node or "", incident.found_at):
            incident.cause += " when agents were told to stop"
            incident.component, incident.node, incident.device = "process", None, None
        if unknown and incident.node is None:
            incident.cause = _with_its_place(job, incident.cause)
        numbers.append(job.record.failures + 1)
        waited_s = job.now - incident.noticed_at
        failed_s = _before_notice_s(job, incident)
        entry = FailureFound(
            failure=job.record.failures + 1,
            kind=incident.kind,
            component=incident.component,
            cause=incident.cause,
            ranks=tuple(sorted(incident.ranks)),
            node=incident.node,
            device=incident.device,
            iteration=incident.iteration,
            epoch=incident.epoch,
            evidence=incident.evidence,
            detect_s=incident.detect_s,
            noticed_s=micros(waited_s),
            failed_s=None if failed_s is None else micros(failed_s + waited_s),
            hardware=incident.component in ("device", "node") and not incident.died,
            diagnosed=_diagnosed(incident),
            explains=tuple(sorted(incident.explains)),
        )
        job.log(entry)
    job.incidents = []
    return numbers


def _noticed_with(loss: Incident, broke_at: float) -> None:
    """Move the notice of a loss back to the time at which communication broke, because training stopped then, before
    the lost rank was known. Not done if an injected fault came after that time."""
    earlier_s = loss.found_at - broke_at
    if earlier_s <= 0.0 or (loss.detect_s is not None and loss.detect_s < earlier_s):
        return
    loss.earlier_s = earlier_s
    if loss.detect_s is not None:
        loss.detect_s -= earlier_s


def _before_notice_s(job: Job, incident: Incident) -> float | None:
    silent: list[int | str] = [*incident.ranks]
    if incident.component == "node" and incident.node is not None:
        silent.append(incident.node)
    since = [job.onsets.silent_since.pop(name) for name in silent if name in job.onsets.silent_since]
    silent_s = max(incident.noticed_at - min(since), 0.0) if since else None
    return job.onsets.before_notice_s(incident.noticed_at, fault_s=incident.detect_s, silent_s=silent_s)


def _with_its_place(job: Job, cause: str) -> str:
    """Return a cause with the node and device of the rank that it begins with. If nothing is known of the script, no
    node is blamed, but the user must be able to find the rank."""
    match = _RANK.match(cause)
    return cause if match is None or int(match[1]) not in job.members else _RANK.sub(job.where(int(match[1])), cause)


def _diagnosed(incident: Incident) -> Diagnosed | None:
    diagnosis = incident.diagnosis
    if diagnosis is None:
        return None
    return Diagnosed(
        code=diagnosis.code,
        category=diagnosis.category,
        ranks=diagnosis.ranks,
        node=diagnosis.node,
        device=diagnosis.device,
    )
