"""A job's folder: `Job`, for a folder of any user, and `OurJob`, for a folder that only we can have written.

Decides whether a job is ours, whether it has a leader, and which journal belongs to it. Every function that writes
takes an `OurJob`, and `ours` is the only way to turn a `Job` into one. Never contacts a running job. Used through
`resihp.wrapper.job_folder`.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from resihp.errors import JobNotFoundError, LedgerError, OwnershipError
from resihp.process import identity
from resihp.wrapper import registry
from resihp.wrapper.file_locks import LOCK_NAME, lock_file
from resihp.wrapper.job_files.contents import (
    MAX_EXIT_CODE_BYTES,
    MAX_PROGRESS_BYTES,
    READ_ERRORS,
    JobFile,
    OriginalFolder,
    ProgressFile,
    SupervisorFile,
)
from resihp.wrapper.job_files.journals import best_of
from resihp.wrapper.job_files.registered import note_figures
from resihp.wrapper.strict_modes import (
    check_above,
    check_folder,
    check_links,
    is_own,
    read_own,
    read_plain,
    write_private,
)

if TYPE_CHECKING:
    from resihp.record import journal

STARTS_S = 60.0
"""How long a job may take to start, in seconds. A job without a supervisor and a journal counts as never begun
afterwards."""


@dataclass(frozen=True, eq=False)
class Job:
    """A job's folder, of any user, and the paths in it. Its files are not trusted."""

    name: str
    folder: Path

    def __eq__(self, job: object) -> bool:
        """Return whether the jobs have the same name and folder. A `Job` and an `OurJob` may be equal."""
        return isinstance(job, Job) and (self.name, self.folder) == (job.name, job.folder)

    def __hash__(self) -> int:
        return hash((self.name, self.folder))

    @property
    def home(self) -> Path:
        """The RESIHP_HOME that contains the job."""
        return self.folder.parent.parent

    @property
    def place_name(self) -> str:
        """Name of the folder on local disk that has the journal, unless the job's folder was moved."""
        digest = hashlib.sha256(str(self.folder.resolve()).encode()).hexdigest()[:10]
        return f"{self.name}-{digest}"

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
    def progress_file(self) -> Path:
        return self.folder / "progress.json"

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
    def journals(self) -> tuple[Path, ...]:
        """Paths from which the journal may be read. For another user's job, that is only the copy in its folder."""
        own = ours(self)
        return (self.journal_copy,) if own is None else own.journals

    @property
    def key(self) -> bytes:
        return read_own(self.key_file, root_may=True)  # an administrator may contact any user's job

    def read(self) -> JobFile:
        """Read job.json. Raises JobNotFoundError if the folder does not contain a job of this version."""
        try:
            check_links(self.folder.parent, self.folder)
            return msgspec.json.decode(read_plain(self.folder / "job.json"), type=JobFile)
        except OwnershipError as error:
            raise JobNotFoundError(f"job {self.name}: {error}") from error
        except READ_ERRORS as error:
            why = f"holds no job of this version: {error}"
            if isinstance(error, FileNotFoundError):
                why = "does not exist, or holds no job"
            elif isinstance(error, PermissionError):
                why = (
                    "cannot be read: permission denied; resihp jobs --all-users lists what its user shares, if the site"
                )
                why += " collects that"
            raise JobNotFoundError(f"job {self.name}: {self.folder} {why}") from error

    def read_own(self, name: str) -> bytes:
        """Read a file that decides which programs run as us.

        Raises OwnershipError if others could have written the file, job.json, one of the folders up to RESIHP_HOME or,
        if it is on this machine, the journal's folder.
        """
        with suppress(FileNotFoundError):
            file = check_ours(self)
            check_folder(Path(file.journal).parent, "RESIHP_LOCAL")
        return read_own(self.folder / name)

    def now(self, path: Path) -> Path:
        """Translate a path that the job recorded, if the job's folder or home was moved since: return the same path
        under the new place. At the old path there may be other files now."""
        with suppress(*READ_ERRORS):
            made = Path(msgspec.json.decode(read_plain(self.run_file), type=OriginalFolder).folder)
            for old, new in ((made, self.folder), (made.parent.parent, self.home)):
                if made.is_absolute() and path.is_relative_to(old):
                    return new / path.relative_to(old)
        return path

    @property
    def is_led(self) -> bool:
        """Whether a process holds the job's lock, so that the job is running or starting."""
        return _is_locked(self)

    @property
    def is_over(self) -> bool:
        """Whether the job has ended and no longer has a supervisor."""
        return self.exit_code_file.exists() and self.supervisor() is None

    def exit_code(self) -> int | None:
        """Return the exit code of the supervisor; None if none is recorded."""
        with suppress(OSError, ValueError):
            code = int(read_plain(self.exit_code_file, MAX_EXIT_CODE_BYTES))
            return code if abs(code) < 1 << 31 else None
        return None

    def never_began(self, now_s: float) -> bool:
        """Return whether the job was created on this machine but never began: it has neither a supervisor nor a
        journal, and was created more than `STARTS_S` ago or by a process that has ended. False for another user's job,
        as this is unknown."""
        if (own := ours(self)) is None:
            return False
        file = own.read()
        if file.host != socket.gethostname() or own.is_led or own.journal_file.exists():
            return False
        return file.created_at < now_s - STARTS_S or _is_gone(file.starter)

    def supervisor(self) -> SupervisorFile | None:
        """Return the supervisor's address; None if no process holds the job's lock, or if the address cannot be
        read."""
        if not self.is_led:
            return None
        try:
            return msgspec.json.decode(read_plain(self.supervisor_file), type=SupervisorFile)
        except READ_ERRORS:
            return None  # the supervisor has just started, or is about to exit

    def progress(self, began_at: float) -> ProgressFile | None:
        """Return the progress of the job that began at `began_at`; None if no supervisor of that job has written it."""
        try:
            file = msgspec.json.decode(read_plain(self.progress_file, MAX_PROGRESS_BYTES), type=ProgressFile)
        except READ_ERRORS:
            return None
        return file if file.began_at == began_at else None

    def records(self) -> list[journal.Record]:
        """Return the records of the best journal file (`best_journal`); old iterations are packed."""
        return self.best_journal()[1]

    def best_journal(self) -> tuple[Path | None, list[journal.Record]]:
        """Return the path and records of the journal file with the most complete history: the original or the copy. The
        path is None if there is no file.

        Raises ProtocolError or OSError if a file cannot be read and there is no other.
        """
        return best_of(self.journals, self.read().uuid)


