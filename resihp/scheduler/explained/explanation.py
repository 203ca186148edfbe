"""The composition of a plan's time, and the time that would be possible: facts that other modules put into words. Pure.

The limiting stage is the stage that works longest in an iteration: only less work or more speed for it makes the
iteration much shorter. The lower bound comes from `resihp.scheduler.explained.bound`, the reasons for idle devices from
`idle`. `healthy` is the time of the job if all devices were healthy and its layers were placed at the least cost. If an
even spread of layers takes much longer than that, failures look cheaper than they are.

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

EQUAL_WORK_TOLERANCE = 1e-3
"""Relative difference below which two stages count as working equally long."""
TUNING_EVALUATIONS = 60
"""Number of orders that are made and played to estimate the time of a tuned job."""
MAX_TUNED_SIZE = 512
"""Maximum of layers times stages, and of micro-batches times stages, of a pipeline for which orders are searched."""


class Limiting(msgspec.Struct, frozen=True):
    """The stage that works longest in an iteration."""

    replica: int
    stage: int
    ranks: tuple[int, ...]
    chunks: tuple[LayerSpan, ...]
    share: float
    """Share of the iteration's time during which the stage works."""
    alike: int
    """Number of other stages that work equally long."""
    speed: float
    """Speed of the stage's slowest rank; 1 for a healthy rank."""


class Healthy(msgspec.Struct, frozen=True):
    """Iteration times of the job if all devices were healthy, with the same groups and one chunk a stage."""

    plain: float
    """Time under the job's own layout."""
    spread: float
    """Time with layers placed at the least cost, under the same schedule."""
    tuned: float | None
    """Time with layers placed at the least cost and with orders of its own; None under ZeRO-1, or if the pipeline is
    too large to search for orders."""

    @property
    def excess(self) -> float:
        """Relative increase of the time under the job's own layout over `spread`."""
        return self.plain / self.spread - 1


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """The explanation of one plan. Times are in `unit`."""

    seconds: float
    """Predicted time of an iteration."""
    unit: Literal["s", "layer times"]
    limiting: Limiting
    beside: float
    """Share of the iteration after the last backward pass: gradient sums and the optimizer's step."""
    idle: tuple[idle.Idle, ...]
    bound: float
    """Lower bound of the iteration time: no layout of the available devices is faster."""
    healthy: Healthy | None = None
    """Times with all devices healthy; None if they were not requested, or cannot be computed."""

    @property
    def above_bound(self) -> float:
        """Relative excess of the plan's time over the bound."""
        return self.seconds / self.bound - 1 if self.bound else 0.0


