"""Whose files are, before anything in them is believed: what sshd calls StrictModes.

`run.json` names the program that runs as us, `key` opens the job's conversations, `job.json` says where its journal is.
Whoever can write one of them, or take the folder that it is in away and put another there, runs programs as us. So a
file is opened first and looked at then, through its descriptor, and nothing that is no plain file is ever waited for.
Files and folders must be ours or root's, and writable by nobody else; a folder may also be sticky, as /tmp is. Above
RESIHP_HOME a project's group may write, which is its owner's choice, and all that it gains is to take our jobs away.
What we write is whole or not there, and for us alone. Decides nothing about a job. Called by `wrapper.job_folder`,
`wrapper.config.run_spec`, and whoever reads or writes a job's files.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import shlex
import stat
from contextlib import suppress
from pathlib import Path

from resihp.durable_files import replacing, write_durably
from resihp.errors import OwnershipError
from resihp.plain_files import open_plain

MAX_BYTES = 64 << 20
"""Of a file that is read whole: a configuration, an address, a key. The largest that we write has some hundred kB."""


def read_own(path: Path, most_bytes: int = MAX_BYTES, *, root_may: bool = False) -> bytes:
    """A file's bytes. Raises OwnershipError if others could have written it, OSError as `read_plain` does.

    `root_may`: root may read another user's, of which nothing is run.
    """
    return _read(path, most_bytes, own=True, root_may=root_may)


def read_plain(path: Path, most_bytes: int = MAX_BYTES) -> bytes:
    """The bytes of a plain file, whoever it belongs to. Raises OSError for a link, a pipe, a device, a folder, or a
    file that is larger than that, and never waits for one."""
    return _read(path, most_bytes, own=False)


def _read(path: Path, most_bytes: int, *, own: bool, root_may: bool = False) -> bytes:
    try:
        descriptor = open_plain(path)
    except OSError as error:
        if own and error.errno == errno.ELOOP:
            raise OwnershipError(f"{path}: is a link, where a file of yours is due; remove it") from None
        raise
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if own and not (root_may and os.geteuid() == 0 and not _open_to(found)):
            _check(path, found, "RESIHP_HOME")
        if found.st_size > most_bytes:
            raise OSError(errno.EFBIG, f"has {found.st_size} bytes, at most {most_bytes} are read", str(path))
        return file.read(found.st_size)


def check_links(*folders: Path) -> None:
    """Raises OwnershipError if one of them is a link that somebody else has made: it may lead anywhere. Our own links,
    to another disk, say, are followed, and root's."""
    for folder in folders:
        found = folder.lstat()
        if stat.S_ISLNK(found.st_mode) and found.st_uid not in (os.geteuid(), 0):
            owner = _user(found.st_uid)
            raise OwnershipError(f"{folder}: is a link of {owner}'s, and not followed; name where it leads")


def write_private(path: Path, content: bytes, *, sync: bool = False) -> None:
    """Write a file that only its owner can read, whole or not at all; with `sync`, also if the machine fails."""
    if sync:
        write_durably(path, content, 0o600)
        return
    with replacing(path, 0o600) as file:
        file.write(content)


def private(path: str, flags: int) -> int:
    """For `open(..., opener=private)`: a file that is made is its owner's alone, whatever the umask, and no link is
    followed."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def check_folder(folder: Path, setting: str = "RESIHP_HOME") -> None:
    """Raises OwnershipError if others could put files into it, OSError if it cannot be looked at.

    `setting`: the environment variable by which another one is chosen.
    """
    _check(folder, folder.stat(), setting)


def check_above(folder: Path, setting: str = "RESIHP_HOME") -> None:
    """Raises OwnershipError if anybody at all may take the folder away: one above it is open to all and not sticky."""
    for parent in folder.resolve().parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise OwnershipError(
                f"{folder}: everybody may take it away, since {parent} is writable by all; "
                f"chmod o-w {shlex.quote(str(parent))}, or set {setting} to a folder of yours elsewhere"
            )


def somebody_elses(folder: Path) -> str:
    """Name the other user whose folder, or link to one, is at a path; empty for ours, for root's, and for none."""
    with suppress(OSError):
        for found in (folder.lstat(), folder.stat()):
            if found.st_uid not in (os.geteuid(), 0):
                return _user(found.st_uid)
    return ""


def is_own(folder: Path) -> bool:
    """Whether it is ours and only ours to write: what is found there may be worked on, not just read."""
    try:
        found = folder.stat()
    except OSError:
        return False
    return found.st_uid == os.geteuid() and not _open_to(found)


def _check(path: Path, found: os.stat_result, setting: str) -> None:
    if found.st_uid not in (os.geteuid(), 0):
        raise OwnershipError(f"{path}: belongs to {_user(found.st_uid)}; set {setting} to a folder of yours")
    if who := _open_to(found):
        owner = "" if found.st_uid == os.geteuid() else f" (it is {_user(found.st_uid)}'s)"
        raise OwnershipError(
            f"{path}: {who} may write it; chmod go-w {shlex.quote(str(path))}{owner}, "
            f"or set {setting} to a folder of yours"
        )


def _open_to(found: os.stat_result) -> str:
    """Who else may write it; empty for nobody."""
    if stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX:
        return ""
    if found.st_mode & stat.S_IWOTH:
        return "everybody"
    return f"group {_group(found.st_gid)}" if found.st_mode & stat.S_IWGRP else ""


def _user(number: int) -> str:
    with suppress(KeyError):
        return pwd.getpwuid(number).pw_name
    return f"user {number}"


def _group(number: int) -> str:
    with suppress(KeyError):
        return grp.getgrgid(number).gr_name
    return str(number)
