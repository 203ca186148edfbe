"""A job's folder: its files, its lock, and its entry in the user's registry.

It is `<RESIHP_HOME, default ./.resihp>/jobs/<job>/`, readable by its owner alone:

    job.json          name, host, journal, ledger                key              32 random bytes
    run.json          the request (`wrapper.config.run_spec`)    supervisor.json  address and pid, while it runs
    supervisor.lock   held by the guardian                       logs/            one file for each process
    journal           a copy, made when the job has ended        checkpoints/     unless configured elsewhere
    progress.json     the job's progress, while it runs

The journal itself is on local disk, `<RESIHP_LOCAL, default /var/tmp/resihp-<uid>>/<job>-<digest of the folder>/`. Two
types make it safe to look at any job. A `Job` may belong to anybody: its files are not trusted, so no file outside of
its folder is opened because a file in it names it, and nothing is written. An `OurJob` is ours, or root's, up to the
home (`wrapper.strict_modes`): its journal and its ledger are where job.json says. Every function that writes takes an
`OurJob`, and `ours` is the only way to turn a `Job` into one. Never talks to a running job. Used through
`wrapper.job_folder`.
"""

from __future__ import annotations

import getpass
import os
import re
import shlex
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from resihp.errors import JobNotFoundError, LedgerError, OwnershipError, ProtocolError
from resihp.process import identity
from wrapper import registry
from wrapper.file_locks import LOCK_NAME, lock_file
from wrapper.strict_modes import (
    check_above,
    check_folder,
    check_links,
    is_own,
    other_owner,
    read_own,
    read_plain,
    write_private,
)

if TYPE_CHECKING:
    from resihp.record import journal

MAX_PROGRESS_BYTES = 64 << 10
"""Limit for progress.json; ours have a few thousand bytes."""
MAX_EXIT_CODE_BYTES = 64
READ_ERRORS = (OSError, ValueError, RecursionError)
"""Errors of reading and decoding any file: those of msgspec and of text encodings are ValueErrors."""
STARTS_S = 60.0
"""How long a starting job may have no visible supervisor."""
NEVER_BEGAN = "never began"
"""State of a job that ended before it had a supervisor."""
SLURM_NAME = re.compile(r"(\d+(?:_\d+)?)(-r\d+)?(-\d+)?")
"""Name of a run in Slurm: the Slurm job, its restart, and its number within the allocation."""


class JobFile(msgspec.Struct, frozen=True, kw_only=True):
    """job.json. `created_at`: UTC, seconds since 1970. `starter`: identity of the process that made the job, on `host`.

    `uuid`: the job's id in its ledger; empty until its journal has begun, and in files of earlier versions.
    """

    name: str
    host: str
    created_at: float
    journal: str
    ledger: str | None = None
    starter: str = ""
    uuid: str = ""

    def __post_init__(self) -> None:
        """Raise ValueError for invalid fields; to a caller that decodes the file, it is a msgspec.ValidationError."""
        if "\0" in self.journal or not self.journal.startswith("/"):
            raise ValueError("names no journal")
        if not abs(self.created_at) < registry.LATEST_S:
            raise ValueError("has an invalid creation time")


class SupervisorFile(msgspec.Struct, frozen=True, kw_only=True):
    """supervisor.json: the supervisor's address for operators."""

    host: str
    port: Annotated[int, msgspec.Meta(gt=0, lt=1 << 16)]
    pid: Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)]


class LastIteration(msgspec.Struct, frozen=True, kw_only=True):
    """A committed iteration; `seconds` and `loss` are null if unknown. Times are UTC, in seconds since 1970."""

    iteration: int
    loss: float | None
    tokens: int
    seconds: float | None
    finished_at: float


class ProgressFile(msgspec.Struct, frozen=True, kw_only=True):
    """progress.json: a job's progress, written by its supervisor every few seconds while it changes.

    `began_at`: the job's `created_at`, so that the file is not taken for a later job's in the same folder. `recent`:
    the last iterations, oldest first.
    """

    began_at: float
    written_at: float
    nodes: int
    gpus_per_node: int
    layout: str = ""
    target: int | None = None
    resumed_from: int = 0
    recent: tuple[LastIteration, ...] = ()


class _OriginalFolder(msgspec.Struct):
    """The part of run.json with the folder that the job was created in."""

    folder: str = ""


