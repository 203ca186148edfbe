"""The stages of a job's life: one table of the allowed changes of stage, and one function that changes the stage.

    gathering -> proposing -> building -> first-iteration -> running -> halting -> ended
                  ^  |            |             |             |  ^
                  |  v            v             |             v  |
                 parking <--------+-------------+---------- pausing

    gathering -> restarting -> gathering

A job is in one stage at a time. `recovering` is the first stage of a new supervisor, until it knows the stage to
continue from. A script that does not declare a model stays in `gathering` while it runs; it is `restarting` while its
processes are ended, to be started again. A failure during training or a change of plan leads to `parking`; the job may
end in any stage. A job under Slurm that has too few nodes left is `closing` for some seconds before its end, to decide
about the lost nodes. A change that is not in the table raises InvalidMoveError with the latest events: it is a bug in
resihp, and the job does not continue. Used by every module of the controller; imports none of them.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Literal

from resihp.errors import ResihpError

if TYPE_CHECKING:
    from resihp.controller.interface import AnyEvent

Stage = Literal[
    "recovering",
    "gathering",
    "restarting",
    "parking",
    "proposing",
    "building",
    "first-iteration",
    "running",
    "pausing",
    "halting",
    "closing",
    "ended",
]

ALLOWED_MOVES: dict[Stage, frozenset[Stage]] = {
    "recovering": frozenset(("gathering", "restarting", "parking", "running", "halting", "ended")),
    "gathering": frozenset(("proposing", "restarting", "closing", "ended")),
    "restarting": frozenset(("gathering", "closing", "ended")),
    "parking": frozenset(("parking", "proposing", "closing", "ended")),
    "proposing": frozenset(("parking", "building", "closing", "ended")),
    "building": frozenset(("parking", "first-iteration", "ended")),
    "first-iteration": frozenset(("running", "parking", "halting", "ended")),
    "running": frozenset(("pausing", "parking", "halting", "ended")),
    "pausing": frozenset(("running", "parking", "halting", "ended")),
    "halting": frozenset(("ended",)),
    "closing": frozenset(("ended",)),
    "ended": frozenset(),
}
CHANGING_STAGES: tuple[Stage, ...] = ("parking", "proposing", "building")
"""Stages without training, between two plans, in the order in which they follow each other."""
TRAINING_STAGES: frozenset[Stage] = frozenset(("first-iteration", "running", "pausing"))
"""Stages in which a plan is in effect and ranks train."""
MAX_STORY_EVENTS = 50
"""Number of latest events that the message of an InvalidMoveError quotes."""


class InvalidMoveError(ResihpError):
    """The controller tried to change to a stage that cannot follow the present one."""


class Lifecycle:
    """The stage of one job, and its latest events for the message of an invalid move."""

    def __init__(self) -> None:
        self.stage: Stage = "gathering"
        self.is_taken_over = False
        """Whether another supervisor led the job before this one."""
        self._story: deque[tuple[float, AnyEvent | Stage]] = deque(maxlen=MAX_STORY_EVENTS)

    def hear(self, now: float, event: AnyEvent) -> None:
        self._story.append((now, event))

    def move(self, stage: Stage, now: float) -> None:
        """Change to another stage. Raises InvalidMoveError if the table does not allow the change."""
        if stage not in ALLOWED_MOVES[self.stage]:
            story = "\n".join(f"{at:10.3f} {str(event)[:300]}" for at, event in self._story)
            raise InvalidMoveError(f"controller: {self.stage} cannot be followed by {stage}; last events:\n{story}")
        self.stage = stage
        self._story.append((now, stage))

    def take_over(self) -> None:
        """Begin in stage `recovering`: a new supervisor waits for the agents of the previous one."""
        self.stage = "recovering"
        self.is_taken_over = True
