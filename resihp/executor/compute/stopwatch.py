"""Measures each primitive of an iteration on this rank: its start, its duration, and the rank's own work within it.

In a tensor-parallel group, all ranks wait in each all-reduce for the slowest one, so the duration of a chunk is about
the same on all of them. Only their own work differs. On a CPU it is the processor time of the computing thread. On a
GPU it is the time outside waits for collectives, measured by events; computation during a collective counts as own
work. Events are read after the iteration, when the following step has been started, so that nothing waits for them.

An injected fault can slow a device (`resihp run --fault slow:...`): before each collective, and at the end of a chunk,
the stopwatch sleeps for the additional time that a device of this speed would need. Never judges a device. Used by the
interpreter and the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from resihp.detector.observation import Floats

Speed = Callable[[], float]
"""Returns the relative speed of the device under an injected fault: 1 means full speed."""


def full_speed() -> float:
    return 1.0


def stopwatch_of(device: torch.device, speed: Speed = full_speed) -> Stopwatch:
    return CudaStopwatch(speed) if device.type == "cuda" else Stopwatch(speed)


class Stopwatch:
    """Measures one iteration on a CPU. Offsets count from the creation of the stopwatch; all times are in seconds."""

    def __init__(self, speed: Speed = full_speed) -> None:
        self._speed = speed
        self._zero = time.perf_counter()
        self._rows: list[tuple[float, float, float]] = []
        self._began = self._work = self._marked = self._slept = self._reduced = 0.0
        self._between_parts = self._paused = 0.0

    def begin(self) -> None:
        """Start a primitive. All its inputs have arrived."""
        self._began, self._slept, self._between_parts = time.perf_counter(), 0.0, 0.0
        self._work = self._marked = time.thread_time()

    def pause(self) -> None:
        """End a part of a primitive. The time until the next part is not counted as work."""
        self.collective()
        self._paused = time.perf_counter()

    def go_on(self) -> None:
        """Start the next part of the primitive."""
        self._between_parts += time.perf_counter() - self._paused
        now = time.thread_time()
        self._work += now - self._marked
        self._marked = now

    def collective(self) -> None:
        """Mark the start of a collective. A slowed device sleeps first, since it would not have got so far yet."""
        worked = time.thread_time() - self._marked
        speed = self._speed()
        if speed < 1.0 and worked > 0.0:
            missing = worked * (1.0 / speed - 1.0)
            time.sleep(missing)
            self._slept += missing
        self._marked = time.thread_time()

    def waits(self) -> None:
        """Mark a point from which work needs the result of a collective."""

    def resumed(self) -> None:
        """Mark the arrival of the result, after which own work continues."""

    def emulate(self, seconds: float) -> None:
        """Sleep until the current primitive has taken `seconds`, or more on a slowed device. This time counts as own
        work, even if the rank has waited for peers meanwhile."""
        needed = seconds / self._speed()
        rest = self._began + self._between_parts + needed - time.perf_counter()
        if rest > 0.0:
            time.sleep(rest)
        self._marked = time.thread_time()
        self._slept = max(self._slept, needed - (self._marked - self._work))

    def end(self) -> None:
        """End the primitive."""
        self.collective()
        own = time.thread_time() - self._work + self._slept
        span = time.perf_counter() - self._began - self._between_parts
        self._rows.append((self._began - self._zero, span, own))

    def reduced(self) -> None:
        """Mark the time when all gradients are reduced."""
        self._reduced = time.perf_counter() - self._zero

    def reduced_s(self) -> float:
        """Return the offset at which all gradients were reduced."""
        return self._reduced

    def read(self) -> Floats:
        """Return an array of shape (3, primitives): starts, durations and own work, in order of execution."""
        return np.array(self._rows, dtype=np.float64).reshape(-1, 3).T


class CudaStopwatch(Stopwatch):
    """Measures one iteration on a GPU, by events, since host time only shows when work was submitted. Not yet run on a
    GPU.

    Call `reduced_s` and `read` only when the device has finished: after the last synchronisation.
    """

    def __init__(self, speed: Speed = full_speed) -> None:
        super().__init__(speed)
        self._segments: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        """Beginning and end of each period of own work in the current primitive."""
        self._done: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = []
        self._open: torch.cuda.Event | None = None
        """Beginning of the current period of own work; None during a wait."""
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
            done = self._mark()  # an event can be read only after it has happened: this serialises work
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
