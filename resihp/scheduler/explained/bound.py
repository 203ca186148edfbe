"""Lower bound of the iteration time over all layouts of a situation: a bound, never a prediction. Pure.

The result is the largest of four bounds, each valid for any layout, shares and orders of work:

- *Work.* All micro-batches pass all layers, and the total speed of the devices is limited: a group is never faster than
  the sum of its ranks.
- *Ramp.* A stage that is not the first of its pipeline is idle until the first micro-batch has passed the stages before
  it: at least one layer's forward pass per stage. This bound is part of the bound on work: the speed of an idle stage
  is lost. The number of such stages follows from the number of replicas that fit. The ramp is left out if stages may be
  vacant, because a pipeline then also uses devices of other pipelines.
- *The busiest replica.* Its share of the micro-batches is at least the even share, and the group with its most
  expensive layer computes that layer for all of them.
- *One micro-batch.* It passes every layer forward and backward, on groups that are not faster than the fastest group.

The optimizer's step is added. Transfers count as nothing, and so do gradient sums, which may overlap with the last
backward pass (`resihp.scheduler.cost.gradient_sync`).

Called by `resihp.scheduler.explained.explanation`.
"""

from __future__ import annotations

import math
from collections import defaultdict

from resihp.scheduler.cost import tensor_bytes
from resihp.scheduler.layouts import vacant_stages
from resihp.scheduler.situation import Situation


def least_seconds(situation: Situation) -> float:
    """Return the lower bound of an iteration, in seconds or layer times; infinite if no available rank has speed above
    0."""
    speeds = {rank: speed for rank in situation.available if (speed := situation.speeds.get(rank, 1.0)) > 0}
    if not speeds:
        return math.inf
    times, count = situation.times, situation.micro_batches
    layers = [times.span(i, i) for i in range(len(times.layers))]
    work = math.fsum(layer.total for layer in layers)
    forward = math.fsum(layer.f for layer in layers)
    inputs = math.fsum(layer.b for layer in layers)
    fastest, total = _fastest_group(situation, speeds), math.fsum(speeds.values())
    stages_may_be_vacant = vacant_stages.may_help(situation)
    ramp = 0.0 if stages_may_be_vacant else min(layer.f for layer in layers)
    max_replicas = max(1, min(count, len(speeds) // _fewest_ranks(situation)))
    least = math.inf
    for replicas in range(1, max_replicas + 1):
        busiest = -(-count // replicas) * max(layer.total for layer in layers) / fastest
        pipelines = max(_with_ramp(count * work, total, fastest, ramp, replicas), busiest, (forward + inputs) / fastest)
        least = min(least, pipelines)
    return least + times.step_s


def _with_ramp(work: float, total: float, fastest: float, ramp: float, replicas: int) -> float:
    """Return the least time of `work` on devices of speed `total`, in `replicas` replicas, including the ramp.

    No stage is faster than the `fastest` group, so speed beyond one such stage in each replica belongs to a second
    stage, which waits for `ramp` / `fastest`; speed beyond that belongs to a third stage, which waits twice as long;
    and so on. The result is the least over all amounts of speed used. The idle time is least if all replicas have equal
    speed. Between whole numbers of stages, the time only rises or only falls, so only whole numbers and the maximum are
    tried.
    """
    max_stages = total / (replicas * fastest)
    least = math.inf
    for stages in (*range(1, int(max_stages) + 1), max_stages):
        whole = int(stages)
        waits = whole * (whole - 1) / 2 + (stages - whole) * whole
        least = min(least, (work + replicas * waits * ramp) / (stages * replicas * fastest))
    return least


def _fastest_group(situation: Situation, speeds: dict[int, float]) -> float:
    """Return the speed of the fastest possible group: ranks of one node up to the job's degree, or an existing
    group."""
    nodes: defaultdict[str, list[float]] = defaultdict(list)
    for rank, speed in speeds.items():
        nodes[situation.nodes[rank]].append(speed)
    best = max(
        k * speed
        for node_speeds in nodes.values()
        for k, speed in enumerate(sorted(node_speeds, reverse=True)[: situation.tp], 1)
    )
    groups = [stage.ranks for replica in situation.base.replicas for stage in replica.stages]
    return max(best, max((situation.speed(g) for g in groups if g and speeds.keys() >= set(g)), default=0.0))


def _fewest_ranks(situation: Situation) -> int:
    """Return the fewest ranks that have room for a replica.

    1 if memory is unknown, or if a replica need not hold the whole model.
    """
    if situation.room_bytes is None or vacant_stages.may_help(situation):
        return 1
    state_bytes = situation.state_bytes_of(
        len(situation.available)
    )  # with as many replicas as ranks, the bytes per parameter are least
    least_bytes = tensor_bytes.least_bytes(situation.model, situation.tokens, state_bytes=state_bytes)
    return max(1, math.ceil(least_bytes / max(1, situation.room_bytes)))
