"""Whether a rank waits for its peers, asked of its device: what the rank's beats tell.

Around each wait for peers two marks go into the device's order of work. A device that has come to the first and not to
the second waits for others. One that has not come to the first is at work of its own; one that has come to all has
nothing to do, since its host is stuck: those two keep the others waiting (`controller.fail_stop.liveness`).

On a GPU the host cannot tell: `wait` returns at once, and the host stands wherever a number is needed next (`float()`,
`tolist()`, a copy from ordinary memory), for its own kernel that does not end as for a peer that does not come. Marks
are events there, two for each wait; written from CUDA's and torch's documentation, not yet run on one, nor is their
cost measured. On a processor whatever is marked has happened. Fed by the trainer, asked by the thread that beats.

A driver that is stuck answers nobody. That must silence neither the beats nor anything else of the process: it is asked
without the interpreter's lock, in a thread that is left behind (`Asking`), and beats tell for how long it has not
answered.
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

ANSWER_S = 0.5
"""How long a beat waits for a device that answered when it was asked last."""
_DRIVER = "libcuda.so.1"
_NOT_READY = 600
"""CUDA_ERROR_NOT_READY of cuda.h."""


class Mark(Protocol):
    """A place in a device's order of work."""

    def query(self) -> bool:
        """Whether the device has come there."""


class _Passed:
    def query(self) -> bool:
        return True


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL(_DRIVER)


class _Event:
    """An event of CUDA's. torch's own `query` holds the interpreter's lock as long as the driver takes (2.13,
    torch/csrc/cuda/Event.cpp), ctypes lets go of it; and the driver's, unlike the runtime's, leaves no "not ready"
    behind that torch would take for an error of the next kernel.

    The thread that asks has never used the device: it is given the context of the thread that has recorded the event.
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
    """A mark behind all that the device was given so far."""
    return _Event() if device.type == "cuda" else _Passed()


@dataclass
class _Wait:
    before: Mark
    after: Mark | None = None
    """None: the host is in it."""


class DeviceWaits:
    """All waits that the device may still have before it.

    `begin` and `end` by the rank's own thread, in turns; `under_way` by any, which a stuck driver can hold up.
    """

    def __init__(self, mark: Callable[[], Mark]) -> None:
        self._mark = mark
        self._waits: deque[_Wait] = deque()
        self._open: _Wait | None = None

    def begin(self) -> None:
        with suppress(RuntimeError):  # a device that fails says so in its own words at whatever it is given next
            while self._waits and (after := self._waits[0].after) is not None and after.query():
                self._waits.popleft()
        self._open = _Wait(self._mark())
        self._waits.append(self._open)

    def end(self) -> None:
        wait, self._open = self._open, None
        if wait is not None:
            wait.after = self._mark()

    def under_way(self) -> bool:
        """Whether the device is in one."""
        try:
            for wait in tuple(self._waits):
                if wait.after is None or not wait.after.query():
                    return wait.before.query()
        except RuntimeError:
            return False  # a device that fails keeps others waiting
        return False


class Asking:
    """Asks a device what it is in, and never waits for it longer than `ANSWER_S`. To be used by one thread."""

    def __init__(self, under_way: Callable[[], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._under_way, self._clock = under_way, clock
        self._asking: threading.Thread | None = None
        self._asked_at = 0.0
        self._waits = False

    def ask(self) -> tuple[bool, float]:
        """Whether the device is in a wait for peers; and, if it does not answer, for how many seconds it has not."""
        if self._asking is None or not self._asking.is_alive():
            self._asked_at = self._clock()
            self._asking = begin_thread(self._look, name="resihp-device")
            self._asking.join(ANSWER_S)
        if self._asking.is_alive():
            return False, self._clock() - self._asked_at
        return self._waits, 0.0

    def _look(self) -> None:
        self._waits = self._under_way()
