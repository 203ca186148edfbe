"""The planning process: reads questions one after the other from its standard input, and writes answers to its output.

`python -P -m resihp.wrapper.supervisor.thinking.process --planner NAME --parent PID`, started by `thinker`. Runs at low
priority, on one core; exits at the end of its input, or with its parent. `resihp.scheduler.thinking` answers the
questions; this module only enforces the time limit of the search.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import BinaryIO

from resihp.controller import interface as api
from resihp.errors import ResihpError
from resihp.process import die_with_parent
from resihp.scheduler import planners
from resihp.scheduler.questions import QUESTION_ENCODER
from resihp.scheduler.situation import Decision
from resihp.scheduler.thinking import think
from resihp.settings import PlannerName
from resihp.wrapper.supervisor.thinking.frames import FRAME_LENGTH, QUESTION_DECODER, frame, length_of

NICE_LEVEL = 10


def serve(questions: BinaryIO, answers: BinaryIO, decide: Callable[[api.Think], Decision]) -> None:
    """Answer questions until the input ends. Raises ValueError for an invalid frame."""
    while len(header := questions.read(FRAME_LENGTH.size)) == FRAME_LENGTH.size:
        length = length_of(header)
        body = questions.read(length)
        if len(body) < length:
            return
        question = QUESTION_DECODER.decode(body)
        try:
            answer = api.Thought(question=question.question, decision=QUESTION_ENCODER.encode(decide(question)))
        except ResihpError as error:
            answer = api.Thought(question=question.question, obstacle=str(error))
        answers.write(frame(answer))
        answers.flush()


def decider(planner: PlannerName) -> Callable[[api.Think], Decision]:
    from resihp.pipeline import checker

    decide = planners.named(planner).decide

    def answer(question: api.Think) -> Decision:
        until: float | None = None

        def more() -> bool:
            nonlocal until
            now = time.perf_counter()
            until = now + question.search_s if until is None else until
            return now < until

        return think(question.situation, decide, checker.check, more if question.search_s else None)

    return answer


def main() -> None:
    parser = argparse.ArgumentParser(prog="resihp.wrapper.supervisor.thinking.process")
    parser.add_argument("--planner", required=True, choices=planners.PLANNER_NAMES)
    parser.add_argument("--parent", required=True, type=int)
    options = parser.parse_args()
    die_with_parent(options.parent)
    os.nice(NICE_LEVEL)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # so that printed text is never taken for an answer
    serve(sys.stdin.buffer, answers, decider(options.planner))


if __name__ == "__main__":
    main()
