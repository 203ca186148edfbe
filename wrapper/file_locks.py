"""Locks on files, while a descriptor is open: who leads a job, and whether anybody does.

Decides nothing. Called by `wrapper.job_folder`, and by an agent that watches over a successor.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path

from resihp.errors import OwnershipError, UsageError

LOCK_NAME = "supervisor.lock"
"""In a job's folder."""
NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})
"""What flock answers on Lustre without -o flock, and on file systems that have no locks at all."""

NO_LOCK_FILE = frozenset({errno.ELOOP, errno.EISDIR, errno.ENXIO})
"""What opening a link, a folder or a socket answers."""
_NOT_REGULAR = "{path}: must be a regular file (the job's lock), but is a link or another kind of file; remove it"


def lock_file(path: Path, *, look: bool = False) -> int | None:
    """Lock a file, made if it is not there, while the descriptor is open; None if somebody else has it.

    `look`: only to see whether somebody has it; nothing is made or written, and others may look as well. Raises
    UsageError where the file system has no locks, OwnershipError where a link, or something else that is no lock, is in
    its place.
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
            f"{path}: its file system takes no locks ({error.strerror}), so two supervisors could lead the job; "
            f"have it mounted with -o flock (Lustre), or set {setting} to a folder on another"
        ) from error
    return descriptor