def explain(
    plan: Plan, seconds: float, situation: Situation, *, unfit: Collection[int] = (), healthy: Plan | None = None
) -> Explanation:
    """Explain a plan for a situation, given its predicted time.

    `unfit`: ranks of the layout that must not get work; they are not among the available ranks of the situation.
    `healthy`: the plan of the job with all devices healthy, to estimate the gain from tuning it; None to leave the
    estimate out.
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


def as_json(explanation: Explanation) -> dict[str, object]:
    """Return the explanation as plain data. Times and changes that are not finite become null.

    Without numba, the search returns numpy's numbers, which msgspec cannot encode.
    """
    limits, healthy = explanation.limiting, explanation.healthy
    return {
        "iteration": explanation.seconds,
        "unit": explanation.unit,
        "limiting": msgspec.to_builtins(limits, enc_hook=float),
        "beside": explanation.beside,
        "idle": msgspec.to_builtins(explanation.idle, enc_hook=float),
        "bound": explanation.bound if math.isfinite(explanation.bound) else None,
        "above_bound": explanation.above_bound,
        "all_well": None
        if healthy is None
        else msgspec.to_builtins(healthy, enc_hook=float) | {"excess": healthy.excess},
    }


def limiting(plan: Plan, seconds: float, situation: Situation) -> Limiting:
    """Return the limiting stage: the first of the stages that work longest. `seconds`: predicted time of the
    iteration."""
    passed = _passed(plan)
    seconds_of: dict[object, float] = {}
    worked: list[tuple[float, int, int]] = []
    for d, replica in enumerate(plan.layout.replicas):
        for s, stage in enumerate(replica.stages):
            speed = situation.speed(stage.ranks)
            if not speed:
                continue
            if plan.migrations:
                chunk_times = [situation.times.span(*chunk).total / speed for chunk in stage.chunks]
                time = sum(passed[d, s, c] * chunk_time for c, chunk_time in enumerate(chunk_times))
            else:
                key = (stage.chunks, speed)
                if key not in seconds_of:
                    seconds_of[key] = sum(situation.times.span(*chunk).total for chunk in stage.chunks) / speed
                time = seconds_of[key] * len(plan.assignment[d])
            worked.append((time, d, s))
    longest = max(time for time, _, _ in worked)
    limiting_stages = [(d, s) for time, d, s in worked if time >= longest * (1 - EQUAL_WORK_TOLERANCE)]
    d, s = limiting_stages[0]
    stage = plan.layout.replicas[d].stages[s]
    slowest = min(situation.speeds.get(rank, 1.0) for rank in stage.ranks)
    return Limiting(d, s, stage.ranks, stage.chunks, longest / seconds, len(limiting_stages) - 1, slowest)


def when_tuned(plan: Plan, situation: Situation) -> Healthy | None:
    """Estimate the gain from tuning a job without slow devices, from its first replica; None if replicas differ."""
    replicas, shares = plan.layout.replicas, {len(share) for share in plan.assignment}
    first = replicas[0].stages
    shapes = {tuple((stage.tp, stage.chunks) for stage in replica.stages) for replica in replicas}
    if len(shares) != 1 or len(shapes) != 1 or not situation.nodes.keys() >= set(replicas[0].ranks):
        return None
    (count,) = shares
    single_replica = msgspec.structs.replace(
        plan, layout=Layout(replicas[:1]), assignment=spread(count, 1), orders=(), migrations=()
    )
    healthy = msgspec.structs.replace(
        situation, micro_batches=count, speeds={}, links={}, base=single_replica.layout, stale=()
    )
    rest_s = after_backward_s(replicas, healthy) - healthy.times.step_s
    plain_s = iteration_seconds(single_replica, healthy)
    spread_s = min(plain_s, _spread_s(single_replica, healthy, len(replicas)))
    tuned_s = None  # under ZeRO-1 a single replica would hold the state that all share
    if (
        not healthy.zero_1
        and len(first) * healthy.model.layers <= MAX_TUNED_SIZE
        and len(first) * count <= MAX_TUNED_SIZE
    ):
        tuned_s = (
            min(spread_s, first_layout.tuned(single_replica, healthy, evaluations=TUNING_EVALUATIONS).seconds) + rest_s
        )
    return Healthy(plain_s + rest_s, spread_s + rest_s, tuned_s)


def _spread_s(plan: Plan, situation: Situation, replicas: int) -> float:
    """Return the time of the plan's replica, one of `replicas`, with its layers distributed in the best possible
    way."""
    stages = plan.layout.replicas[0].stages
    if any(len(stage.chunks) > 1 for stage in stages) or len(stages) == 1:
        return math.inf
    speeds = [situation.speed(stage.ranks) for stage in stages]
    layer_count = situation.model.layers
    limits = [layer_count] * len(stages)
    if situation.room_bytes is not None:
        setups = [situation.stage_setup(s, len(stages), stage.tp, replicas) for s, stage in enumerate(stages)]
        limits = [memory.capacity(situation.model, p, situation.room_bytes, situation.tokens) for p in setups]
    prices, least = Prices(situation), math.inf
    for counts in layers.trade_offs(situation.times, speeds, limits):
        ends = [*itertools.accumulate(counts)]
        cut = tuple(
            Stage(stage.ranks, ((end - n, end - 1),)) for stage, n, end in zip(stages, counts, ends, strict=True)
        )
        least = min(least, prices.iteration([prices.priced(Replica(cut))])[1])
    return least


def _passed(plan: Plan) -> Counter[tuple[int, int, int]]:
    """Return the number of micro-batches that pass each (replica, stage, chunk); empty if none migrates."""
    if not plan.migrations:
        return Counter()
    return Counter((stop.replica, stop.stage, stop.chunk) for stops in plan.paths().values() for stop in stops)
