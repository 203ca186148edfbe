"""Logs on local disk, copied to the job's folder: a shared file system that hangs must not stop what writes them.

Whatever a node's processes print goes to a file on the node's own disk. A thread appends what is new to the file of the
same name in the job's folder, once a second, and frees the local blocks that it has copied. If the folder hangs, the
thread hangs with it, and nothing else does. Owned by `wrapper.agent.process`.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from pathlib import Path

COPY_EVERY_S = 1.0
LAST_COPY_S = 2.0
"""How long the end of an agent waits for what was printed last."""
CHUNK_BYTES = 1 << 20
FREE_BYTES = 16 << 20
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
        self._ending = threading.Event()
        here.mkdir(mode=0o700, exist_ok=True)
        for left in here.glob(self._pattern):
            left.unlink()
        self._thread = threading.Thread(target=self._run, name="resihp-logs", daemon=True)
        self._thread.start()

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
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        with path.open("r+b") as source, open(os.open(self._there / path.name, flags, 0o600), "wb") as target:
            source.seek(done)
            while chunk := source.read(CHUNK_BYTES):
                target.write(chunk)
                target.flush()
                done += len(chunk)
                self._copied[path.name] = done
            if done - self._freed.get(path.name, 0) >= FREE_BYTES:
                _free(source.fileno(), done)
                self._freed[path.name] = done


def _free(descriptor: int, size: int) -> None:
    """Give the file's first bytes back to the disk; they read as zeros then. Where that cannot be, nothing happens."""
    allocate = ctypes.CDLL(None, use_errno=True).fallocate
    allocate(descriptor, _KEEP_SIZE_AND_PUNCH_HOLE, ctypes.c_int64(0), ctypes.c_int64(size))


def print_to(path: Path) -> None:
    """From here on, whatever this process prints goes to that file. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
