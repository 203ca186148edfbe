"""The people of a hostile-home run and their folders: a reader, root, an attacker, and a stranger.

`World` makes them, watches what the reader and root own, and restores it after a fault. The attacker's home is
made by the product's own functions once (`pristine`), and copied for every mutation. Called by the harness; knows no
mutation and no command.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.hostile_homes.listeners import Listeners

READER_UID, ATTACKER_UID, STRANGER_UID = 47_111, 47_112, 47_113
"""Nobody's on any machine; none has a passwd entry, so that USER says their names."""
MEMORY = Path("/dev/shm")
SECRETS = (".ssh/id_ed25519", ".pgpass", "notes.txt")
"""Files of a reader and of root whose text no command may show."""

Signature = tuple[int, ...]
Snapshot = dict[str, Signature | tuple[str, ...]]


@dataclass(frozen=True)
class Person:
    """A user of the machine: `folder` is the home directory, with a job home of its own in it."""

    name: str
    uid: int
    folder: Path

    @property
    def cwd(self) -> Path:
        return self.folder / "work"

    @property
    def home(self) -> Path:
        """Its own RESIHP_HOME."""
        return self.folder / "home"

    @property
    def job(self) -> Path:
        """The folder of its own job."""
        return self.home / "jobs" / "local-1"

    @property
    def environment(self) -> dict[str, str]:
        """Without RESIHP_HOME, which a case says where it wants one."""
        return {
            "COLUMNS": "120",
            "HOME": str(self.folder),
            "LANG": "C.UTF-8",
            "LOGNAME": self.name,
            "PATH": "/nonexistent",
            "RESIHP_LOCAL": str(self.folder / "local"),
            "TERM": "dumb",
            "TMPDIR": str(self.folder / "tmp"),
            "USER": self.name,
            "XDG_CONFIG_HOME": str(self.folder / ".config"),
            "XDG_STATE_HOME": str(self.folder / "state"),
        }


@dataclass
class World:
    """Folders of all people below `base`, and listeners for whoever is led astray."""

    base: Path
    listeners: Listeners
    secret: str = field(default_factory=lambda: f"secret-{secrets.token_hex(8)}")

    def __post_init__(self) -> None:
        self.reader = Person("reader", READER_UID, self.base / "reader")
        self.root = Person("root", 0, self.base / "root")
        self.attacker = Person("attacker", ATTACKER_UID, self.base / "attacker")

    @property
    def lure(self) -> Path:
        """A folder of the attacker's that people change into: everybody may write it, and it holds a home."""
        return self.attacker.folder / "lure"

    @property
    def home(self) -> Path:
        """The hostile home."""
        return self.lure / ".resihp"

    @property
    def local(self) -> Path:
        """Where journals of the hostile home are."""
        return self.attacker.folder / "local"

    @property
    def readers(self) -> tuple[Person, Person]:
        return self.reader, self.root

    def furnish(self) -> None:
        """Make the folders of all people, and what a reader or root would miss."""
        from tests.hostile_homes import homes

        self.base.chmod(0o711)
        for person in (*self.readers, self.attacker):
            for folder in ("tmp", "state", ".config", "work"):
                (person.folder / folder).mkdir(parents=True)
        self.lure.mkdir()
        for person in self.readers:
            self._fill(person)
            homes.make(person.home, person.folder / "local", person.folder / "state", kinds=("finished",))
        homes.make(self.home, self.local, self.attacker.folder / "state", kinds=homes.KINDS)
        homes.open_to_all(self.home)
        homes.open_to_all(self.local)
        for person in (*self.readers, self.attacker):
            give(person.folder, person.uid)
        self.lure.chmod(0o1777)
        for what in self._kept:
            shutil.copytree(what, self._copy_of(what), symlinks=True)

    def _fill(self, person: Person) -> None:
        ssh = person.folder / ".ssh"
        ssh.mkdir(mode=0o700)
        (ssh / "authorized_keys").write_text("ssh-ed25519 AAAA reader\n")
        for name in SECRETS:
            (person.folder / name).write_text(f"{self.secret}\n" * 3)
            (person.folder / name).chmod(0o600)
        (person.folder / ".profile").write_text("umask 022\n")

    @property
    def _kept(self) -> tuple[Path, ...]:
        """What is copied, to be restored."""
        return self.home, self.local, self.reader.folder, self.root.folder

    def _copy_of(self, what: Path) -> Path:
        return self.base / "pristine" / str(what.relative_to(self.base)).replace("/", "_")

    def renew_hostile(self) -> None:
        """Put the attacker's home back to what the product made."""
        self._renew(self.home, ATTACKER_UID)
        self._renew(self.local, ATTACKER_UID)
        for path in self.lure.iterdir():
            if path != self.home:
                remove(path)

    def renew_readers(self) -> None:
        """Put back what the reader and root own, after a fault."""
        for person in self.readers:
            self._renew(person.folder, person.uid)

    def empty(self, person: Person) -> None:
        """Remove what a command left in the person's working folder, where it may."""
        for folder in (person.cwd, person.folder / "tmp"):
            for path in folder.iterdir():
                remove(path)

    def _renew(self, folder: Path, owner: int) -> None:
        remove(folder)
        shutil.copytree(self._copy_of(folder), folder, symlinks=True)
        give(folder, owner)

    def belongings(self) -> Snapshot:
        """What the reader and root own, but for their working folders."""
        found: Snapshot = {}
        for person in self.readers:
            found |= snapshot(person.folder, without=(person.cwd, person.folder / "tmp"))
        return found

    def hostile(self) -> Snapshot:
        """What the attacker owns."""
        return snapshot(self.home) | snapshot(self.local)


