"""Answers a question that can wait: decides, searches for as long as the caller allows, and checks the plan. Pure.

`resihp.wrapper.supervisor.thinking` calls it in a separate process, the simulator on its virtual clock. Modules that
only ask questions import `resihp.scheduler.questions`, which does not load the code of the search.
"""

from __future__ import annotations

from collections.abc import Callable

from resihp.errors import LayoutError
from resihp.parallelism.plan import Plan
from resihp.scheduler.anytime import Anytime
from resihp.scheduler.situation import Decision, Situation

TRIALS_PER_CHECK = 20
"""Trials of the search between two calls of `more`."""


def think(
    situation: Situation,
    decide: Callable[[Situation], Decision],
    check: Callable[[Plan], None],
    more: Callable[[], bool] | None = None,
) -> Decision:
    """Return a checked decision, improved by a search for as long as `more()` returns true; no search if `more` is
    None.

    `decide` makes the first decision; `check` raises LayoutError for a plan that must not be carried out. Raises
    LayoutError if there is no plan, or no plan passes the check.
    """
    decision = decide(situation)
    if more is not None:
        anytime = Anytime(situation, decision)
        while anytime.obstacle is None and more():
            anytime.run(TRIALS_PER_CHECK)
        searched = anytime.decision()
        try:
            check(searched.plan)
            return searched
        except LayoutError:
            if searched.plan == decision.plan:
                raise
    check(decision.plan)
    return decision
