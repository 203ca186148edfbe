"""What is left of the sums of gradients when a replica's last backward is through. Pure.

They begin inside that backward (`resihp.pipeline.parts`): little is left where computing takes longer than they do.
Called by `resihp.scheduler.cost.prices`.
"""

from __future__ import annotations

from collections.abc import Sequence

from resihp.parallelism.layout import Replica
from resihp.pipeline.parts import PARTS
from resihp.scheduler.situation import Situation

GRADIENT_BYTES = 4
"""Of a parameter: sums are of 32 bits."""
BUCKET_BYTES = 32 << 20
"""Of gradients that are summed at once (`resihp.pipeline.program.buckets`)."""


def exposed_s(
    replica: Replica, speeds: Sequence[float], situation: Situation, links: Sequence[float] | None = None
) -> float:
    """Seconds after the end of a replica's last work at which all its stages have summed their gradients.

    As the executor does it (`resihp.pipeline.parts`, measured by `benchmarks/overlap.py`): the work that completes a
    stage's gradients is cut into P equal parts, and the sum of each begins when it is through, one after the other. Of
    sums that take G beside work that takes B, max(G / P, G - B (P - 1) / P) is left at the end of it. A stage's last
    backward ends before that of the stages before it begins, if W is not apart from it: what is done by then does not
    count. Careful where it is rough: sums of a stage with several chunks are beside the last one's work alone. Sums of
    the embedding and the head are not counted.
    """
    times, split = situation.times, situation.schedule == "zero-bubble"
    layer_bytes = GRADIENT_BYTES * situation.model.parameters_per_layer
    longest = earlier = 0.0
    for s, (stage, speed) in enumerate(zip(replica.stages, speeds, strict=True)):
        if not speed:
            continue
        first, last = stage.chunks[0]
        held = sum(b - a + 1 for a, b in stage.chunks)
        work = times.span(first, last)
        work_s = (work.w if split else work.b + work.w) / speed
        sums_s = held * times.gradient_s / stage.tp / (links[s] if links else 1.0)
        least = max(-(-(last - first + 1) // PARTS), -(-BUCKET_BYTES * stage.tp // layer_bytes))
        parts = max(1, (last - first + 1) // least)
        left = max(sums_s / parts, sums_s - work_s * (parts - 1) / parts)
        longest = max(longest, left - earlier)
        earlier += 0.0 if split else work_s
    return longest


def peer_links(replica: Replica, replicas: Sequence[Replica], situation: Situation) -> tuple[float, ...]:
    """Of each stage, the speed of the slowest link to one of another replica that holds some of its layers."""
    found = []
    for stage in replica.stages:
        mine = set(stage.layers)
        peers = [s for r in replicas if r is not replica for s in r.stages if mine.intersection(s.layers)]
        found.append(min((situation.link(stage.ranks, peer.ranks) for peer in peers), default=1.0))
    return tuple(found)
