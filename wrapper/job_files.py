"""A job's folder: the files in it, who holds it, and what a user's registry is told of it.

It is `<RESIHP_HOME, default ./.resihp>/jobs/<job>/`, readable by its owner alone:

    job.json          name, host, journal, ledger                key              32 random bytes
    run.json          what was asked for (`wrapper.config.run_spec`)     supervisor.json  address and pid, while it runs
    supervisor.lock   held by the guardian                       logs/            one file for each process
    journal           a copy, made when the job has ended        checkpoints/     unless configured elsewhere
    progress.json     how far it is, while it runs

The journal itself is on local disk, `<RESIHP_LOCAL, default /var/tmp/resihp-<uid>>/<job>-<digest of the folder>/`.
Two types keep looking safe. A `Job` may be anybody's: its files are read as what somebody says, nothing outside of its
folder is opened because a file in it names it, and nothing is written. An `OurJob` is ours, or root's, up to the home
(`wrapper.strict_modes`): its journal and its ledger are where job.json says. Whatever writes takes an `OurJob`, and
`ours` is the only way from the one to the other. Never talks to a running job. Used through `wrapper.job_folder`.
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
    read_own,
    read_plain,
    somebody_elses,
    write_private,
)

if TYPE_CHECKING:
    from resihp.record import journal

MOST_PROGRESS_BYTES = 64 << 10
"""Of progress.json; ours have some thousand."""
MOST_EXIT_CODE_BYTES = 64
UNREADABLE = (OSError, ValueError, RecursionError)
"""What reading and decoding a file may raise that may hold anything: errors of msgspec and of text are ValueErrors."""
STARTS_S = 60.0
"""So long a job may have no supervisor that can be seen, at its start."""
NEVER_BEGAN = "never began"
"""State of a job that ended before its supervisor was there."""
SLURM_NAME = re.compile(r"(\d+(?:_\d+)?)(-r\d+)?(-\d+)?")
"""What a job in Slurm is called, and which one that is."""


class JobFile(msgspec.Struct, frozen=True, kw_only=True):
    """job.json. `created_at`: UTC, seconds since 1970. `starter`: identity of the process that made it, on `host`.

    `uuid`: what the job's ledger knows it by; empty until its journal has begun, and in files of before.
    """

    name: str
    host: str
    created_at: float
    journal: str
    ledger: str | None = None
    starter: str = ""
    uuid: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError, which is a msgspec.ValidationError for who decodes it."""
        if "\0" in self.journal or not self.journal.startswith("/"):
            raise ValueError("names no journal")
        if not abs(self.created_at) < registry.LATEST_S:
            raise ValueError("was made at a time that no calendar has")


class SupervisorFile(msgspec.Struct, frozen=True, kw_only=True):
    """supervisor.json: where operators reach the supervisor."""

    host: str
    port: Annotated[int, msgspec.Meta(gt=0, lt=1 << 16)]
    pid: Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)]


class LastIteration(msgspec.Struct, frozen=True, kw_only=True):
    """One that was committed; `seconds` and `loss` are null where they are not known. UTC, seconds since 1970."""

    iteration: int
    loss: float | None
    tokens: int
    seconds: float | None
    finished_at: float


class ProgressFile(msgspec.Struct, frozen=True, kw_only=True):
    """progress.json: how far a job is, by its supervisor, which writes it every few seconds while that changes.

    `began_at`: the job's `created_at`, so that nobody takes it for a later job's in the same folder. `recent`: its last
    iterations, oldest first.
    """

    began_at: float
    written_at: float
    nodes: int
    gpus_per_node: int
    layout: str = ""
    target: int | None = None
    resumed_from: int = 0
    recent: tuple[LastIteration, ...] = ()


class _MadeIn(msgspec.Struct):
    """Of run.json, the folder that the job was made in."""

    folder: str = ""


