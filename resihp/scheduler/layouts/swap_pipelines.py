"""Other neighbours for stages that a slow link joins: replicas exchange the rear parts of their pipelines. Pure.

Stages of two replicas that hold equal layers are interchangeable, so no state moves: only communicators change, and the
slow link then carries nothing, or only gradients. The planner treats the results as additional candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from resihp.parallelism.layout import Replica, Stage
from resihp.scheduler.situation import Situation


def crossed(replicas: Sequence[Replica], situation: Situation) -> tuple[Replica, ...] | None:
    """Return the same stages joined in other pipelines, so that transfers take less time; None if no exchange helps.

    At each slow boundary, the stages behind it are exchanged with those of another replica: the one that gives the
    least transfer time in the slower of the two replicas, then in both together.
    """
    crossed_replicas = list(replicas)
    for a in range(len(crossed_replicas)):
        for cut in range(1, len(crossed_replicas[a].stages)):
            before, behind = crossed_replicas[a].stages[cut - 1], crossed_replicas[a].stages[cut]
            if situation.link(before.ranks, behind.ranks) >= 1.0:
                continue
            offers = []
            for b, partner in enumerate(crossed_replicas):
                if b != a and _alike(crossed_replicas[a], partner, cut):
                    pair = _exchanged(crossed_replicas[a], partner, cut)
                    exchanged_s = _late(pair, situation)
                    if exchanged_s < _late((crossed_replicas[a], partner), situation):
                        offers.append((exchanged_s, b, pair))
            if offers:
                _, b, (crossed_replicas[a], crossed_replicas[b]) = min(offers, key=lambda offer: offer[:2])
    return None if crossed_replicas == [*replicas] else tuple(crossed_replicas)


def _alike(first: Replica, second: Replica, cut: int) -> bool:
    """Return whether the stages of two replicas from `cut` on are interchangeable."""
    tails = [[stage.chunks for stage in replica.stages[cut:]] for replica in (first, second)]
    return tails[0] == tails[1] and len(first.stages) == len(second.stages)


def _exchanged(first: Replica, second: Replica, cut: int) -> tuple[Replica, Replica]:
    return (
        Replica((*first.stages[:cut], *second.stages[cut:])),
        Replica((*second.stages[:cut], *first.stages[cut:])),
    )


def _late(pair: tuple[Replica, Replica], situation: Situation) -> tuple[float, float]:
    """Return the seconds of one micro-batch's transfers in the slower of two replicas, and in both together."""
    seconds = [
        sum(situation.transfer_s(before.ranks, behind.ranks) for before, behind in pairwise(_way(replica)))
        for replica in pair
    ]
    return max(seconds), sum(seconds)


def _way(replica: Replica) -> tuple[Stage, ...]:
    """Return the stages in the order of a pass; with several chunks, the last stage passes on to the first."""
    return replica.stages if len(replica.stages[0].chunks) == 1 else (*replica.stages, replica.stages[0])
