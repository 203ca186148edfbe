"""Keep plans that were made in advance, by the exact question that they answer, until the situation changes.

All of them may be lost: without a ready answer the planner is called as if it had not been asked before. Answers stay
encoded, because few are ever used. Owned by `Job`, filled by `asking`, read by `planning`. Makes no plan itself.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from resihp.parallelism.layout import Replica
from resihp.scheduler.questions import answer_for, canonical, key_of
from resihp.scheduler.situation import Decision, Situation


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A possible event for which a plan is made in advance: the loss of `ranks`. If `ranks` is empty nothing is lost,
    and the question is for a better plan than the one in effect."""

    ranks: tuple[int, ...]
    what: str


@dataclass(frozen=True, kw_only=True)
class OpenQuestion:
    """A question that the planning process is working on. `key` identifies it; `at`: the time at which it was asked."""

    key: str
    loss: Loss
    at: float


@dataclass
class PlanCache:
    """The questions asked in advance in the present situation, and their answers."""

    asked_of: object = None
    """All facts that the questions depend on. Once any of them changes, all answers are void."""
    since: int = 0
    """The last committed iteration when `asked_of` took its present value."""
    seen: int = -1
    """The last committed iteration when the cache was last reviewed."""
    todo: deque[Loss] | None = None
    """Questions that are still to be asked, in order; None until they have been listed for the present situation."""
    asked: OpenQuestion | None = None
    """The question in progress; None if there is none."""
    unanswered: int = 0
    """Number of questions in a row without an answer."""
    losses: dict[str, Loss] = field(default_factory=dict)
    """All losses asked about so far, by the key of their question."""
    answers: dict[str, bytes] = field(default_factory=dict)
    searched: tuple[Replica, ...] | None = None
    """Layout in effect when a better plan was last searched for; None if there was no search."""
    copies_looked_for: tuple[tuple[Replica, ...], frozenset[int]] | None = None
    """The layout in effect and the ranks without work when second copies of state were last looked for. `forget` keeps
    this value, so that a declined copy is not asked for again."""

    def forget(self, asked_of: object, since: int) -> None:
        """Drop all questions and answers, because the situation has changed at iteration `since`. `asked_of`: the new
        situation."""
        self.asked_of, self.since = asked_of, since
        self.todo, self.asked, self.unanswered = None, None, 0
        self.losses, self.answers = {}, {}

    def ready(self, situation: Situation) -> Decision | None:
        """Return the plan made in advance for exactly this situation; None if there is none."""
        if not self.answers:
            return None
        encoded = self.answers.get(key_of(canonical(situation)))
        return None if encoded is None else answer_for(situation, encoded)
