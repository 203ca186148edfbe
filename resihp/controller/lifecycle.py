"""Where a job stands in its life: one stage, one table of what may follow what, one function that moves on.

    gathering -> proposing -> building -> first-iteration -> running -> halting -> ended
                  ^  |            |             |             |  ^
                  |  v            v             |             v  |
                 parking <--------+-------------+---------- pausing

`recovering` comes before whatever a new supervisor finds. A failure parks at any time; any stage may end. What is not
in the table raises, with what was heard before: a move that nobody thought of is a fault of ours, and no job goes on by
it. Asked and told by every module of the controller; knows none of them.
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
    "parking",
    "proposing",
    "building",
    "first-iteration",
    "running",
    "pausing",
    "halting",
    "ended",
]

MOVES: dict[Stage, frozenset[Stage]] = {
    "recovering": frozenset(("gathering", "parking", "running", "halting", "ended")),
    "gathering": frozenset(("proposing", "ended")),
    "parking": frozenset(("parking", "proposing", "ended")),
    "proposing": frozenset(("parking", "building", "ended")),
    "building": frozenset(("parking", "first-iteration", "ended")),
    "first-iteration": frozenset(("running", "parking", "halting", "ended")),
    "running": frozenset(("pausing", "parking", "halting", "ended")),
    "pausing": frozenset(("running", "parking", "halting", "ended")),
    "halting": frozenset(("ended",)),
    "ended": frozenset(),
}
CHANGES: tuple[Stage, ...] = ("parking", "proposing", "building")
"""Training stands still, from one plan to the next: one after the other."""
TRAINING: frozenset[Stage] = frozenset(("first-iteration", "running", "pausing"))
"""A plan is in effect, and iterations are under way."""
STORY = 50
"""How many of the last events an invalid move tells."""


class InvalidMoveError(ResihpError):
    """A stage that cannot follow the one before."""


class Lifecycle:
    """The stage of one job, and the last events that it went by."""

    def __init__(self) -> None:
        self.stage: Stage = "gathering"
        self._story: deque[tuple[float, AnyEvent | Stage]] = deque(maxlen=STORY)

    def hear(self, now: float, event: AnyEvent) -> None:
        self._story.append((now, event))

    def move(self, stage: Stage, now: float) -> None:
        """Go on to another stage. Raises InvalidMoveError where the table does not have it."""
        if stage not in MOVES[self.stage]:
            story = "\n".join(f"{at:10.3f} {str(what)[:300]}" for at, what in self._story)
            raise InvalidMoveError(f"controller: {self.stage} cannot be followed by {stage}; what was heard:\n{story}")
        self.stage = stage
        self._story.append((now, stage))

    def take_over(self) -> None:
        """A new supervisor begins by waiting for the agents of the one before."""
        self.stage = "recovering"
