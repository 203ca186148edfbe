"""End the job: because its script fails, because too few healthy nodes are left, or for any other reason.

If nodes with failures are the cause, the job ends only after it has been decided what to do about these nodes, so that
the next run does not get them again. Called by the modules that handle losses, and by those that stop the job.
"""

from __future__ import annotations

from typing import Literal

from resihp.controller import interface as api
from resihp.controller.fail_stop import incidents, own_causes
from resihp.controller.nodes import drains, replacements
from resihp.controller.state.incidents import Incident
from resihp.controller.state.job import Job
from resihp.controller.state.requests import Closing
from resihp.record.journal import JobEnded
from resihp.words import count_of

CLOSING_S = 15.0
"""Longest time for the decisions about the failed nodes of a job that ends."""


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
    incidents.log_incidents(job)


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
    incidents.log_incidents(job)
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


def too_few(job: Job, reason: str, exit_code: int = 5) -> None:
    """End the job because too few healthy nodes are left. Slurm runs it again if that is allowed and useful; otherwise
    it ends with `exit_code`.

    A run that added a checkpoint may always be requeued. A run that added none may be requeued only a limited number of
    times in a row, and its iterations are trained again.
    """
    requeue = runs_again(job)
    outcome = "; ".join(filter(None, (reason, _what_follows(job))))
    _end_once_decided(job, 75 if requeue else exit_code, outcome, requeue=requeue)


def _what_follows(job: Job) -> str:
    """Return, in words, whether and how a job with too few nodes is run again, or how its user can continue it."""
    settings, began = job.settings, job.record.plan is not None
    newest = job.checkpointed or (job.record.trains.resume_from if job.record.trains is not None else 0)
    done = job.record.committed - newest if began else 0
    if not settings.slurm:
        return _advice(job, newest) if began else ""
    if not settings.may_requeue:
        return "not run again, because its batch script forbids it; submit it again to continue"
    if not runs_again(job):
        return "not requeued: this run added no checkpoint, and [slurm] restarts is used up"
    if newest:
        return f"to be run again, from the checkpoint of iteration {newest}"
    if done:
        are = "is" if done == 1 else "are"
        again = f"there is no checkpoint, so {count_of(done, 'iteration')} {are} trained again"
        return f"to be run again, from the beginning: {again}"
    return "to be run again"


def runs_again(job: Job) -> bool:
    """Return whether Slurm would run the job again if it ended because too few healthy nodes are left."""
    settings = job.settings
    return settings.slurm and settings.may_requeue and (bool(job.checkpointed) or settings.restarts_left > 0)


def _advice(job: Job, newest: int) -> str:
    if newest:
        return f"to continue from the checkpoint of iteration {newest}: --resume {job.settings.job}"
    return "there is no checkpoint to continue from (--checkpoint-every N writes them)"


def _end_once_decided(job: Job, exit_code: int, reason: str, requeue: bool = False) -> None:
    """End the job once it is decided what to do about the nodes that have failed, which takes some seconds.
    Otherwise the next run could get the same nodes again. A new supervisor to which no agent has returned ends the job
    at once, because it cannot know which nodes are lost."""
    if job.stage == "closing":
        return
    incidents.log_incidents(job)
    if job.stage == "recovering" or not drains.are_undecided(job):
        end(job, exit_code, reason, requeue=requeue)
        return
    job.closing = Closing(exit_code=exit_code, reason=reason, requeue=requeue, until=job.now + CLOSING_S)
    job.transition = job.pause = None
    job.move("closing")
    job.say("notice", f"{reason}; looking for other lost nodes before it ends")


def review(job: Job) -> None:
    """Decide what to do about the failed nodes of a job that is closing, and end the job once this is decided. If the
    job is to stop meanwhile, `shutdown` ends it."""
    if job.stage != "closing" or job.stop_request is not None:
        return
    assert job.closing is not None
    in_time = job.now < job.closing.until
    if in_time:
        incidents.log_incidents(job)  # nodes that were lost since then
    drains.review(job)
    if not in_time or not drains.are_undecided(job):
        end(job, job.closing.exit_code, job.closing.reason, requeue=job.closing.requeue)


def end(job: Job, exit_code: int, reason: str, workers_leave: bool = False, requeue: bool = False) -> None:
    if job.stage == "ended":
        return
    incidents.log_incidents(job)
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
