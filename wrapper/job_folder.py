"""Jobs on disk: creates a job's folder, and finds a job by its name.

A job is named after its Slurm job: `1234`, or `1234_5` for a task of an array; `1234-r1`, `1234-r2` after Slurm has
requeued it; `1234-2` for a second job in the same allocation. Without Slurm, the name is `local-<n>`.
`resihp.wrapper.job_files` describes the folder. The registry (`resihp.wrapper.registry`) has a user's jobs of all
homes, so that a name is understood in any folder. Used by every command that takes a job's name. Never contacts a
running job.
"""

from __future__ import annotations

import difflib
import itertools
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from resihp.errors import JobNotFoundError, OwnershipError, ProtocolError, UsageError
from resihp.process import identity
from resihp.wrapper import registry
from resihp.wrapper.file_locks import LOCK_NAME as LOCK_NAME
from resihp.wrapper.file_locks import NO_LOCKS as NO_LOCKS
from resihp.wrapper.file_locks import lock_file as lock_file
from resihp.wrapper.job_files.contents import JobFile
from resihp.wrapper.job_files.contents import SupervisorFile as SupervisorFile
from resihp.wrapper.job_files.homes import home as home
from resihp.wrapper.job_files.job import Job as Job
from resihp.wrapper.job_files.job import OurJob as OurJob
from resihp.wrapper.job_files.job import not_ours as not_ours
from resihp.wrapper.job_files.job import ours as ours
from resihp.wrapper.job_files.job import take_lock as take_lock
from resihp.wrapper.job_files.registered import SLURM_NAME, entry_of
from resihp.wrapper.job_files.registered import note_end as note_end
from resihp.wrapper.job_files.registered import slurm_job_of as slurm_job_of
from resihp.wrapper.strict_modes import check_above, check_folder
from resihp.wrapper.strict_modes import write_private as write_private

if TYPE_CHECKING:
    pass

LOCK_PATIENCE_S = 2.0
"""How long to wait for the lock, in seconds: commands that check whether a job is alive hold it for a moment."""
SLURM_TIMEOUT_S = 3.0
"""How long to wait for Slurm's answer about a submitted job."""
MAX_HOMES = 3
"""Most other homes that a message names."""

_ID = re.compile(r"(?!\d+$)[0-9a-f]{8}[0-9a-f-]{0,28}")
"""A job's id in its ledger, or the beginning of one. Digits alone are not an id but a Slurm job's number, perhaps
mistyped."""
_LOCAL_NAME = re.compile(r"local-(\d+)")


def close_home() -> None:
    """Make sure that nobody else can put a job into this home, if the home exists.

    If an older version created the folder `jobs` with write permission for others, that permission is removed. Raises
    OwnershipError if the home, or a folder above it, is writable by others.
    """
    jobs = home() / "jobs"
    if not jobs.parent.is_dir():
        return
    check_folder(jobs.parent)
    check_above(jobs.parent)
    with suppress(FileNotFoundError):
        status = jobs.stat()
        if status.st_uid == os.geteuid() and status.st_mode & 0o022:
            jobs.chmod(status.st_mode & 0o7755)
        check_folder(jobs)


def _make_jobs() -> Path:
    """Create the folder of all jobs, accessible only to its owner whatever the umask is. Raises OSError,
    OwnershipError."""
    jobs = home() / "jobs"
    for folder in (jobs.parent, jobs):
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700, parents=True)
    close_home()
    return jobs


def create_local_job() -> OurJob:
    """Create the folder, the key and the journal folder of the next `local-<n>`. Several processes may call this at
    once."""
    jobs = home() / "jobs"
    try:
        _make_jobs()
        taken = [int(match[1]) for path in jobs.iterdir() if (match := _LOCAL_NAME.fullmatch(path.name))]
        number = max(taken, default=0) + 1
        while True:
            try:
                (jobs / f"local-{number}").mkdir(mode=0o700)
                break
            except FileExistsError:
                number += 1
        return _furnish(OurJob(f"local-{number}", jobs / f"local-{number}"))
    except OSError as error:
        raise UsageError(f"{jobs}: cannot make a job's folder: {error.strerror}; set RESIHP_HOME to another") from error


