"""Who answers the controller's questions ahead in a simulated job: by the code of a real one, after some virtual time.

Mostly; some answers never come, some come late or twice, some say that there is none, and some are none. Draws are of
its own, so that a job's other draws are the same with and without. Held by `world`.
"""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING

from resihp.controller import interface as api
from resihp.errors import LayoutError
from resihp.parallelism.layout import Layout
from resihp.parallelism.plan import Plan
from resihp.scheduler.planners import named
from resihp.scheduler.questions import QUESTION_ENCODER, key_of
from resihp.scheduler.thinking import think
from resihp.simulator.rules import expect

if TYPE_CHECKING:
    from resihp.simulator.world import World

TRIALS = 2
"""Looks at whether a search is to go on: few, for there are thousands of jobs."""


class Thinking:
    """One question at a time, as there is one process for it."""

    def __init__(self, world: World) -> None:
        self._world, self._rng = world, random.Random(f"{world.scenario.seed} thinks")
        self._next: api.Think | None = None
        self._busy = False
        self._found: list[Layout] = []
        """Layouts in effect for which a plan was found that may be better."""

    def has_found(self, plan: Plan) -> bool:
        """Whether the controller may know of a better plan than this one, that is in effect."""
        return any(layout.replicas == plan.layout.replicas for layout in self._found)

    def asked(self, action: api.Think) -> None:
        """A question: after the one under way, and in place of one that is not begun yet."""
        expect(self._world.settings.plans_ahead, f"{action} where nobody thinks")
        expect(action.question == key_of(action.situation), "a question by another's name")
        self._next = action
        self._begin()

    def _begin(self) -> None:
        if self._busy or self._next is None:
            return
        action, self._next, self._busy = self._next, None, True
        delay_s = self._rng.choice([0.0, 0.01, 0.1, 0.1, 1.0, 30.0])
        self._world.at(delay_s, self._done, action)

    def _done(self, action: api.Think) -> None:
        self._busy = False
        fate = self._rng.random()
        if fate > 0.05:
            answer = self._answer(action) if fate > 0.15 else self._odd(action)
            if answer.decision and set(action.situation.available).issuperset(action.situation.base.active):
                self._found.append(action.situation.base)
            self._world.feed(answer)
            if self._rng.random() < 0.05:
                self._world.at(self._rng.uniform(0.0, 5.0), self._world.feed, answer)
        self._begin()

    def _answer(self, action: api.Think) -> api.Thought:
        world, looks = self._world, itertools.count()
        planner = world.dependencies.planner or named(world.settings.planner)
        more = (lambda: next(looks) < TRIALS) if action.search_s else None
        try:
            found = think(action.situation, planner.decide, world.dependencies.check, more)
        except LayoutError as error:
            return api.Thought(question=action.question, obstacle=str(error))
        return api.Thought(question=action.question, decision=QUESTION_ENCODER.encode(found))

    def _odd(self, action: api.Think) -> api.Thought:
        if self._rng.random() < 0.5:
            return api.Thought(question=action.question, obstacle="it had no time")
        return api.Thought(question=action.question, decision=b"\xc1 no decision")
