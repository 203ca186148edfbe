"""Process exit while threads may still be inside a library.

While the interpreter shuts down, Python ends any thread that returns from C++, and torch's calls cannot be ended that
way: the whole process aborts (SIGABRT, "terminate called without an active exception"), although its work was done. A
communicator takes time to close, more so on a busy machine, so ranks that had finished would be reported as failed.

Threads of ours that call torch are therefore started here, and the process waits for them before it exits. A worker of
the fork server, whose status is known, does not shut the interpreter down while such a thread is stuck: it exits
without the interpreter's last steps.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

EXIT_WAIT_S = 5.0
"""Time that the end of a process waits for these threads, all together."""

_started: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_guard = threading.Lock()
_status: int | None = None


def begin_thread(target: Callable[..., None], *args: Any, name: str) -> threading.Thread:
    """Start a thread that may spend a long time inside torch. It delays a process's end by at most `EXIT_WAIT_S`."""
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    with _guard:
        _started.add(thread)
    thread.start()
    return thread


def will_leave_with(status: int) -> None:
    """Record the status that this process reports to its parent; the caller raises SystemExit next."""
    global _status
    _status = status


def _leave() -> None:
    until = time.monotonic() + EXIT_WAIT_S
    with _guard:
        started = list(_started)
    for thread in started:
        with suppress(RuntimeError):  # not started yet
            thread.join(max(0.0, until - time.monotonic()))
    if _status is not None and any(thread.is_alive() for thread in started):
        _flush_files()
        os._exit(_status)


def _flush_files() -> None:
    """Flush all open files, including those that the script has left open."""
    for candidate in gc.get_objects():
        if issubclass(type(candidate), io.TextIOWrapper | io.BufferedWriter):
            with suppress(OSError, ValueError):
                candidate.flush()


atexit.register(_leave)
"""In a fork server's workers this runs last of all handlers: no module that registers one was imported earlier."""
