"""Jobs on disk: creating a job's folder, finding a job by its name, and ending a job whose supervisor is dead.

A job is named after its Slurm job, `1234`, or `1234_5` in an array, and after Slurm has requeued that, `1234-r1`,
`1234-r2`; a further one in the same allocation is `1234-2`; without Slurm it is `local-<n>`. `wrapper.job_files`
describes its folder. A registry (`wrapper.registry`) knows a user's jobs of all homes, so that a name is understood in
any folder. Used by every command that names a job. Never talks to a running job.
"""

from __future__ import annotations

import difflib
import hashlib
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

from resihp.errors import JobNotFoundError, LedgerError, OwnershipError, ProtocolError, UsageError
from resihp.process import identity
from wrapper import registry
from wrapper.file_locks import LOCK_NAME as LOCK_NAME
from wrapper.file_locks import NO_LOCKS as NO_LOCKS
from wrapper.file_locks import lock_file as lock_file
from wrapper.job_files import SLURM_NAME, JobFile, entry_of, has_ended, is_journal_of, is_succeeded
from wrapper.job_files import Job as Job
from wrapper.job_files import OurJob as OurJob
from wrapper.job_files import SupervisorFile as SupervisorFile
from wrapper.job_files import home as home
from wrapper.job_files import not_ours as not_ours
from wrapper.job_files import note_end as note_end
from wrapper.job_files import ours as ours
from wrapper.job_files import slurm_job_of as slurm_job_of
from wrapper.job_files import take_lock as take_lock
from wrapper.strict_modes import check_above, check_folder, is_own, read_plain
from wrapper.strict_modes import write_private as write_private

if TYPE_CHECKING:
    from resihp.record.journal import Record

LOCK_PATIENCE_S = 2.0
"""How long to wait for the lock: commands that check whether a job is alive hold it for a moment."""
MAX_HOMES = 3
"""Most other homes that are named in a message."""

_ID = re.compile(r"(?!\d+$)[0-9a-f]{8}[0-9a-f-]{0,28}")
"""A job's id in its ledger, or its beginning; digits alone are a Slurm job's number, perhaps a mistyped one."""
_LOCAL_NAME = re.compile(r"local-(\d+)")


