"""Time of the gradient sums that remains after a replica's last backward. Pure.

The sums begin inside that backward (`resihp.pipeline.parts`): little remains where computing takes longer than they do.
Called by `resihp.scheduler.cost.prices`.
"""

from __future__ import annotations

from collections.abc import Sequence

from resihp.parallelism.layout import Replica
from resihp.pipeline.parts import MAX_PARTS
from resihp.scheduler.situation import Situation

GRADIENT_BYTES = 4
"""Bytes of a gradient per parameter: sums are of 32 bits."""
BUCKET_BYTES = 32 << 20
"""Bytes of gradients that are summed at once (`resihp.pipeline.program.buckets`)."""


def exposed_s(
    replica: Replica, speeds: Sequence[float], situation: Situation, links: Sequence[float] | None = None
) -> float:
    """Return the seconds after the end of a replica's last work at which all its stages have summed their gradients.

    Like the executor (`resihp.pipeline.parts`, measured by `benchmarks/overlap.py`), the model cuts the work that
    completes a stage's gradients into P equal parts, and the sum of each part begins when the part is done, one after
    the other. Of sums that take G during work that takes B, max(G / P, G - B (P - 1) / P) remains at its end. A stage's
    last backward ends before that of the stages before it begins, unless W is separate; sums done by then do not count.
    The estimate is cautious where it is rough: sums of a stage with several chunks overlap with the work of the last
    chunk only. Sums of the embedding and the head are not counted.
    """
    times, split = situation.times, situation.schedule == "zero-bubble"
    layer_bytes = GRADIENT_BYTES * situation.model.parameters_per_layer
    longest = earlier = 0.0
    for s, (stage, speed) in enumerate(zip(replica.stages, speeds, strict=True)):
        if not speed:
            continue
        first, last = stage.chunks[0]
        layers = sum(b - a + 1 for a, b in stage.chunks)
        work = times.span(first, last)
        work_s = (work.w if split else work.b + work.w) / speed
        sums_s = layers * times.gradient_s / stage.tp / (links[s] if links else 1.0)
        min_part_layers = max(-(-(last - first + 1) // MAX_PARTS), -(-BUCKET_BYTES * stage.tp // layer_bytes))
        parts = max(1, (last - first + 1) // min_part_layers)
        remaining_s = max(sums_s / parts, sums_s - work_s * (parts - 1) / parts)
        longest = max(longest, remaining_s - earlier)
        earlier += 0.0 if split else work_s
    return longest


def peer_links(replica: Replica, replicas: Sequence[Replica], situation: Situation) -> tuple[float, ...]:
    """Return for each stage the speed of its slowest link to a stage of another replica that holds some of its
    layers."""
    speeds = []
    for stage in replica.stages:
        own_layers = set(stage.layers)
        peers = [s for r in replicas if r is not replica for s in r.stages if own_layers.intersection(s.layers)]
        speeds.append(min((situation.link(stage.ranks, peer.ranks) for peer in peers), default=1.0))
    return tuple(speeds)
