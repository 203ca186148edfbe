"""Checks who could have written a file before its content is trusted, like sshd's StrictModes.

`run.json` names the program that runs as us, `key` gives access to the job's connections, `job.json` has the path of
its journal. Anybody who can write one of them, or replace its folder, can run programs as us. So a file is opened first
and then checked through its descriptor, and only plain files are opened, so that nothing can block. Files and folders
must be ours or root's, and writable by nobody else; a folder may also be sticky, as /tmp is. Above RESIHP_HOME, a
project's group may have write permission: that is its owner's choice, and its members can at most move our jobs away.
Our own files are written whole or not at all, and for us alone. Decides nothing about a job. Called by
`wrapper.job_folder`, `wrapper.config.run_spec`, and all modules that read or write a job's files.
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

MAX_FILE_BYTES = 64 << 20
"""Limit for a file that is read as a whole: a configuration, an address, a key. The largest that we write has a few
hundred kB."""


def read_own(path: Path, most_bytes: int = MAX_FILE_BYTES, *, root_may: bool = False) -> bytes:
    """Read a file. Raises OwnershipError if others could have written it, OSError as `read_plain` does.

    `root_may`: root may read another user's file, from which no program is started.
    """
    return _read(path, most_bytes, own=True, root_may=root_may)


def read_plain(path: Path, most_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Read a plain file, whoever owns it. Raises OSError for a link, a pipe, a device, a folder, or a larger file, and
    never blocks on one."""
    return _read(path, most_bytes, own=False)


def _read(path: Path, most_bytes: int, *, own: bool, root_may: bool = False) -> bytes:
    try:
        descriptor = open_plain(path)
    except OSError as error:
        if own and error.errno == errno.ELOOP:
            raise OwnershipError(f"{path}: is a link, but must be a file of yours; remove it") from None
        raise
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if own and not (root_may and os.geteuid() == 0 and not _other_writers(status)):
            _check(path, status, "RESIHP_HOME")
        if status.st_size > most_bytes:
            raise OSError(errno.EFBIG, f"has {status.st_size} bytes, at most {most_bytes} are read", str(path))
        return file.read(status.st_size)


def check_links(*folders: Path) -> None:
    """Raise OwnershipError if one of the folders is a link made by another user, because it may lead anywhere. Our own
    links, for example to another disk, are followed, and root's."""
    for folder in folders:
        status = folder.lstat()
        if stat.S_ISLNK(status.st_mode) and status.st_uid not in (os.geteuid(), 0):
            owner = _user(status.st_uid)
            raise OwnershipError(f"{folder}: is a link of {owner}'s, and not followed; name its target")


def write_private(path: Path, content: bytes, *, sync: bool = False) -> None:
    """Write a file that only its owner can read, whole or not at all; with `sync`, also if the machine fails."""
    if sync:
        write_durably(path, content, 0o600)
        return
    with replacing(path, 0o600) as file:
        file.write(content)


def private(path: str, flags: int) -> int:
    """Open a file, as in `open(..., opener=private)`: a new file is its owner's alone, whatever the umask, and links
    are not followed."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def check_folder(folder: Path, setting: str = "RESIHP_HOME") -> None:
    """Raise OwnershipError if others could put files into a folder, OSError if it cannot be checked.

    `setting`: the environment variable with which another folder is chosen.
    """
    _check(folder, folder.stat(), setting)


def check_above(folder: Path, setting: str = "RESIHP_HOME") -> None:
    """Raise OwnershipError if anybody may move the folder away: a folder above it is writable by all and not sticky."""
    for parent in folder.resolve().parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise OwnershipError(
                f"{folder}: everybody may move it away, since {parent} is writable by all; "
                f"chmod o-w {shlex.quote(str(parent))}, or set {setting} to a folder of yours elsewhere"
            )


def other_owner(folder: Path) -> str:
    """Return the name of another user who owns the folder, or the link, at a path; empty for ours, root's, and no
    folder."""
    with suppress(OSError):
        for status in (folder.lstat(), folder.stat()):
            if status.st_uid not in (os.geteuid(), 0):
                return _user(status.st_uid)
    return ""


def is_own(folder: Path) -> bool:
    """Return whether a folder is ours and writable only by us: then its files may be changed, not just read."""
    try:
        status = folder.stat()
    except OSError:
        return False
    return status.st_uid == os.geteuid() and not _other_writers(status)


def _check(path: Path, status: os.stat_result, setting: str) -> None:
    if status.st_uid not in (os.geteuid(), 0):
        raise OwnershipError(f"{path}: belongs to {_user(status.st_uid)}; set {setting} to a folder of yours")
    if writers := _other_writers(status):
        owner = "" if status.st_uid == os.geteuid() else f" (it is {_user(status.st_uid)}'s)"
        raise OwnershipError(
            f"{path}: {writers} may write it; chmod go-w {shlex.quote(str(path))}{owner}, "
            f"or set {setting} to a folder of yours"
        )


def _other_writers(status: os.stat_result) -> str:
    """Return which others may write a file or folder; empty for nobody."""
    if stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX:
        return ""
    if status.st_mode & stat.S_IWOTH:
        return "everybody"
    return f"group {_group(status.st_gid)}" if status.st_mode & stat.S_IWGRP else ""


def _user(number: int) -> str:
    with suppress(KeyError):
        return pwd.getpwuid(number).pw_name
    return f"user {number}"


def _group(number: int) -> str:
    with suppress(KeyError):
        return grp.getgrgid(number).gr_name
    return str(number)
