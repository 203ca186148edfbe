"""What is done about a question that can wait: decided, searched for as long as the caller says, and checked. Pure.

`wrapper.supervisor.thinking` answers so in a process of its own, the simulator on its virtual clock. Who only asks
imports `resihp.scheduler.questions`, and does not load what searches.
"""

from __future__ import annotations

from collections.abc import Callable

from resihp.errors import LayoutError
from resihp.parallelism.plan import Plan
from resihp.scheduler.anytime import Anytime
from resihp.scheduler.situation import Decision, Situation

TRIALS = 20
"""Of a search between two looks at whether it is to go on."""


def think(
    situation: Situation,
    decide: Callable[[Situation], Decision],
    check: Callable[[Plan], None],
    more: Callable[[], bool] | None = None,
) -> Decision:
    """What is decided, checked; searched as long as there is to be `more`. Raises LayoutError where there is no plan,
    or none that passes the check."""
    decision = decide(situation)
    if more is not None:
        anytime = Anytime(situation, decision)
        while anytime.obstacle is None and more():
            anytime.run(TRIALS)
        found = anytime.decision()
        try:
            check(found.plan)
            return found
        except LayoutError:
            if found.plan == decision.plan:
                raise
    check(decision.plan)
    return decision
