"""Where a run goes on from: the checkpoints of another run, and whether another start is worth it.

What Slurm starts again goes on where it was, asked or not. A job whose runs fail one after the other and add no
checkpoint is not run for ever: it ends with the exit code of a spent budget. A run that was stopped (preempted, warned,
at its time limit, requeued by an administrator) has not failed, and is passed over. How a run ended stands in its
journal; one that left none, or no end in it, failed unless it was being stopped: its node died, or somebody killed it.
A job that has completed already, and which Slurm starts once more, is not run at all. Writes nothing but the name of
what attempts have in common, beside their checkpoints. Used by `resihp run`.
"""

from __future__ import annotations

import shlex
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from db.url_passwords import without_password
from resihp.errors import (
    CheckpointError,
    JobNotFoundError,
    OwnershipError,
    ProtocolError,
    ResihpError,
    RestartBudgetError,
    UsageError,
)
from resihp.record.journal import JobEnded, JobSignalled
from resihp.worker.checkpoints import iteration_of, newest_complete
from wrapper.config.run_spec import RunRequest, load
from wrapper.job_folder import (
    Job,
    all_jobs,
    find_job,
    home,
    named,
    not_ours,
    other_homes,
    ours,
    runs_of,
    write_private,
)
from wrapper.strict_modes import read_plain

RUN_FILE = ".run"
MOST_OF_COMMAND = 200
"""Letters shown."""
MOST_BYTES = 64
"""Of that file, which others may have written."""


class CompletedError(ResihpError):
    """There is nothing left to do: an earlier run of the same Slurm job has completed. Ends with exit code 0."""


@dataclass(frozen=True)
class Resumption:
    """`folder`: whose checkpoints are taken, and where new ones go; `iteration`: of the newest one seen there."""

    folder: Path
    iteration: int


def asked_for(configured: Path | None, name: str, command: Sequence[str], notice: Callable[[str], None]) -> Resumption:
    """For `--resume [NAME]`: the named job's folder, the configured one, or that of the newest job of this home which
    has a checkpoint. Whose it is, is said; a job of another home has to be named.

    Raises CheckpointError when there is none. Which checkpoint in it is complete, the trainer finds out.
    """
    job = find_job(name) if name else None
    if job is None and configured is None:
        return _newest_here(command, notice)
    folder = checkpoint_folder_of(job) if job else configured
    assert folder is not None
    found = _newest(folder)
    if found is None:
        raise CheckpointError(f"--resume: no complete checkpoint in {folder}")
    whose = f" of job {job.name}{_another(job, command)}" if job else ""
    notice(f"--resume: iteration {found.iteration}{whose}, from {folder}")
    return found


def _newest_here(command: Sequence[str], notice: Callable[[str], None]) -> Resumption:
    for job in all_jobs():
        try:
            found = _newest(checkpoint_folder_of(job))
        except OwnershipError:
            raise
        except UsageError as error:  # of another version, say: it is not the newest that can be taken
            notice(f"--resume: job {job.name} is passed over: {error}")
            continue
        if found is not None:
            notice(
                f"--resume: iteration {found.iteration} of job {job.name}{_another(job, command)}, "
                f"the newest in {home()} that has a checkpoint, from {found.folder}"
            )
            return found
    homes = other_homes()
    elsewhere = f"; you have jobs in {named(homes)}: name one, --resume JOB" if homes else ""
    raise CheckpointError(
        f"--resume: no job in {home()} has a complete checkpoint{elsewhere}; or name a folder with --checkpoint-folder"
    )


def _another(job: Job, command: Sequence[str]) -> str:
    """That a job ran something else, if it did."""
    ran = request.command if (request := _load(job)) else command
    return "" if tuple(ran) == tuple(command) else f" (which ran {shlex.join(ran)[:MOST_OF_COMMAND]})"


def if_there_is_one(folder: Path | None, notice: Callable[[str], None]) -> Resumption | None:
    """For `--resume-or-start`, as in a chain of jobs. Raises UsageError when no folder is configured."""
    if folder is None:
        raise UsageError(
            "--resume-or-start: needs a folder that all jobs of the chain share; name it with --checkpoint-folder"
        )
    found = _newest(folder)
    if found is None:
        notice(f"no complete checkpoint in {folder}; starting afresh")
    return found


@dataclass(frozen=True)
class Restart:
    """What follows from earlier runs. `resumption`: None to start afresh; `failed`: runs in a row, without a checkpoint
    in between; `run`: what they have in common, empty if that is not known."""

    resumption: Resumption | None
    failed: int
    run: str = ""


