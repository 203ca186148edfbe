"""Locks on files. A lock is held while its descriptor is open, and shows whether a process leads a job.

Decides nothing. Called by `resihp.wrapper.job_folder`, and by an agent that watches a successor.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path

from resihp.errors import OwnershipError, UsageError

LOCK_NAME = "supervisor.lock"
"""Name of the lock file in a job's folder."""
NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})
"""Errors of flock on Lustre mounted without -o flock, and on other file systems without locks."""

NO_LOCK_FILE = frozenset({errno.ELOOP, errno.EISDIR, errno.ENXIO})
"""Errors of opening a path that is a link, a folder or a socket."""
_NOT_REGULAR = "{path}: must be a regular file (the job's lock), but is a link or another kind of file; remove it"


def lock_file(path: Path, *, look: bool = False) -> int | None:
    """Lock a file until its descriptor is closed; return the descriptor, or None if another process holds the lock.

    The file is created if needed. `look`: only check whether the lock is held; nothing is created or written, and other
    processes may check at the same time. Raises UsageError if the file system has no locks, OwnershipError if the path
    is a link or not a regular file.
    """
    flags = os.O_RDONLY if look else os.O_RDWR | os.O_CREAT
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in NO_LOCK_FILE:
            raise OwnershipError(_NOT_REGULAR.format(path=path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OwnershipError(_NOT_REGULAR.format(path=path))
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if look else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError as error:
        os.close(descriptor)
        if error.errno not in NO_LOCKS:
            raise
        setting = "RESIHP_HOME" if path.name == LOCK_NAME else "RESIHP_LOCAL"
        raise UsageError(
            f"{path}: its file system does not support locks ({error.strerror}), so two supervisors could lead the "
            f"job; have it mounted with -o flock (Lustre), or set {setting} to a folder on another"
        ) from error
    return descriptor