@dataclass(frozen=True, eq=False)
class Job:
    """A job's folder, whoever made it, and the paths in it. Its files are not trusted."""

    name: str
    folder: Path

    def __eq__(self, other: object) -> bool:
        """Two jobs are equal if they have the same name and folder, whether or not they may be written."""
        return isinstance(other, Job) and (self.name, self.folder) == (other.name, other.folder)

    def __hash__(self) -> int:
        return hash((self.name, self.folder))

    @property
    def home(self) -> Path:
        """The RESIHP_HOME of the job."""
        return self.folder.parent.parent

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
            made = Path(msgspec.json.decode(read_plain(self.run_file), type=_OriginalFolder).folder)
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

        The copy is made when the job has ended, and is preferred to an original that is damaged, that lacks the job's
        end, or that belongs to an earlier job of the same name. Raises ProtocolError, OSError for a file that cannot be
        read if there is no other.
        """
        from resihp.record import journal_file  # importing it takes as long as listing all jobs

        trouble: ProtocolError | None = None
        best: tuple[Path | None, list[journal.Record]] = (None, [])
        uuid = self.read().uuid
        for path in self.journals:
            try:
                records = journal_file.read_packed(path)
            except FileNotFoundError:
                continue
            except ProtocolError as error:
                trouble = trouble or error
                continue
            if not is_journal_of(uuid, records):
                continue
            if has_ended(records):
                return path, records
            if not best[1]:
                best = (path, records)
        if trouble is not None and not best[1]:
            raise trouble
        return best


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
            return Path(msgspec.json.decode(read_plain(self.run_file), type=_OriginalFolder).folder)
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
        _note(self, is_started=True, ledger=masked(url))

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


def is_journal_of(uuid: str, records: Sequence[journal.Record]) -> bool:
    """Return whether a journal belongs to the job with this uuid, and not to an earlier one in a folder of the same
    name. True if one of the two is unknown."""
    from resihp.record.job_uuid import job_uuid

    if not uuid or not records:
        return True
    try:
        return job_uuid(records[0]) == uuid
    except ValueError:
        return False


def has_ended(records: Sequence[journal.Record]) -> bool:
    from resihp.record.journal import JobEnded

    return any(isinstance(record.entry, JobEnded) for record in records)


def home() -> Path:
    """Return RESIHP_HOME, or else `.resihp` in the current folder. Raises OwnershipError if the latter is another
    user's: working in a folder that others write to must not mean using the files that they put there."""
    if named := os.environ.get("RESIHP_HOME"):
        return Path(named).absolute()
    here = Path(".resihp").absolute()
    if owner := other_owner(here):
        raise OwnershipError(
            f"{here}: belongs to {owner}; a .resihp of another user is not used by default. To use it: "
            f"RESIHP_HOME={shlex.quote(str(here))}"
        )
    return here


def slurm_job_of(name: str) -> str | None:
    """Return the Slurm job of a run of this name; None for a run without Slurm."""
    match = SLURM_NAME.fullmatch(name)
    return match[1] if match else None


def entry_of(job: Job, file: JobFile) -> registry.KnownJob:
    """Return the registry's entry for a job that begins."""
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
    except (KeyError, OSError):  # in a container, we may have no name
        return str(os.geteuid())


def _note(job: OurJob, *, is_started: bool = False, **figures: Any) -> registry.KnownJob | None:
    """Add figures to the job's entry in the registry, and return it; nothing for a job of root's. A registry that
    cannot be written was already reported when the job began.

    `is_started`: called by the job's own supervisor, so the entry is proof that this user started the job. Other
    commands may look at a job that came out of an archive: their entries say so (`KnownJob.only_seen`).
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
    """Record in the registry how a job ended and how far it came, from its journal; for a job without a journal, its
    exit code, or that it never began. Nothing depends on it, and nothing is raised."""
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
                case journal.IterationCommitted(outcome=outcome):
                    figures |= {"iterations": outcome.iteration, "loss": outcome.loss, "last_iteration_at": record.at}
                case journal.JobEnded(state=state, exit_code=code):
                    figures |= {"state": state, "exit_code": code, "ended_at": record.at}
        if decided.shown_plan is not None:
            figures["layout"] = decided.shown_plan.describe()
    return _note(job, **figures)


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
