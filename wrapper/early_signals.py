"""Signals that arrive before a job can handle them: its supervisor imports for seconds, and the user may press Ctrl-C
just then.

`resihp run` notes them from before it creates the job's folder (`note`) until its guardian passes them on (`noted`).
The guardian starts the supervisor with these signals blocked in the kernel (`held`); when the supervisor begins to run,
it notes them as well, and once there is a job they are handled as if they had arrived now (`hand_over`). After its
event loop has ended, it ignores them (`ignore`). State of one process, as signals are.
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
"""Handlers that were replaced by `note`."""


@contextmanager
def held() -> Iterator[None]:
    """Block the signals while a child is started: for it they stay pending until it calls `note`. Ours arrive
    afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, JOB_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def of_command() -> tuple[signal.Signals, ...]:
    """Return the signals that `resihp run` handles: also the closing of its terminal, unless that is ignored
    (nohup)."""
    return JOB_SIGNALS if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (*JOB_SIGNALS, signal.SIGHUP)


def note(numbers: Sequence[signal.Signals] = JOB_SIGNALS) -> None:
    """From here on, note these signals, which then do not end this process. Call before starting threads: theirs would
    stay blocked."""
    for number in numbers:
        before = signal.signal(number, lambda number, _: _received.append(signal.Signals(number)))
        _previous_handlers.setdefault(number, before)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, JOB_SIGNALS)


def noted() -> list[signal.Signals]:
    """Return the signals that have arrived, once."""
    received, _received[:] = list(_received), []
    return received


def as_before() -> None:
    """Restore the handlers from before `note`."""
    for number, handler in _previous_handlers.items():
        signal.signal(number, handler)
    _previous_handlers.clear()


def hand_over(answer: Callable[[signal.Signals], None]) -> None:
    """Handle the signals in the running loop from here on, and now those that have already arrived."""
    loop = asyncio.get_running_loop()
    for number in JOB_SIGNALS:
        loop.add_signal_handler(number, answer, number)
    for number in noted():
        answer(number)


def ignore() -> None:
    """Ignore the signals, because nothing is left to stop. In the kernel: Python's handlers end before its process
    does."""
    for number in JOB_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
