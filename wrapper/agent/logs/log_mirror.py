"""Copies logs from local disk to the job's folder, so that a hung shared file system does not stop the processes that
write the logs.

The output of a node's processes goes to files on the node's own disk. Once a second, a thread appends new output to the
file of the same name in the job's folder, and frees the local blocks that it has copied. If the folder hangs, only this
thread hangs. Another thread keeps uncopied output from filling the node's disk, which also holds the job's journal: it
cuts the middle out of the output, and the copy contains a notice in its place. Owned by `resihp.wrapper.agent.process`.
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
"""How long an agent that exits waits for the last copy."""
CHUNK_BYTES = 1 << 20
FREE_BYTES = 16 << 20
MAX_UNCOPIED_BYTES = 256 << 20
"""Limit on the uncopied bytes of one file. If a file exceeds it, the uncopied bytes except for the last half of this
limit are cut."""
LOOK_EVERY_S = 1.0
_KEEP_SIZE_AND_PUNCH_HOLE = 0x01 | 0x02


class LogMirror:
    """Copies the files of one node, `<node>.*`, from one folder to another. At its start it removes local files that an
    earlier agent left."""

    def __init__(self, node: str, local_folder: Path, target_folder: Path) -> None:
        """`local_folder` is created if it does not exist. Raises OSError if it cannot be created or used."""
        self._pattern = f"{node}.*"
        self._local_folder = local_folder
        self._target_folder = target_folder
        self._copied: dict[str, int] = {}
        self._freed: dict[str, int] = {}
        self._cut: dict[str, tuple[int, int]] = {}
        """Range of bytes that was cut from each file, and that the copy skips."""
        self._reading = threading.Lock()
        """Held while a file is read, so that nothing is cut meanwhile. Only local disk is accessed while the lock is
        held."""
        self._ending = threading.Event()
        local_folder.mkdir(mode=0o700, exist_ok=True)
        for leftover in local_folder.glob(self._pattern):
            leftover.unlink()
        self._thread = threading.Thread(target=self._run, name="resihp-logs", daemon=True)
        self._thread.start()
        threading.Thread(target=self._limit, name="resihp-log-limit", daemon=True).start()

    def close(self) -> None:
        """Copy the remaining output, or give up after a time limit if the folder hangs."""
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
        """Return the next bytes to copy, and the position after them. Where bytes were cut, return a notice instead."""
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
    """Free the blocks of a part of the file, which then reads as zeros. Return False if the file system does not
    support this."""
    allocate = ctypes.CDLL(None, use_errno=True).fallocate
    return bool(allocate(descriptor, _KEEP_SIZE_AND_PUNCH_HOLE, ctypes.c_int64(start), ctypes.c_int64(size)) == 0)


def print_to(path: Path) -> None:
    """Redirect this process's output to a file. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
