"""Take a job that trains with resihp.Trainer back to its newest checkpoint, after the loss of state that no surviving
rank holds.

No process ends: all ranks have parked, and the next plan has each of them load the checkpoint, or draw initial
parameters if there is none. Processes that are being started again take part, because the model may need their
devices. A rollback is refused when the limit of the user is reached, or when several in a row went back to the same
checkpoint; the caller then ends the job. Called by `transition`, at each tick of `watchdog` while something is awaited.
"""

from __future__ import annotations

from resihp.controller.state.job import Job
from resihp.controller.state.transitions import Transition
from resihp.protocol import messages as m
from resihp.record.journal import RollbackDecided
from resihp.words import count_of

MAX_IN_A_ROW = 3
"""Number of rollbacks in a row without a new checkpoint after which the job does not go back any more."""
MANIFEST_PATIENCE_S = 10.0
"""Seconds to wait for the supervisor to complete a checkpoint with all parts written."""


def waits(job: Job) -> bool:
    """Return whether the decision has to wait: until the next tick, because other processes may be lost, or be ordered
    to start again, by the same event; and until a checkpoint with all parts written is complete."""
    transition = _transition(job)
    if not job.settings.max_restarts:
        return False
    transition.held_since = transition.held_since or job.now
    is_new, is_recent = job.now == transition.held_since, job.now - transition.held_since <= MANIFEST_PATIENCE_S
    return is_new or (is_recent and job.checkpointed > job.record.checkpointed)


def is_pending(job: Job) -> bool:
    """Return whether all ranks have parked and the next plan has to wait."""
    return job.transition is not None and job.stage == "parking" and not job.transition.waiting


def begin(job: Job, reason: str) -> bool:
    """Decide to go back to the newest checkpoint; return whether this was decided. If not, the user is told the reason,
    unless no process is left or rollbacks are switched off."""
    if not (job.ready or _starting(job)) or not job.settings.max_restarts:
        return False
    iteration, folder = job.record.rollbacks.newest or job.record.rollbacks.loaded(job.record.trains)
    place = f"the checkpoint of iteration {iteration}" if folder else "the beginning"
    if why_not := _obstacle(job, place):
        job.say("notice", f"does not go back to {place}: {why_not}")
        return False
    again = count_of(job.record.committed - iteration, "iteration")
    job.log(RollbackDecided(epoch=job.epoch, iteration=iteration, folder=folder, reason=reason))
    job.say("notice", f"{reason}; goes back to {place}, {again} to be trained again")
    _forget_later_iterations(job)
    return True


def awaits_processes(job: Job) -> bool:
    """Return whether the next plan has to wait for processes that are starting: after a rollback, and if no other
    process is left. Those that are ready are ordered to park, like all others."""
    transition = _transition(job)
    goes_back = job.record.rollbacks.last is not None and job.record.committed == job.begins_after
    if not job.settings.max_restarts or (transition.parked and not goes_back):
        return False
    newcomers = tuple(rank for rank in job.ready if rank not in transition.asked)
    if newcomers:
        transition.asked.update(newcomers)
        transition.waiting.update(newcomers)
        transition.stage_at = job.now  # they have the time that the others had
        job.order(newcomers, m.Park(epoch=job.epoch, reason=transition.reason))
        return True
    if not transition.parked:
        transition.held_since = transition.held_since or job.now
    if job.now == transition.held_since:
        return True  # the same event may order processes to start again
    starting = _starting(job)
    if job.now - transition.began_at > job.settings.start_budget_s or not (starting or job.unmeasured):
        return False
    if starting and not transition.waits_for_processes:
        transition.waits_for_processes = True
        count = "a process that is" if len(starting) == 1 else f"{len(starting)} processes that are"
        job.say("notice", f"waits until {count} started again can take part")
    return True


def _starting(job: Job) -> set[int]:
    """Return the ranks of processes that are starting and may take part in the next plan."""
    members = (job.members[rank] for rank in job.live)
    return job.starting | {member.rank for member in members if member.declared is None and member.fenced is None}


def _obstacle(job: Job, place: str) -> str:
    """Return why the job does not go back; empty if it does."""
    rollbacks, limit = job.record.rollbacks, job.settings.max_restarts
    if rollbacks.count >= limit:
        return f"it has gone back {count_of(rollbacks.count, 'time')}; [adapt] max_restarts is {limit}"
    if rollbacks.in_a_row >= MAX_IN_A_ROW:
        return f"it has gone back to {place} {count_of(rollbacks.in_a_row, 'time')}, and saved no checkpoint since"
    return ""


def _forget_later_iterations(job: Job) -> None:
    """Drop all that is known of iterations after the one from which training goes on."""
    transition = _transition(job)
    transition.resizes, transition.tuned, transition.graceful = False, None, False
    job.reports.clear()
    job.parts.clear()
    job.checkpointed = job.record.checkpointed
    job.forecast = None
    for member in job.members.values():
        member.finished = False
    job.stand_at(job.members, job.record.committed)


def _transition(job: Job) -> Transition:
    assert job.transition is not None
    return job.transition
