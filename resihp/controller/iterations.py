"""Commit iterations: an iteration is committed once any rank has taken its step (architecture.md, "One iteration, and
when it counts"). Also completes checkpoints and ends the job after the last iteration."""

from __future__ import annotations

import signal as signals

from resihp.controller import interface as api
from resihp.controller.fail_slow import expectation
from resihp.controller.fail_stop import endings
from resihp.controller.scripts import script_checkpoints
from resihp.controller.state.job import Job
from resihp.controller.state.members import Member
from resihp.controller.tuning import retuning
from resihp.protocol import messages as m
from resihp.record.journal import EvaluationDone, IterationCommitted, Reconfigured
from resihp.words import count_of

MAX_UNCOMMITTED_ITERATIONS = 3
"""Largest number of iterations that wait for missing reports when a control connection is silent. Beyond it, iterations
are committed without those reports."""


def transition_done(job: Job) -> None:
    """Finish the transition, after the commit of the first iteration under the new plan."""
    transition = job.transition
    if transition is None:
        return
    job.transition = None
    job.move("running")
    if transition.initial or transition.action == "start":
        return
    entry = Reconfigured(
        epoch=transition.epoch,
        failures=tuple(transition.failures),
        attempts=transition.attempts,
        action=transition.action,
        park_s=transition.park_s,
        plan_s=transition.plan_s,
        planning_s=transition.planning_s,
        groups_s=transition.groups_s,
        state_s=transition.state_s,
        first_iteration_s=job.now - transition.begun_at,
        seconds=job.now - transition.began_at,
        bytes_moved=transition.bytes_moved,
        extra_bytes=transition.extra_bytes,
    )
    job.log(entry)


def stepped(job: Job, member: Member, report: m.Stepped) -> None:
    note_outcome(job, member, report.epoch, report.outcome, report)
    if not job.training or job.record.plan is None or report.epoch != job.epoch:
        return
    commit_reported(job)


def note_outcome(job: Job, member: Member, epoch: int, outcome: m.StepOutcome, report: m.Stepped | None = None) -> None:
    """Note that a rank took a step. `report` is None if the rank mentioned the step only in its answer to an order to
    park.

    A report from an older epoch is ignored once a plan has been decided without it.
    """
    if epoch < job.epoch and job.stage != "parking":
        return
    job.note_step(member, epoch, outcome, report)
    job.progress_at = member.progress_at = job.now


def commit_reported(job: Job) -> None:
    """Commit iterations in order; an iteration is committed once every active rank has reported its step.

    If a silent control connection delays reports, at most `MAX_UNCOMMITTED_ITERATIONS` iterations wait for them.
    """
    assert job.record.plan is not None
    while (reports := job.reports.get(job.record.committed + 1)) is not None:
        if (
            not reports.is_complete(job.record.working)
            and job.furthest <= job.record.committed + MAX_UNCOMMITTED_ITERATIONS
        ):
            return
        commit_up_to(job, job.record.committed + 1)
        if job.transition is not None:
            transition_done(job)


def commit_up_to(job: Job, iteration: int) -> None:
    """Log every iteration up to `iteration` as committed. At least one rank has taken the step of each."""
    for i in range(job.record.committed + 1, iteration + 1):
        reports = job.reports.pop(i)
        predicted_s = expectation.iteration_done(job, i, reports)
        job.rebuilds = 0
        retuning.note(job, reports.seconds, reports.outcome.tokens)
        job.onsets.add(i, job.now, reports.seconds)
        job.log(
            IterationCommitted(
                epoch=min(reports.epoch, job.record.plan.epoch) if job.record.plan else reports.epoch,
                outcome=reports.outcome,
                seconds=reports.seconds,
                predicted_seconds=predicted_s,
            )
        )
        if reports.evaluation is not None:
            evaluated(job, reports.evaluation)


