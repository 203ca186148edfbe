"""Plans that are ready: kept by the exact question, and dropped once the situation has changed.

All of it may be lost: where no answer is ready, the planner is asked as if nobody had asked before. Answers stay
encoded, because few are ever used. Held by `Job`, filled by `asking`, read by `planning`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from resihp.parallelism.layout import Replica
from resihp.scheduler.questions import answer_for, canonical, key_of
from resihp.scheduler.situation import Decision, Situation


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Something that may happen next: the loss of these ranks. Without ranks nothing is lost, and a better plan is
    looked for."""

    ranks: tuple[int, ...]
    what: str


@dataclass(frozen=True, kw_only=True)
class OpenQuestion:
    """A question that was put to the planning process."""

    key: str
    loss: Loss
    at: float


@dataclass
class PlanCache:
    """The questions asked under the plan in effect, and their answers."""

    asked_of: object = None
    """Everything the questions depend on; once it differs, all answers here are void."""
    since: int = 0
    """The committed iteration at which `asked_of` became so."""
    seen: int = -1
    """The last committed iteration at which the cache was reviewed."""
    todo: deque[Loss] | None = None
    """Losses still to be asked about; None before the first question."""
    asked: OpenQuestion | None = None
    """The question under way."""
    unanswered: int = 0
    """Number of questions in a row that got no answer."""
    losses: dict[str, Loss] = field(default_factory=dict)
    """All losses asked about, by the key of their question."""
    answers: dict[str, bytes] = field(default_factory=dict)
    searched: tuple[Replica, ...] | None = None
    """Layout of the plan in effect for which a better one was last looked for."""
    copies_looked_for: tuple[tuple[Replica, ...], frozenset[int]] | None = None
    """The layout in effect, and the ranks without work, for which second copies of state were last looked for. Outlives
    `forget`, because a refused copy is not asked for again."""

    def forget(self, asked_of: object, since: int) -> None:
        """Drop all questions and answers: the situation has changed as of that iteration."""
        self.asked_of, self.since = asked_of, since
        self.todo, self.asked, self.unanswered = None, None, 0
        self.losses, self.answers = {}, {}

    def ready(self, situation: Situation) -> Decision | None:
        """Return the answer to exactly this question, or None if it was not asked or is not there."""
        if not self.answers:
            return None
        encoded = self.answers.get(key_of(canonical(situation)))
        return None if encoded is None else answer_for(situation, encoded)
