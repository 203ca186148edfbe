"""Logs on local disk, copied to the job's folder: a shared file system that hangs must not stop the processes that
write them.

The output of a node's processes goes to files on the node's own disk. A thread appends new output to the file of the
same name in the job's folder, once a second, and frees the local blocks that it has copied. If the folder hangs, only
this thread hangs with it: another thread makes sure that uncopied output does not fill the node's disk, which also
holds the job's journal. It cuts the middle of the output, and the copy has a notice in its place. Owned by
`wrapper.agent.process`.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from contextlib import suppress
from io import RawIOBase
from pathlib import Path

COPY_EVERY_S = 1.0
CLOSE_TIMEOUT_S = 2.0
"""How long an agent that ends waits for the last copy."""
CHUNK_BYTES = 1 << 20
FREE_BYTES = 16 << 20
MAX_UNCOPIED_BYTES = 256 << 20
"""Most uncopied bytes of one file. Beyond that, all but the last half of them is cut."""
LOOK_EVERY_S = 1.0
_KEEP_SIZE_AND_PUNCH_HOLE = 0x01 | 0x02


class LogMirror:
    """Copies the files of one node, `<node>.*`, from one folder to another. Removes files that an earlier agent has
    left."""

    def __init__(self, node: str, local_folder: Path, target_folder: Path) -> None:
        """`local_folder` is made if it does not exist. Raises OSError."""
        self._pattern = f"{node}.*"
        self._local_folder = local_folder
        self._target_folder = target_folder
        self._copied: dict[str, int] = {}
        self._freed: dict[str, int] = {}
        self._cut: dict[str, tuple[int, int]] = {}
        """By file, the range of bytes that was cut, and is skipped by the copy."""
        self._reading = threading.Lock()
        """Held while a file is read, so that nothing is cut meanwhile. Only local disk is accessed while it is held."""
        self._ending = threading.Event()
        local_folder.mkdir(mode=0o700, exist_ok=True)
        for leftover in local_folder.glob(self._pattern):
            leftover.unlink()
        self._thread = threading.Thread(target=self._run, name="resihp-logs", daemon=True)
        self._thread.start()
        threading.Thread(target=self._limit, name="resihp-log-limit", daemon=True).start()

    def close(self) -> None:
        """Copy the rest, or give up if the folder hangs."""
        self._ending.set()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        ending = False
        reported = ""
        while not ending:
            ending = self._ending.wait(COPY_EVERY_S)
            for path in sorted(self._local_folder.glob(self._pattern)):
                try:
                    self._copy(path)
                except OSError as error:
                    if (
                        trouble := f"{path.name}: cannot be copied to {self._target_folder}: {error.strerror}"
                    ) != reported:
                        print(trouble, flush=True)
                        reported = trouble

    def _copy(self, path: Path) -> None:
        done = self._copied.get(path.name, 0)
        if path.stat().st_size <= done:
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        with (
            path.open("r+b", buffering=0) as source,
            open(os.open(self._target_folder / path.name, flags, 0o600), "wb") as target,
        ):
            while True:
                with self._reading:
                    chunk, done = self._next(path.name, source, done)
                if not chunk:
                    break
                target.write(chunk)
                target.flush()
                self._copied[path.name] = done
            if done - self._freed.get(path.name, 0) >= FREE_BYTES:
                _free(source.fileno(), done)
                self._freed[path.name] = done

    def _next(self, name: str, source: RawIOBase, done: int) -> tuple[bytes, int]:
        """Return the bytes that follow the first `done` bytes, or a notice in their place, and the new position of the
        copy."""
        start, end = self._cut.get(name, (0, 0))
        if start <= done < end:
            notice = (
                f"\nresihp: {end - done} bytes are missing here: {self._target_folder} was not writable for too long\n"
            )
            return notice.encode(), end
        source.seek(done)
        chunk = source.read(min(CHUNK_BYTES, start - done) if done < start else CHUNK_BYTES) or b""
        return chunk, done + len(chunk)

    def _limit(self) -> None:
        while not self._ending.wait(LOOK_EVERY_S):
            for path in self._local_folder.glob(self._pattern):
                with suppress(OSError):
                    self._cut_what_waits(path)

    def _cut_what_waits(self, path: Path) -> None:
        with self._reading:
            size, copied = path.stat().st_size, self._copied.get(path.name, 0)
            start, end = self._cut.get(path.name, (0, 0))
            if end <= copied:
                start = end = copied + CHUNK_BYTES  # the part before is just being written
            if size - end <= MAX_UNCOPIED_BYTES:
                return
            kept = size - MAX_UNCOPIED_BYTES // 2
            with path.open("r+b") as file:
                if _free(file.fileno(), kept - end, end):
                    self._cut[path.name] = (start, kept)


def _free(descriptor: int, size: int, start: int = 0) -> bool:
    """Give a part of the file back to the disk; it then reads as zeros. Return False if that is not possible."""
    allocate = ctypes.CDLL(None, use_errno=True).fallocate
    return bool(allocate(descriptor, _KEEP_SIZE_AND_PUNCH_HOLE, ctypes.c_int64(start), ctypes.c_int64(size)) == 0)


def print_to(path: Path) -> None:
    """Redirect the output of this process to a file. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
