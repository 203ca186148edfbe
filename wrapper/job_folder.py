"""Jobs on disk: where a job's files are, who holds it, and what becomes of one whose supervisor is dead.

A job's folder is `<RESIHP_HOME, default ./.resihp>/jobs/<job>/`, readable by its owner alone:

    job.json          name, host, journal, ledger                key              32 random bytes
    run.json          what was asked for (`wrapper.config.run_spec`)     supervisor.json  address and pid, while it runs
    supervisor.lock   held by the guardian                       logs/            one file for each process
    journal           a copy, made when the job has ended        checkpoints/     unless configured elsewhere

A job is called after the Slurm job that it runs in, `1234`, or `1234_5` in an array, and once Slurm has run that again
`1234-r1`, `1234-r2`; a further one in the same allocation is `1234-2`; without Slurm it is `local-<n>`.

The journal itself is on local disk, `<RESIHP_LOCAL, default /var/tmp/resihp-<uid>>/<job>-<digest of the folder>/`.
Used by every command that names a job. Never talks to a running job. What is run must be ours alone
(`wrapper.strict_modes`); what is only shown may be anybody's who lets us read it, and is never written then.
"""

from __future__ import annotations

import difflib
import errno
import fcntl
import hashlib
import itertools
import os
import re
import shutil
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from resihp.errors import JobNotFoundError, ProtocolError, UsageError
from resihp.protocol.framing import KEY_BYTES
from resihp.record import journal, journal_file
from wrapper.strict_modes import check_above, check_folder, is_own, read_own, read_plain

LOCK_PATIENCE_S = 2.0
"""Commands that look whether a job is alive hold its lock for a moment."""

LOCK_NAME = "supervisor.lock"
NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})
"""What flock answers on Lustre without -o flock, and on file systems that have no locks at all."""

_LOCAL_NAME = re.compile(r"local-(\d+)")
_SLURM_NAME = re.compile(r"(\d+(?:_\d+)?)(-r\d+)?(-\d+)?")


class JobFile(msgspec.Struct, frozen=True, kw_only=True):
    """job.json. `created_at`: UTC, seconds since 1970."""

    name: str
    host: str
    created_at: float
    journal: str
    ledger: str | None = None


class SupervisorFile(msgspec.Struct, frozen=True, kw_only=True):
    """supervisor.json: where operators reach the supervisor."""

    host: str
    port: int
    pid: int


@dataclass(frozen=True)
class Job:
    """One job's folder, and the names in it."""

    name: str
    folder: Path

    @property
    def key_file(self) -> Path:
        return self.folder / "key"

    @property
    def run_file(self) -> Path:
        return self.folder / "run.json"

    @property
    def supervisor_file(self) -> Path:
        return self.folder / "supervisor.json"

    @property
    def exit_code_file(self) -> Path:
        return self.folder / "exit_code"

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def journal_copy(self) -> Path:
        return self.folder / "journal"

    @property
    def journal_file(self) -> Path:
        return Path(self.read().journal)

    @property
    def key(self) -> bytes:
        return read_own(self.key_file, root_may=True)  # an administrator may speak to any job

    def read(self) -> JobFile:
        """job.json. Raises JobNotFoundError if the folder holds no job of this version."""
        try:
            return msgspec.json.decode(read_plain(self.folder / "job.json"), type=JobFile)
        except (OSError, UnicodeError, RecursionError, msgspec.DecodeError) as error:
            raise JobNotFoundError(f"job {self.name}: {self.folder} holds no job of this version: {error}") from error

    def read_own(self, name: str) -> bytes:
        """A file of it that decides what runs as us. Raises OwnershipError if others could have written that, or what
        leads to it: job.json and the folders, up to RESIHP_HOME, and the one with the journal where it is here."""
        for folder in (self.folder.parent.parent, self.folder.parent, self.folder):
            check_folder(folder)
        check_above(self.folder.parent.parent)
        with suppress(FileNotFoundError):
            file = msgspec.json.decode(read_own(self.folder / "job.json"), type=JobFile)
            check_folder(Path(file.journal).parent, "RESIHP_LOCAL")
        return read_own(self.folder / name)

    def set_ledger(self, url: str) -> None:
        """Remember where the job's ledger is, for the commands that read it."""
        write_private(self.folder / "job.json", msgspec.json.encode(msgspec.structs.replace(self.read(), ledger=url)))

    def move_journal(self, path: Path) -> None:
        """Remember that the journal is on this machine now."""
        file = msgspec.structs.replace(self.read(), journal=str(path), host=socket.gethostname())
        write_private(self.folder / "job.json", msgspec.json.encode(file))

    def supervisor(self) -> SupervisorFile | None:
        """Where the supervisor listens; None when none has the job's lock."""
        if not _is_locked(self):
            return None
        try:
            return msgspec.json.decode(read_plain(self.supervisor_file), type=SupervisorFile)
        except (OSError, UnicodeError, RecursionError, msgspec.DecodeError):
            return None  # it has just started, or is about to be gone

    def records(self) -> list[journal.Record]:
        """What the journal tells, from the copy when the original is not on this machine; old iterations are packed."""
        for path in (self.journal_file, self.journal_copy):
            if path.exists():
                return journal_file.read_packed(path)
        return []


