"""Stops a chain of jobs with a broken training program: the job that finds it broken leaves a note for the waiting
jobs.

A job of a chain (`--resume-or-start`) that ends with exit code 93 leaves a note beside the checkpoints that all jobs of
the chain share. A job that was submitted before the note ends at once, with 93 as well. A job that is submitted
afterwards runs, because its user is assumed to have fixed the program. If the note cannot be written or read, or if
Slurm does not report the job's submission time, the job runs. Called by `resihp run` and by the supervisor's process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from resihp.errors import TrainingProgramError
from resihp.record.journal import JobEnded, Record
from resihp.slurm.client import Slurm
from resihp.slurm.errors import SlurmError
from resihp.wrapper.config.run_spec import RunRequest
from resihp.wrapper.job_folder import write_private

NOTE_FILE = "broken.json"
TEMPLATES_NAME = "resihp-chain"
"""Name of a chain's jobs in the template, where each job waits for all jobs of this name."""


class Broken(msgspec.Struct, frozen=True, kw_only=True):
    """The note. `job`: the job that found the program broken; `at`: time in UTC, seconds since 1970; `reason`: why that
    job ended."""

    job: str
    at: float
    reason: str


def leave_note(request: RunRequest, records: Iterable[Record], say: Callable[[str], None]) -> None:
    """Write the note for the waiting jobs, after the job has ended with exit code 93."""
    reason = next((record.entry.reason for record in records if isinstance(record.entry, JobEnded)), "")
    note = Path(request.checkpoint_folder) / NOTE_FILE
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        write_private(note, msgspec.json.encode(Broken(job=request.job, at=time.time(), reason=reason)))
    except OSError as error:
        say(
            f"{note}: cannot be written: {error.strerror}; the next jobs of the chain will start, and fail the same way"
        )


def check(folder: Path, job_id: str, slurm: Slurm, notice: Callable[[str], None]) -> None:
    """Raise TrainingProgramError if the training program was found broken after the job `job_id` was submitted."""
    note = folder / NOTE_FILE
    try:
        broken = msgspec.json.decode(note.read_bytes(), type=Broken)
        when = f"{datetime.fromtimestamp(broken.at, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except FileNotFoundError:
        return
    except (OSError, msgspec.DecodeError, ValueError, OverflowError) as error:
        notice(f"{note}: cannot be read: {error}; going ahead")
        return
    finding = f"job {broken.job} of this chain found the training program broken at {when}: {broken.reason}"
    try:
        view = slurm.job(job_id)
    except SlurmError as error:
        notice(f"{finding}; the submission time of this job is unknown ({error}); going ahead")
        return
    if view is None or view.submitted_at is None:
        notice(f"{finding}; Slurm does not report when this job was submitted; going ahead")
    elif view.submitted_at < broken.at:
        raise TrainingProgramError(
            f"job {job_id}: not started: {finding}; fix it and submit the chain again: jobs submitted from now on "
            "start, jobs already waiting do not"
        )
