"""Opens files that another user may have created: only regular files, without blocking, without following links.

The check uses the open descriptor, because the name may refer to another file a moment later. This module never
examines a file's content. Called by all code that reads a job's folder, a ledger or a log.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def open_plain(path: Path, *, follow: bool = False, at: int | None = None) -> int:
    """Open a regular file for reading and return its descriptor, without blocking.

    With `follow`, the last part of the path may be a symbolic link; without, a link raises OSError (ELOOP). `at`: the
    descriptor of the folder from which a relative path leads; None for the current folder. A socket, a pipe, a device,
    a folder, or a path that contains a NUL raises OSError (EINVAL).
    """
    if "\0" in str(path):
        raise OSError(errno.EINVAL, "holds a NUL", ascii(str(path)))
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags, dir_fd=at)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket
            raise OSError(errno.EINVAL, "is no plain file", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is no plain file", str(path))
    return descriptor


def is_plain(path: Path) -> bool:
    """Return whether `path` is a regular file; a link to one does not count."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except (OSError, ValueError):
        return False


def is_trusted(status: os.stat_result) -> bool:
    """Return whether a file belongs to the current user or root, and neither its group nor others may write it.

    A sticky folder that others may write, such as /tmp, is not trusted: others can add files to it.
    """
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