def after_restart(
    job_id: str, restart_count: int, command: Sequence[str], most_in_vain: int, notice: Callable[[str], None]
) -> Restart:
    """Where the earlier runs of this command in the same Slurm job got to; with a notice if that is nowhere.

    Raises CompletedError when the last of them completed, and RestartBudgetError after `most_in_vain` runs in a row
    that failed and added no checkpoint.
    """
    runs = [request for run in runs_of(job_id) if (request := _load(run)) is not None]
    earlier = [run for run in runs if run.restart_count < restart_count and run.command == tuple(command)]
    if not earlier:
        notice(f"job {job_id}: restarted, and no earlier run is found in {home()}; starting afresh")
        return Restart(None, 0)
    if _completed(earlier[0].of_job):
        raise CompletedError(
            f"job {job_id}: its run {earlier[0].job} has completed, and Slurm started it once more; nothing is left to "
            "do. To train further, submit it anew with --resume"
        )
    found = _newest(Path(earlier[0].checkpoint_folder))
    here = found.iteration if found else 0
    failed = sum(_has_failed(run.of_job) for run in takewhile(lambda run: run.begins_at == here, earlier))
    if failed >= most_in_vain:
        where = f"iteration {here}" if found else "the beginning"
        which = f"{failed} runs in a row" if failed > 1 else "the last run"
        raise RestartBudgetError(
            f"job {job_id}: {which} began at {where}, failed and added no checkpoint; not running it "
            f"again. Logs: {earlier[0].of_job.logs}. To go on, submit it anew; [slurm] restarts allows more"
        )
    if found is None:
        notice(f"job {job_id}: restarted, and {earlier[0].job} left no complete checkpoint; starting afresh")
    return Restart(found, failed, earlier[0].run)


def run_of(folder: Path, *, resumed: bool, earlier: str) -> str:
    """What this attempt has in common with those whose checkpoints it goes on from, or that Slurm requeued: `earlier`,
    or what stands beside the checkpoints; of one that begins afresh its own, which is left there. Where nothing can be
    read or written, attempts are merely not known to belong together."""
    beside = folder / RUN_FILE
    if not earlier and resumed:
        with suppress(OSError, UnicodeError, ValueError):
            earlier = str(uuid.UUID(read_plain(beside, MOST_BYTES).decode()))
    run = earlier or str(uuid.uuid4())
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        write_private(beside, run.encode())
    return run


def command_to_go_on(arguments: Sequence[str], job: str, command: Sequence[str], resumed: str = "") -> str:
    """The command line that goes on from a job's checkpoints: as it was started, `arguments`, but from there, and
    without the faults that were injected and the password of a ledger, which would be shown on terminals and in logs.
    `resumed`: whose checkpoints it went on from itself, if that was said."""
    said = list(arguments)
    if command and said[-len(command) :] == list(command):
        said = said[: -len(command)]
    if said[-1:] == ["--"]:
        said.pop()
    if resumed and said[-1:] == [resumed]:
        said.pop()
    kept: list[str] = []
    for before, one in zip(["", *said], said, strict=False):
        if (
            one in ("--resume", "--resume-or-start", "--fault", "--dry-run")
            or before == "--fault"
            or one.startswith("--fault=")
        ):
            continue
        kept.append(without_password(one) if before == "--ledger" or one.startswith("--ledger=") else one)
    return shlex.join(["resihp", *(kept or ["run"]), "--resume", job, "--", *command])


def how_to_go_on(request: RunRequest) -> str:
    """Where the newest checkpoint of an ended run is, and the command that goes on from it; empty without any."""
    found = _newest(Path(request.checkpoint_folder))
    if found is None:
        return ""
    where = newest_complete(found.folder, verify=False)
    command = request.go_on or f"resihp run --resume {request.job} ..."
    again = "put into the batch script" if request.slurm else "type"
    return f"checkpoint of iteration {found.iteration}: {where}\nto go on from it, {again}: {command}"


def _completed(run: Job) -> bool:
    return run.exit_code() == 0  # None where it did not get so far as to say how it ended


def checkpoint_folder_of(job: Job) -> Path:
    """Where a job wrote its checkpoints: a resumed one goes on in the folder that it took over."""
    if job.run_file.exists():
        return Path(load(job.run_file).checkpoint_folder)
    if ours(job) is None:
        raise not_ours(job, "its checkpoints are not listed")
    return job.checkpoints


def _newest(folder: Path) -> Resumption | None:
    newest = newest_complete(folder, verify=False)
    return None if newest is None else Resumption(folder, iteration_of(newest))


def _has_failed(run: Job) -> bool:
    """Whether a run ended by a failure of its own, and not because somebody stopped it."""
    try:
        entries = [record.entry for record in run.records()]
    except (OSError, ProtocolError, JobNotFoundError):
        return True
    ended = next((entry for entry in entries if isinstance(entry, JobEnded)), None)
    if ended is not None and ended.state != "abnormal":
        return ended.state == "failed"
    return not any(isinstance(entry, JobSignalled) for entry in entries)


def _load(run: Job) -> RunRequest | None:
    try:
        return load(run.run_file)
    except OwnershipError:
        raise
    except UsageError:
        return None  # it ended before it began
