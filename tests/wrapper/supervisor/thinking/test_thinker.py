"""The supervisor's end of who thinks: a process that answers, and ones that do not."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from resihp.controller import interface as api
from resihp.parallelism.layout import Layout
from resihp.scheduler import decide
from resihp.scheduler.questions import answer_for
from resihp.scheduler.situation import Situation
from resihp.wrapper.supervisor.thinking import child, thinker
from resihp.wrapper.supervisor.thinking.frames import FRAME_LENGTH
from resihp.wrapper.supervisor.thinking.thinker import MAX_STARTS, Thinker, command
from tests.resihp.scheduler.cases import on_nodes, situation

GARBAGE = (
    f"import sys; sys.stdout.buffer.write({FRAME_LENGTH.pack(3)!r} + b'abc'); sys.stdout.flush(); sys.stdin.read()"
)
HUGE = f"import sys; sys.stdout.buffer.write({FRAME_LENGTH.pack(2**31)!r}); sys.stdout.flush(); sys.stdin.read()"
ENDS = "raise SystemExit(1)"
SILENT = "import sys, time; time.sleep(600)"


def case(lost: Sequence[int] = (1,)) -> Situation:
    return situation(Layout.uniform(tp=2, pp=2, dp=2, layers=6), nodes=on_nodes(8, 4), tp=2, pp=2, lost=list(lost))


def question(number: int, lost: Sequence[int] = (1,)) -> api.Think:
    return api.Think(question=f"q{number}", situation=case(lost), search_s=0.0, why=f"the loss of ranks {lost}")


def script(text: str) -> list[str]:
    return [sys.executable, "-c", text]


class Heard:
    """What was answered, and a thinker that tells it."""

    def __init__(self, command: Sequence[str]) -> None:
        self.answers: list[api.Thought] = []
        self.came = asyncio.Event()
        self.thinker = Thinker(self.tell, command)

    def tell(self, event: api.AnyEvent) -> None:
        assert isinstance(event, api.Thought)
        self.answers.append(event)
        self.came.set()

    async def next(self) -> api.Thought:
        async with asyncio.timeout(60):
            await self.came.wait()
        self.came.clear()
        return self.answers[-1]

    async def idle(self) -> None:
        """Nothing is being asked any more."""
        assert self.thinker._task is not None
        async with asyncio.timeout(60):
            await self.thinker._task


def test_a_process_answers_what_would_be_decided_here_and_ends_with_its_supervisor() -> None:
    async def run() -> None:
        heard = Heard(command("resihp"))
        heard.thinker.ask(question(1))
        answer = await heard.next()
        assert (answer.question, answer.obstacle) == ("q1", "")
        ready = answer_for(case(), answer.decision)
        assert ready is not None
        assert ready.plan == decide(case()).plan
        child = heard.thinker._child
        assert child is not None
        await heard.thinker.close()
        assert child.process.wait(60) == -signal.SIGKILL

    asyncio.run(run())


def test_a_question_without_a_plan_is_answered_with_why() -> None:
    async def run() -> None:
        heard = Heard(command("drop-replica"))
        heard.thinker.ask(question(1, (1, 5)))
        answer = await heard.next()
        assert answer.decision == b""
        assert "every replica has lost a rank" in answer.obstacle
        await heard.thinker.close()

    asyncio.run(run())


def test_one_that_is_killed_is_started_again_with_the_next_question() -> None:
    async def run() -> None:
        heard = Heard(command("resihp"))
        heard.thinker.ask(question(1))
        await heard.next()
        assert heard.thinker._child is not None
        heard.thinker._child.process.kill()
        heard.thinker._child.process.wait(60)
        heard.thinker.ask(question(2))
        await heard.idle()
        assert len(heard.answers) == 1, "the one that found it dead has no answer"
        heard.thinker.ask(question(3))
        assert (await heard.next()).question == "q3"
        await heard.thinker.close()

    asyncio.run(run())


@pytest.mark.parametrize("text", [GARBAGE, HUGE, ENDS], ids=["garbage", "huge", "ends"])
def test_one_that_answers_nonsense_or_ends_is_started_a_few_times_and_nobody_is_told(text: str) -> None:
    async def run() -> None:
        heard = Heard(script(text))
        for number in range(MAX_STARTS + 2):
            heard.thinker.ask(question(number))
            await heard.idle()
        assert heard.answers == []
        assert heard.thinker._starts == MAX_STARTS
        await heard.thinker.close()

    asyncio.run(run())


def test_one_that_is_silent_is_given_up_and_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thinker, "ANSWER_TIMEOUT_S", 0.2)

    async def run() -> None:
        heard = Heard(script(SILENT))
        began = time.monotonic()
        heard.thinker.ask(question(1))
        assert time.monotonic() - began < 0.1, "asking waits for nothing"
        await heard.idle()
        assert heard.answers == []
        assert heard.thinker._child is None
        heard.thinker.ask(question(2))
        await asyncio.sleep(0.05)
        await heard.thinker.close()
        assert heard.thinker._child is None

    asyncio.run(run())


def test_of_questions_that_wait_the_last_one_is_asked() -> None:
    async def run() -> None:
        heard = Heard(command("resihp"))
        for number in range(5):
            heard.thinker.ask(question(number))
        await heard.idle()
        assert [answer.question for answer in heard.answers] == ["q4"]
        await heard.thinker.close()

    asyncio.run(run())


def test_one_that_does_not_start_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its fork closes files of a folder that hangs, and whoever forked it waits meanwhile."""
    hangs, begun, killed = threading.Event(), threading.Event(), threading.Event()
    real = subprocess.Popen

    class Slow(real):  # type: ignore[type-arg,misc,valid-type]
        def __init__(self, *words: Any, **named: Any) -> None:
            begun.set()
            hangs.wait(60)
            super().__init__(*words, **named)

        def kill(self) -> None:
            super().kill()
            killed.set()

    monkeypatch.setattr(child.subprocess, "Popen", Slow)

    async def run() -> None:
        heard = Heard(script(SILENT))
        heard.thinker.ask(question(1))
        while not begun.is_set():
            await asyncio.sleep(0.01)
        began = time.monotonic()
        await heard.thinker.close()
        assert time.monotonic() - began < 1.0
        hangs.set()
        while not killed.is_set():  # what started after all
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), 60))
