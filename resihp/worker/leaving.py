"""Ends a process cleanly while threads may still be inside a library.

While the interpreter shuts down, Python ends any thread that returns from C++. Calls of torch cannot be ended like
this: the whole process aborts (SIGABRT, "terminate called without an active exception"), although its work was done.
Closing a communicator takes time, on a busy machine even more, so finished ranks would be reported as failed.

So resihp starts threads that call torch through this module, and the process waits for them before it exits. A worker
of the fork server, which has recorded its exit status, exits without the interpreter's last steps if such a thread is
stuck. Decides nothing else. Used by the executor and the fork server.
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
"""Seconds for which an exiting process waits for all these threads together."""

_started: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_guard = threading.Lock()
_status: int | None = None


def begin_thread(target: Callable[..., None], *args: Any, name: str) -> threading.Thread:
    """Start a thread that may spend a long time inside torch. It delays the process's exit by at most `EXIT_WAIT_S`."""
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    with _guard:
        _started.add(thread)
    thread.start()
    return thread


def will_leave_with(status: int) -> None:
    """Record the exit status of this process; the caller raises SystemExit next."""
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
    """Flush all open files, including those that the script has not closed."""
    for candidate in gc.get_objects():
        if issubclass(type(candidate), io.TextIOWrapper | io.BufferedWriter):
            with suppress(OSError, ValueError):
                candidate.flush()


atexit.register(_leave)
"""In workers of a fork server this handler runs last, since no module imported before registers one."""