def create_slurm_job(job_id: str, restart_count: int) -> OurJob:
    """Create the folder, the key and the journal folder of a run of this Slurm job."""
    jobs = home() / "jobs"
    name = f"{job_id}-r{restart_count}" if restart_count else job_id
    try:
        _make_jobs()
        for number in itertools.count(2):
            try:
                (jobs / name).mkdir(mode=0o700)
                break
            except FileExistsError:
                name = f"{job_id}-r{restart_count}-{number}" if restart_count else f"{job_id}-{number}"
        return _furnish(OurJob(name, jobs / name))
    except OSError as error:
        raise UsageError(
            f"{jobs}: cannot make a job's folder: {error.strerror}; set RESIHP_HOME to a folder that all nodes share"
        ) from error


def runs_of(job_id: str, in_home: Path | None = None) -> list[Job]:
    """Return the runs of this Slurm job in `in_home`, by default in this home, newest first."""
    return [job for job in all_jobs(in_home) if slurm_job_of(job.name) == job_id]


def _furnish(job: OurJob) -> OurJob:
    from resihp.protocol.framing import KEY_BYTES

    job.logs.mkdir(mode=0o700)
    write_private(job.key_file, os.urandom(KEY_BYTES))
    place = _local_place(job)
    file = JobFile(
        name=job.name,
        host=socket.gethostname(),
        created_at=time.time(),
        journal=str(place / "journal"),
        starter=identity(os.getpid()),
    )
    write_private(job.folder / "job.json", msgspec.json.encode(file))
    if trouble := registry.save(entry_of(job, file)):
        print(
            f"resihp: warning: {trouble}; this job is found only from {home().parent}, and a ledger outside of "
            f"{home()} is shown only with --ledger URL",
            file=sys.stderr,
        )
    return job


def _local_place(job: Job) -> Path:
    """Create a folder on local disk for the journal of this job. Its name includes a digest of the job's folder,
    because names of jobs repeat between homes.

    Raises UsageError if the folder of all journals is writable by others, as they could forge our files there.
    """
    root = Path(os.environ.get("RESIHP_LOCAL") or f"/var/tmp/resihp-{os.getuid()}").absolute()
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if root.is_symlink() and not os.environ.get("RESIHP_LOCAL"):
            raise UsageError(f"{root}: is a link; set RESIHP_LOCAL to a folder of yours on local disk")
        check_folder(root, "RESIHP_LOCAL")
        check_above(root, "RESIHP_LOCAL")
        place = root / job.place_name
        if place.exists():  # left by an earlier job of the same folder that was removed since
            shutil.rmtree(place)
        place.mkdir(mode=0o700)
    except OSError as error:
        raise UsageError(f"{root}: cannot hold journals: {error.strerror}; set RESIHP_LOCAL to another") from error
    return place


def all_jobs(in_home: Path | None = None) -> list[Job]:
    """Return the jobs of `in_home`, by default of this home, newest first."""
    jobs = (in_home or home()) / "jobs"
    try:
        folders = list(jobs.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError) as error:
        raise UsageError(f"{jobs}: cannot be listed: {getattr(error, 'strerror', None) or error}") from error
    jobs_by_age: list[tuple[float, str, Job]] = []
    for folder in folders:
        job = Job(folder.name, folder)
        try:
            jobs_by_age.append((job.read().created_at, job.name, job))
        except JobNotFoundError:
            continue  # incomplete, or not readable for us
    return [job for _, _, job in sorted(jobs_by_age, key=lambda item: item[:2], reverse=True)]


