"""Signals that come to a supervisor before it can answer any: it imports for seconds, and Ctrl-C is typed just then.

The guardian starts it with them held back by the kernel (`held`); as it begins to run it notes them (`note`), and once
there is a job they are answered as if they had come now (`hand_over`). Once its loop is over it disregards them
(`ignore`). Of one process, as signals are.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
"""Those that mean something to a job."""

_came: list[signal.Signals] = []


@contextmanager
def held() -> Iterator[None]:
    """A child that is started now has them pending until it calls `note`. Ours come afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def note() -> None:
    """From here on none of them ends this process. Before it starts threads: theirs would stay blocked."""
    for number in SIGNALS:
        signal.signal(number, lambda number, _: _came.append(signal.Signals(number)))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def hand_over(answer: Callable[[signal.Signals], None]) -> None:
    """Whoever answers in the running loop from here on, and now to those that came before."""
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, answer, number)
    came, _came[:] = list(_came), []
    for number in came:
        answer(number)


def ignore() -> None:
    """Nothing is left to be stopped. By the kernel: Python's own handlers end before its process does."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