class OurJob(Job):
    """A job's folder that, with all folders up to the home, only we or root can have written: the paths in its files
    are trusted.

    Created by `ours`, and by functions that have just created the folder or checked it (`Job.read_own`).
    """

    @property
    def journal_file(self) -> Path:
        return Path(self.read().journal)

    @property
    def journals(self) -> tuple[Path, ...]:
        """Paths where the journal may be: the original, if it is on this machine, and the copy."""
        return self.journal_file, self.journal_copy

    def may_name(self, path: Path) -> bool:
        """Return whether job.json may name this path: any path in the job's home, and any other path if the user's
        registry has the job.

        A user who has unpacked an archive or cloned a repository owns the files in it, but has not written them.
        """
        file = self.read()
        if Path(os.path.realpath(path)).is_relative_to(os.path.realpath(self.home)):
            return True
        return registry.knows(file.name, self._folders(), file.created_at)

    @property
    def known(self) -> registry.KnownJob | None:
        """The job's entry in the user's registry, even if the job's folder was moved since; None without one."""
        file = self.read()
        return registry.known(file.name, self._folders(), file.created_at)

    def _folders(self) -> tuple[str, ...]:
        """Return the job's present folder, and the folder in which it was created."""
        return tuple(dict.fromkeys((str(self.folder), str(self._made_in()))))

    def _made_in(self) -> Path:
        """Return the folder in which the job was created, from run.json; the present folder if that is not recorded."""
        with suppress(*READ_ERRORS):
            return Path(msgspec.json.decode(read_plain(self.run_file), type=OriginalFolder).folder)
        return self.folder

    @property
    def ledger_url(self) -> str | None:
        """The URL of the job's ledger; None if none is recorded. Raises JobNotFoundError, LedgerError.

        Connection parameters that `check_stored` refuses are accepted if the registry has the same URL, because then
        this user gave them when the job began.
        """
        from resihp.db.engine import check_stored, file_of, masked, resolve

        if (url := self.read().ledger) is None:
            return None
        entry = self.known
        if entry is None or entry.ledger != masked(url):
            check_stored(url, self.folder / "job.json")
        parsed = resolve(url, self.folder)
        if (file := file_of(parsed)) is not None:
            parsed = parsed.set(database=str(self.now(file)))
        if not self.may_name(Path("/") if file is None else self.now(file)):
            raise LedgerError(
                f"ledger {masked(parsed)}: {self.folder / 'job.json'} points outside the job's home, and there is no "
                f"record in {registry.place() or 'a registry (no home directory here: set RESIHP_STATE)'} that you "
                "started this job; it may come from an unpacked archive. If you trust it: --ledger URL"
            )
        return parsed.render_as_string(hide_password=False)

    def set_ledger(self, url: str) -> None:
        """Record the URL of the job's ledger, for commands that read the ledger."""
        from resihp.db.engine import masked

        self._change(ledger=url)
        note_figures(self, is_started=True, ledger=masked(url))

    def set_uuid(self, uuid: str) -> None:
        """Record the job's id, so that a journal of another job is recognised as such."""
        if self.read().uuid != uuid:
            self._change(uuid=uuid)

    def move_journal(self, path: Path) -> None:
        """Record that the journal is now on this machine, at `path`."""
        self._change(journal=str(path), host=socket.gethostname())

    def _change(self, **fields: str) -> None:
        write_private(self.folder / "job.json", msgspec.json.encode(msgspec.structs.replace(self.read(), **fields)))

    @property
    def is_writable(self) -> bool:
        """Whether the folder belongs to us alone and can be written: it is not on a read-only file system."""
        return is_own(self.folder) and os.access(self.folder, os.W_OK)