def find_job(name: str | None = None, *, acts: bool = False) -> Job:
    """Return the job of this name; without a name, the newest job. If Slurm requeued the job, return its newest run.

    This home is searched first, then the user's other homes. A text that is no job's name may be the beginning of a
    job's id, and a path names the job in that folder. `acts`: the command changes the job, so that a job of another
    home is used only if it is named.

    Raises JobNotFoundError with similar names, or UsageError with the choices if several other homes have a job of this
    name.
    """
    if name is not None and os.sep in name:
        return _in_folder(Path(name).absolute())
    jobs = all_jobs()
    if name is None:
        if not jobs and acts:
            raise no_job_here()
        return jobs[0] if jobs else _newest_elsewhere()
    for job in jobs:
        if _is_named(job.name, name):
            return job
    return _find_elsewhere(name, jobs)


def _find_elsewhere(name: str, jobs: Sequence[Job]) -> Job:
    """Return the job of this name in another home, or the job with this id in any home. `jobs`: the jobs of this
    home."""
    matches, wrong = registry.entries(lambda other: _is_named(other, name))
    by_home = {entry.home: entry for entry in reversed(matches) if is_there(entry)}  # the newest entry of each home
    if len(by_home) == 1:
        return job_of(*by_home.values())
    if by_home:
        choices = "".join(f"\n{_choice(entry)}" for entry in reversed(by_home.values()))
        raise UsageError(f"job {name}: not in {home()}, and in {len(by_home)} others; name one by its folder:{choices}")
    if matches:
        raise JobNotFoundError(f"job {name}: {gone(matches[0])}")
    jobs_with_id = _with_id(name, jobs) if _ID.fullmatch(name) else []
    if len(jobs_with_id) == 1:
        return jobs_with_id[0]
    if jobs_with_id:
        raise UsageError(f"job {name}: {len(jobs_with_id)} jobs have ids that begin with it; give more of it")
    if wrong:
        raise JobNotFoundError(f"job {name}: not in {home()}; whether it is in another folder of yours: {wrong[0]}")
    near = difflib.get_close_matches(name, dict.fromkeys([*(job.name for job in jobs), *registry.names()]), n=3)
    lists = "resihp jobs --all lists all of yours, --all-users those of others"
    hint = f"did you mean {' or '.join(near)}?" if near else lists
    raise JobNotFoundError(f"job {name}: not in {home()}, nor in another folder of yours; {hint}")


def id_of(job: Job) -> str | None:
    """Return the job's id in its ledger (`resihp history jobs`), from job.json or from the first record of its journal;
    None if neither has it."""
    from resihp.record import journal_file
    from resihp.record.job_uuid import job_uuid

    with suppress(JobNotFoundError):
        if uuid := job.read().uuid:
            return uuid
    for path in job.journals:
        with suppress(OSError, ProtocolError, ValueError):
            if (begins := journal_file.first(path)) is not None:
                return job_uuid(begins)
    return None


def _with_id(begins: str, here: Sequence[Job]) -> list[Job]:
    """Return the jobs, in all homes of the user, whose ids begin with `begins`. `here`: the jobs of this home."""
    others = [job_of(entry) for entry in registry.entries()[0] if is_there(entry)]
    candidates = {job.folder: job for job in (*here, *others)}.values()
    return [job for job in candidates if (uuid := id_of(job)) is not None and uuid.startswith(begins)]


def no_job_here() -> JobNotFoundError:
    """Return the error for a home without jobs, with advice."""
    homes, (_, wrong) = other_homes(), registry.entries()
    where = f"; you have jobs in {named(homes)}: set RESIHP_HOME to one of them, or name a job" if homes else ""
    unread = f"; {wrong[0]}" if wrong else ""
    return JobNotFoundError(f"no job in {home()}{where or unread or '; start one with resihp run, or set RESIHP_HOME'}")


def other_homes() -> list[str]:
    """Return the user's other homes that have jobs and are visible from here, the home with the newest job first."""
    here = str(home())
    homes = dict.fromkeys(entry.home for entry in registry.entries()[0] if entry.home != here)
    return [folder for folder in homes if Path(folder, "jobs").is_dir()]


def named(homes: Sequence[str]) -> str:
    """Return the first homes as text, with the number of the others."""
    more = len(homes) - MAX_HOMES
    return ", ".join(homes[:MAX_HOMES]) + (f" and {more} more" if more > 0 else "")


