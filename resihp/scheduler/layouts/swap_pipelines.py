"""Other neighbours for stages that a slow link joins: replicas exchange the rest of their pipelines. Pure.

Stages of two replicas that hold the same layers may follow either's, so no state moves: only communicators change, and
the slow link carries nothing any more, or gradients alone. Offered to the planner as candidates of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from resihp.parallelism.layout import Replica, Stage
from resihp.scheduler.situation import Situation


def crossed(replicas: Sequence[Replica], situation: Situation) -> tuple[Replica, ...] | None:
    """The same stages, joined such that transfers of the replicas concerned take less time; None if there is no way.

    One slow boundary after the other, what comes behind it is exchanged with the replica that makes the worse of the
    two fastest, then both together.
    """
    found = list(replicas)
    for a in range(len(found)):
        for cut in range(1, len(found[a].stages)):
            before, behind = found[a].stages[cut - 1], found[a].stages[cut]
            if situation.link(before.ranks, behind.ranks) >= 1.0:
                continue
            offers = []
            for b, other in enumerate(found):
                if b != a and _alike(found[a], other, cut):
                    pair = _exchanged(found[a], other, cut)
                    late = _late(pair, situation)
                    if late < _late((found[a], other), situation):
                        offers.append((late, b, pair))
            if offers:
                _, b, (found[a], found[b]) = min(offers, key=lambda offer: offer[:2])
    return None if found == [*replicas] else tuple(found)


def _alike(one: Replica, other: Replica, cut: int) -> bool:
    """Whether what follows in the one may follow in the other."""
    tails = [[stage.chunks for stage in replica.stages[cut:]] for replica in (one, other)]
    return tails[0] == tails[1] and len(one.stages) == len(other.stages)


def _exchanged(one: Replica, other: Replica, cut: int) -> tuple[Replica, Replica]:
    return (
        Replica((*one.stages[:cut], *other.stages[cut:])),
        Replica((*other.stages[:cut], *one.stages[cut:])),
    )


def _late(pair: tuple[Replica, Replica], situation: Situation) -> tuple[float, float]:
    """Seconds of one micro-batch's transfers on its way, of the worse of two replicas, and of both."""
    seconds = [
        sum(situation.transfer_s(before.ranks, behind.ranks) for before, behind in pairwise(_way(replica)))
        for replica in pair
    ]
    return max(seconds), sum(seconds)


def _way(replica: Replica) -> tuple[Stage, ...]:
    """Stages in the order of a pass; with several chunks it goes round, and the last one passes on to the first."""
    return replica.stages if len(replica.stages[0].chunks) == 1 else (*replica.stages, replica.stages[0])
