"""What each primitive of an iteration took on this rank: when it began, until when, and how much of that was own work.

Inside a tensor-parallel group everybody waits for the slowest in each all-reduce, so the time from a chunk's beginning
to its end looks alike on all of them. Own work is what tells them apart: the processor time of the computing thread, or
on a GPU the time outside its waits for collectives, by its own events: what it computes beside a collective under way
is its own work. Events are read when the iteration is over and the step after it under way: nobody waits for that.

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
        self._began = self._work = self._marked = self._slept = self._reduced = 0.0
        self._apart = self._paused = 0.0

    def begin(self) -> None:
        """A primitive has all that it needs."""
        self._began, self._slept, self._apart = time.perf_counter(), 0.0, 0.0
        self._work = self._marked = time.thread_time()

    def pause(self) -> None:
        """A part of a primitive is done; what comes before the next one is not its work."""
        self.collective()
        self._paused = time.perf_counter()

    def go_on(self) -> None:
        """The next part."""
        self._apart += time.perf_counter() - self._paused
        now = time.thread_time()
        self._work += now - self._marked
        self._marked = now

    def collective(self) -> None:
        """A collective is about to start: a device that is made slow has not come as far."""
        worked = time.thread_time() - self._marked
        speed = self._speed()
        if speed < 1.0 and worked > 0.0:
            missing = worked * (1.0 / speed - 1.0)
            time.sleep(missing)
            self._slept += missing
        self._marked = time.thread_time()

    def waits(self) -> None:
        """The work that follows needs a collective's result."""

    def resumed(self) -> None:
        """It is there: own work goes on."""

    def emulate(self, seconds: float) -> None:
        """Take at least `seconds` for the primitive under way, or more if the device is made slow: as one would that
        needs them. They are its own work then, whether it had to wait for peers meanwhile or not."""
        needed = seconds / self._speed()
        rest = self._began + self._apart + needed - time.perf_counter()
        if rest > 0.0:
            time.sleep(rest)
        self._marked = time.thread_time()
        self._slept = max(self._slept, needed - (self._marked - self._work))

    def end(self) -> None:
        """The primitive is done."""
        self.collective()
        own = time.thread_time() - self._work + self._slept
        span = time.perf_counter() - self._began - self._apart
        self._rows.append((self._began - self._zero, span, own))

    def reduced(self) -> None:
        """All gradients are summed."""
        self._reduced = time.perf_counter() - self._zero

    def reduced_s(self) -> float:
        """Offset at which they were."""
        return self._reduced

    def read(self) -> Floats:
        """(3, primitives): starts, spans, own work, in the order in which they were carried out."""
        return np.array(self._rows, dtype=np.float64).reshape(-1, 3).T


class CudaStopwatch(Stopwatch):
    """The same on a GPU: host time says when work was handed over, events say when it ran. Not yet run on one.

    `reduced_s` and `read` are for when the device has done it all: after the last synchronisation.
    """

    def __init__(self, speed: Speed = full_speed) -> None:
        super().__init__(speed)
        self._segments: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        """Own work of the primitive under way: from when to when."""
        self._done: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = []
        self._open: torch.cuda.Event | None = None
        """Since when it is at its own work; None while it waits."""
        self._first = self._last = self._mark()

    @staticmethod
    def _mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin(self) -> None:
        self._began = time.perf_counter()
        self._segments = []
        self._open = self._mark()

    def collective(self) -> None:
        speed = self._speed()
        if speed < 1.0 and self._open is not None:
            done = self._mark()  # can be read only once it has happened: this serialises, as a slow device would
            done.synchronize()
            time.sleep(self._open.elapsed_time(done) / 1e3 * (1.0 / speed - 1.0))
            self.waits()
            self.resumed()

    def waits(self) -> None:
        if self._open is not None:
            self._segments.append((self._open, self._mark()))
            self._open = None

    def resumed(self) -> None:
        if self._open is None:
            self._open = self._mark()

    def pause(self) -> None:
        self.collective()
        self.waits()

    def go_on(self) -> None:
        self.resumed()

    def end(self) -> None:
        self.collective()
        self.waits()
        self._done.append(self._segments)

    def reduced(self) -> None:
        self._last = self._mark()

    def reduced_s(self) -> float:
        return self._first.elapsed_time(self._last) / 1e3

    def read(self) -> Floats:
        rows = [
            (
                self._first.elapsed_time(segments[0][0]) / 1e3,
                segments[0][0].elapsed_time(segments[-1][1]) / 1e3,
                sum(begun.elapsed_time(done) for begun, done in segments) / 1e3,
            )
            for segments in self._done
        ]
        return np.array(rows, dtype=np.float64).reshape(-1, 3).T
