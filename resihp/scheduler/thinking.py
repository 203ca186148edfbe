"""Answers a question that can wait: decides, searches for as long as the caller says, and checks the plan. Pure.

`wrapper.supervisor.thinking` runs it in a process of its own, the simulator on its virtual clock. Modules that only ask
import `resihp.scheduler.questions`, and do not load the code of the search.
"""

from __future__ import annotations

from collections.abc import Callable

from resihp.errors import LayoutError
from resihp.parallelism.plan import Plan
from resihp.scheduler.anytime import Anytime
from resihp.scheduler.situation import Decision, Situation

TRIALS_PER_CHECK = 20
"""Trials of a search between two checks whether it should go on."""


def think(
    situation: Situation,
    decide: Callable[[Situation], Decision],
    check: Callable[[Plan], None],
    more: Callable[[], bool] | None = None,
) -> Decision:
    """Return a checked decision, improved by a search while `more()` is true.

    Raises LayoutError if there is no plan, or no plan that passes the check.
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