def evaluated(job: Job, report: m.Evaluated) -> None:
    """Log an evaluation once, after the commit of the iteration that produced the evaluated weights."""
    if report.epoch < job.record.rollbacks.epoch:
        return
    if (reports := job.reports.get(report.iteration)) is not None:
        reports.evaluation = report
    elif job.record.evaluated < report.iteration <= job.record.committed:
        job.log(EvaluationDone(epoch=report.epoch, iteration=report.iteration, loss=report.loss, tokens=report.tokens))


def is_over(job: Job) -> bool:
    """Return whether training is over: all live ranks with work have taken the last step and finished its evaluation,
    if one is due."""
    active = [member for rank in job.record.active if (member := job.members[rank]).alive]
    goal, evaluates = job.record.goal, job.declaration.evaluates
    return bool(active) and all(m.stepped >= goal and (m.finished or not evaluates) for m in active)


def finished(job: Job, member: Member) -> None:
    member.finished = True
    halt_when_finished(job)


def halt_when_finished(job: Job) -> None:
    if not job.training or job.record.plan is None or job.record.committed < job.record.goal:
        return
    if all(job.members[rank].finished for rank in job.record.active if job.members[rank].alive):
        job.move("halting")
        job.halted_at = job.now
        job.pause = None
        job.order(job.ready, m.Halt(reason=f"iteration {job.record.goal} of {job.record.goal} is committed"))
        newcomers_leave(job)
        end_when_gone(job)


def newcomers_leave(job: Job) -> None:
    """Kill the processes that are still starting, because training is done."""
    for rank in job.live:
        member = job.members[rank]
        if not member.ready and member.fenced is None:
            member.fenced = "started too late to take part"
            job.do(api.SignalWorker(rank=rank, signal=int(signals.SIGKILL)))


def end_when_gone(job: Job) -> None:
    """End the job once its last worker has exited. Does nothing while workers are still being started."""
    if job.stage == "halting":
        if not job.ready:
            conclude(job)
    elif job.record.placements and not job.starting and not job.live:
        conclude(job)


def conclude(job: Job) -> None:
    """End a job after its training, or a script that does not train with resihp, is done. The job fails if a configured
    fault did not fire."""
    unfired = [armed for armed in job.faults.values() if armed.fault.id not in job.record.fired]
    if unfired:
        unfired_faults = "; ".join(f"fault {armed.fault} did not fire: {armed.excuse}" for armed in unfired)
        endings.end(job, 1, unfired_faults)
    elif job.stage == "halting":
        if job.begins_after != job.record.committed != job.checkpointed:
            job.say("notice", _unsaved(job))
        endings.end(job, 0, f"done: {count_of(job.record.committed, 'iteration')}", workers_leave=not job.live)
    else:
        job.start.done_at = job.start.done_at or job.now
        if script_checkpoints.is_ready(job, job.start.done_at):  # so that the last checkpoint is recorded
            endings.end(job, 0, "done", workers_leave=True)


def _unsaved(job: Job) -> str:
    """Return the warning that the trained model is lost when its processes end."""
    if not job.settings.checkpoint_every:
        return "the trained model was not saved: --checkpoint-every N saves it each N iterations, and at the end"
    newest = f"the newest one is of iteration {job.checkpointed}" if job.checkpointed else "there is none"
    return f"no complete checkpoint of iteration {job.record.committed}: not all of its writers survived; {newest}"