@contextmanager
def world(*, keep: bool = False) -> Iterator[World]:
    """A furnished world in memory, gone afterwards unless it is to be kept. Needs root."""
    base = Path(tempfile.mkdtemp(prefix="resihp-hostile-", dir=MEMORY if os.access(MEMORY, os.W_OK) else None))
    try:
        with Listeners.open(base) as listeners:
            made = World(base, listeners)
            made.furnish()
            yield made
    finally:
        if keep:
            print(f"kept: {base}")
        else:
            remove(base)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()


def give(folder: Path, owner: int) -> None:
    """Make a folder and all below it that user's."""
    for path in below(folder):
        os.chown(path, owner, owner, follow_symlinks=False)


def below(folder: Path) -> Iterator[Path]:
    """The folder, and everything in it; no link is followed."""
    yield folder
    for where, folders, files in os.walk(folder):
        for name in (*folders, *files):
            yield Path(where, name)


def snapshot(folder: Path, without: tuple[Path, ...] = ()) -> Snapshot:
    """What is below a folder: of a file all that a change of it changes, of a folder its names and rights alone, since
    a file may be made beside another for a moment."""
    found: Snapshot = {}
    pending = [str(folder)] if os.path.lexists(folder) else []
    excluded = {str(path) for path in without}
    while pending:
        path = pending.pop()
        seen = os.lstat(path)
        if stat.S_ISDIR(seen.st_mode):
            names = sorted(os.listdir(path)) if path not in excluded else []
            found[path] = (str(seen.st_mode), str(seen.st_uid), str(seen.st_gid), *names)
            pending += [f"{path}/{name}" for name in names]
            continue
        times = (seen.st_mtime_ns, seen.st_ctime_ns)
        found[path] = (seen.st_mode, seen.st_uid, seen.st_gid, seen.st_ino, seen.st_nlink, seen.st_size, *times)
    return found


def differences(before: Snapshot, after: Snapshot) -> list[str]:
    """What was made, changed and removed, in words."""
    made = [f"made {path}" for path in after if path not in before]
    removed = [f"deleted {path}" for path in before if path not in after]
    changed = [f"changed {path}" for path in after if path in before and before[path] != after[path]]
    is_parent = {os.path.dirname(line.partition(" ")[2]) for line in (*made, *removed)}
    return made + removed + [line for line in changed if line.partition(" ")[2] not in is_parent]
