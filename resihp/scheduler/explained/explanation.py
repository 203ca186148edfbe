"""What a plan's time is made of, and what it could be: facts, which others put into words. Pure.

The limiting stage is the one that works longest in an iteration: nothing but less work or more speed for it makes the
iteration much shorter. The bound is that of `resihp.scheduler.explained.bound`, who stands by is told by `idle`.
`healthy` tells what the job would take if all were well and its layers lay where they cost least: where an even spread
is far from that, failures look cheaper than they are.

Called by `resihp plan`, and by `history`, `why` and the report for plans of the ledger; never by the controller.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection
from typing import Literal

import msgspec

from resihp.parallelism.layout import LayerSpan, Layout, Replica, Stage
from resihp.parallelism.plan import Plan, spread
from resihp.scheduler.cost import memory
from resihp.scheduler.cost.prices import Prices, after_backward_s, iteration_seconds
from resihp.scheduler.explained import bound, idle
from resihp.scheduler.layouts import first_layout, layers
from resihp.scheduler.situation import Situation

ALIKE = 1e-3
"""Relative difference below which two stages work equally long."""
EVALUATIONS = 60
"""Orders made and played to see what a tuned job would do."""
MOST_TUNED = 512
"""Layers, and micro-batches, times stages of a pipeline for which orders are looked for."""


class Limiting(msgspec.Struct, frozen=True):
    """The stage that works longest."""

    replica: int
    stage: int
    ranks: tuple[int, ...]
    chunks: tuple[LayerSpan, ...]
    share: float
    """Of the iteration's time in which it works."""
    alike: int
    """Other stages that work as long."""
    speed: float
    """Of its slowest rank, 1 for a healthy one."""


class Healthy(msgspec.Struct, frozen=True):
    """The job when all is well, with the same groups and one chunk a stage: what an iteration takes."""

    plain: float
    """Under its own layout."""
    spread: float
    """With layers where they cost least, and the same schedule."""
    tuned: float | None
    """With orders of its own as well; None where the pipeline is too large to look for them."""

    @property
    def excess(self) -> float:
        """How much longer the job's own layout takes than the one of `spread`, relatively."""
        return self.plain / self.spread - 1


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Of one plan. Times in `unit`."""

    seconds: float
    """Predicted for an iteration."""
    unit: Literal["s", "layer times"]
    limiting: Limiting
    beside: float
    """Share of the iteration after the last backward: sums of gradients and the optimizer's step."""
    idle: tuple[idle.Idle, ...]
    bound: float
    """No layout of the devices that may work is faster."""
    healthy: Healthy | None = None
    """None where it was not asked for, or cannot be told."""

    @property
    def above_bound(self) -> float:
        """How far the plan is above the bound, relatively."""
        return self.seconds / self.bound - 1 if self.bound else 0.0


def explain(
    plan: Plan, seconds: float, situation: Situation, *, unfit: Collection[int] = (), healthy: Plan | None = None
) -> Explanation:
    """Of a plan for a situation, with its predicted time.

    `unfit`: ranks of the layout that were not to get work; they are not among the situation's available ones.
    `healthy`: the plan of the job when all is well, where what tuning it would give is asked for.
    """
    return Explanation(
        seconds=seconds,
        unit=situation.unit,
        limiting=limiting(plan, seconds, situation),
        beside=after_backward_s(plan.layout.replicas, situation) / seconds,
        idle=idle.reasons(plan, situation, unfit),
        bound=bound.least_seconds(situation),
        healthy=None if healthy is None else when_tuned(healthy, situation),
    )


def as_json(found: Explanation) -> dict[str, object]:
    """Plain data. Times and changes that are not finite become null.

    Where numba is absent, the search gives numpy's numbers, which msgspec does not know.
    """
    limits, healthy = found.limiting, found.healthy
    return {
        "iteration": found.seconds,
        "unit": found.unit,
        "limiting": msgspec.to_builtins(limits, enc_hook=float),
        "beside": found.beside,
        "idle": msgspec.to_builtins(found.idle, enc_hook=float),
        "bound": found.bound if math.isfinite(found.bound) else None,
        "above_bound": found.above_bound,
        "all_well": None
        if healthy is None
        else msgspec.to_builtins(healthy, enc_hook=float) | {"excess": healthy.excess},
    }


