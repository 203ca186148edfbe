"""A thread that does beside the job what may take long or fail: one thing after the other, from a bounded queue.

Used by what tells others of the job (`wrapper.sinks.hooks`, `wrapper.sinks.tensorboard`). The supervisor only puts
things in; when too many wait, the oldest is dropped and counted. What fails is said once, and once more when it works
again. Decides nothing about the job.
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

MOST_WAITING = 1000

_log = logging.getLogger("resihp.aside")
_Item = TypeVar("_Item")


class UndeliveredError(ResihpError):
    """What was to be done beside the job could not be; the message names no secret. `again`: trying again may help."""

    def __init__(self, text: str, *, again: bool = True) -> None:
        super().__init__(text)
        self.again = again


class Aside(Generic[_Item]):
    """`put` from any thread, never waits. `work` does one item, in our thread; raises UndeliveredError or OSError.

    `pauses_s` are those between tries of one item: it is tried once more than there are pauses. `say` is told of what
    fails, from our thread. `closing` is set once no time is left but until the deadline.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[_Item], None],
        say: Callable[[str], None],
        *,
        pauses_s: tuple[float, ...] = (),
        most_waiting: int = MOST_WAITING,
    ) -> None:
        self.name = name
        self.done = self.failed = self.dropped = 0
        """Items, each counted once, after its last try."""
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
        # What hangs must not keep the supervisor's process from ending, hence a daemon.
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
        """Do what waits until that moment (monotonic seconds); False if something is left then."""
        self._deadline = deadline
        self.closing.set()
        self._wake.set()
        self._thread.join(max(0.0, deadline - time.monotonic()))
        with self._lock:
            left = len(self._items)
        if self._thread.is_alive() or left:
            self._tell(f"{self.name}: the job has ended before all was done; {max(left, 1)} left")
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
            except (UndeliveredError, OSError) as error:
                worth_it = not isinstance(error, UndeliveredError) or error.again
                text = str(error)
            except Exception as error:  # noqa: BLE001 - ours to mend, not a reason to stop telling
                _log.exception("%s", self.name)
                worth_it, text = False, f"internal error ({type(error).__name__})"
            else:
                self.done += 1
                if self._failing:
                    self._failing = False
                    self._tell(f"{self.name}: works again")
                return
            if pause_s is None or not worth_it or time.monotonic() + pause_s > self._deadline:
                break
            self.closing.wait(pause_s)
        self.failed += 1
        if not self._failing:
            self._failing = True
            self._tell(f"{self.name}: {text}; not told again until it works, the job goes on")

    def _tell(self, text: str) -> None:
        with suppress(RuntimeError):  # whoever would tell it is gone
            self._say(text)
