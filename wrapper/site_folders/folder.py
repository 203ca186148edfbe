"""Opens a folder that a site shares among all users, after checking that no user can replace files of others in it.

The check uses the open descriptor, and files are opened relative to it. Called by the modules beside it and by `resihp
doctor`.
"""

from __future__ import annotations

import os
import pwd
import shlex
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from resihp.errors import ResihpError

ADMINISTRATOR_UID = 0
"""Owner of the site's folders."""


class SiteFolderError(ResihpError):
    """A folder of the site is missing, or is not safe to share, or a file in it cannot be used."""


@contextmanager
def opened(folder: Path, setting: str) -> Iterator[int]:
    """Yield a descriptor of the folder, to open files relative to it. `setting`: the key that names the folder.

    Raises SiteFolderError if the folder is missing, is a link, does not belong to root, or may be written by others
    without being sticky.
    """
    subject = f"[site] {setting} {folder}"
    try:
        descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        words = "is a link or no folder" if isinstance(error, NotADirectoryError) else (error.strerror or "").lower()
        raise SiteFolderError(f"{subject}: {words}; ask the administrator for it ({remedy(folder)})") from None
    try:
        status = os.fstat(descriptor)
        if status.st_uid != ADMINISTRATOR_UID:
            raise SiteFolderError(f"{subject}: belongs to {user_of(status.st_uid)} and not to root; {remedy(folder)}")
        if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
            raise SiteFolderError(f"{subject}: others may write there and it is not sticky; {remedy(folder)}")
        yield descriptor
    finally:
        os.close(descriptor)


def file_mode(at: int) -> int:
    """Return the mode of files in a site's folder: a setgid folder gives them its group, which alone reads them."""
    return 0o640 if os.fstat(at).st_mode & stat.S_ISGID else 0o644


def remedy(folder: Path) -> str:
    """Return the command with which an administrator makes the folder."""
    return f"install -d -o root -g root -m 1733 {shlex.quote(str(folder))}"


def check_writable(folder: Path, setting: str) -> None:
    """Raise SiteFolderError if this user cannot add files to the folder. Writes nothing."""
    with opened(folder, setting) as descriptor:
        path = f"/proc/self/fd/{descriptor}"
        file_system = os.statvfs(path)
        if file_system.f_flag & os.ST_RDONLY:
            raise SiteFolderError(f"[site] {setting} {folder}: its file system is read-only; tell the administrator")
        if not os.access(path, os.W_OK | os.X_OK):
            raise SiteFolderError(f"[site] {setting} {folder}: you may not write there; {remedy(folder)}")
        if file_system.f_blocks and not file_system.f_bavail:
            raise SiteFolderError(f"[site] {setting} {folder}: no space left there; tell the administrator")


def printable(text: str, most: int) -> str:
    """Return a text on one line, without control characters, and at most `most` characters long."""
    words = "".join(letter if letter.isprintable() else " " for letter in text[: 4 * most]).split()
    return " ".join(words)[:most]


def user_of(uid: int) -> str:
    """Return the name of a user; the number if it has no name here."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
