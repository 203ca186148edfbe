"""Whether a rank waits for its peers, asked of its device: what the rank's beats tell.

Around each wait for peers two marks go into the device's order of work. A device that has come to the first and not to
the second waits for others. One that has not come to the first is at work of its own; one that has come to all has
nothing to do, since its host is stuck: those two keep the others waiting (`controller.fail_stop.liveness`).

On a GPU the host cannot tell: `wait` returns at once, and the host stands wherever a number is needed next (`float()`,
`tolist()`, a copy from ordinary memory), for its own kernel that does not end as for a peer that does not come. Marks
are events there, two for each wait; written from CUDA's and torch's documentation, not yet run on one, nor is their
cost measured. On a processor whatever is marked has happened. Fed by the trainer, asked by the thread that beats.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


class Mark(Protocol):
    """A place in a device's order of work."""

    def query(self) -> bool:
        """Whether the device has come there."""


class _Passed:
    def query(self) -> bool:
        return True


def mark_on(device: torch.device) -> Mark:
    """A mark behind all that the device was given so far."""
    if device.type != "cuda":
        return _Passed()
    event = torch.cuda.Event()
    event.record()
    return event


@dataclass
class _Wait:
    before: Mark
    after: Mark | None = None
    """None: the host is in it."""


class DeviceWaits:
    """All waits that the device may still have before it.

    `begin` and `end` by the rank's own thread, in turns; `under_way` by the one that beats, only where the rank makes
    no progress: a driver that is stuck can hold up whoever asks it.
    """

    def __init__(self, mark: Callable[[], Mark]) -> None:
        self._mark = mark
        self._waits: deque[_Wait] = deque()
        self._open: _Wait | None = None

    def begin(self) -> None:
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
