"""Let a worker's stacks be read from outside, without ptrace and without help of the script.

Before the script begins, faulthandler is told to write the stacks of all threads when the process receives
`STACK_SIGNAL`. It does so inside the signal handler, so it also works while the main thread waits in a library. The
text goes into a file in memory that only this process holds; its agent reads the file through `/proc`. Nothing happens
until then, and no thread is started.

The fork server ignores the signal, so that it never ends a process: a command that replaces the worker ignores it, too.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from contextlib import suppress
from pathlib import Path

STACK_SIGNAL = signal.SIGRTMAX - 4
STACKS_NAME = "resihp-stacks"
"""Name of the file in memory, as `/proc/PID/fd` shows it."""


def ignore() -> None:
    """Ignore the signal in this process and in its children."""
    signal.signal(STACK_SIGNAL, signal.SIG_IGN)


def register() -> None:
    """Have this process write its stacks when it receives the signal."""
    with suppress(OSError, RuntimeError, ValueError):
        file = os.memfd_create(STACKS_NAME)
        faulthandler.register(STACK_SIGNAL, file=file, all_threads=True, chain=False)


def file_of(pid: int) -> Path | None:
    """Return the file with the stacks of a process; None if the process does not write any now: it is no python
    process, has not registered, or has closed the file. Such a process must not get the signal."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
        caught = next(line for line in status.splitlines() if line.startswith("SigCgt:")).split()[1]
        if not int(caught, 16) >> (STACK_SIGNAL - 1) & 1:
            return None
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if os.readlink(path).startswith(f"/memfd:{STACKS_NAME}"):
                    return path
    except (OSError, StopIteration, ValueError):
        pass
    return None
