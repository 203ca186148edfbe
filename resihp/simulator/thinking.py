"""Answers the controller's questions about future plans in a simulated job, by the real code, after some virtual time.

A few answers never arrive, arrive late or twice, report that there is no plan, or are malformed. This module has its
own random generator, so that all other draws of a job are the same with and without it. Never decides whether an answer
is used. Called by `world` and `actions`.
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
from resihp.simulator.invariants.violations import expect

if TYPE_CHECKING:
    from resihp.simulator.world import World

MAX_SEARCH_LOOKS = 2
"""Maximum number of times that a search may continue. Low, because thousands of jobs are played."""


class Thinking:
    """Answers one question at a time, like the separate process in a real job."""

    def __init__(self, world: World) -> None:
        self._world, self._rng = world, random.Random(f"{world.scenario.seed} thinks")
        self._next: api.Think | None = None
        self._busy = False
        self._found: list[Layout] = []
        """Layouts for which a better plan may have been found while they were in effect."""

    def has_found(self, plan: Plan) -> bool:
        """Return whether the controller may know a better plan than `plan`, the plan in effect."""
        return any(layout.replicas == plan.layout.replicas for layout in self._found)

    def accept(self, action: api.Think) -> None:
        """Accept a question. It replaces a waiting question, and begins after the question in progress."""
        expect(self._world.settings.plans_ahead, f"{action} in a job that does not plan ahead")
        expect(action.question == key_of(action.situation), "the question's key does not match its situation")
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
        more = (lambda: next(looks) < MAX_SEARCH_LOOKS) if action.search_s else None
        try:
            decision = think(action.situation, planner.decide, world.dependencies.check, more)
        except LayoutError as error:
            return api.Thought(question=action.question, obstacle=str(error))
        return api.Thought(question=action.question, decision=QUESTION_ENCODER.encode(decision))

    def _odd(self, action: api.Think) -> api.Thought:
        if self._rng.random() < 0.5:
            return api.Thought(question=action.question, obstacle="it had no time")
        return api.Thought(question=action.question, decision=b"\xc1 no decision")
