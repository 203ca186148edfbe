"""What no layout of a situation can be faster than: a bound, never a price. Pure.

Four reasons, each of which holds whatever the layout, the shares and the orders of work are; the largest counts.

- *Work.* All micro-batches pass all layers, and all devices together have so much speed: a group is never faster than
  the sum of its ranks.
- *Ramp.* A stage that begins behind others stands still until the first micro-batch has passed these, one layer's
  forward each at least. It is part of the work's reason: speed that stands still is not there. How many stages begin
  behind others follows from how many replicas there are room for. Left out where stages may be without ranks: then the
  devices of a pipeline are not its own.
- *The busiest replica.* It has its share of the micro-batches, the even one at least, and one group that holds the
  dearest layer has to compute it for all of them.
- *One micro-batch.* It passes every layer forward and back, on groups of which none is faster than the fastest.

On top comes the optimizer's step. Transfers count as nothing, and so do sums of gradients, which may hide beside the
last backward (`resihp.scheduler.cost.gradient_sync`).

Called by `resihp.scheduler.explained.explanation`.
"""

from __future__ import annotations

import math
from collections import defaultdict

from resihp.scheduler.cost import memory
from resihp.scheduler.layouts import vacant_stages
from resihp.scheduler.situation import Situation


def least_seconds(situation: Situation) -> float:
    """Seconds (or layer times, as the situation has it) of an iteration at least; infinite where nobody can work."""
    speeds = {rank: speed for rank in situation.available if (speed := situation.speeds.get(rank, 1.0)) > 0}
    if not speeds:
        return math.inf
    times, count = situation.times, situation.micro_batches
    layers = [times.span(i, i) for i in range(len(times.layers))]
    work = math.fsum(layer.total for layer in layers)
    forward = math.fsum(layer.f for layer in layers)
    inputs = math.fsum(layer.b for layer in layers)
    fastest, total = _fastest_group(situation, speeds), math.fsum(speeds.values())
    shared = vacant_stages.may_help(situation)
    ramp = 0.0 if shared else min(layer.f for layer in layers)
    most = max(1, min(count, len(speeds) // _fewest_ranks(situation)))
    found = math.inf
    for replicas in range(1, most + 1):
        busiest = -(-count // replicas) * max(layer.total for layer in layers) / fastest
        pipelines = max(_with_ramp(count * work, total, fastest, ramp, replicas), busiest, (forward + inputs) / fastest)
        found = min(found, pipelines)
    return found + times.step_s


def _with_ramp(work: float, total: float, fastest: float, ramp: float, replicas: int) -> float:
    """Time of that much work on speed `total` in so many replicas, the ramp counted, if as much speed is used as helps.

    Stages are never faster than the `fastest` group, so speed beyond one such stage in each replica stands in a second
    one, which waits for `ramp` / `fastest`, beyond that in a third, which waits twice as long. What stands still is
    least where all replicas have equal speed. Between whole stages the time goes only up or only down.
    """
    most = total / (replicas * fastest)
    found = math.inf
    for stages in (*range(1, int(most) + 1), most):
        whole = int(stages)
        waits = whole * (whole - 1) / 2 + (stages - whole) * whole
        found = min(found, (work + replicas * waits * ramp) / (stages * replicas * fastest))
    return found


def _fastest_group(situation: Situation, speeds: dict[int, float]) -> float:
    """Speed of the fastest group: of ranks of one node, as many as a group may have, or one that is there already."""
    nodes: defaultdict[str, list[float]] = defaultdict(list)
    for rank, speed in speeds.items():
        nodes[situation.nodes[rank]].append(speed)
    best = max(
        k * speed for there in nodes.values() for k, speed in enumerate(sorted(there, reverse=True)[: situation.tp], 1)
    )
    groups = [stage.ranks for replica in situation.base.replicas for stage in replica.stages]
    return max(best, max((situation.speed(g) for g in groups if g and speeds.keys() >= set(g)), default=0.0))


def _fewest_ranks(situation: Situation) -> int:
    """Of a replica that has room for the model; 1 where memory is not known or a replica need not hold all."""
    if situation.room_bytes is None or vacant_stages.may_help(situation):
        return 1
    state_bytes = situation.state_bytes_of(
        len(situation.available)
    )  # as many replicas as ranks: no fewer bytes than that
    least = memory.least_bytes(situation.model, situation.tokens, state_bytes=state_bytes)
    return max(1, math.ceil(least / max(1, situation.room_bytes)))
