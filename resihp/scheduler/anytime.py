"""A decision that is made better for as long as there is time. Pure: trials are counted, the caller has the clock.

The instant plan (`resihp.scheduler.planner`) is the first answer; then whole layouts are searched
(`resihp.scheduler.layouts.search`), and what is found is given its schedule (`resihp.scheduler.orders.refinement`).
Called by `resihp plan --search`.
"""

from __future__ import annotations

from collections.abc import Sequence

from resihp.errors import LayoutError
from resihp.parallelism.layout import Replica
from resihp.parallelism.plan import Plan
from resihp.scheduler.cost.prices import Prices
from resihp.scheduler.layouts.labels import relabelled
from resihp.scheduler.layouts.search import Search
from resihp.scheduler.orders import refinement
from resihp.scheduler.planner import TIE, PricedPlan, candidate, reachable
from resihp.scheduler.situation import Decision, Situation


class Anytime:
    """Begins with the instant `decision`; the same seed and number of trials come to the same one."""

    def __init__(self, situation: Situation, decision: Decision, seed: int = 0) -> None:
        self._situation, self._instant, self._prices = situation, decision, Prices(situation)
        self._search: Search | None = None
        self.obstacle = _obstacle(situation, decision)
        """Why nothing can be searched; None where it can."""
        if self.obstacle is None:
            self._search = Search(situation, self._prices, decision.plan.layout.replicas, seed)

    def run(self, trials: int) -> bool:
        """Try so many changes; whether a better layout was found."""
        return self._search is not None and self._search.run(trials)

    def decision(self) -> Decision:
        """The best so far, with orders of its own where these pay; the instant one where nothing is better."""
        if self._search is None:
            return self._instant
        try:
            found = self._candidate(self._search.found)
            named = self._candidate(relabelled(self._search.found, self._situation))
        except LayoutError:
            return self._instant
        if named.seconds <= found.seconds * (1 + TIE):
            found = named  # the same, for fewer bytes
        refined = self._refined(found.plan, found.seconds)
        name = found.name
        if not self._instant.plan.orders and not self._instant.plan.migrations:
            other = self._refined(self._instant.plan, self._instant.seconds)
            if other.seconds <= refined.seconds * (1 + TIE):
                refined, name = other, "the same layout"
        if refined.seconds >= self._instant.seconds * (1 - TIE):
            return self._instant
        name = name if not refined.how else f"{name}, with {refined.how}"
        seconds, unit = self._instant.seconds, self._situation.unit
        return Decision(
            plan=refined.plan,
            seconds=refined.seconds,
            reason=f"{name}: predicted {refined.seconds:.4g} {unit} an iteration, against {seconds:.4g} at once",
            alternatives=(("at once", seconds), *self._instant.alternatives),
        )

    def _candidate(self, replicas: Sequence[Replica]) -> PricedPlan:
        found = candidate("searched", self._situation, self._prices, [self._prices.priced(one) for one in replicas])
        return reachable(self._situation, self._prices, found)

    def _refined(self, plan: Plan, seconds: float) -> refinement.Refined:
        return refinement.refined(self._situation, plan, seconds, self._prices, thorough=True)


def _obstacle(situation: Situation, decision: Decision) -> str | None:
    stages = [stage for replica in decision.plan.layout.replicas for stage in replica.stages]
    if situation.memory_bytes is None:
        return "memory is not known, and layouts change as little as they can"
    if situation.chunks > 1 or any(len(stage.chunks) > 1 for stage in stages):
        return "stages have several chunks"
    return "a stage has no ranks" if any(not stage.ranks for stage in stages) else None