def home() -> Path:
    return Path(os.environ.get("RESIHP_HOME") or ".resihp").absolute()


def write_private(path: Path, content: bytes, *, sync: bool = False) -> None:
    """Write a file that only its owner can read, whole or not at all; with `sync`, also if the machine fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with suppress(FileNotFoundError):
        temporary.unlink()  # of an earlier process of that number, or put there by somebody to be written into
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        if sync:
            file.flush()
            os.fsync(file.fileno())
    temporary.replace(path)


def close_home() -> None:
    """See to it that nobody else can put a job into this home, if there is one.

    `jobs` is made by us alone: where an older version left it to the umask, others may no longer write it. Raises
    OwnershipError if the home, or what is above it, is open to others.
    """
    jobs = home() / "jobs"
    if not jobs.parent.is_dir():
        return
    check_folder(jobs.parent)
    check_above(jobs.parent)
    with suppress(FileNotFoundError):
        found = jobs.stat()
        if found.st_uid == os.geteuid() and found.st_mode & 0o022:
            jobs.chmod(found.st_mode & 0o7755)
        check_folder(jobs)


def _make_jobs() -> Path:
    """The folder of all jobs, for its owner alone whatever the umask. Raises OSError, OwnershipError."""
    jobs = home() / "jobs"
    for folder in (jobs.parent, jobs):
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700, parents=True)
    close_home()
    return jobs


def create_local_job() -> Job:
    """Make the folder, key and journal place of the next `local-<n>`; safe against others doing the same."""
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
        return _furnish(Job(f"local-{number}", jobs / f"local-{number}"))
    except OSError as error:
        raise UsageError(f"{jobs}: cannot make a job's folder: {error.strerror}; set RESIHP_HOME to another") from error


def create_slurm_job(job_id: str, restart_count: int) -> Job:
    """Make the folder, key and journal place of a run of this Slurm job."""
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
        return _furnish(Job(name, jobs / name))
    except OSError as error:
        raise UsageError(
            f"{jobs}: cannot make a job's folder: {error.strerror}; set RESIHP_HOME to a folder that all nodes share"
        ) from error


def runs_of(job_id: str) -> list[Job]:
    """What has run in this Slurm job, newest first."""
    return [job for job in all_jobs() if slurm_job_of(job.name) == job_id]


def slurm_job_of(name: str) -> str | None:
    """The Slurm job that a run of this name was in; None for one without Slurm."""
    match = _SLURM_NAME.fullmatch(name)
    return match[1] if match else None


def _furnish(job: Job) -> Job:
    job.logs.mkdir(mode=0o700)
    write_private(job.key_file, os.urandom(KEY_BYTES))
    place = _local_place(job)
    file = JobFile(name=job.name, host=socket.gethostname(), created_at=time.time(), journal=str(place / "journal"))
    write_private(job.folder / "job.json", msgspec.json.encode(file))
    return job


def _local_place(job: Job) -> Path:
    """A folder on local disk that no other job shares: names repeat between homes, so their folder's digest is in it.

    Raises UsageError if the folder for all jobs is open to somebody else, who could forge what we find there.
    """
    root = Path(os.environ.get("RESIHP_LOCAL") or f"/var/tmp/resihp-{os.getuid()}").absolute()
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if root.is_symlink() and not os.environ.get("RESIHP_LOCAL"):
            raise UsageError(f"{root}: is a link; set RESIHP_LOCAL to a folder of yours on local disk")
        check_folder(root, "RESIHP_LOCAL")
        check_above(root, "RESIHP_LOCAL")
        digest = hashlib.sha256(str(job.folder.resolve()).encode()).hexdigest()[:10]
        place = root / f"{job.name}-{digest}"
        if place.exists():  # of a job in a folder that was removed since
            shutil.rmtree(place)
        place.mkdir(mode=0o700)
    except OSError as error:
        raise UsageError(f"{root}: cannot hold journals: {error.strerror}; set RESIHP_LOCAL to another") from error
    return place


def all_jobs() -> list[Job]:
    """The jobs of this home, newest first."""
    jobs = home() / "jobs"
    if not jobs.is_dir():
        return []
    found: list[tuple[float, str, Job]] = []
    for folder in jobs.iterdir():
        job = Job(folder.name, folder)
        try:
            found.append((job.read().created_at, job.name, job))
        except JobNotFoundError:
            continue  # half made, or not ours
    return [job for _, _, job in sorted(found, key=lambda item: item[:2], reverse=True)]


def find_job(name: str | None = None) -> Job:
    """The job of that name, the newest one without a name; of a Slurm job that was run again, its newest run.

    Raises JobNotFoundError naming near matches.
    """
    jobs = all_jobs()
    if name is None:
        if not jobs:
            raise JobNotFoundError(f"no job in {home()}; start one with resihp run, or set RESIHP_HOME")
        return jobs[0]
    for job in jobs:
        if job.name == name or ((run := _SLURM_NAME.fullmatch(job.name)) and run[1] == name):
            return job
    near = difflib.get_close_matches(name, [job.name for job in jobs], n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"it holds {len(jobs)} others"
    raise JobNotFoundError(f"job {name}: not in {home()}; {hint}")


def take_lock(job: Job) -> int | None:
    """Become the one who may write the job's journal: a descriptor to keep open, or None if somebody else is."""
    return lock_file(job.folder / LOCK_NAME)