def check_ours(job: Job) -> JobFile:
    """Return the content of job.json of a job that is ours, or root's.

    Raises OwnershipError if anybody else could have written or replaced job.json or a folder up to RESIHP_HOME;
    FileNotFoundError or another of `READ_ERRORS` if job.json is missing or invalid.
    """
    for folder in (job.home, job.folder.parent, job.folder):
        check_folder(folder)
    check_above(job.home)
    return msgspec.json.decode(read_own(job.folder / "job.json"), type=JobFile)


def ours(job: Job) -> OurJob | None:
    """Return the job as an `OurJob` if it is ours, or root's; None if others could have written in its folder."""
    if isinstance(job, OurJob):
        return job
    try:
        check_ours(job)
    except (OwnershipError, *READ_ERRORS):
        return None
    return OurJob(job.name, job.folder)


def not_ours(job: Job, action: str) -> OwnershipError:
    """Return an error that explains why an action is refused for a job that is not ours."""
    try:
        check_ours(job)
    except (OwnershipError, *READ_ERRORS) as error:
        return OwnershipError(f"job {job.name}: {action}: {error}")
    return OwnershipError(f"job {job.name}: {action}")


def take_lock(job: OurJob) -> int | None:
    """Take the lock that permits writing the job's journal. Return a descriptor to keep open; None if another process
    has the lock."""
    return lock_file(job.folder / LOCK_NAME)


def _is_gone(starter: str) -> bool:
    """Return whether the process with this identity, on this machine, has ended; False for an invalid identity."""
    pid = starter.partition("/")[0]
    return re.fullmatch(r"[0-9]{1,10}", pid) is not None and identity(int(pid)) != starter


def _is_locked(job: Job) -> bool:
    """Return whether the job has a supervisor: one that `resihp run` started, or a successor on this machine."""
    own = ours(job)
    try:
        if own is not None and own.is_writable:
            descriptor = take_lock(own)
        else:
            descriptor = lock_file(job.folder / LOCK_NAME, look=True)
    except OwnershipError:
        if own is not None:
            raise
        return False  # another user's folder, with a link or a pipe at the path of the lock
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return False  # another user's job that never had a supervisor, or that we may not read
    if descriptor is None:
        return True
    os.close(descriptor)
    return own is not None and is_succeeded(own.journal_file)


def is_succeeded(path: Path) -> bool:
    """Return whether an agent on this machine runs a successor, which then writes the journal at `path`."""
    lock = path.with_suffix(".lock")
    try:
        descriptor = lock_file(lock, look=True)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return False
    if descriptor is None:
        return True
    os.close(descriptor)
    return False
