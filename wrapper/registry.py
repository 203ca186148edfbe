"""Registry of a user's jobs: one small file for each job, so that commands find a job in any folder.

The files are `<RESIHP_STATE, default $XDG_STATE_HOME/resihp or ~/.local/state/resihp>/jobs/<job>.<digest>.json`, which
only this user may write. A file is written when a job is submitted, when its folder is created, when the URL of its
ledger is known, and when it ends. The folder may be on NFS and written from many hosts: each job has its own file,
which is replaced as a whole.

An entry only says where the job's folder is: the state of a job is in that folder, and no program is started because of
an entry. But paths outside of a job's folder are trusted only if the job is registered here. No training depends on the
registry: a failed write is reported once, and a file system that hangs is not waited for. Written by
`resihp.wrapper.job_files` and `resihp submit`; read by `resihp.wrapper.job_folder` and `resihp jobs`.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from resihp.errors import OwnershipError
from resihp.wrapper.strict_modes import is_own, read_own, write_private

MAX_ENTRY_BYTES = 64 << 10
"""Largest size of a file that is read; ours have a few hundred bytes."""
ANSWER_TIMEOUT_S = 2.0
"""How long a job waits for the file system of the registry, or of the exclusion list beside it."""

LATEST_S = 2.5e11
"""Latest valid time, in seconds since 1970: the year 9892. Calendar functions fail for later times."""

_FILE_NAME = re.compile(r"(?P<job>[^./]+)\.[0-9a-f]{16}\.json")


QUEUED = "queued"
"""State of a job that was submitted and has not yet begun."""


class KnownJob(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A job's entry. Times are UTC, in seconds since 1970. `host`: where the folder was created. `ledger`: the URL
    without passwords.

    `state` is "running" until the job's end, when `nodes` and the fields after it are recorded; `iterations` is the
    last committed iteration. For a submitted job, `state` is `QUEUED` and `began_at` is the time of submission; when
    the job begins, a second entry with the same `slurm_job` is written. `only_seen`: a command that looked at a home
    wrote this entry, and not a process of the job. The folder may come from an archive, so the entry does not prove
    that this user started the job.
    """

    name: str
    folder: str
    host: str
    user: str
    began_at: float
    ledger: str = ""
    cluster: str = ""
    slurm_job: str = ""
    state: str = "running"
    exit_code: int | None = None
    ended_at: float | None = None
    nodes: int = 0
    gpus_per_node: int = 0
    layout: str = ""
    iterations: int = 0
    target: int = 0
    last_iteration_at: float | None = None
    loss: float | None = None
    only_seen: bool = False

    @property
    def home(self) -> str:
        """The RESIHP_HOME that contains the job."""
        return str(Path(self.folder).parent.parent)


def place() -> Path | None:
    """Return the folder of the entries; None for a user without a home directory."""
    if state := os.environ.get("RESIHP_STATE"):
        return Path(state).absolute() / "jobs"
    if state := os.environ.get("XDG_STATE_HOME"):
        return Path(state).absolute() / "resihp" / "jobs"
    with suppress(RuntimeError):
        return Path.home() / ".local" / "state" / "resihp" / "jobs"
    return None


def file_of(name: str, folder: str, began_at: float) -> Path | None:
    """Return the path of a job's entry; None without a registry. The path depends on `began_at`, because another job
    may have the same folder: a later job, or a job on another host."""
    root = place()
    digest = hashlib.sha256(f"{folder}\0{began_at!r}".encode()).hexdigest()[:16]
    return None if root is None else root / f"{name}.{digest}.json"


def knows(name: str, folders: Iterable[str], began_at: float) -> bool:
    """Return whether the user started the job of this name, at this time, in one of these folders."""
    return known(name, folders, began_at) is not None


def known(name: str, folders: Iterable[str], began_at: float) -> KnownJob | None:
    """Return the entry of the job of this name that the user started, at this time, in one of these folders; None
    without one. An entry that is `only_seen` does not count."""
    files = [file_of(name, folder, began_at) for folder in folders]
    entries_there = (_read(file) for file in files if file is not None and is_own(file.parent))
    return next((entry for entry in entries_there if entry is not None and not entry.only_seen), None)


