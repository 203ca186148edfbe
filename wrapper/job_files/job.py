"""A job's folder: one that anybody may have made (`Job`), and one that is ours (`OurJob`), with trusted files.

Decides whether a job is ours, whether it is led, and which journal is its own. Every function that writes takes an
`OurJob`, and `ours` is the only way to turn a `Job` into one. Never talks to a running job. Used through
`wrapper.job_folder`.
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
from wrapper import registry
from wrapper.file_locks import LOCK_NAME, lock_file
from wrapper.job_files.contents import (
    MAX_EXIT_CODE_BYTES,
    MAX_PROGRESS_BYTES,
    READ_ERRORS,
    JobFile,
    OriginalFolder,
    ProgressFile,
    SupervisorFile,
)
from wrapper.job_files.journals import best_of
from wrapper.job_files.registered import note_figures
from wrapper.strict_modes import (
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
"""How long a starting job may have no visible supervisor."""


@dataclass(frozen=True, eq=False)
class Job:
    """A job's folder, whoever made it, and the paths in it. Its files are not trusted."""

    name: str
    folder: Path

    def __eq__(self, job: object) -> bool:
        """Two jobs are equal if they have the same name and folder, whether or not they may be written."""
        return isinstance(job, Job) and (self.name, self.folder) == (job.name, job.folder)

    def __hash__(self) -> int:
        return hash((self.name, self.folder))

    @property
    def home(self) -> Path:
        """The RESIHP_HOME of the job."""
        return self.folder.parent.parent

    @property
    def place_name(self) -> str:
        """The name of its journal's folder on local disk, assuming that the job's folder has not been moved."""
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
        """Paths where its journal may be read: of another user's job only the copy in its folder."""
        own = ours(self)
        return (self.journal_copy,) if own is None else own.journals

    @property
    def key(self) -> bytes:
        return read_own(self.key_file, root_may=True)  # an administrator may contact any job

    def read(self) -> JobFile:
        """Read job.json. Raises JobNotFoundError if the folder holds no job of this version."""
        try:
            check_links(self.folder.parent, self.folder)
            return msgspec.json.decode(read_plain(self.folder / "job.json"), type=JobFile)
        except OwnershipError as error:
            raise JobNotFoundError(f"job {self.name}: {error}") from error
        except READ_ERRORS as error:
            is_missing = isinstance(error, FileNotFoundError)
            why = "does not exist, or holds no job" if is_missing else f"holds no job of this version: {error}"
            raise JobNotFoundError(f"job {self.name}: {self.folder} {why}") from error

    def read_own(self, name: str) -> bytes:
        """Read a file that decides which programs run as us. Raises OwnershipError if others could have written it, or
        a file or folder that leads to it: job.json and the folders up to RESIHP_HOME, and the journal's folder, if that
        is on this machine."""
        with suppress(FileNotFoundError):
            file = check_ours(self)
            check_folder(Path(file.journal).parent, "RESIHP_LOCAL")
        return read_own(self.folder / name)

    def now(self, path: Path) -> Path:
        """Translate a recorded path of the job to its present place: its folder, or its home, may have been moved
        since, and other files may be in their place."""
        with suppress(*READ_ERRORS):
            made = Path(msgspec.json.decode(read_plain(self.run_file), type=OriginalFolder).folder)
            for old, new in ((made, self.folder), (made.parent.parent, self.home)):
                if made.is_absolute() and path.is_relative_to(old):
                    return new / path.relative_to(old)
        return path

    @property
    def is_led(self) -> bool:
        """Whether a process holds the job's lock: then the job runs, or begins."""
        return _is_locked(self)

    @property
    def is_over(self) -> bool:
        """Whether the job has ended and has no supervisor any more."""
        return self.exit_code_file.exists() and self.supervisor() is None

    def exit_code(self) -> int | None:
        """Return the exit code of its supervisor; None if none is recorded."""
        with suppress(OSError, ValueError):
            code = int(read_plain(self.exit_code_file, MAX_EXIT_CODE_BYTES))
            return code if abs(code) < 1 << 31 else None
        return None

    def never_began(self, now_s: float) -> bool:
        """Return whether the job was made on this machine, some time ago or by a process that has ended, and has
        neither a supervisor nor a journal. False for another user's job, for which it is unknown."""
        if (own := ours(self)) is None:
            return False
        file = own.read()
        if file.host != socket.gethostname() or own.is_led or own.journal_file.exists():
            return False
        return file.created_at < now_s - STARTS_S or _is_gone(file.starter)

    def supervisor(self) -> SupervisorFile | None:
        """Return the supervisor's address; None if no process holds the job's lock."""
        if not self.is_led:
            return None
        try:
            return msgspec.json.decode(read_plain(self.supervisor_file), type=SupervisorFile)
        except READ_ERRORS:
            return None  # the supervisor has just started, or is about to end

    def progress(self, began_at: float) -> ProgressFile | None:
        """Return the progress of the job in this folder that began then; None if no supervisor has written it."""
        try:
            file = msgspec.json.decode(read_plain(self.progress_file, MAX_PROGRESS_BYTES), type=ProgressFile)
        except READ_ERRORS:
            return None
        return file if file.began_at == began_at else None

    def records(self) -> list[journal.Record]:
        """Return the records of the journal (`best_journal`); old iterations are packed."""
        return self.best_journal()[1]

    def best_journal(self) -> tuple[Path | None, list[journal.Record]]:
        """Return the journal file with the most of the job, and its records; the copy if the original is not on this
        machine.

        Raises ProtocolError, OSError for a file that cannot be read if there is no other.
        """
        return best_of(self.journals, self.read().uuid)