def is_there(entry: registry.KnownJob) -> bool:
    """Return whether the folder of a registered job still contains that job."""
    try:
        return job_of(entry).read().created_at == entry.began_at
    except JobNotFoundError:
        return False


def gone(entry: registry.KnownJob) -> str:
    """Explain why a registered job's folder is missing."""
    if entry.state == registry.QUEUED:
        at = f"{datetime.fromtimestamp(entry.began_at, UTC):%m-%d %H:%M:%S} UTC"
        return f"submitted {at} and {_why_not_begun(entry)}"
    if entry.host != socket.gethostname():
        return f"its folder {entry.folder} is not seen from here; it was made on {entry.host}: look there"
    return f"its folder {entry.folder} is gone; resihp jobs --all lists the others"


def _why_not_begun(entry: registry.KnownJob) -> str:
    """Tell whether a submitted job still waits in Slurm. Without an answer of Slurm, it counts as waiting."""
    from resihp.slurm.commands import CommandLine
    from resihp.slurm.errors import SlurmError

    number, slurm = entry.slurm_job, CommandLine(timeout_s=SLURM_TIMEOUT_S)
    waits = f"has not begun; squeue --start --jobs={number} shows when it may begin, scancel {number} ends it"
    try:
        if entry.cluster and slurm.cluster() != entry.cluster:
            return waits
        view = slurm.job(number)
    except SlurmError:
        return waits
    if view is not None and view.active:
        return waits
    state = f"is {view.state}" if view is not None else "is no longer known to Slurm"
    return f"never began: Slurm job {number} {state}; sacct -j {number} has more where Slurm keeps accounts"


def job_of(entry: registry.KnownJob) -> Job:
    return Job(entry.name, Path(entry.folder))


def _is_named(job: str, name: str) -> bool:
    return job == name or ((run := SLURM_NAME.fullmatch(job)) is not None and run[1] == name)


def _in_folder(folder: Path) -> Job:
    job = Job(folder.name, folder)
    job.read()
    return job


def is_our_home(home: Path) -> bool:
    """Return whether a home exists and belongs to us, or root: then its files are trusted, and may be changed."""
    try:
        check_our_home(home)
    except OwnershipError:
        return False
    return home.is_dir()


def check_our_home(home: Path) -> Path:
    """Return the home if it belongs to us or root, or does not exist yet.

    Raises OwnershipError if others could have put files into it: such files are neither trusted nor overwritten.
    """
    try:
        check_folder(home)
        check_above(home)
    except FileNotFoundError:
        return home
    except (OSError, ValueError) as error:
        raise OwnershipError(f"{home}: cannot be checked: {error}; set RESIHP_HOME to another") from error
    return home


def our_jobs(in_home: Path | None = None) -> list[OurJob]:
    """Return the jobs of `all_jobs` that are ours."""
    return [own for job in all_jobs(in_home) if (own := ours(job)) is not None]


def _newest_elsewhere() -> Job:
    entry = next(filter(is_there, registry.entries()[0]), None)
    if entry is None:
        raise no_job_here()
    print(
        f"resihp: no job in {home()}; using your newest, {entry.name} in {entry.folder} (host {entry.host})",
        file=sys.stderr,
    )
    return job_of(entry)


def _choice(entry: registry.KnownJob) -> str:
    state = entry.state
    if entry.ended_at is None and job_of(entry).supervisor() is None:
        state = "not running"
    began = datetime.fromtimestamp(entry.began_at, UTC)
    return f"{entry.folder} (host {entry.host}, began {began:%Y-%m-%d %H:%M} UTC, {state})"


def hold_lock(job: OurJob) -> int:
    """Take the job's lock until this process ends, and return its descriptor. Raises UsageError if another process
    keeps the lock."""
    deadline = time.monotonic() + LOCK_PATIENCE_S
    while (lock := take_lock(job)) is None:
        if time.monotonic() > deadline:
            raise UsageError(f"job {job.name}: another supervisor holds {job.folder / 'supervisor.lock'}")
        time.sleep(0.05)
    return lock
