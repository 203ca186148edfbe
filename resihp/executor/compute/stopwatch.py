"""What each primitive of an iteration took on this rank: when it began, until when, and how much of that was own work.

Inside a tensor-parallel group everybody waits for the slowest in each all-reduce, so the time from a chunk's beginning
to its end looks alike on all of them. Own work is what tells them apart: the processor time of the computing thread, or
on a GPU the time between two collectives by its own events, which are read only when the iteration is over.

A device can be made slow on purpose (`resihp run --fault slow:...`): before each collective, and at the end of a chunk,
it then sleeps as long as a device of that speed would still have been at work. Measures; judges nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from resihp.detector.observation import Floats

Speed = Callable[[], float]
"""How fast the device is made to be: 1 is its own speed."""


def full_speed() -> float:
    return 1.0


def stopwatch_of(device: torch.device, speed: Speed = full_speed) -> Stopwatch:
    return CudaStopwatch(speed) if device.type == "cuda" else Stopwatch(speed)


class Stopwatch:
    """One iteration on a processor. Offsets count from when it is made; all times are seconds."""

    def __init__(self, speed: Speed = full_speed) -> None:
        self._speed = speed
        self._zero = time.perf_counter()
        self._rows: list[tuple[float, float, float]] = []
        self._began = self._work = self._marked = self._slept = 0.0

    def begin(self) -> None:
        """A primitive has all that it needs."""
        self._began, self._slept = time.perf_counter(), 0.0
        self._work = self._marked = time.thread_time()

    def collective(self) -> None:
        """Own work pauses: a collective is about to start."""
        worked = time.thread_time() - self._marked
        speed = self._speed()
        if speed < 1.0 and worked > 0.0:
            missing = worked * (1.0 / speed - 1.0)
            time.sleep(missing)
            self._slept += missing
        self._marked = time.thread_time()

    def resumed(self) -> None:
        """The collective is over: own work goes on."""

    def emulate(self, seconds: float) -> None:
        """Take at least `seconds` for the primitive under way, or more if the device is made slow: as one would that
        needs them. They are its own work then, whether it had to wait for peers meanwhile or not."""
        needed = seconds / self._speed()
        rest = self._began + needed - time.perf_counter()
        if rest > 0.0:
            time.sleep(rest)
        self._marked = time.thread_time()
        self._slept = max(self._slept, needed - (self._marked - self._work))

    def end(self) -> None:
        """The primitive is done."""
        self.collective()
        own = time.thread_time() - self._work + self._slept
        self._rows.append((self._began - self._zero, time.perf_counter() - self._began, own))

    def offset(self) -> float:
        """Seconds since the beginning."""
        return time.perf_counter() - self._zero

    def read(self) -> Floats:
        """(3, primitives): starts, spans, own work, in the order in which they were carried out."""
        return np.array(self._rows, dtype=np.float64).reshape(-1, 3).T


class CudaStopwatch(Stopwatch):
    """The same on a GPU: host time says when work was handed over, events say when it ran. Not yet run on one."""

    def __init__(self, speed: Speed = full_speed) -> None:
        super().__init__(speed)
        self._events: list[tuple[torch.cuda.Event, list[tuple[torch.cuda.Event, torch.cuda.Event]]]] = []
        self._first = self._mark()
        self._segments: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._open: torch.cuda.Event | None = None
        self._begun: torch.cuda.Event = self._first

    @staticmethod
    def _mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin(self) -> None:
        super().begin()
        self._segments = []
        self._begun = self._open = self._mark()

    def collective(self) -> None:
        assert self._open is not None, "begin first"
        self._segments.append((self._open, self._mark()))
        speed = self._speed()
        if speed < 1.0:  # events can be read only once they have happened: this serialises, as a slow device would
            begun, done = self._segments[-1]
            done.synchronize()
            time.sleep(begun.elapsed_time(done) / 1e3 * (1.0 / speed - 1.0))
            self._segments[-1] = (begun, self._mark())

    def resumed(self) -> None:
        self._open = self._mark()

    def end(self) -> None:
        self.collective()
        self._events.append((self._begun, self._segments))

    def read(self) -> Floats:
        if self._events:
            self._events[-1][1][-1][1].synchronize()
        rows = [
            (
                self._first.elapsed_time(begun) / 1e3,
                begun.elapsed_time(segments[-1][1]) / 1e3,
                sum(a.elapsed_time(b) for a, b in segments) / 1e3,
            )
            for begun, segments in self._events
        ]
        return np.array(rows, dtype=np.float64).reshape(-1, 3).T
