"""Files that are whole or not there, and stay: whoever reads sees the old or the new one, also after a power cut.

A file is made beside its place first, which may be a folder that others write as well, as /tmp is: its name there
cannot be guessed, it is made anew, and no link that stands there is written through.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

DEVICES = (Path("/dev"), Path("/dev/fd"), Path("/proc/self/fd"))
"""Folders whose names are devices, pipes and open files, which nobody replaces."""


@contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Open a new file that takes the place of `path` once the block has ended well, and is removed otherwise.

    `mode` less the umask are its permissions. A device is written itself, as of `-o /dev/stdout`. Raises OSError.
    """
    if path.parent in DEVICES:
        with path.open("wb") as device:
            yield device
        return
    temporary = path.with_name(f".{path.name[:200]}.{os.getpid()}-{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def write_durably(path: Path, content: bytes) -> None:
    """Replace a file at once and for good. Raises OSError."""
    with replacing(path) as file:
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