def save(entry: KnownJob) -> str:
    """Write an entry. Return the reason if that failed, otherwise an empty string."""
    path = file_of(entry.name, entry.folder, entry.began_at)
    if path is None:
        return "you have no home folder here; set RESIHP_STATE"
    return promptly(lambda: _write(path, entry), str(path.parent))


def note(job: KnownJob, change: Callable[[KnownJob | None], KnownJob]) -> str:
    """Replace a job's entry by `change(entry)`; `change` gets None if the entry cannot be read. Return the reason if
    that failed, otherwise an empty string."""
    path = file_of(job.name, job.folder, job.began_at)
    if path is None:
        return "no place"
    return promptly(lambda: _write(path, change(_read(path))), str(path.parent))


def entries(wanted: Callable[[str], bool] = lambda name: True) -> tuple[list[KnownJob], list[str]]:
    """Return the entries of the jobs whose names are `wanted`, newest first, and messages about files that cannot be
    read."""
    root = place()
    if root is None or not root.is_dir():
        return [], []
    if not is_own(root):
        return [], [f"{root}: is not yours alone, and not read; set RESIHP_STATE to a folder of yours"]
    readable: list[KnownJob] = []
    wrong: list[str] = []
    for path, name in _files(root):
        if not wanted(name):
            continue
        try:
            readable.append(_decoded(read_own(path, MAX_ENTRY_BYTES)))
        except FileNotFoundError:
            continue  # another command has just removed it
        except (OSError, OwnershipError, ValueError, RecursionError) as error:
            wrong.append(f"{path}: left out: {error}; it may be removed")
    return sorted(readable, key=lambda entry: (entry.began_at, entry.name), reverse=True), wrong


def names() -> list[str]:
    """Return the names of all jobs, without reading their files."""
    root = place()
    return [] if root is None or not root.is_dir() or not is_own(root) else [name for _, name in _files(root)]


def drop(entry: KnownJob) -> None:
    """Remove a job's entry, after its folder is gone."""
    path = file_of(entry.name, entry.folder, entry.began_at)
    with suppress(OSError):
        if path is not None:
            path.unlink()


def _files(root: Path) -> Iterator[tuple[Path, str]]:
    with suppress(OSError), os.scandir(root) as directory:
        for item in directory:
            if match := _FILE_NAME.fullmatch(item.name):
                yield root / item.name, match["job"]


def _decoded(content: bytes) -> KnownJob:
    """Decode an entry. Raises ValueError if it is invalid: errors of msgspec and of text encodings are ValueErrors."""
    entry = msgspec.json.decode(content, type=KnownJob)
    times = (entry.began_at, entry.ended_at or 0.0, entry.last_iteration_at or 0.0)
    if not entry.folder.startswith("/") or not all(0 <= time_s < LATEST_S for time_s in times):
        raise ValueError("has no absolute folder, or an invalid time")
    return entry


def _read(path: Path) -> KnownJob | None:
    with suppress(OSError, OwnershipError, ValueError, RecursionError):
        return _decoded(read_own(path, MAX_ENTRY_BYTES))
    return None


def _write(path: Path, entry: KnownJob) -> None:
    for folder in (path.parent.parent, path.parent):
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700, parents=True)
    if not is_own(path.parent):
        raise OwnershipError(f"{path.parent}: is not yours alone; set RESIHP_STATE to a folder of yours")
    write_private(path, msgspec.json.encode(entry))


def promptly(work: Callable[[], None], where: str) -> str:
    """Run `work` in a thread, and wait for at most `ANSWER_TIMEOUT_S`. Return the reason if it failed or has not
    finished, otherwise an empty string. Unfinished work continues in the background."""
    trouble = [f"{where}: no answer for {ANSWER_TIMEOUT_S:.0f} s"]

    def attempt() -> None:
        try:
            work()
            trouble[:] = [""]
        except (OSError, OwnershipError) as error:
            trouble[:] = [str(error) if isinstance(error, OwnershipError) else f"{where}: {error.strerror or error}"]

    thread = threading.Thread(target=attempt, name="registry of jobs", daemon=True)
    thread.start()
    thread.join(ANSWER_TIMEOUT_S)
    return trouble[0]