def checkpoint_part(job: Job, member: Member, part: m.CheckpointPart) -> None:
    """Take one written part of a checkpoint. The checkpoint is complete once all ranks of one replica have written
    their parts.

    Training goes on during the writing, so that another plan may be in effect when the last part is reported. The
    checkpoint is valid all the same.
    """
    if part.error:
        text = f"{job.where(member.rank)}: no checkpoint of iteration {part.iteration}: {part.error}"
        job.say("warning", text)
        answer_askers(job, False, text)
        return
    if job.record.plan is None or part.iteration <= job.checkpointed or part.epoch < job.record.rollbacks.epoch:
        return
    present = part.epoch == job.record.plan.epoch
    writers = job.record.writers.get(part.epoch, ())
    if present and job.stop_request is not None and job.stop_request.writers:
        writers = job.stop_request.writers
    if not writers or not (present or part.iteration <= job.record.committed):
        return
    parts = job.parts.setdefault((part.epoch, part.iteration, part.folder), {})
    parts[member.rank] = part
    if set(writers) <= parts.keys():
        if part.iteration > job.record.committed:
            # All its writers have taken that step, even if some have not reported it yet.
            if not job.reports.keys() >= set(range(job.record.committed + 1, part.iteration + 1)):
                return  # after a take-over: the reports of earlier steps are lost
            commit_up_to(job, part.iteration)
            if job.stage == "first-iteration":
                transition_done(job)
        job.parts = {key: value for key, value in job.parts.items() if key[1] > part.iteration}
        _warn_of_missed_checkpoints(job, part.iteration)
        job.checkpointed = max(job.checkpointed, part.iteration)
        job.do(
            api.CommitCheckpoint(
                iteration=part.iteration,
                folder=part.folder,
                parts=tuple((parts[rank].file, parts[rank].bytes) for rank in writers),
                seconds=max(p.seconds for p in parts.values()),
                layout=job.record.plan.describe() if present else "",
            )
        )


def _warn_of_missed_checkpoints(job: Job, complete: int) -> None:
    """Warn about checkpoints that stayed incomplete because the supervisor changed. `complete`: iteration of the
    checkpoint that is complete now."""
    interval, before = job.settings.checkpoint_every, max(job.checkpointed, job.declaration.resume_from)
    inherited = job.onsets.inherited
    if not interval or not inherited or before > inherited:
        return  # this supervisor has led since the last checkpoint
    missed = range(before - before % interval + interval, complete, interval)
    if missed:
        due = f"the checkpoint of iteration {missed[0]} was"
        if len(missed) > 1:
            due = f"{len(missed)} checkpoints, of iterations {missed[0]} to {missed[-1]}, were"
        newest = f"the newest complete one is of iteration {complete}"
        job.say("warning", f"{due} not completed: the supervisor was replaced meanwhile; {newest}")


# --- checkpoints that operators ask for -----------------------------------------------------------------------------


def checkpoint_asked(job: Job, event: api.CheckpointAsked) -> None:
    """Take a request of `resihp checkpoint now`. Training goes on; the checkpoint is of the iteration in progress."""
    if job.record.trains is None:
        why = "training has not begun" if job.settings.declares else "its command does not train with resihp"
        job.do(api.Reply(request=event.request, ok=False, text=f"no checkpoint: {why}"))
    else:
        job.saves.askers[event.request] = job.record.committed


def review_askers(job: Job) -> None:
    """Answer the checkpoint requests that are fulfilled or can no longer be; order the checkpoint if that has not
    happened.

    One rank gets the order and passes it on to all ranks in the iteration's last synchronisation. If that rank is lost,
    or all ranks park before the synchronisation, another rank gets the order under the next plan. The order is repeated
    if a checkpoint that was under way when a request came has used it up.
    """
    saves = job.saves
    newest = job.record.checkpointed
    for request in [request for request, since in saves.askers.items() if newest > since]:
        del saves.askers[request]
        job.do(api.Reply(request=request, ok=True, text=f"checkpoint of iteration {newest} is complete"))
    if saves.since is not None and (newest > saves.since or job.stop_request is not None or job.stage == "halting"):
        saves.since = None  # written, or the last checkpoint of the job is about to be
    if not saves.askers and saves.since is None:
        saves.epoch = 0
    elif job.stop_request is not None:
        answer_askers(job, False, "the job is stopping, and writes a last checkpoint if it can")
    elif job.stage == "halting":
        answer_askers(job, False, "no checkpoint: training is done")
    elif job.training and (saves.epoch != job.epoch or newest > saves.before):
        assert job.record.plan is not None
        saves.number += 1
        saves.epoch, saves.before = job.epoch, newest
        job.order(job.record.plan.layout.active[:1], m.SaveNext(number=saves.number))


def answer_askers(job: Job, ok: bool, text: str) -> None:
    """Give all pending requests the same answer."""
    for request in job.saves.askers:
        job.do(api.Reply(request=request, ok=ok, text=text))
    job.saves.askers.clear()
