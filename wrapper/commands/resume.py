"""Decides which checkpoint a run resumes from, and whether to run a job again that Slurm has started again.

A job that Slurm starts again resumes automatically. If its runs fail one after the other without a new checkpoint, it
is not run for ever: it ends with the exit code for a spent restart budget. A run that was stopped (preempted, warned,
at its time limit, requeued by an administrator) did not fail, and does not count. The journal records how a run ended.
A run without a journal, or without an end in it, has failed (its node died, or somebody killed it) unless it was being
stopped. A job that has already completed is not run again.

The only file that this module writes is the id that the attempts of one training share, beside their checkpoints. Used
by `resihp run`.
"""

from __future__ import annotations

import shlex
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from resihp.db.url_passwords import without_password
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
from resihp.wrapper.config.run_spec import RunRequest, load
from resihp.wrapper.job_folder import (
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
from resihp.wrapper.strict_modes import read_plain

RUN_FILE = ".run"
MAX_COMMAND_CHARACTERS = 200
"""Most characters of a command that are shown."""
MAX_RUN_FILE_BYTES = 64
"""Most bytes of RUN_FILE that are read, because others may have written the file."""


class CompletedError(ResihpError):
    """An earlier run of the same Slurm job has completed, so that nothing is left to do. The exit code is 0."""


@dataclass(frozen=True)
class Resumption:
    """Checkpoints to resume from. `folder`: for old and new checkpoints; `iteration`: of the newest checkpoint in
    it."""

    folder: Path
    iteration: int


def requested_resumption(
    configured: Path | None, name: str, command: Sequence[str], notice: Callable[[str], None]
) -> Resumption:
    """Return the checkpoints to resume from for `--resume [NAME]`, and give a notice that names them.

    They are those of the named job, or else of the configured folder, or else of the newest job of this home that has a
    checkpoint. A job of another home must be named. The trainer itself finds out which checkpoint is complete.

    Raises CheckpointError if there is no checkpoint.
    """
    job = find_job(name) if name else None
    if job is None and configured is None:
        return _newest_here(command, notice)
    folder = checkpoint_folder_of(job) if job else configured
    assert folder is not None
    resumption = _newest(folder)
    if resumption is None:
        raise CheckpointError(f"--resume: no complete checkpoint in {folder}")
    of_job = f" of job {job.name}{_another(job, command)}" if job else ""
    notice(f"--resume: iteration {resumption.iteration}{of_job}, from {folder}")
    return resumption


def _newest_here(command: Sequence[str], notice: Callable[[str], None]) -> Resumption:
    for job in all_jobs():
        try:
            resumption = _newest(checkpoint_folder_of(job))
        except OwnershipError:
            raise
        except UsageError as error:  # for example because the job is of another version; an older job may be usable
            notice(f"--resume: job {job.name} is skipped: {error}")
            continue
        if resumption is not None:
            notice(
                f"--resume: iteration {resumption.iteration} of job {job.name}{_another(job, command)}, "
                f"the newest in {home()} that has a checkpoint, from {resumption.folder}"
            )
            return resumption
    homes = other_homes()
    elsewhere = f"; you have jobs in {named(homes)}: name one, --resume JOB" if homes else ""
    raise CheckpointError(
        f"--resume: no job in {home()} has a complete checkpoint{elsewhere}; or name a folder with --checkpoint-folder"
    )


def _another(job: Job, command: Sequence[str]) -> str:
    """Return the other job's command in parentheses if it differs from `command`; otherwise an empty text."""
    command_ran = request.command if (request := _load(job)) else command
    return (
        ""
        if tuple(command_ran) == tuple(command)
        else f" (which ran {shlex.join(command_ran)[:MAX_COMMAND_CHARACTERS]})"
    )


def resumption_if_any(folder: Path | None, notice: Callable[[str], None]) -> Resumption | None:
    """Return the checkpoints to resume from for `--resume-or-start`; None to start without a checkpoint.

    Chains of jobs use it. Raises UsageError if no folder is configured.
    """
    if folder is None:
        raise UsageError(
            "--resume-or-start: needs a folder that all jobs of the chain share; set it with --checkpoint-folder"
        )
    resumption = _newest(folder)
    if resumption is None:
        notice(f"no complete checkpoint in {folder}; starting afresh")
    return resumption


@dataclass(frozen=True)
class Restart:
    """Conclusions from the earlier runs of a job.

    `resumption`: checkpoints to resume from; None to start without a checkpoint. `failed`: number of consecutive failed
    runs without a new checkpoint. `run`: the id that all attempts share; empty if unknown.
    """

    resumption: Resumption | None
    failed: int
    run: str = ""


def after_restart(
    job_id: str, restart_count: int, command: Sequence[str], max_failed_runs: int, notice: Callable[[str], None]
) -> Restart:
    """Return the conclusions from the earlier runs of this command in the same Slurm job. Gives a notice if there is no
    run or no checkpoint.

    Raises CompletedError if the last of these runs completed, and RestartBudgetError after `max_failed_runs`
    consecutive runs that failed without a new checkpoint.
    """
    runs = [request for run in runs_of(job_id) if (request := _load(run)) is not None]
    earlier = [run for run in runs if run.restart_count < restart_count and run.command == tuple(command)]
    if not earlier:
        notice(f"job {job_id}: restarted, but no earlier run is in {home()}; starting afresh")
        return Restart(None, 0)
    if _completed(earlier[0].of_job):
        raise CompletedError(
            f"job {job_id}: started again by Slurm, but its run {earlier[0].job} has completed; nothing is left to do. "
            "To train further, submit a new job with --resume"
        )
    resumption = _newest(Path(earlier[0].checkpoint_folder))
    resume_iteration = resumption.iteration if resumption else 0
    failed = sum(_has_failed(run.of_job) for run in takewhile(lambda run: run.begins_at == resume_iteration, earlier))
    if failed >= max_failed_runs:
        where = f"iteration {resume_iteration}" if resumption else "the beginning"
        failed_runs = f"{failed} runs in a row" if failed > 1 else "the last run"
        raise RestartBudgetError(
            f"job {job_id}: {failed_runs} began at {where} and failed without a new checkpoint; not running it again. "
            f"Logs: {earlier[0].of_job.logs}. To continue, submit it again; raise restarts in [slurm] to allow more"
        )
    if resumption is None:
        notice(f"job {job_id}: restarted, but {earlier[0].job} left no complete checkpoint; starting afresh")
    return Restart(resumption, failed, earlier[0].run)


def run_of(folder: Path, *, resumed: bool, earlier: str) -> str:
    """Return the id that all attempts of one training share, and write it to a file beside the checkpoints.

    The id is `earlier` if known; for a resumed attempt, the id beside the checkpoints; otherwise a new one. If the file
    can be neither read nor written, the only loss is that the attempts are not known to belong together.
    """
    run_file = folder / RUN_FILE
    if not earlier and resumed:
        with suppress(OSError, UnicodeError, ValueError):
            earlier = str(uuid.UUID(read_plain(run_file, MAX_RUN_FILE_BYTES).decode()))
    run = earlier or str(uuid.uuid4())
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        write_private(run_file, run.encode())
    return run


def command_to_go_on(arguments: Sequence[str], job: str, command: Sequence[str], resumed: str = "") -> str:
    """Return the command line that resumes a job from its checkpoints.

    It is the original command line (`arguments`) with `--resume`, but without injected faults, and without the ledger's
    password, which would appear on terminals and in logs. `resumed`: the job named after `--resume` in `arguments`,
    empty if none.
    """
    options = list(arguments)
    if command and options[-len(command) :] == list(command):
        options = options[: -len(command)]
    if options[-1:] == ["--"]:
        options.pop()
    if resumed and options[-1:] == [resumed]:
        options.pop()
    kept_options: list[str] = []
    for previous, option in zip(["", *options], options, strict=False):
        if (
            option in ("--resume", "--resume-or-start", "--fault", "--dry-run")
            or previous == "--fault"
            or option.startswith("--fault=")
        ):
            continue
        kept_options.append(
            without_password(option) if previous == "--ledger" or option.startswith("--ledger=") else option
        )
    return shlex.join(["resihp", *(kept_options or ["run"]), "--resume", job, "--", *command])


def resume_hint(request: RunRequest) -> str:
    """Return the path of the newest checkpoint of an ended run, and the command that resumes from it; empty without a
    checkpoint."""
    resumption = _newest(Path(request.checkpoint_folder))
    if resumption is None:
        return ""
    where = newest_complete(resumption.folder, verify=False)
    command = request.go_on or f"resihp run --resume {request.job} ..."
    where_to_type = "type"
    if request.slurm is not None:
        number = request.slurm.job_id
        where_to_type = f"put this into the batch script, unless Slurm runs job {number} again (squeue -j {number})"
    return f"checkpoint of iteration {resumption.iteration}: {where}\nto resume from it, {where_to_type}: {command}"


def _completed(run: Job) -> bool:
    return run.exit_code() == 0  # None if the run ended without recording an exit code


def checkpoint_folder_of(job: Job) -> Path:
    """Return the folder to which a job wrote its checkpoints. A resumed job uses the folder from which it resumed."""
    if job.run_file.exists():
        return Path(load(job.run_file).checkpoint_folder)
    if ours(job) is None:
        raise not_ours(job, "its checkpoints are not listed")
    return job.checkpoints


def _newest(folder: Path) -> Resumption | None:
    newest = newest_complete(folder, verify=False)
    return None if newest is None else Resumption(folder, iteration_of(newest))


def _has_failed(run: Job) -> bool:
    """Return whether a run ended because it failed, and not because somebody stopped it."""
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
        return None  # the run ended before it had begun
