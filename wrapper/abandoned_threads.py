"""Ask a file system that may hang, in a thread that can be abandoned.

The thread is a daemon of its own, because a process waits at its exit for the threads of an executor
(`asyncio.to_thread`). Used by agents and by the supervisor.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

Answer = TypeVar("Answer")


async def answer_within(limit_s: float | None, ask: Callable[[], Answer], otherwise: Answer, name: str) -> Answer:
    """Return the answer of a function that may block on a file system, without blocking the event loop; `otherwise` if
    it takes longer than `limit_s` (None: no limit) or raises an exception. The thread `name` is then abandoned."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Answer] = loop.create_future()

    def deliver(answer: Answer) -> None:
        if not result.done():
            result.set_result(answer)

    def run() -> None:
        answer = otherwise
        try:
            answer = ask()
        finally:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(deliver, answer)

    threading.Thread(target=run, name=name, daemon=True).start()
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            return await result
    return otherwise
