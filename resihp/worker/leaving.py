"""The way out of a process whose threads may still be inside a library.

Python ends a thread that comes back from C++ while the interpreter goes down, and torch's calls do not let themselves
be ended so: the whole process aborts (SIGABRT, "terminate called without an active exception"), whatever it has done.
A communicator that goes takes its time, the more so on a busy machine, and would make failures of ranks that are done.

So threads of ours that call torch are started here, and the process waits for them before it goes. A worker of the fork
server, which knows its status, does not go down with one that is stuck: it leaves without the interpreter's last steps.
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

WAITS_S = 5.0
"""How long the end of a process waits for them, all together."""

_started: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_guard = threading.Lock()
_status: int | None = None


def begin_thread(target: Callable[..., None], *args: Any, name: str) -> threading.Thread:
    """A thread that may be inside of torch for long. It keeps no process from ending for more than `WAITS_S`."""
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    with _guard:
        _started.add(thread)
    thread.start()
    return thread


def will_leave_with(status: int) -> None:
    """What this process is to end with, known to whoever forked it; it raises SystemExit next."""
    global _status
    _status = status


def _leave() -> None:
    until = time.monotonic() + WAITS_S
    with _guard:
        started = list(_started)
    for thread in started:
        with suppress(RuntimeError):  # not begun yet
            thread.join(max(0.0, until - time.monotonic()))
    if _status is not None and any(thread.is_alive() for thread in started):
        _flush_files()
        os._exit(_status)


def _flush_files() -> None:
    """Also those that the script has left open."""
    for each in gc.get_objects():
        if issubclass(type(each), io.TextIOWrapper | io.BufferedWriter):
            with suppress(OSError, ValueError):
                each.flush()


atexit.register(_leave)
"""Of a fork server's workers the last of all: nothing that registers anything has been imported before."""