class OurJob(Job):
    """A job's folder that only we, or root, can have written, up to the home: the paths in its files are trusted.

    Made by `ours`, and by functions that have just created the folder or checked it (`Job.read_own`).
    """

    @property
    def journal_file(self) -> Path:
        return Path(self.read().journal)

    @property
    def journals(self) -> tuple[Path, ...]:
        """Paths where its journal may be: the original, if that is on this machine, and the copy."""
        return self.journal_file, self.journal_copy

    def may_name(self, path: Path) -> bool:
        """Return whether job.json may name that path: one in its home, or any path if the user's registry knows the
        job.

        A user who has unpacked an archive or cloned a repository owns its files, but has not written them.
        """
        file = self.read()
        if Path(os.path.realpath(path)).is_relative_to(os.path.realpath(self.home)):
            return True
        return registry.knows(file.name, self._folders(), file.created_at)

    @property
    def known(self) -> registry.KnownJob | None:
        """The entry of this job in the user's registry, even if the job's folder was moved since."""
        file = self.read()
        return registry.known(file.name, self._folders(), file.created_at)

    def _folders(self) -> tuple[str, ...]:
        """Return the job's present folder, and the one that it was created in."""
        return tuple(dict.fromkeys((str(self.folder), str(self._made_in()))))

    def _made_in(self) -> Path:
        """Return the folder that the job was created in, from run.json; the present one if it is not recorded."""
        with suppress(*READ_ERRORS):
            return Path(msgspec.json.decode(read_plain(self.run_file), type=OriginalFolder).folder)
        return self.folder

    @property
    def ledger_url(self) -> str | None:
        """The URL of its ledger, None if none is recorded. Raises JobNotFoundError, LedgerError.

        Connection parameters that `check_stored` refuses are accepted if the registry has the same URL: then this user
        gave them when the job began.
        """
        from db.engine import check_stored, file_of, masked, resolve

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
        """Record the URL of the job's ledger, for the commands that read it."""
        from db.engine import masked

        self._change(ledger=url)
        note_figures(self, is_started=True, ledger=masked(url))

    def set_uuid(self, uuid: str) -> None:
        """Record the job's id, so that another job's journal is not taken for its own."""
        if self.read().uuid != uuid:
            self._change(uuid=uuid)

    def move_journal(self, path: Path) -> None:
        """Record that the journal is now on this machine."""
        self._change(journal=str(path), host=socket.gethostname())

    def _change(self, **fields: str) -> None:
        write_private(self.folder / "job.json", msgspec.json.encode(msgspec.structs.replace(self.read(), **fields)))

    @property
    def is_writable(self) -> bool:
        """Whether its folder is ours alone and writable: not on a read-only file system."""
        return is_own(self.folder) and os.access(self.folder, os.W_OK)


def check_ours(job: Job) -> JobFile:
    """Return job.json of a job that is ours, or root's. Raises OwnershipError if anybody else could have written it, or
    replaced it or the folders up to RESIHP_HOME; FileNotFoundError and others if it is missing or invalid."""
    for folder in (job.home, job.folder.parent, job.folder):
        check_folder(folder)
    check_above(job.home)
    return msgspec.json.decode(read_own(job.folder / "job.json"), type=JobFile)


def ours(job: Job) -> OurJob | None:
    """Return the job as one that is ours, or root's; None if somebody else could have written in its folder."""
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
    """Take the lock that permits writing the job's journal; return a descriptor to keep open, None if another process
    has it."""
    return lock_file(job.folder / LOCK_NAME)


def _is_gone(starter: str) -> bool:
    """Return whether this process of this machine has ended; False if nothing is known of it."""
    pid = starter.partition("/")[0]
    return re.fullmatch(r"[0-9]{1,10}", pid) is not None and identity(int(pid)) != starter


def _is_locked(job: Job) -> bool:
    """Return whether the job has a supervisor: started from its own node, or as a successor on this machine."""
    own = ours(job)
    try:
        if own is not None and own.is_writable:
            descriptor = take_lock(own)
        else:
            descriptor = lock_file(job.folder / LOCK_NAME, look=True)
    except OwnershipError:
        if own is not None:
            raise
        return False  # another user's folder, with a link or a pipe in place of the lock
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return False  # another user's job: it never had a supervisor, or we may not look
    if descriptor is None:
        return True
    os.close(descriptor)
    return own is not None and is_succeeded(own.journal_file)


def is_succeeded(path: Path) -> bool:
    """Return whether an agent on this machine runs a successor, which then writes this journal."""
    lock = path.with_suffix(".lock")
    try:
        descriptor = lock_file(lock, look=True)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return False
    if descriptor is None:
        return True
    os.close(descriptor)
    return False
