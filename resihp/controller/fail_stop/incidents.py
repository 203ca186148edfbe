"""Collect root causes during a transition, journal them when its plan is decided, and end the job. Called by the
modules that handle losses, and by `transition`."""

from __future__ import annotations

import re
from typing import Literal

from resihp.controller import interface as api
from resihp.controller.fail_stop import own_causes, root_causes, silence
from resihp.controller.fail_stop.onsets import micros
from resihp.controller.nodes import replacements
from resihp.controller.state.incidents import Incident
from resihp.controller.state.job import Job
from resihp.controller.state.members import Member
from resihp.controller.state.requests import COINCIDENCE_S
from resihp.record.journal import Diagnosed, FailureFound, JobEnded, WorkerEnded
from resihp.words import count_of

_RANK = re.compile(r"rank (\d+)\b(?! \()")
NOT_RESTARTED = (
    "nothing was restarted: a script that does not train with resihp.Trainer ends with its first rank that fails; "
    'submit it again, or make it survive failures: docs/interface.md, "Scripts that do not use resihp"'
)


def traceback_of(job: Job, rank: int) -> str:
    raised = job.members[rank].raised
    return f"{job.where(rank)} raised:\n{raised.traceback.rstrip()}" if raised else ""


def program_is_broken(job: Job, ranks: list[int]) -> None:
    """End the job because its script raised the same exception on all these ranks."""
    rank, count = min(ranks), len(ranks)
    raised = job.members[rank].raised
    assert raised is not None
    job.say("error", traceback_of(job, rank))
    if count > 1:
        subject = f"{count} ranks raised the same"
        outcome = f"the training script fails in the same way on {count} ranks"
    else:
        subject = f"{job.where(rank)} raised"
        outcome = f"the training script fails on rank {rank}"
    _add_script_failure(job, f"{subject}: {raised.error}", raised.traceback[-4000:], ranks)
    end(job, 93, f"{outcome}: {raised.error}; no node is the cause")


def program_ends(job: Job, ranks: list[int], status: int) -> None:
    """End the job because its script exits on these ranks before training has begun, without an exception."""
    count = f"{len(ranks)} ranks" if len(ranks) > 1 else f"rank {ranks[0]}"
    _add_script_failure(job, f"{count} exited with status {status}", "", ranks)
    outcome = f"the training script exits with status {status}"
    end(job, 93, f"{outcome}, on {count}; no node is the cause")


def _add_script_failure(job: Job, cause: str, evidence: str, ranks: list[int]) -> None:
    """Journal one failure of the script in place of the failures of its ranks. Other failures stay."""
    job.incidents = [incident for incident in job.incidents if not (incident.ranks and incident.ranks <= set(ranks))]
    job.incidents.append(
        Incident(
            kind="program",
            component="script",
            cause=cause,
            evidence=evidence,
            found_at=job.now,
            iteration=job.record.committed + 1,
            epoch=job.epoch,
        )
    )
    log_incidents(job)


def outside_failed(job: Job, ranks: list[int], symptom: str) -> None:
    """End a job that cannot start because storage, or a service that its script uses, fails on these ranks in the same
    way.

    Slurm runs the job again if allowed, as after a lost node, because the same script may then succeed on the same
    nodes.
    """
    rank = min(ranks)
    count = f"{len(ranks)} ranks" if len(ranks) > 1 else f"rank {rank}"
    member = job.members[rank]
    if member.raised is not None:
        job.say("error", traceback_of(job, rank))
    evidence = (
        member.raised.traceback[-4000:] if member.raised is not None else "\n".join(own_causes.log_lines(job, rank))
    )
    job.incidents.append(
        Incident(
            kind="fail-stop",
            component="process",
            cause=f"{count} {symptom}",
            evidence=f"{evidence}\nnext: {own_causes.advice(job, rank)}",
            found_at=job.now,
            iteration=job.record.committed + 1,
            epoch=job.epoch,
        )
    )
    log_incidents(job)
    too_few(job, f"{count} {symptom}; neither the script nor a node is the cause: {own_causes.advice(job, rank)}", 1)


