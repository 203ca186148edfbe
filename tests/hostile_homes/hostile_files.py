"""Mutations of files as files: what stands in their place, whose they are, how old, how large, how many."""

from __future__ import annotations

import os
import random
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tests.hostile_homes.places import READER_UID, SECRETS, STRANGER_UID, below, remove

if TYPE_CHECKING:
    from tests.hostile_homes.mutations import Target

GIANT_BYTES = 1 << 40
"""Of a file with nothing in it."""
MANY = 3_000
READ_FIRST = ("job.json", "run.json", "key", "journal", "ledger.db", "exit_code", "progress.json", "supervisor.lock")
"""Files that commands look at, to be hit more often than those of logs and checkpoints."""


def everything(folder: Path) -> Iterator[Path]:
    """Below a folder, in an order that no file system decides."""
    return iter(sorted(path for path in below(folder) if path != folder))


def become_link(target: Target) -> str:
    """A file is a link: to a secret of the reader's or root's, to what is not there yet, to a device, in a circle."""
    path = _some_file(target)
    world = target.world
    leads = [
        *(person.folder / name for person in world.readers for name in SECRETS),
        *(person.folder / ".ssh" / "authorized_keys2" for person in world.readers),
        *(person.job / path.name for person in world.readers),
        *(Path(name) for name in ("/dev/zero", "/dev/tty", "/etc/shadow", "/proc/kmsg", "/dev/full", str(path))),
        world.reader.folder / ".ssh",
    ]
    to = target.rng.choice(leads)
    remove(path)
    path.symlink_to(to)
    return f"{target.shown(path)} is a link to {to}"


def become_pipe(target: Target) -> str:
    path = _some_file(target)
    remove(path)
    os.mkfifo(path, 0o666)
    path.chmod(0o666)
    return f"{target.shown(path)} is a pipe"


def become_device(target: Target) -> str:
    """A device, or a link to it: file systems may be mounted so that devices on them cannot be opened."""
    path = _some_file(target)
    name, major, minor = target.rng.choice((("zero", 1, 5), ("tty", 5, 0), ("full", 1, 7), ("null", 1, 3)))
    remove(path)
    if target.rng.random() < 0.5:
        path.symlink_to(f"/dev/{name}")
        return f"{target.shown(path)} is a link to the device {name}"
    os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(major, minor))
    path.chmod(0o666)
    return f"{target.shown(path)} is the device {name}"


def become_socket(target: Target) -> str:
    path = _some_file(target)
    remove(path)
    with socket.socket(socket.AF_UNIX) as listening:
        folder = os.open(path.parent, os.O_RDONLY)
        listening.bind(f"/proc/self/fd/{folder}/{path.name}")
        os.close(folder)
    return f"{target.shown(path)} is a socket"


def become_folder(target: Target) -> str:
    path = _some_file(target)
    remove(path)
    path.mkdir()
    (path / "inside").write_text("x")
    return f"{target.shown(path)} is a folder"


def become_giant(target: Target) -> str:
    """A terabyte of nothing, after what the file had or alone."""
    path = _some_file(target)
    if target.rng.random() < 0.5:
        path.write_bytes(b"")
    os.truncate(path, target.rng.choice((GIANT_BYTES, 1 << 31, 70 << 20)))
    return f"{target.shown(path)} has {path.stat().st_size} bytes"


def become_nothing(target: Target) -> str:
    path = target.rng.choice([_some_file(target), target.folder / "logs", target.folder / "checkpoints", target.local])
    remove(path)
    return f"{target.shown(path)} is not there"


def folder_becomes_link(target: Target) -> str:
    """A folder is a link to one of the reader's or root's, or the job's folder is."""
    world = target.world
    person = target.rng.choice(world.readers)
    path, to = target.rng.choice(
        (
            (target.folder / "logs", person.folder / ".ssh"),
            (target.folder / "checkpoints", person.folder),
            (target.folder / "checkpoints" / "iteration-000020", person.folder / ".ssh"),
            (target.local, person.folder / ".ssh"),
            (target.folder, person.job),
            (world.home / "jobs" / "local-9", person.folder / ".ssh"),
            (target.folder / "logs", Path("/proc/self")),
            (target.folder / "logs", target.folder),
        )
    )
    remove(path)
    path.symlink_to(to)
    return f"{target.shown(path)} is a link to {to}"


def many(target: Target) -> str:
    """Thousands of logs, jobs or checkpoints."""
    what = target.rng.choice(("logs", "jobs", "checkpoints"))
    for number in range(MANY):
        if what == "logs":
            (target.folder / "logs" / f"n{number}.rank{number}.log").touch()
        elif what == "checkpoints":
            (target.folder / "checkpoints" / f"iteration-{number + 100:06d}").mkdir()
        else:
            (target.world.home / "jobs" / f"empty-{number}").mkdir()
    return f"{MANY} {what}"


def modes(target: Target) -> str:
    """Files and folders that nobody may read, or everybody may write."""
    words = []
    for path in target.rng.sample(_all(target), 3):
        mode = target.rng.choice((0o000, 0o000, 0o777, 0o666, 0o4755, 0o1777, 0o200, 0o100))
        path.chmod(mode)
        words.append(f"{target.shown(path)} {mode:o}")
    return ", ".join(words)


def owners(target: Target) -> str:
    """Files and folders in the home that are not the attacker's."""
    words = []
    for path in target.rng.sample(_all(target), 3):
        owner = target.rng.choice((0, READER_UID, STRANGER_UID))
        os.chown(path, owner, owner, follow_symlinks=False)
        target.given_away.add(path)
        words.append(f"{target.shown(path)} is of {owner}")
    return ", ".join(words)


def times(target: Target) -> str:
    """Files of 1901 to far away."""
    moments = (0.0, -(2.0**31), 4_102_444_800.0, 2.0**33, 253_402_300_800.0, 1e12, -1e11)
    words = []
    for path in _all(target):
        if target.rng.random() < 0.4:
            at = target.rng.choice(moments)
            try:
                os.utime(path, ns=(int(at * 1e9), int(at * 1e9)))
            except (OSError, OverflowError):
                continue
            words.append(f"{path.name} {at:g}")
    return f"times: {', '.join(words[:6])}"


def planted(target: Target) -> str:
    """Links in the folder that the reader works in, where commands write files whose names can be guessed."""
    lure, person = target.world.lure, target.rng.choice(target.world.readers)
    to = person.folder / ".ssh" / "authorized_keys2"
    for name in (f"report-{target.name}.html", "job.toml", "job.sbatch", ".job.toml.tmp", "output", "output.parquet"):
        (lure / name).symlink_to(to)
    for pid in range(os.getpid(), os.getpid() + 200):
        for name in (f".report-{target.name}.html.{pid}", f".job.toml.{pid}", f".output.{pid}"):
            (lure / name).symlink_to(to)
    return f"links to {to} where reports are written"


def _some_file(target: Target) -> Path:
    """A file of the job, one that commands look at rather than another; or its journal on local disk."""
    rng: random.Random = target.rng
    often = [target.folder / name for name in READ_FIRST if (target.folder / name).is_file()]
    often += [path for path in target.journals if path.is_file()]
    often += [path for path in sorted((target.folder / "logs").glob("*.log"))[:2] if path.is_file()]
    files = [path for path in everything(target.folder) if path.is_file()]
    return rng.choice(often if often and rng.random() < 0.75 else files)


def _all(target: Target) -> list[Path]:
    return [*everything(target.folder), target.folder, target.local, *everything(target.local)]