@dataclass(frozen=True, eq=False)
class Job:
    """A job's folder, whoever made it, and the names in it. What is read there is what somebody says."""

    name: str
    folder: Path

    def __eq__(self, other: object) -> bool:
        """The same folder is the same job, whatever may be done there."""
        return isinstance(other, Job) and (self.name, self.folder) == (other.name, other.folder)

    def __hash__(self) -> int:
        return hash((self.name, self.folder))

    @property
    def home(self) -> Path:
        """The RESIHP_HOME that it is in."""
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
        """Where its journal may be read: of somebody's job the copy alone, which is in its folder."""
        own = ours(self)
        return (self.journal_copy,) if own is None else own.journals

    @property
    def key(self) -> bytes:
        return read_own(self.key_file, root_may=True)  # an administrator may speak to any job

    def read(self) -> JobFile:
        """job.json. Raises JobNotFoundError if the folder holds no job of this version."""
        try:
            check_links(self.folder.parent, self.folder)
            return msgspec.json.decode(read_plain(self.folder / "job.json"), type=JobFile)
        except OwnershipError as error:
            raise JobNotFoundError(f"job {self.name}: {error}") from error
        except UNREADABLE as error:
            gone = isinstance(error, FileNotFoundError)
            why = "is there no more, or holds no job" if gone else f"holds no job of this version: {error}"
            raise JobNotFoundError(f"job {self.name}: {self.folder} {why}") from error

    def read_own(self, name: str) -> bytes:
        """A file of it that decides what runs as us. Raises OwnershipError if others could have written that, or what
        leads to it: job.json and the folders, up to RESIHP_HOME, and the one with the journal where it is here."""
        with suppress(FileNotFoundError):
            file = check_ours(self)
            check_folder(Path(file.journal).parent, "RESIHP_LOCAL")
        return read_own(self.folder / name)

    def now(self, path: Path) -> Path:
        """Where that is now which was written down of the job: its folder, or its home, may have been moved since,
        and something else may be in their place."""
        with suppress(*UNREADABLE):
            made = Path(msgspec.json.decode(read_plain(self.run_file), type=_MadeIn).folder)
            for old, new in ((made, self.folder), (made.parent.parent, self.home)):
                if made.is_absolute() and path.is_relative_to(old):
                    return new / path.relative_to(old)
        return path

    @property
    def is_led(self) -> bool:
        """Whether somebody has the job's lock: it runs, or begins."""
        return _is_locked(self)

    @property
    def is_over(self) -> bool:
        """Whether it has ended and nobody leads it any more."""
        return self.exit_code_file.exists() and self.supervisor() is None

    def exit_code(self) -> int | None:
        """What its supervisor exited with; None where it has not said."""
        with suppress(OSError, ValueError):
            code = int(read_plain(self.exit_code_file, MOST_EXIT_CODE_BYTES))
            return code if abs(code) < 1 << 31 else None
        return None

    def never_began(self, now_s: float) -> bool:
        """Whether it was made on this machine, a while ago or by a process that is gone, and nobody leads it or left a
        journal. Of somebody's job nobody can tell."""
        if (own := ours(self)) is None:
            return False
        file = own.read()
        if file.host != socket.gethostname() or own.is_led or own.journal_file.exists():
            return False
        return file.created_at < now_s - STARTS_S or _is_gone(file.starter)

    def supervisor(self) -> SupervisorFile | None:
        """Where the supervisor listens; None when none has the job's lock."""
        if not self.is_led:
            return None
        try:
            return msgspec.json.decode(read_plain(self.supervisor_file), type=SupervisorFile)
        except UNREADABLE:
            return None  # it has just started, or is about to be gone

    def progress(self, began_at: float) -> ProgressFile | None:
        """How far the job of this folder that began then is; None where no supervisor has told."""
        try:
            file = msgspec.json.decode(read_plain(self.progress_file, MOST_PROGRESS_BYTES), type=ProgressFile)
        except UNREADABLE:
            return None
        return file if file.began_at == began_at else None

    def records(self) -> list[journal.Record]:
        """What the journal tells (`journal_told`); old iterations are packed."""
        return self.journal_told()[1]

    def journal_told(self) -> tuple[Path | None, list[journal.Record]]:
        """The file that tells most of the job, and what it tells; the copy when the original is not on this machine.

        The copy is made when the job has ended, and knows better than an original that is damaged, that does not tell
        the end, or that is an earlier job's of the same name. Raises ProtocolError, OSError for one that cannot be read
        where there is no other.
        """
        from resihp.record import journal_file  # takes as long to import as a list of jobs to make

        trouble: ProtocolError | None = None
        found: tuple[Path | None, list[journal.Record]] = (None, [])
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
            if not found[1]:
                found = (path, records)
        if trouble is not None and not found[1]:
            raise trouble
        return found


