"""Tells from a rank's device whether the rank waits for its peers; the answer is part of the rank's beats.

Around each wait for peers two marks are placed in the device's queue of work. A device that has reached the first mark
and not the second is waiting for peers. One that has not reached the first is busy with its own work; one that has
reached all has nothing to do, since its host is stuck. The latter two keep other ranks waiting
(`controller.fail_stop.liveness`).

On a GPU the host itself cannot tell: `wait` returns at once, and the host blocks wherever it next needs a number
(`float()`, `tolist()`, a copy from ordinary memory), on its own endless kernel in the same way as on a missing peer.
There, marks are events, two for each wait; written from CUDA's and torch's documentation, not yet run on a GPU, and
their cost is not measured. On a CPU all marked work has already happened. Fed by the trainer, queried by the thread
that beats.

A stuck driver answers no query. That must block neither the beats nor any other thread of the process: the query runs
without the interpreter lock, in a thread that can be abandoned (`DeviceWatch`), and beats report for how long the
device has not answered.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import torch

from resihp.worker.leaving import begin_thread

ANSWER_TIMEOUT_S = 0.5
"""Time that a beat waits for the answer of a device that answered the previous query."""
_DRIVER = "libcuda.so.1"
_NOT_READY = 600
"""CUDA_ERROR_NOT_READY of cuda.h."""


class Mark(Protocol):
    """A position in a device's queue of work."""

    def query(self) -> bool:
        """Return whether the device has reached this position."""


class _Passed:
    def query(self) -> bool:
        return True


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL(_DRIVER)


class _Event:
    """A CUDA event. torch's own `query` holds the interpreter lock for as long as the driver takes (2.13,
    torch/csrc/cuda/Event.cpp); ctypes releases it. Unlike the runtime's query, the driver's leaves no "not ready" error
    behind that torch would attribute to the next kernel.

    The querying thread has never used the device, so it is given the context of the thread that recorded the event.
    """

    def __init__(self) -> None:
        self._event = torch.cuda.Event()
        self._event.record()
        self._context = ctypes.c_void_p()
        _check(_driver().cuCtxGetCurrent(ctypes.byref(self._context)))

    def query(self) -> bool:
        _check(_driver().cuCtxSetCurrent(self._context))
        code = _driver().cuEventQuery(ctypes.c_void_p(self._event.cuda_event))
        if code == _NOT_READY:
            return False
        _check(code)
        return True


def _check(code: int) -> None:
    """Raise RuntimeError for an error of the driver."""
    if code:
        raise RuntimeError(f"CUDA error {code} of an event")


def mark_on(device: torch.device) -> Mark:
    """Return a mark behind all work that the device has been given so far."""
    return _Event() if device.type == "cuda" else _Passed()


@dataclass
class _Wait:
    before: Mark
    after: Mark | None = None
    """None while the host is inside the wait."""


class DeviceWaits:
    """All waits that the device may not have passed yet.

    `begin` and `end` are called by the rank's own thread, alternately; `under_way` by any thread, which a stuck driver
    can block.
    """

    def __init__(self, mark: Callable[[], Mark]) -> None:
        self._mark = mark
        self._waits: deque[_Wait] = deque()
        self._open: _Wait | None = None

    def begin(self) -> None:
        with suppress(RuntimeError):  # a failing device reports its own error on its next work
            while self._waits and (after := self._waits[0].after) is not None and after.query():
                self._waits.popleft()
        self._open = _Wait(self._mark())
        self._waits.append(self._open)

    def end(self) -> None:
        wait, self._open = self._open, None
        if wait is not None:
            wait.after = self._mark()

    def under_way(self) -> bool:
        """Return whether the device is inside a wait."""
        try:
            for wait in tuple(self._waits):
                if wait.after is None or not wait.after.query():
                    return wait.before.query()
        except RuntimeError:
            return False  # a failing device keeps others waiting
        return False


class DeviceWatch:
    """Queries whether a device waits for peers, blocking for at most `ANSWER_TIMEOUT_S`. For use by one thread."""

    def __init__(self, under_way: Callable[[], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._under_way, self._clock = under_way, clock
        self._thread: threading.Thread | None = None
        self._asked_at = 0.0
        self._waits = False

    def ask(self) -> tuple[bool, float]:
        """Return whether the device waits for peers and, if it does not answer, for how many seconds it has not."""
        if self._thread is None or not self._thread.is_alive():
            self._asked_at = self._clock()
            self._thread = begin_thread(self._look, name="resihp-device")
            self._thread.join(ANSWER_TIMEOUT_S)
        if self._thread.is_alive():
            return False, self._clock() - self._asked_at
        return self._waits, 0.0

    def _look(self) -> None:
        self._waits = self._under_way()
