"""The supervisor's end of planning ahead: sends questions to a separate process, one at a time.

The process is started with the first question, and restarted a few times if it fails. The supervisor never waits for
the process: if an answer is missing when it is needed, the planner is asked then, as without planning ahead.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Sequence

import msgspec

from resihp.controller import interface as api
from resihp.wrapper.supervisor.thinking.child import Child, start
from resihp.wrapper.supervisor.thinking.frames import ANSWER_DECODER, FRAME_LENGTH, frame, length_of

MAX_STARTS = 4
ANSWER_TIMEOUT_S = 120.0
"""How long an answer may take in addition to the time that is granted for its search."""
SINGLE_CORE_ENVIRONMENT = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

_log = logging.getLogger("thinker")


def command(planner: str) -> list[str]:
    module = "resihp.wrapper.supervisor.thinking.process"
    return [sys.executable, "-P", "-m", module, "--planner", planner, "--parent", str(os.getpid())]


class Thinker:
    """Sends questions to the planning process. `handle` receives the answers, in the event loop in which the questions
    are asked."""

    def __init__(self, handle: Callable[[api.AnyEvent], None], command: Sequence[str]) -> None:
        self._handle, self._command = handle, command
        self._next: api.Think | None = None
        self._starts = 0
        self._child: Child | None = None
        self._task: asyncio.Task[None] | None = None

    def ask(self, question: api.Think) -> None:
        """Queue a question behind the one in progress; it replaces a queued question."""
        self._next = question
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._work())

    async def close(self) -> None:
        """Stop answering."""
        self._next = None
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._end()

    async def _work(self) -> None:
        """Answer questions until none is queued. Never fails: if the process fails, its question gets no answer."""
        while (question := self._next) is not None:
            self._next = None
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT_S + question.search_s):
                    answer = await self._answer(question)
            except (OSError, EOFError, ValueError, msgspec.MsgspecError, TimeoutError) as error:
                _log.warning("no answer to %s: %s", question.why, str(error) or type(error).__name__)
                self._end()
                continue
            if answer is not None:
                self._handle(answer)

    async def _answer(self, question: api.Think) -> api.Thought | None:
        """Return the answer to a question; None if the process was already started `MAX_STARTS` times. Raises OSError,
        EOFError or ValueError if the process fails."""
        if self._child is None:
            if self._starts == MAX_STARTS:
                return None
            self._starts += 1
            # it inherits this process's stderr: a file in the job's folder may hang, and block everything
            self._child = await start(self._command, os.environ | SINGLE_CORE_ENVIRONMENT)
        self._child.writer.write(frame(question))
        await self._child.writer.drain()
        header = await self._child.reader.readexactly(FRAME_LENGTH.size)
        answer = ANSWER_DECODER.decode(await self._child.reader.readexactly(length_of(header)))
        if answer.question != question.question:
            raise ValueError("the answer belongs to another question")
        return answer

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.end()