def close_home() -> None:
    """Make sure that nobody else can put a job into this home, if it exists.

    `jobs` is created by us alone: if an older version left its mode to the umask, write permission of others is
    removed. Raises OwnershipError if the home, or a folder above it, is writable by others.
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
    """Create the folder of all jobs, for its owner alone whatever the umask. Raises OSError, OwnershipError."""
    jobs = home() / "jobs"
    for folder in (jobs.parent, jobs):
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700, parents=True)
    close_home()
    return jobs


def create_local_job() -> OurJob:
    """Create folder, key and journal folder of the next `local-<n>`; safe against other processes that do the same."""
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
    """Create folder, key and journal folder of a run of this Slurm job."""
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
    """Return the runs of this Slurm job, newest first; `in_home`: of that home."""
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
    """Create a folder on local disk for this job alone: names repeat between homes, so its name has a digest of the
    job's folder.

    Raises UsageError if the folder for all jobs is writable by others, who could forge our files there.
    """
    root = Path(os.environ.get("RESIHP_LOCAL") or f"/var/tmp/resihp-{os.getuid()}").absolute()
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if root.is_symlink() and not os.environ.get("RESIHP_LOCAL"):
            raise UsageError(f"{root}: is a link; set RESIHP_LOCAL to a folder of yours on local disk")
        check_folder(root, "RESIHP_LOCAL")
        check_above(root, "RESIHP_LOCAL")
        place = root / _place_name(job)
        if place.exists():  # of an earlier job that was removed since
            shutil.rmtree(place)
        place.mkdir(mode=0o700)
    except OSError as error:
        raise UsageError(f"{root}: cannot hold journals: {error.strerror}; set RESIHP_LOCAL to another") from error
    return place


def _place_name(job: Job) -> str:
    """Return the name of the journal's folder, assuming that the job's folder has not been moved."""
    digest = hashlib.sha256(str(job.folder.resolve()).encode()).hexdigest()[:10]
    return f"{job.name}-{digest}"


def all_jobs(in_home: Path | None = None) -> list[Job]:
    """Return the jobs of this home, or of the one named, newest first."""
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
            continue  # incomplete, or not ours
    return [job for _, _, job in sorted(jobs_by_age, key=lambda item: item[:2], reverse=True)]


def find_job(name: str | None = None, *, acts: bool = False) -> Job:
    """Return the job of that name, the newest one without a name; of a Slurm job that was requeued, its newest run.

    This home is searched first, then the user's jobs of all other homes; a string that is no name may be the beginning
    of an id. A path names the job in that folder. `acts`: the command changes the job, so a job of another home has to
    be named.

    Raises JobNotFoundError with similar names, UsageError with the choices if several other homes have that name.
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
    matches, wrong = registry.entries(lambda other: _is_named(other, name))
    by_home = {entry.home: entry for entry in reversed(matches) if is_there(entry)}  # the newest of each home
    if len(by_home) == 1:
        return job_of(*by_home.values())
    if by_home:
        choices = "".join(f"\n{_choice(entry)}" for entry in reversed(by_home.values()))
        raise UsageError(f"job {name}: not in {home()}, and in {len(by_home)} others; name one by its folder:{choices}")
    if matches:
        raise JobNotFoundError(f"job {name}: {gone(matches[0])}")
    if _ID.fullmatch(name) and (of_that_id := _with_id(name, jobs)):
        if len(of_that_id) == 1:
            return of_that_id[0]
        raise UsageError(f"job {name}: {len(of_that_id)} jobs have ids that begin with it; give more of it")
    if wrong:
        raise JobNotFoundError(f"job {name}: not in {home()}; whether it is in another folder of yours: {wrong[0]}")
    near = difflib.get_close_matches(name, dict.fromkeys([*(job.name for job in jobs), *registry.names()]), n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else "resihp jobs --all lists all jobs"
    raise JobNotFoundError(f"job {name}: not in {home()}, nor in another folder of yours; {hint}")


def id_of(job: Job) -> str | None:
    """Return the job's id in its ledger (`resihp history jobs`), from job.json, or from the first record of its
    journal; None if neither has it."""
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
    """Return the jobs, of this home and of all others, whose ids begin so."""
    others = [job_of(entry) for entry in registry.entries()[0] if is_there(entry)]
    candidates = {job.folder: job for job in (*here, *others)}.values()
    return [job for job in candidates if (uuid := id_of(job)) is not None and uuid.startswith(begins)]


def no_job_here() -> JobNotFoundError:
    """Return the error for a home without jobs."""
    homes, (_, wrong) = other_homes(), registry.entries()
    where = f"; you have jobs in {named(homes)}: set RESIHP_HOME to one of them, or name a job" if homes else ""
    unread = f"; {wrong[0]}" if wrong else ""
    return JobNotFoundError(f"no job in {home()}{where or unread or '; start one with resihp run, or set RESIHP_HOME'}")


def other_homes() -> list[str]:
    """Return other homes of the user with jobs that are visible from here, the one with the newest job first."""
    here = str(home())
    homes = dict.fromkeys(entry.home for entry in registry.entries()[0] if entry.home != here)
    return [folder for folder in homes if Path(folder, "jobs").is_dir()]


def named(homes: Sequence[str]) -> str:
    """Return the first homes, and the number of further ones."""
    more = len(homes) - MAX_HOMES
    return ", ".join(homes[:MAX_HOMES]) + (f" and {more} more" if more > 0 else "")


def is_there(entry: registry.KnownJob) -> bool:
    """Return whether the folder of a registered job still holds that job."""
    try:
        return job_of(entry).read().created_at == entry.began_at
    except JobNotFoundError:
        return False


def gone(entry: registry.KnownJob) -> str:
    """Explain why a registered job's folder is missing."""
    if entry.state == registry.QUEUED:
        at = f"{datetime.fromtimestamp(entry.began_at, UTC):%m-%d %H:%M:%S} UTC"
        number = entry.slurm_job
        how = f"squeue --start --jobs={number} shows when it may begin, scancel {number} ends it"
        return f"submitted {at} and has not begun; {how}"
    if entry.host != socket.gethostname():
        return f"its folder {entry.folder} is not seen from here; it was made on {entry.host}: look there"
    return f"its folder {entry.folder} is gone; resihp jobs --all lists the others"


def job_of(entry: registry.KnownJob) -> Job:
    return Job(entry.name, Path(entry.folder))


def _is_named(job: str, name: str) -> bool:
    return job == name or ((run := SLURM_NAME.fullmatch(job)) is not None and run[1] == name)


def _in_folder(folder: Path) -> Job:
    job = Job(folder.name, folder)
    job.read()
    return job


def is_our_home(home: Path) -> bool:
    """Return whether a home exists and is ours, or root's: then its files are trusted, and may be changed."""
    try:
        check_our_home(home)
    except OwnershipError:
        return False
    return home.is_dir()


def check_our_home(home: Path) -> Path:
    """Return a home that is ours, or root's, or does not exist yet. Raises OwnershipError if others could have put
    files into it, which are neither trusted nor overwritten."""
    try:
        check_folder(home)
        check_above(home)
    except FileNotFoundError:
        return home
    except (OSError, ValueError) as error:
        raise OwnershipError(f"{home}: cannot be checked: {error}; set RESIHP_HOME to another") from error
    return home


def our_jobs(in_home: Path | None = None) -> list[OurJob]:
    """Return those of `all_jobs` that are ours."""
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
    """Take the job's lock until this process ends. Raises UsageError if another process has it."""
    deadline = time.monotonic() + LOCK_PATIENCE_S
    while (lock := take_lock(job)) is None:
        if time.monotonic() > deadline:
            raise UsageError(f"job {job.name}: another supervisor holds {job.folder / 'supervisor.lock'}")
        time.sleep(0.05)
    return lock


def finish_dead_job(job: OurJob, reason: str = "the supervisor was found dead", *, locked: bool = False) -> bool:
    """Write the end of a job that has no supervisor any more; return whether that was needed.

    Does nothing while a supervisor holds the lock, for a job that has ended or has not begun, if the journal is on
    another machine, for another user's job, and if the folder is read-only. A job's own record of its end is kept: if
    its exit code or the copy of its journal exists, nothing is overwritten, and an original that lacks the end is
    restored from the copy. The ledger catches up with the journal. `locked`: our guardian has the lock for us.
    """
    from resihp.record import journal, journal_file

    path = job.journal_file
    if not job.is_writable or not is_own(path.parent) or not path.exists():
        return False
    if path.parent.name != _place_name(job) and not job.may_name(path):
        # its folder may come from another user's archive, and that file may be another job's, or not a journal
        return False
    if job.read().host != socket.gethostname() and not locked:
        return False  # the journal is an earlier job's of that name on this machine
    if is_succeeded(path):
        return False
    lock = None if locked else take_lock(job)
    if lock is None and not locked:
        return False
    try:
        try:
            records = journal_file.read_packed(path)
        except ProtocolError as error:
            if _is_restored(job, []):
                return False
            raise ProtocolError(f"job {job.name}: {error}") from error
        if not records or has_ended(records) or not is_journal_of(job.read().uuid, records):
            return False
        if _is_restored(job, records) or job.exit_code_file.exists():
            return False
        writer = journal_file.Journal(path)
        entry = journal.JobEnded(exit_code=1, state="abnormal", reason=reason)
        writer.append(entry, time.time())
        writer.close()
        copy_journal(job)
        write_private(job.exit_code_file, b"1\n")
        note_end(job)
        url = None
        try:
            url = job.ledger_url
        except LedgerError as error:
            _warn(f"the end of job {job.name} is not in its ledger: {error}")
        if url is not None:
            from db.writing.catch_up import catch_up

            catch_up(url, job.folder, path)
    except OSError as error:
        if locked:
            raise
        _warn(f"the end of job {job.name} cannot be written: {error.filename or job.folder}: {error.strerror}")
        return False
    finally:
        if lock is not None:
            os.close(lock)
    return True


def _warn(text: str) -> None:
    printable = "".join(letter if letter.isprintable() else "?" for letter in text)
    print(f"resihp: warning: {printable}", file=sys.stderr)


def _is_restored(job: OurJob, records: Sequence[Record]) -> bool:
    """Restore the original journal, whose content is `records`, from its copy, if the copy has the job's end and begins
    as the original does; return whether that was done."""
    from resihp.record import journal_file

    try:
        copied = journal_file.read_packed(job.journal_copy)
    except (OSError, ProtocolError):
        return False
    if not has_ended(copied) or not is_journal_of(job.read().uuid, copied) or (records and copied[0] != records[0]):
        return False
    with suppress(OSError):  # for example if a folder has the journal's name
        write_private(job.journal_file, read_plain(job.journal_copy, journal_file.MAX_FILE_BYTES), sync=True)
        return True
    return False


def copy_journal(job: OurJob) -> None:
    """Put a copy of the journal beside the job's other files."""
    source = job.journal_file
    if source.exists():
        write_private(job.journal_copy, source.read_bytes())
