"""A chain of jobs whose training program is broken: who finds out says so to those that wait behind it.

A job of a chain (`--resume-or-start`) that ends with 93 leaves a note beside the checkpoints that all of them share. A
job that was submitted before ends at once, with 93 as well; whoever submits one afterwards is taken to have looked. A
note that cannot be written or read stops nothing, and neither does a Slurm that does not tell when the job was
submitted. Called by `resihp run` and the supervisor's process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from resihp.errors import TrainingProgramError
from resihp.record.journal import JobEnded, Record
from slurm.client import Slurm
from slurm.errors import SlurmError
from wrapper.config.run_spec import RunRequest
from wrapper.job_folder import write_private

NOTE = "broken.json"
TEMPLATES_NAME = "resihp-chain"
"""What a chain's jobs are called in the template. It has them wait for all jobs of their name."""


class Broken(msgspec.Struct, frozen=True, kw_only=True):
    """The note: which job found out, when (UTC, seconds since 1970), and why it gave up."""

    job: str
    at: float
    reason: str


def leave_note(request: RunRequest, records: Iterable[Record], say: Callable[[str], None]) -> None:
    """The job has ended with 93: tell those that wait behind it."""
    reason = next((record.entry.reason for record in records if isinstance(record.entry, JobEnded)), "")
    note = Path(request.checkpoint_folder) / NOTE
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        write_private(note, msgspec.json.encode(Broken(job=request.job, at=time.time(), reason=reason)))
    except OSError as error:
        say(f"{note}: cannot be written: {error.strerror}; the next jobs of the chain will start, and fail alike")


def check(folder: Path, job_id: str, slurm: Slurm, notice: Callable[[str], None]) -> None:
    """Raises TrainingProgramError if the training program was found to be broken since the job was submitted."""
    note = folder / NOTE
    try:
        broken = msgspec.json.decode(note.read_bytes(), type=Broken)
        when = f"{datetime.fromtimestamp(broken.at, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except FileNotFoundError:
        return
    except (OSError, msgspec.DecodeError, ValueError, OverflowError) as error:
        notice(f"{note}: cannot be read: {error}; going ahead")
        return
    found = f"job {broken.job} of this chain found the training program broken at {when}: {broken.reason}"
    try:
        view = slurm.job(job_id)
    except SlurmError as error:
        notice(f"{found}; when this job was submitted is not known ({error}); going ahead")
        return
    if view is None or view.submitted_at is None:
        notice(f"{found}; Slurm does not tell when this job was submitted; going ahead")
    elif view.submitted_at < broken.at:
        raise TrainingProgramError(
            f"job {job_id}: not started: {found}; mend it and submit the chain anew: jobs that are submitted from now "
            "on go ahead, those that wait already do not"
        )
