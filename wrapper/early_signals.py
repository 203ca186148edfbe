"""Signals that come to a job before anybody can answer them: its supervisor imports for seconds, and Ctrl-C is typed
just then.

`resihp run` notes them from before the job's folder is made (`note`) until its guardian passes them on (`noted`). That
starts the supervisor with them held back by the kernel (`held`); as it begins to run it notes them as well, and once
there is a job they are answered as if they had come now (`hand_over`). Once its loop is over it disregards them
(`ignore`). Of one process, as signals are.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""Those that mean something to a job."""

_came: list[signal.Signals] = []
_before: dict[signal.Signals, Any] = {}
"""What they did before they were noted."""


@contextmanager
def held() -> Iterator[None]:
    """A child that is started now has them pending until it calls `note`. Ours come afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def of_command() -> tuple[signal.Signals, ...]:
    """What `resihp run` answers: when its terminal is closed as well, unless it was told not to (nohup)."""
    return SIGNALS if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (*SIGNALS, signal.SIGHUP)


def note(numbers: Sequence[signal.Signals] = SIGNALS) -> None:
    """From here on none of them ends this process. Before it starts threads: theirs would stay blocked."""
    for number in numbers:
        before = signal.signal(number, lambda number, _: _came.append(signal.Signals(number)))
        _before.setdefault(number, before)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def noted() -> list[signal.Signals]:
    """Those that came, once."""
    came, _came[:] = list(_came), []
    return came


def as_before() -> None:
    """They do again what they did before `note`."""
    for number, handler in _before.items():
        signal.signal(number, handler)
    _before.clear()


def hand_over(answer: Callable[[signal.Signals], None]) -> None:
    """Whoever answers in the running loop from here on, and now to those that came before."""
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, answer, number)
    for number in noted():
        answer(number)


def ignore() -> None:
    """Nothing is left to be stopped. By the kernel: Python's own handlers end before its process does."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
