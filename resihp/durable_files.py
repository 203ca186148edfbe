"""Atomic, durable file replacement: readers see either the old file or the new one, even after a power failure.

A new file is first written next to its destination, possibly in a folder such as /tmp that other users can write to.
Its temporary name therefore cannot be guessed, it is always newly created, and it is never opened through an existing
link.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

DEVICE_FOLDERS = (Path("/dev"), Path("/dev/fd"), Path("/proc/self/fd"))
"""Folders whose entries are devices, pipes and open files; these are written to, never replaced."""


MAX_LINKS = 40
"""Longest chain of symbolic links that is followed; the same limit as Linux."""


@contextmanager
def replacing(path: Path, mode: int = 0o666, *, named_by_user: bool = False) -> Iterator[BinaryIO]:
    """Yield a new file for writing; it replaces `path` when the block ends, and is deleted if the block raises.

    The new file has the permissions `mode` less the umask. If `path` is in one of `DEVICE_FOLDERS`, as in
    `-o /dev/stdout`, it is opened for writing directly. With `named_by_user`, symbolic links that belong to the user or
    to root are followed, and a pipe or character device that belongs to the user or to root is also opened directly:
    its owner put it there for that purpose. Raises OSError.
    """
    if named_by_user:
        path = own_links_followed(path)
    if path.parent in DEVICE_FOLDERS or (named_by_user and _is_own_channel(path)):
        with path.open("wb") as device:
            yield device
        return
    # The temporary name does not contain the target's name, which may already have the maximum length.
    temporary = path.with_name(f".resihp-{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def replace_in(folder: int, name: str, content: bytes, mode: int, *, sync: bool = False) -> None:
    """Replace the file `name` in an open folder by `content`, as a whole or not at all, with the permissions `mode`
    whatever the umask. `folder`: a descriptor of it, which need not permit listing. Raises OSError."""
    temporary = f".resihp-{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(temporary, flags, mode, dir_fd=folder), "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(content)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise


def own_users() -> tuple[int, ...]:
    """Return the ids of the users whose links are followed: the current user and root."""
    return (os.geteuid(), 0)


def own_links_followed(path: Path) -> Path:
    """Return `path` with its symbolic links followed, up to the first link that neither the user nor root owns."""
    for _ in range(MAX_LINKS):
        try:
            link = path.lstat()
        except OSError:
            break
        if path.parent in DEVICE_FOLDERS:  # links there do not point to paths, for example `pipe:[123]`
            break
        if not stat.S_ISLNK(link.st_mode) or link.st_uid not in own_users():
            break
        path = path.parent / path.readlink()
    return path


def _is_own_channel(path: Path) -> bool:
    """Return whether `path` is a pipe or character device that belongs to the user or to root."""
    try:
        target = path.lstat()
    except OSError:
        return False
    is_channel = stat.S_ISFIFO(target.st_mode) or stat.S_ISCHR(target.st_mode)
    return is_channel and target.st_uid in own_users()


def write_durably(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Replace the file `path` by `content` atomically, and flush file and folder to disk. Raises OSError."""
    with replacing(path, mode) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)


def commit_file(temporary: Path, path: Path) -> None:
    """Rename `temporary` to `path` and flush the folder. The caller must have flushed the file's content before."""
    temporary.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
