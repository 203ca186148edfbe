"""React to reservations, such as for maintenance, that begin on nodes of the job before its time limit.

Slurm starts no job into a reservation, but lets a running job go on, unless an administrator ends it. So a checkpoint
is written some time before the reservation begins, and training goes on. `replacements` requests no node if too little
time is left until then. Called by the controller, with Slurm's report and at the end of each event.
"""

from __future__ import annotations

from resihp.controller import interface as api
from resihp.controller.state.job import Job
from resihp.controller.state.upkeep import ReservedTime
from resihp.record.journal import ReservationSeen

SAVE_LEAD_S = 600.0
"""Seconds before a reservation at which the checkpoint is ordered, if the job has no lead of its own for the warning
before its time limit."""


def ahead(job: Job, event: api.ReservationAhead) -> None:
    """Note the next reservation on nodes of the job."""
    nodes = tuple(name for name in event.nodes if name in job.nodes and job.nodes[name].alive)
    before = job.maintenance.reserved
    if event.seconds is None or not nodes:
        if before is not None:
            job.maintenance.reserved = None
            job.log(ReservationSeen(reservation=before.name, nodes=(), seconds=None))
            job.say("notice", f"reservation {before.name}: no longer ahead of this job")
        return
    job.maintenance.reserved = ReservedTime(event.name, nodes, job.now + event.seconds)
    job.log(ReservationSeen(reservation=event.name, nodes=nodes, seconds=event.seconds))
    when = f"begins in {event.seconds / 60:.0f} min on {', '.join(nodes)}"
    saved = f"{_lead_s(job) / 60:.0f} min before" if event.seconds > _lead_s(job) else "now"
    job.say("notice", f"reservation {event.name}: {when}; a checkpoint is written {saved}")


def next_on(job: Job) -> ReservedTime | None:
    """Return the next reservation on nodes that the job still has."""
    reserved = job.maintenance.reserved
    if reserved is None or not any(name in job.nodes and job.nodes[name].alive for name in reserved.nodes):
        return None
    return reserved


def review(job: Job) -> None:
    """Order a checkpoint if the reservation begins soon. Training goes on."""
    reserved = next_on(job)
    if reserved is None or reserved.saves or job.now < reserved.at - _lead_s(job):
        return
    if job.record.trains is None or not job.training or job.stop_request is not None:
        return
    reserved.saves = True
    job.saves.since = job.record.committed
    job.say("notice", f"reservation {reserved.name} begins soon: writing a checkpoint; training goes on")


def _lead_s(job: Job) -> float:
    return job.settings.warning_lead_s or SAVE_LEAD_S
