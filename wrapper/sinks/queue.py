"""A thread that does slow or unreliable work beside the job, item by item, from a bounded queue.

Used by listeners that send a job's events elsewhere (`resihp.wrapper.sinks.hooks`, `resihp.wrapper.sinks.tensorboard`).
The supervisor only adds items. If the queue is full, the oldest item is dropped and counted. The first of several
failures is reported, and the first success after them. Decides nothing about the job.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from resihp.errors import ResihpError

MAX_WAITING = 1000

_log = logging.getLogger("resihp.aside")
_Item = TypeVar("_Item")


class UndeliveredError(ResihpError):
    """An item of work failed. The message contains no secret. `again`: whether another attempt may succeed."""

    def __init__(self, text: str, *, again: bool = True) -> None:
        super().__init__(text)
        self.again = again


class BackgroundQueue(Generic[_Item]):
    """A bounded queue and the thread that works it off. `put` never waits, and may be called from any thread.

    `work` processes one item, in the queue's thread; it raises ResihpError or OSError if it fails. `pauses_s`: the
    pauses between attempts for one item; there is one more attempt than pauses. `say` reports failures, from the
    queue's thread. `closing` is set by `close`: work must then end by the deadline.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[_Item], None],
        say: Callable[[str], None],
        *,
        pauses_s: tuple[float, ...] = (),
        most_waiting: int = MAX_WAITING,
    ) -> None:
        self.name = name
        self.done = self.failed = self.dropped = 0
        """Number of items by outcome. Each item is counted once, after its last attempt."""
        self.closing = threading.Event()
        self._work = work
        self._say = say
        self._pauses_s = pauses_s
        self._most = most_waiting
        self._items: deque[_Item] = deque()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._deadline = float("inf")
        self._failing = False
        # A daemon thread, so that work that hangs cannot keep the supervisor from exiting.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, item: _Item) -> None:
        with self._lock:
            if len(self._items) >= self._most:
                self._items.popleft()
                self.dropped += 1
            self._items.append(item)
        self._wake.set()

    def close(self, deadline: float) -> bool:
        """Work on the remaining items until `deadline` (monotonic seconds); return False if items are left."""
        self._deadline = deadline
        self.closing.set()
        self._wake.set()
        self._thread.join(max(0.0, deadline - time.monotonic()))
        with self._lock:
            remaining = len(self._items)
        if self._thread.is_alive() or remaining:
            self._report(f"{self.name}: the job has ended before all was done; {max(remaining, 1)} left")
            return False
        return True

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            while (item := self._next()) is not None:
                self._do(item)
            if self.closing.is_set() and not self._wake.is_set():
                return

    def _next(self) -> _Item | None:
        with self._lock:
            if not self._items or time.monotonic() > self._deadline:
                return None
            return self._items.popleft()

    def _do(self, item: _Item) -> None:
        for pause_s in (*self._pauses_s, None):
            try:
                self._work(item)
            except (ResihpError, OSError) as error:
                worth_it = not isinstance(error, UndeliveredError) or error.again
                text = str(error)
            except Exception as error:  # noqa: BLE001 - a bug of ours must not stop later items
                _log.exception("%s", self.name)
                worth_it, text = False, f"internal error ({type(error).__name__})"
            else:
                self.done += 1
                if self._failing:
                    self._failing = False
                    self._report(f"{self.name}: works again")
                return
            if pause_s is None or not worth_it or time.monotonic() + pause_s > self._deadline:
                break
            self.closing.wait(pause_s)
        self.failed += 1
        if not self._failing:
            self._failing = True
            self._report(f"{self.name}: {text}; not reported again until it works, the job continues")

    def _report(self, text: str) -> None:
        with suppress(RuntimeError):  # raised if the event loop has ended
            self._say(text)
