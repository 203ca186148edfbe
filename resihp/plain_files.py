"""Files that somebody else may have put there: opened if they are plain, never waited for, no link followed.

Looks at a file through its descriptor, since a name may mean another file a moment later. Decides nothing about what is
in it. Called by whatever reads a job's folder, a ledger or a log.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def open_plain(path: Path, *, follow: bool = False) -> int:
    """Open a plain file for reading, and return the descriptor.

    `follow`: a link in the last part of the path may lead to it. Raises OSError for a link (ELOOP) and for a pipe, a
    device or a folder (EINVAL), without waiting for any of them; also for a path that holds a NUL.
    """
    if "\0" in str(path):
        raise OSError(errno.EINVAL, "holds a NUL", ascii(str(path)))
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket
            raise OSError(errno.EINVAL, "is no plain file", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is no plain file", str(path))
    return descriptor


def is_plain(path: Path) -> bool:
    """Tell whether a plain file is there; a link to one is none."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except (OSError, ValueError):
        return False


def is_trusted(found: os.stat_result) -> bool:
    """Tell whether only we, or root, can have written what was looked at: it is ours or root's, and closed to others.

    A sticky folder counts as open: others can add files to it.
    """
    return found.st_uid in (os.geteuid(), 0) and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
