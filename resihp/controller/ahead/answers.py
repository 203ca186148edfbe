"""Answers that are ready: kept by the exact question, forgotten with what they were asked for.

All of it may be lost: whoever finds no answer asks the planner, as if nobody had asked before. Answers stay encoded,
for few are ever used. Held by `Job`, filled by `asking`, looked into by `planning`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from resihp.parallelism.layout import Replica
from resihp.scheduler.questions import answer_for, canonical, key_of
from resihp.scheduler.situation import Decision, Situation


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Something that may happen next: these ranks are gone. None of them: nothing happens, and a better plan is
    looked for."""

    ranks: tuple[int, ...]
    what: str


@dataclass(frozen=True, kw_only=True)
class OpenQuestion:
    """A question that was put to whoever thinks."""

    key: str
    loss: Loss
    at: float


@dataclass
class Foresight:
    """What was asked under the plan in effect, and what came of it."""

    asked_of: object = None
    """All that the questions depend on; another one, and all here is void."""
    since: int = 0
    """The iteration that was committed when that was so first."""
    seen: int = -1
    """The last committed iteration in which this was looked at."""
    todo: deque[Loss] | None = None
    """What is still to be asked; None before the first question."""
    asked: OpenQuestion | None = None
    """The one under way."""
    unanswered: int = 0
    """Questions in a row that nobody answered."""
    losses: dict[str, Loss] = field(default_factory=dict)
    """All that was asked, by key."""
    answers: dict[str, bytes] = field(default_factory=dict)
    searched: tuple[Replica, ...] | None = None
    """The layout that the last answer used has, where it was searched for."""
    copies_looked_for: tuple[tuple[Replica, ...], frozenset[int]] | None = None
    """For which layout in effect, and which ranks without work, second copies of state were looked for last. Outlives
    `forget`: what was refused is not asked for again."""

    def forget(self, asked_of: object, since: int) -> None:
        """Something is not as it was: other questions, from that iteration on."""
        self.asked_of, self.since = asked_of, since
        self.todo, self.asked, self.unanswered = None, None, 0
        self.losses, self.answers = {}, {}

    def ready(self, situation: Situation) -> Decision | None:
        """The answer to exactly this question, if it was asked and is there."""
        if not self.answers:
            return None
        encoded = self.answers.get(key_of(canonical(situation)))
        return None if encoded is None else answer_for(situation, encoded)
