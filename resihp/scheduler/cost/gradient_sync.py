"""Time of the gradient sums that continue after a replica's last backward pass. Pure.

Sums begin during the last backward pass (`resihp.pipeline.parts`): if computing takes longer than the sums, little of
them remains after it. Called by `resihp.scheduler.cost.prices`.
"""

from __future__ import annotations

from collections.abc import Sequence

from resihp.parallelism.layout import Replica
from resihp.pipeline.parts import MAX_PARTS
from resihp.scheduler.situation import Situation

GRADIENT_BYTES = 4
"""Bytes of a gradient per parameter: sums are in 32 bits."""
BUCKET_BYTES = 32 << 20
"""Bytes of gradients that are summed at once (`resihp.pipeline.program.buckets`)."""


def exposed_s(
    replica: Replica, speeds: Sequence[float], situation: Situation, links: Sequence[float] | None = None
) -> float:
    """Return the seconds between the end of a replica's last work and the moment at which all its stages have summed
    their gradients.

    The model is the executor's behaviour (`resihp.pipeline.parts`, measured by `benchmarks/overlap.py`). The work that
    completes a stage's gradients is cut into P equal parts; the sum of each part begins when the part is done, one sum
    after another. If the sums take G and the work takes B, then max(G / P, G - B (P - 1) / P) of the sums remains at
    the end of the work. Unless W is separate, a stage's last backward ends before the last backward of the stage before
    it begins, and sums that are done by the end of the replica's work do not count. Where the estimate is rough, it is
    too high rather than too low: sums of a stage with several chunks overlap only with the work of the last chunk. Sums
    of the embedding and of the head are not counted.
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
    """Return, for each stage, the speed of its slowest link to a stage of another replica that holds some of the same
    layers."""
    speeds = []
    for stage in replica.stages:
        own_layers = set(stage.layers)
        peers = [s for r in replicas if r is not replica for s in r.stages if own_layers.intersection(s.layers)]
        speeds.append(min((situation.link(stage.ranks, peer.ranks) for peer in peers), default=1.0))
    return tuple(speeds)