class OurJob(Job):
    """A job's folder that only we, or root, can have written, up to the home: what its files name is believed.

    Made by `ours`, and by whoever has just made the folder or checked it (`Job.read_own`).
    """

    @property
    def journal_file(self) -> Path:
        return Path(self.read().journal)

    @property
    def journals(self) -> tuple[Path, ...]:
        """Where its journal may be: itself, where that is on this machine, and the copy."""
        return self.journal_file, self.journal_copy

    def may_name(self, path: Path) -> bool:
        """Tell whether job.json may name that place: one in its home, or any if the user's registry knows the job.

        Whoever has unpacked an archive or cloned a repository owns what is in it, and wrote none of it.
        """
        file = self.read()
        if Path(os.path.realpath(path)).is_relative_to(os.path.realpath(self.home)):
            return True
        return registry.knows(file.name, self._folders(), file.created_at)

    @property
    def known(self) -> registry.KnownJob | None:
        """The entry of this job in the user's registry, also where the job's folder was moved since."""
        file = self.read()
        return registry.known(file.name, self._folders(), file.created_at)

    def _folders(self) -> tuple[str, ...]:
        """Where the job's folder is, and where it was made."""
        return tuple(dict.fromkeys((str(self.folder), str(self._made_in()))))

    def _made_in(self) -> Path:
        """The folder that the job was made in, as run.json has it; that of today where it does not say."""
        with suppress(*UNREADABLE):
            return Path(msgspec.json.decode(read_plain(self.run_file), type=_MadeIn).folder)
        return self.folder

    @property
    def ledger_url(self) -> str | None:
        """Where its ledger is, None where nobody has said. Raises JobNotFoundError, LedgerError.

        Connection parameters that `check_stored` refuses are believed if the registry has the same URL: then this user
        gave them when the job began.
        """
        from db.engine import check_stored, file_of, masked, resolve

        if (url := self.read().ledger) is None:
            return None
        known = self.known
        if known is None or known.ledger != masked(url):
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
        """Remember where the job's ledger is, for the commands that read it."""
        from db.engine import masked

        self._change(ledger=url)
        _note(self, is_started=True, ledger=masked(url))

    def set_uuid(self, uuid: str) -> None:
        """Remember which job this is, so that no other one's journal is taken for it."""
        if self.read().uuid != uuid:
            self._change(uuid=uuid)

    def move_journal(self, path: Path) -> None:
        """Remember that the journal is on this machine now."""
        self._change(journal=str(path), host=socket.gethostname())

    def _change(self, **fields: str) -> None:
        write_private(self.folder / "job.json", msgspec.json.encode(msgspec.structs.replace(self.read(), **fields)))

    @property
    def is_writable(self) -> bool:
        """Whether its folder is ours alone, and may be worked on: not where its file system is read-only."""
        return is_own(self.folder) and os.access(self.folder, os.W_OK)


def check_ours(job: Job) -> JobFile:
    """Return job.json of a job that is ours, or root's. Raises OwnershipError if anybody else could have written it, or
    put it there: it, and the folders up to RESIHP_HOME; FileNotFoundError and others if it is not there, or none."""
    for folder in (job.home, job.folder.parent, job.folder):
        check_folder(folder)
    check_above(job.home)
    return msgspec.json.decode(read_own(job.folder / "job.json"), type=JobFile)


def ours(job: Job) -> OurJob | None:
    """Return the job as one that is ours, or root's; None where somebody else could have written in its folder."""
    if isinstance(job, OurJob):
        return job
    try:
        check_ours(job)
    except (OwnershipError, *UNREADABLE):
        return None
    return OurJob(job.name, job.folder)


