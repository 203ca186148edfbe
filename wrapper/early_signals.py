"""Records signals that arrive before a job can handle them. The imports of its supervisor take seconds, and the user
may press Ctrl-C meanwhile.

`resihp run` records signals (`note`) from before it creates the job's folder until its guardian forwards them
(`noted`). The guardian starts the supervisor with these signals blocked in the kernel (`held`). When the supervisor
begins to run, it records them as well; once there is a job, they are handled as if they had arrived at that moment
(`hand_over`). After its event loop has ended, the supervisor ignores them (`ignore`). The state belongs to one process,
as signal handlers do.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

JOB_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a job handles."""

_received: list[signal.Signals] = []
_previous_handlers: dict[signal.Signals, Any] = {}
"""The handlers that `note` replaced."""


@contextmanager
def held() -> Iterator[None]:
    """Block the signals while a child process is started. For the child, they stay pending until it calls `note`; this
    process receives its own signals afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, JOB_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def of_command() -> tuple[signal.Signals, ...]:
    """Return the signals that `resihp run` handles: those of a job, and SIGHUP, unless it is ignored (nohup)."""
    return JOB_SIGNALS if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (*JOB_SIGNALS, signal.SIGHUP)


def note(numbers: Sequence[signal.Signals] = JOB_SIGNALS) -> None:
    """Record these signals from now on, instead of ending this process. Call this before starting threads: otherwise
    the signals would stay blocked in the threads."""
    for number in numbers:
        before = signal.signal(number, lambda number, _: _received.append(signal.Signals(number)))
        _previous_handlers.setdefault(number, before)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, JOB_SIGNALS)


def noted() -> list[signal.Signals]:
    """Return the signals that have arrived since the last call, and forget them."""
    received, _received[:] = list(_received), []
    return received


def as_before() -> None:
    """Restore the handlers that `note` replaced."""
    for number, handler in _previous_handlers.items():
        signal.signal(number, handler)
    _previous_handlers.clear()


def hand_over(answer: Callable[[signal.Signals], None]) -> None:
    """Let `answer` handle the signals in the running event loop from now on, and also those that have already
    arrived."""
    loop = asyncio.get_running_loop()
    for number in JOB_SIGNALS:
        loop.add_signal_handler(number, answer, number)
    for number in noted():
        answer(number)


def ignore() -> None:
    """Ignore the signals from now on, because nothing is left to stop. They are ignored in the kernel, since Python's
    handlers end before the process does."""
    for number in JOB_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