def limiting(plan: Plan, seconds: float, situation: Situation) -> Limiting:
    """Of stages that work equally long the first; `seconds` of the iteration."""
    passed = _passed(plan)
    known: dict[object, float] = {}
    worked: list[tuple[float, int, int]] = []
    for d, replica in enumerate(plan.layout.replicas):
        for s, stage in enumerate(replica.stages):
            speed = situation.speed(stage.ranks)
            if not speed:
                continue
            if plan.migrations:
                each = [situation.times.span(*chunk).total / speed for chunk in stage.chunks]
                time = sum(passed[d, s, c] * one for c, one in enumerate(each))
            else:
                key = (stage.chunks, speed)
                if key not in known:
                    known[key] = sum(situation.times.span(*chunk).total for chunk in stage.chunks) / speed
                time = known[key] * len(plan.assignment[d])
            worked.append((time, d, s))
    most = max(time for time, _, _ in worked)
    same = [(d, s) for time, d, s in worked if time >= most * (1 - ALIKE)]
    d, s = same[0]
    stage = plan.layout.replicas[d].stages[s]
    slowest = min(situation.speeds.get(rank, 1.0) for rank in stage.ranks)
    return Limiting(d, s, stage.ranks, stage.chunks, most / seconds, len(same) - 1, slowest)


def when_tuned(plan: Plan, situation: Situation) -> Healthy | None:
    """What tuning would give a job with nothing slow, by its first replica alone; None for one that is not even."""
    replicas, shares = plan.layout.replicas, {len(share) for share in plan.assignment}
    first = replicas[0].stages
    alike = {tuple((stage.tp, stage.chunks) for stage in replica.stages) for replica in replicas}
    if len(shares) != 1 or len(alike) != 1 or not situation.nodes.keys() >= set(replicas[0].ranks):
        return None
    (count,) = shares
    one = msgspec.structs.replace(
        plan, layout=Layout(replicas[:1]), assignment=spread(count, 1), orders=(), migrations=()
    )
    well = msgspec.structs.replace(situation, micro_batches=count, speeds={}, links={}, base=one.layout, stale=())
    rest_s = after_backward_s(replicas, well) - well.times.step_s
    plain_s = iteration_seconds(one, well)
    spread_s = min(plain_s, _spread_s(one, well, len(replicas)))
    tuned_s = None  # under ZeRO-1 one replica alone would hold what all share
    if not well.zero_1 and len(first) * well.model.layers <= MOST_TUNED and len(first) * count <= MOST_TUNED:
        tuned_s = min(spread_s, first_layout.tuned(one, well, evaluations=EVALUATIONS).seconds) + rest_s
    return Healthy(plain_s + rest_s, spread_s + rest_s, tuned_s)


def _spread_s(one: Plan, situation: Situation, replicas: int) -> float:
    """Of one replica of so many, its layers cut anew in any of the ways that may be best."""
    stages = one.layout.replicas[0].stages
    if any(len(stage.chunks) > 1 for stage in stages) or len(stages) == 1:
        return math.inf
    speeds = [situation.speed(stage.ranks) for stage in stages]
    layers_there = situation.model.layers
    limits = [layers_there] * len(stages)
    if situation.room_bytes is not None:
        posts = [situation.post(s, len(stages), stage.tp, replicas) for s, stage in enumerate(stages)]
        limits = [memory.capacity(situation.model, p, situation.room_bytes, situation.tokens) for p in posts]
    prices, found = Prices(situation), math.inf
    for counts in layers.trade_offs(situation.times, speeds, limits):
        ends = [*itertools.accumulate(counts)]
        cut = tuple(
            Stage(stage.ranks, ((end - n, end - 1),)) for stage, n, end in zip(stages, counts, ends, strict=True)
        )
        found = min(found, prices.iteration([prices.priced(Replica(cut))])[1])
    return found


def _passed(plan: Plan) -> Counter[tuple[int, int, int]]:
    """Micro-batches that pass each chunk of each stage, where some pass elsewhere than at home."""
    if not plan.migrations:
        return Counter()
    return Counter((stop.replica, stop.stage, stop.chunk) for stops in plan.paths().values() for stop in stops)
