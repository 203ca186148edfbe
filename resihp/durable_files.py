"""Files that are whole or not there, and stay: whoever reads sees the old or the new one, also after a power cut.

A file is made beside its place first, which may be a folder that others write as well, as /tmp is: its name there
cannot be guessed, it is made anew, and no link that stands there is written through.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

DEVICES = (Path("/dev"), Path("/dev/fd"), Path("/proc/self/fd"))
"""Folders whose names are devices, pipes and open files, which nobody replaces."""


MAX_LINKS = 40
"""As many as Linux follows."""


@contextmanager
def replacing(path: Path, mode: int = 0o666, *, named_by_user: bool = False) -> Iterator[BinaryIO]:
    """Open a new file that takes the place of `path` once the block has ended well, and is removed otherwise.

    `mode` less the umask are its permissions. A device is written itself, as of `-o /dev/stdout`. With `named_by_user`,
    the user's own link, or root's, is followed, and a pipe or device of theirs is written itself: he has put it there
    for that. Raises OSError.
    """
    if named_by_user:
        path = own_links_followed(path)
    if path.parent in DEVICES or (named_by_user and _is_own_channel(path)):
        with path.open("wb") as device:
            yield device
        return
    # The target's name is no part of the new one: that may be as long as a name can be.
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


def own_users() -> tuple[int, ...]:
    """Return the numbers of the users whose links are followed: the user himself and root."""
    return (os.geteuid(), 0)


def own_links_followed(path: Path) -> Path:
    """Return where the user's or root's links lead from a path, up to the first link of somebody else."""
    for _ in range(MAX_LINKS):
        try:
            link = path.lstat()
        except OSError:
            break
        if path.parent in DEVICES:  # names there lead to no path, as to `pipe:[123]`
            break
        if not stat.S_ISLNK(link.st_mode) or link.st_uid not in own_users():
            break
        path = path.parent / path.readlink()
    return path


def _is_own_channel(path: Path) -> bool:
    """Tell whether a pipe or a device of the user's or root's is there, which is written and not replaced."""
    try:
        target = path.lstat()
    except OSError:
        return False
    is_channel = stat.S_ISFIFO(target.st_mode) or stat.S_ISCHR(target.st_mode)
    return is_channel and target.st_uid in own_users()


def write_durably(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Replace a file at once and for good. Raises OSError."""
    with replacing(path, mode) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)


def commit_file(temporary: Path, path: Path) -> None:
    """Rename, and flush the folder that holds the name. The file's content must be flushed already."""
    temporary.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush the names in it. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