def lock_file(path: Path, *, look: bool = False) -> int | None:
    """Lock a file, made if it is not there, while the descriptor is open; None if somebody else has it.

    `look`: only to see whether somebody has it; nothing is made or written, and others may look as well. Raises
    UsageError where the file system has no locks.
    """
    flags = os.O_RDONLY if look else os.O_RDWR | os.O_CREAT
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if look else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError as error:
        os.close(descriptor)
        if error.errno not in NO_LOCKS:
            raise
        setting = "RESIHP_HOME" if path.name == LOCK_NAME else "RESIHP_LOCAL"
        raise UsageError(
            f"{path}: its file system takes no locks ({error.strerror}), so two supervisors could lead the job; "
            f"have it mounted with -o flock (Lustre), or set {setting} to a folder on another"
        ) from error
    return descriptor


def hold_lock(job: Job) -> int:
    """Take the job's lock, for good. Raises UsageError when somebody else has it."""
    deadline = time.monotonic() + LOCK_PATIENCE_S
    while (lock := take_lock(job)) is None:
        if time.monotonic() > deadline:
            raise UsageError(f"job {job.name}: another supervisor holds {job.folder / 'supervisor.lock'}")
        time.sleep(0.05)
    return lock


def _is_locked(job: Job) -> bool:
    """Whether somebody supervises the job: from where it was started, or from another node, if that is this one."""
    try:
        descriptor = take_lock(job) if is_own(job.folder) else lock_file(job.folder / LOCK_NAME, look=True)
    except (FileNotFoundError, PermissionError):
        return False  # another user's job: nobody has led it yet, or we may not even look
    if descriptor is None:
        return True
    os.close(descriptor)
    return _is_succeeded(job.journal_file)


def _is_succeeded(path: Path) -> bool:
    """Whether an agent of this machine watches over a successor, which writes this journal."""
    lock = path.with_suffix(".lock")
    try:
        descriptor = lock_file(lock, look=True)
    except (FileNotFoundError, PermissionError):
        return False
    if descriptor is None:
        return True
    os.close(descriptor)
    return False


def finish_dead_job(job: Job, reason: str = "the supervisor was found dead", *, locked: bool = False) -> bool:
    """Write the end of a job that nobody supervises any more; True if that was to be done.

    A no-op while a supervisor holds the lock, for a job that has ended or has not begun, where the journal is on
    another machine, and for another user's. The ledger catches up with the journal. `locked`: our guardian has the
    lock for us.
    """
    path = job.journal_file
    if not is_own(job.folder) or not is_own(path.parent) or not path.exists():
        return False
    if _is_succeeded(path):
        return False
    lock = None if locked else take_lock(job)
    if lock is None and not locked:
        return False
    try:
        try:
            records = journal_file.read_packed(path)
        except ProtocolError as error:
            raise ProtocolError(f"job {job.name}: {error}") from error
        if not records or any(isinstance(record.entry, journal.JobEnded) for record in records):
            return False
        writer = journal_file.Journal(path)
        entry = journal.JobEnded(exit_code=1, state="abnormal", reason=reason)
        writer.append(entry, time.time())
        writer.close()
        copy_journal(job)
        write_private(job.exit_code_file, b"1\n")
        if (url := job.read().ledger) is not None:
            from db.writer import catch_up

            catch_up(url, job.folder, path)
    finally:
        if lock is not None:
            os.close(lock)
    return True


def copy_journal(job: Job) -> None:
    """Put a copy of the journal beside the job's other files."""
    source = job.journal_file
    if source.exists():
        write_private(job.journal_copy, source.read_bytes())