def not_ours(job: Job, what: str) -> OwnershipError:
    """Say why something is not done to a job that is not ours."""
    try:
        check_ours(job)
    except (OwnershipError, *UNREADABLE) as error:
        return OwnershipError(f"job {job.name}: {what}: {error}")
    return OwnershipError(f"job {job.name}: {what}")


def is_journal_of(uuid: str, records: Sequence[journal.Record]) -> bool:
    """Whether a journal is that of the job of this uuid, and not of an earlier one in a folder of the same name; also
    where nothing is known of one of them."""
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
    """RESIHP_HOME, or else `.resihp` in the current folder. Raises OwnershipError for the latter where it is somebody
    else's: whoever works in a folder that others write to has not asked for what they put there."""
    if named := os.environ.get("RESIHP_HOME"):
        return Path(named).absolute()
    here = Path(".resihp").absolute()
    if owner := somebody_elses(here):
        raise OwnershipError(
            f"{here}: belongs to {owner}; a .resihp of another user is not used by default. To use it: "
            f"RESIHP_HOME={shlex.quote(str(here))}"
        )
    return here


def slurm_job_of(name: str) -> str | None:
    """The Slurm job that a run of this name was in; None for one without Slurm."""
    match = SLURM_NAME.fullmatch(name)
    return match[1] if match else None


def entry_of(job: Job, file: JobFile) -> registry.KnownJob:
    """What the registry is told of a job that begins."""
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
    except (KeyError, OSError):  # a container has no name for us
        return str(os.geteuid())


def _note(job: OurJob, *, is_started: bool = False, **figures: Any) -> registry.KnownJob | None:
    """Add something to what the registry has of a job, and return it; nothing of a job of root's. What cannot be
    written was told when it began.

    `is_started`: the job's own supervisor asks, so the entry is proof that this user started the job. Other commands
    may look at a job that came out of an archive: an entry that they make says so (`KnownJob.only_seen`).
    """
    if not job.is_writable:
        return None

    def change(entry: registry.KnownJob | None) -> registry.KnownJob:
        known = job.known
        if known is None:
            known = msgspec.structs.replace(entry or begins, only_seen=not is_started)
        return msgspec.structs.replace(known, folder=begins.folder, **figures)

    with suppress(JobNotFoundError):
        begins = entry_of(job, job.read())
        registry.note(begins, change)
        return msgspec.structs.replace(begins, **figures)
    return None


def note_end(job: OurJob, exit_code: int | None = None) -> registry.KnownJob | None:
    """Tell the registry how a job ended and how far it came, as its journal has it; of one without a journal, with what
    it exited, or that it never began. Nothing depends on it, and nothing is raised."""
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
    """Become the one who may write the job's journal: a descriptor to keep open, or None if somebody else is."""
    return lock_file(job.folder / LOCK_NAME)


def _is_gone(starter: str) -> bool:
    """Whether the process of this machine has ended; not of one that nothing is known of."""
    pid = starter.partition("/")[0]
    return re.fullmatch(r"[0-9]{1,10}", pid) is not None and identity(int(pid)) != starter


def _is_locked(job: Job) -> bool:
    """Whether somebody supervises the job: from where it was started, or from another node, if that is this one."""
    own = ours(job)
    try:
        if own is not None and own.is_writable:
            descriptor = take_lock(own)
        else:
            descriptor = lock_file(job.folder / LOCK_NAME, look=True)
    except OwnershipError:
        if own is not None:
            raise
        return False  # somebody else's, who has put a link or a pipe there
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return False  # another user's job: nobody has led it yet, or we may not even look
    if descriptor is None:
        return True
    os.close(descriptor)
    return own is not None and is_succeeded(own.journal_file)


def is_succeeded(path: Path) -> bool:
    """Whether an agent of this machine watches over a successor, which writes this journal."""
    lock = path.with_suffix(".lock")
    try:
        descriptor = lock_file(lock, look=True)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return False
    if descriptor is None:
        return True
    os.close(descriptor)
    return False
