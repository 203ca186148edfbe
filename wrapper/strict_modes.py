"""Checks that nobody else could have written a file before its content is trusted, like sshd's StrictModes.

`run.json` names the program that runs as us, `key` gives access to the job's connections, and `job.json` has the path
of its journal. Anybody able to write one of these files, or to replace its folder, could run programs as us. So a file
is first opened and then checked through its descriptor; only regular files are opened, so that opening cannot block.
Files and folders must belong to us or root, and must not be writable by others; a sticky folder such as /tmp is
allowed. Above RESIHP_HOME, a project's group may have write permission: the folder's owner has chosen that, and the
group's members can at most move our jobs away. Our own files are written completely or not at all, and only we can read
them. Decides nothing about a job. Called by `resihp.wrapper.job_folder`, `resihp.wrapper.config.run_spec`, and all
modules that read or write a job's files.
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
"""Largest file that is read as a whole: a configuration, an address, a key. The largest that we write has a few hundred
kB."""


def read_own(path: Path, most_bytes: int = MAX_FILE_BYTES, *, root_may: bool = False) -> bytes:
    """Read a file that nobody else could have written. Raises OwnershipError if others could have; OSError as
    `read_plain` does.

    `root_may`: root may also read another user's file. Set it only for files from which no program is started.
    """
    return _read(path, most_bytes, own=True, root_may=root_may)


def read_plain(path: Path, most_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Read a regular file of any owner. Raises OSError for a link, a pipe, a device, a folder, or a larger file; never
    blocks."""
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
    """Raise OwnershipError if one of the folders is a link that another user made, because it may lead anywhere. Links
    of this user, for example to another disk, and of root are followed."""
    for folder in folders:
        status = folder.lstat()
        if stat.S_ISLNK(status.st_mode) and status.st_uid not in (os.geteuid(), 0):
            owner = _user(status.st_uid)
            raise OwnershipError(f"{folder}: is a link of {owner}'s, and not followed; name its target")


def write_private(path: Path, content: bytes, *, sync: bool = False) -> None:
    """Write a file that only its owner can read, completely or not at all. `sync`: the content must survive a crash of
    the machine."""
    if sync:
        write_durably(path, content, 0o600)
        return
    with replacing(path, 0o600) as file:
        file.write(content)


def private(path: str, flags: int) -> int:
    """Open a file as the opener of `open(..., opener=private)`. Only the owner can access a new file, whatever the
    umask is; links are not followed."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def check_folder(folder: Path, setting: str = "RESIHP_HOME") -> None:
    """Raise OwnershipError if others could put files into a folder, OSError if the folder cannot be checked.

    `setting`: the environment variable that chooses another folder, for the error's message.
    """
    _check(folder, folder.stat(), setting)


def check_above(folder: Path, setting: str = "RESIHP_HOME") -> None:
    """Raise OwnershipError if anybody may move the folder away, because a folder above it is writable by all and not
    sticky."""
    for parent in folder.resolve().parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise OwnershipError(
                f"{folder}: everybody may move it away, since {parent} is writable by all; "
                f"chmod o-w {shlex.quote(str(parent))}, or set {setting} to a folder of yours elsewhere"
            )


def other_owner(folder: Path) -> str:
    """Return the name of the user who owns the folder at a path, or a link there. Empty if that is this user or root,
    or if there is no folder."""
    with suppress(OSError):
        for status in (folder.lstat(), folder.stat()):
            if status.st_uid not in (os.geteuid(), 0):
                return _user(status.st_uid)
    return ""


def is_own(folder: Path) -> bool:
    """Return whether a folder belongs to us and only we may write it. If so, its files may be changed, not only
    read."""
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
    """Return a description of the other users who may write a file or folder; empty if none may."""
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
