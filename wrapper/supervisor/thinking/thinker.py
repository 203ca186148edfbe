"""The supervisor's end of who thinks: has questions answered by a process of its own, one at a time.

The process is started with the first question, and again if it fails, a few times. Nothing waits for it: without it, or
where it is slow, answers are not there when they are needed, and then the planner is asked as if nobody had thought.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Sequence

import msgspec

from resihp.controller import interface as api
from wrapper.supervisor.thinking.child import Child, start
from wrapper.supervisor.thinking.frames import ANSWERS, LENGTH, frame, length_of

MOST_STARTS = 4
LIMIT_S = 120.0
"""How long an answer may take beyond the time that is given to its search."""
ONE_CORE = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

_log = logging.getLogger("thinker")


def command(planner: str) -> list[str]:
    module = "wrapper.supervisor.thinking.process"
    return [sys.executable, "-P", "-m", module, "--planner", planner, "--parent", str(os.getpid())]


class Thinker:
    """`tell` hears the answers, in the loop in which questions are asked."""

    def __init__(self, tell: Callable[[api.AnyEvent], None], command: Sequence[str]) -> None:
        self._tell, self._command = tell, command
        self._next: api.Think | None = None
        self._starts = 0
        self._child: Child | None = None
        self._task: asyncio.Task[None] | None = None

    def ask(self, question: api.Think) -> None:
        """Have it answered after the one under way; one that was not begun yet is given up for it."""
        self._next = question
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._work())

    async def close(self) -> None:
        """No more answers."""
        self._next = None
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._end()

    async def _work(self) -> None:
        """Never fails: whatever goes wrong with a question, it has no answer."""
        while (question := self._next) is not None:
            self._next = None
            try:
                async with asyncio.timeout(LIMIT_S + question.search_s):
                    answer = await self._answer(question)
            except (OSError, EOFError, ValueError, msgspec.MsgspecError, TimeoutError) as error:
                _log.warning("no answer to %s: %s", question.why, str(error) or type(error).__name__)
                self._end()
                continue
            if answer is not None:
                self._tell(answer)

    async def _answer(self, question: api.Think) -> api.Thought | None:
        """None where it was started too often. Raises OSError, EOFError, ValueError where the process fails."""
        if self._child is None:
            if self._starts == MOST_STARTS:
                return None
            self._starts += 1
            # its stderr is ours: a file in the job's folder may hang, and all would wait
            self._child = await start(self._command, os.environ | ONE_CORE)
        self._child.writer.write(frame(question))
        await self._child.writer.drain()
        header = await self._child.reader.readexactly(LENGTH.size)
        answer = ANSWERS.decode(await self._child.reader.readexactly(length_of(header)))
        if answer.question != question.question:
            raise ValueError("it answers to something else")
        return answer

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.end()