def same_error_everywhere(job: Job) -> bool:
    """End the job if ranks of two nodes raised the same exception, which means that the script or a sample fails on any
    device; return whether the job was ended.

    Ranks of a single node may share an exception because of the node: a full disk, or a file system that is not
    mounted. Training then goes on without them, and the exception of a sample follows it to another node. Two ranks are
    enough if all work is on their node, and one rank if no other rank has work or was about to get work. Errors that
    the script cannot have caused (of storage, a service, a device or a lost peer) do not count: their processes are
    lost, and training continues with the other ranks or from a checkpoint.
    """
    just_failed = {rank for incident in job.incidents for rank in incident.ranks}
    by_error: dict[tuple[int | None, str], set[int]] = {}
    for rank, (iteration, error) in job.errors.items():
        if own_causes.may_be_the_program(job, rank):
            by_error.setdefault((iteration, error), set()).add(rank)
            if rank in just_failed:  # together, if not in the same iteration
                by_error.setdefault((None, error), set()).add(rank)
    worst = max((sorted(ranks) for ranks in by_error.values()), key=len, default=[])
    proposed = job.record.proposed
    plans = [job.record.plan or job.record.first_plan, None if proposed is None else proposed.plan]
    with_work = {rank for plan in plans if plan is not None for rank in plan.computing}
    nodes = {job.members[rank].node for rank in worst}
    on_one_node = {job.members[rank].node for rank in with_work if rank in job.members} <= nodes
    if (len(worst) >= 2 and (len(nodes) >= 2 or on_one_node)) or (worst and with_work == set(worst)):
        program_is_broken(job, worst)
        return True
    return False


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


def too_few(job: Job, reason: str, exit_code: int = 5) -> None:
    """End the job because too few healthy nodes are left. Slurm runs it again if that is allowed and useful; otherwise
    it ends with `exit_code`.

    A run that added a checkpoint may always be requeued. A run that added none may be requeued only a limited number of
    times in a row, and its iterations are trained again.
    """
    settings, began = job.settings, job.record.plan is not None
    newest = job.checkpointed or (job.record.trains.resume_from if job.record.trains is not None else 0)
    done = job.record.committed - newest if began else 0
    if not settings.slurm:
        end(job, exit_code, f"{reason}{_advice(job, newest) if began else ''}")
    elif not settings.may_requeue:
        end(
            job, exit_code, f"{reason}; not run again, because its batch script forbids it; submit it again to continue"
        )
    elif not job.checkpointed and settings.restarts_left < 1:
        end(
            job,
            exit_code,
            f"{reason}; not requeued: this run added no checkpoint, and [slurm] restarts is used up",
        )
    elif newest:
        end(job, 75, f"{reason}; to be run again, from the checkpoint of iteration {newest}", requeue=True)
    elif done:
        are = "is" if done == 1 else "are"
        again = f"there is no checkpoint, so {count_of(done, 'iteration')} {are} trained again"
        end(job, 75, f"{reason}; to be run again, from the beginning: {again}", requeue=True)
    else:
        end(job, 75, f"{reason}; to be run again", requeue=True)


def runs_again(job: Job) -> bool:
    """Return whether Slurm would run the job again if it ended because too few healthy nodes are left."""
    settings = job.settings
    return settings.slurm and settings.may_requeue and (bool(job.checkpointed) or settings.restarts_left > 0)


def _advice(job: Job, newest: int) -> str:
    if newest:
        return f"; to continue from the checkpoint of iteration {newest}: --resume {job.settings.job}"
    return "; there is no checkpoint to continue from (--checkpoint-every N writes them)"


def end(job: Job, exit_code: int, reason: str, workers_leave: bool = False, requeue: bool = False) -> None:
    if job.stage == "ended":
        return
    log_incidents(job)
    if requeue or exit_code != 75:  # else a successor may lead and need the requested nodes
        replacements.cancel_open(job, "the job ends")
    for request, since in job.saves.askers.items():
        is_there = job.record.checkpointed > since
        text = f"checkpoint of iteration {job.record.checkpointed} is complete" if is_there else "no checkpoint"
        job.do(api.Reply(request=request, ok=is_there, text=f"{text}; the job has ended: {reason}"))
    job.move("ended")
    job.pause = None
    state: Literal["completed", "failed", "cancelled"] = "completed" if exit_code == 0 else "failed"
    if exit_code in (130, 143) or (requeue and job.stop_request is not None):
        state = "cancelled"
    job.say("progress" if exit_code == 0 else "notice" if requeue else "error", reason)
    job.log(JobEnded(exit_code=exit_code, state=state, reason=reason))
    job.do(api.End(exit_code=exit_code, reason=reason, workers_leave=workers_leave, requeue=requeue))
