"""Logs on local disk, copied to the job's folder: a shared file system that hangs must not stop what writes them.

Whatever a node's processes print goes to a file on the node's own disk. A thread appends what is new to the file of the
same name in the job's folder, once a second, and frees the local blocks that it has copied. If the folder hangs, the
thread hangs with it, and nothing else does: another one sees to it that what waits does not fill the node's disk, on
which the job's journal is. What it cuts is missing in the middle, and the copy says so there. Owned by
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
LAST_COPY_S = 2.0
"""How long the end of an agent waits for what was printed last."""
CHUNK_BYTES = 1 << 20
FREE_BYTES = 16 << 20
MOST_WAITING_BYTES = 256 << 20
"""Of one file, not copied yet. Beyond that, all but the last half of it is cut."""
LOOK_EVERY_S = 1.0
_KEEP_SIZE_AND_PUNCH_HOLE = 0x01 | 0x02


class LogMirror:
    """Files of one node, `<node>.*`, from one folder to another. Removes what an earlier agent has left there."""

    def __init__(self, node: str, here: Path, there: Path) -> None:
        """`here` is made if it is not there. Raises OSError."""
        self._pattern = f"{node}.*"
        self._here = here
        self._there = there
        self._copied: dict[str, int] = {}
        self._freed: dict[str, int] = {}
        self._cut: dict[str, tuple[int, int]] = {}
        """By file, which of its bytes are gone, to be passed over when the copy comes to them."""
        self._reading = threading.Lock()
        """Nothing is cut while it is read. Local disk alone is touched while it is held."""
        self._ending = threading.Event()
        here.mkdir(mode=0o700, exist_ok=True)
        for left in here.glob(self._pattern):
            left.unlink()
        self._thread = threading.Thread(target=self._run, name="resihp-logs", daemon=True)
        self._thread.start()
        threading.Thread(target=self._limit, name="resihp-log-limit", daemon=True).start()

    def close(self) -> None:
        """Copy what is still to be copied, or give it up where the folder hangs."""
        self._ending.set()
        self._thread.join(LAST_COPY_S)

    def _run(self) -> None:
        ending = False
        told = ""
        while not ending:
            ending = self._ending.wait(COPY_EVERY_S)
            for path in sorted(self._here.glob(self._pattern)):
                try:
                    self._copy(path)
                except OSError as error:
                    if (trouble := f"{path.name}: cannot be copied to {self._there}: {error.strerror}") != told:
                        print(trouble, flush=True)
                        told = trouble

    def _copy(self, path: Path) -> None:
        done = self._copied.get(path.name, 0)
        if path.stat().st_size <= done:
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        with (
            path.open("r+b", buffering=0) as source,
            open(os.open(self._there / path.name, flags, 0o600), "wb") as target,
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
        """What follows the first `done` bytes, or words in its place, and how far the copy is with it."""
        start, end = self._cut.get(name, (0, 0))
        if start <= done < end:
            told = f"\nresihp: {end - done} bytes are missing here: {self._there} took nothing for too long\n"
            return told.encode(), end
        source.seek(done)
        chunk = source.read(min(CHUNK_BYTES, start - done) if done < start else CHUNK_BYTES) or b""
        return chunk, done + len(chunk)

    def _limit(self) -> None:
        while not self._ending.wait(LOOK_EVERY_S):
            for path in self._here.glob(self._pattern):
                with suppress(OSError):
                    self._cut_what_waits(path)

    def _cut_what_waits(self, path: Path) -> None:
        with self._reading:
            size, copied = path.stat().st_size, self._copied.get(path.name, 0)
            start, end = self._cut.get(path.name, (0, 0))
            if end <= copied:
                start = end = copied + CHUNK_BYTES  # up to there it is being written just now
            if size - end <= MOST_WAITING_BYTES:
                return
            kept = size - MOST_WAITING_BYTES // 2
            with path.open("r+b") as file:
                if _free(file.fileno(), kept - end, end):
                    self._cut[path.name] = (start, kept)


def _free(descriptor: int, size: int, start: int = 0) -> bool:
    """Give a part of the file back to the disk; it reads as zeros then. Where that cannot be, nothing happens."""
    allocate = ctypes.CDLL(None, use_errno=True).fallocate
    return bool(allocate(descriptor, _KEEP_SIZE_AND_PUNCH_HOLE, ctypes.c_int64(start), ctypes.c_int64(size)) == 0)


def print_to(path: Path) -> None:
    """From here on, whatever this process prints goes to that file. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
