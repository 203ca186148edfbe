"""A job's entry in the user's registry: written when the job begins, and updated while it runs and when it has ended.

Decides the content of the entry. Nothing depends on the entry, and a registry that cannot be written stops nothing.
Called by `job`, by `dead_jobs`, by `resihp.wrapper.job_folder`, and by the supervisor at the job's end.
"""

from __future__ import annotations

import getpass
import os
import re
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from resihp.errors import JobNotFoundError, ProtocolError
from resihp.wrapper import registry

if TYPE_CHECKING:
    from resihp.wrapper.job_files.contents import JobFile
    from resihp.wrapper.job_files.job import Job, OurJob

NEVER_BEGAN = "never began"
"""State of a job that ended before it had a supervisor."""
SLURM_NAME = re.compile(r"(\d+(?:_\d+)?)(-r\d+)?(-\d+)?")
"""Name of a run in Slurm: the number of the Slurm job, of its restart (`-r1`), and of the run within the allocation
(`-2`)."""


def slurm_job_of(name: str) -> str | None:
    """Return the number of the Slurm job from a run's name; None for a run without Slurm."""
    match = SLURM_NAME.fullmatch(name)
    return match[1] if match else None


def entry_of(job: Job, file: JobFile) -> registry.KnownJob:
    """Return the registry's entry for a job that is just beginning."""
    slurm_job = slurm_job_of(job.name) or ""
    return registry.KnownJob(
        name=job.name,
        folder=str(job.folder),
        host=file.host,
        user=user_name(),
        began_at=file.created_at,
        cluster=os.environ.get("SLURM_CLUSTER_NAME", "") if slurm_job else "",
        slurm_job=slurm_job,
    )


def user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # in a container, the user may have no name
        return str(os.geteuid())


def note_figures(job: OurJob, *, is_started: bool = False, **figures: Any) -> registry.KnownJob | None:
    """Add figures to the job's entry in the registry, and return the entry.

    None, and no change, if we may not write the job's folder. A registry that cannot be written is not reported here,
    as that was done when the job began. `is_started`: the job's own supervisor calls, so that the entry proves that
    this user started the job. Other commands may look at a job that came out of an archive: an entry that they create
    is marked as such (`KnownJob.only_seen`).
    """
    if not job.is_writable:
        return None

    def change(entry: registry.KnownJob | None) -> registry.KnownJob:
        entry_now = job.known
        if entry_now is None:
            entry_now = msgspec.structs.replace(entry or begins, only_seen=not is_started)
        return msgspec.structs.replace(entry_now, folder=begins.folder, **figures)

    with suppress(JobNotFoundError):
        begins = entry_of(job, job.read())
        registry.note(begins, change)
        return msgspec.structs.replace(begins, **figures)
    return None


def note_end(job: OurJob, exit_code: int | None = None) -> registry.KnownJob | None:
    """Record in the registry how a job ended and how far it came, from its journal. A job without a journal gets its
    exit code, or the state that it never began. Nothing depends on it, and nothing is raised."""
    from resihp.record import fold, journal
    from resihp.record.state import JobRecord

    if (noted := job.exit_code()) is not None:
        exit_code = noted
    state = NEVER_BEGAN if exit_code is None else "failed"
    figures: dict[str, Any] = {"state": state, "exit_code": exit_code, "ended_at": time.time()}
    decided = JobRecord()
    with suppress(OSError, ProtocolError, JobNotFoundError):
        for record in job.records():
            fold.apply(decided, record.entry)
            match record.entry:
                case journal.JobStarted(nodes=nodes, gpus_per_node=gpus):
                    figures |= {"nodes": nodes, "gpus_per_node": gpus}
                case journal.ModelDeclared(declare=declare):
                    figures |= {"target": declare.iterations, "iterations": declare.resume_from}
                case journal.CounterSeen(goal=goal):
                    figures |= {"target": goal or 0}
                case journal.IterationCommitted(outcome=outcome):
                    loss = None if outcome.loss_is_unknown else outcome.loss
                    figures |= {"iterations": outcome.iteration, "loss": loss, "last_iteration_at": record.at}
                case journal.RollbackDecided(iteration=iteration):
                    figures |= {"iterations": iteration}
                case journal.JobEnded(state=state, exit_code=code):
                    figures |= {"state": state, "exit_code": code, "ended_at": record.at}
        if decided.shown_plan is not None:
            figures["layout"] = decided.shown_plan.describe()
    return note_figures(job, **figures)
