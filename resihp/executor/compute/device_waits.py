"""Determines from a rank's device whether the rank waits for its peers. Heartbeats report the answer.

Around each wait for peers, two marks are placed in the device's queue of work. A device between the first and the
second mark waits for peers. A device before the first mark is busy with its own work: it delays its peers. A device
after all marks has nothing to do, since its host is stuck: it delays its peers as well
(`controller.fail_stop.liveness`).

On a GPU, the host cannot know this: `wait` returns at once, and the host blocks where it next needs a number
(`float()`, `tolist()`, a copy from ordinary memory), for its own endless kernel in the same way as for a missing peer.
So marks on a GPU are events, two for each wait. This is written from the documentation of CUDA and torch and not yet
run on a GPU; its cost is not measured. On a CPU, all marked work has already been done. The trainer places marks; the
thread that sends heartbeats reads them.

A stuck driver answers no query, which must not block heartbeats or any other thread. So the query runs without the
interpreter lock, in a thread that can be abandoned (`DeviceWatch`), and heartbeats report for how long the device has
not answered. This module never decides whether a rank is stuck.
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
"""Seconds for which a heartbeat waits for the device's answer, if the device answered the previous query."""
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
    """A CUDA event that is queried without the interpreter lock.

    torch's own `query` holds the lock for as long as the driver takes (2.13, torch/csrc/cuda/Event.cpp); ctypes
    releases it. The driver's query, unlike the runtime's, leaves no "not ready" error behind that torch would attribute
    to the next kernel. The querying thread has never used the device, so it gets the context of the thread that
    recorded the event.
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
    """Raise RuntimeError for an error code of the driver."""
    if code:
        raise RuntimeError(f"CUDA error {code} of an event")


def mark_on(device: torch.device) -> Mark:
    """Return a mark after all work that has been submitted to the device so far."""
    return _Event() if device.type == "cuda" else _Passed()


@dataclass
class _Wait:
    before: Mark
    after: Mark | None = None
    """Mark at the end of the wait; None while the host is inside the wait."""


class DeviceWaits:
    """All waits for peers that the device may not have passed yet.

    The rank's own thread calls `begin` and `end` alternately. Any thread may call `under_way`; a stuck driver can block
    it.
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
        """Return whether the device waits for peers now."""
        try:
            for wait in tuple(self._waits):
                if wait.after is None or not wait.after.query():
                    return wait.before.query()
        except RuntimeError:
            return False  # a failing device makes its peers wait; it is not waiting itself
        return False


class DeviceWatch:
    """Queries whether a device waits for peers, blocking for at most `ANSWER_TIMEOUT_S`. Only one thread may use it."""

    def __init__(self, under_way: Callable[[], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._under_way, self._clock = under_way, clock
        self._thread: threading.Thread | None = None
        self._asked_at = 0.0
        self._waits = False

    def ask(self) -> tuple[bool, float]:
        """Return whether the device waits for peers, and for how many seconds it has not answered; 0 if it has
        answered."""
        if self._thread is None or not self._thread.is_alive():
            self._asked_at = self._clock()
            self._thread = begin_thread(self._look, name="resihp-device")
            self._thread.join(ANSWER_TIMEOUT_S)
        if self._thread.is_alive():
            return False, self._clock() - self._asked_at
        return self._waits, 0.0

    def _look(self) -> None:
        self._waits = self._under_way()
