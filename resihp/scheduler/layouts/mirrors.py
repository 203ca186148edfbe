"""Gives standby ranks copies of state that has a single holder, so that the next loss does not destroy it. Pure.

A mirror is a replica without micro-batches (`resihp.parallelism.plan.Plan.mirrors`). It takes part in the gradient sums
and takes each step, so a slow device is sufficient. Mirrors come after all other replicas of a plan; there is one
mirror for each run of neighbouring stages that one group of ranks copies. Layers that several replicas hold are not
mirrored.

This module decides which ranks mirror which stages. It never changes which ranks compute, and never decides whether a
change of layout is worth its cost (`resihp.controller.replan_policy`). Called by `resihp.controller.planning` with each
plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

import msgspec

from resihp.errors import LayoutError
from resihp.parallelism.layout import LayerSpan, Layout, Replica, Stage, validate
from resihp.parallelism.plan import Plan
from resihp.scheduler.candidates import transition_obstacle
from resihp.scheduler.cost import tensor_bytes
from resihp.scheduler.cost.held_state import HeldState, holdings
from resihp.scheduler.cost.prices import after_backward_s, iteration_seconds
from resihp.scheduler.orders.lanes import overfull
from resihp.scheduler.situation import Situation

Group = tuple[int, ...]
"""Ranks that hold one copy of a stage together, each rank a part."""
Run = tuple[int, list[int]]
"""A replica, and some of its neighbouring stages that one group copies."""
MAX_SLOWDOWN = 0.1
"""Maximum share that mirrors may add to an iteration's time, for example over a slow link. Beyond it, they would cost
more than the loss that they insure against."""
MAX_CHECKED = 8
"""Maximum number of plans with mirrors that are fully checked; each check takes some 30 ms at 500 ranks."""


def layers_held_once(layout: Layout) -> frozenset[int]:
    """Return the layers of `layout` that exactly one stage with ranks holds.

    The embedding belongs to the first layer; the last norm and the head belong to the last layer.
    """
    if layout.whole > 1:
        return frozenset()
    holders = Counter(
        layer for replica in layout.replicas for stage in replica.stages if stage.ranks for layer in stage.layers
    )
    return frozenset(layer for layer, count in holders.items() if count == 1)


def with_mirrors(plan: Plan, situation: Situation, able: Collection[int]) -> Plan:
    """Return `plan` with mirrors for the layers that have a single holder, made of ranks of `able`.

    As many layers are mirrored as ranks and memory allow. The plan is unchanged if all layers are held twice, or if no
    rank can hold a copy without slowing iterations by more than `MAX_SLOWDOWN`. Mirrors in effect keep their places as
    far as these are useful.
    """
    plan = plan.without_mirrors()
    at_risk = layers_held_once(plan.layout)
    idle = sorted(set(able).intersection(plan.layout.standby))
    if not at_risk or not idle:
        return plan
    state_of_rank = dict(holdings(situation.holding.replicas))
    added_s = MAX_SLOWDOWN * iteration_seconds(plan, situation)
    best, most_copied, checked = plan, 0, 0
    for runs, groups in _candidates(plan, situation, at_risk, idle):
        copied = sum(_layers(plan, *run) for run in runs)
        if copied <= most_copied or any(_is_too_large(plan, situation, run, len(groups[0])) for run in runs):
            continue
        candidate = _mirrored(plan, situation, runs, groups, state_of_rank)
        checked += 1
        if _slowdown_s(plan, candidate, situation) <= added_s and _possible(candidate, situation):
            best, most_copied = candidate, copied
        if most_copied == len(at_risk) or checked == MAX_CHECKED:
            break
    return best


def _candidates(
    plan: Plan, situation: Situation, at_risk: frozenset[int], idle: Sequence[int]
) -> Iterator[tuple[list[Run], list[Group]]]:
    """Yield (runs of stages to copy, groups to copy them), starting with groups that spread each copy over most
    ranks."""
    sources: list[Run] = []
    for d, replica in enumerate(plan.layout.replicas):
        stages = [s for s, stage in enumerate(replica.stages) if stage.ranks and at_risk.intersection(stage.layers)]
        if stages:
            sources.append((d, stages))
    widest = max(stage.tp for replica in plan.layout.replicas for stage in replica.stages)
    for tp in range(min(widest, len(idle)), 0, -1):
        if situation.model.tensor_parallel_obstacle(tp) is not None:
            continue
        groups = _groups(situation, idle, tp)
        whole = sum(len(_joinable_runs(plan, d, stages)) for d, stages in sources)
        most = sum(len(stages) for _, stages in sources)
        all_copied = range(min(most, len(groups)), whole - 1, -1)
        some_copied = range(max(whole, len(groups) + 1), most + 1)
        for pieces in (*all_copied, *some_copied):
            yield _cut(plan, sources, pieces)[: len(groups)], groups


def _joinable_runs(plan: Plan, d: int, stages: Sequence[int]) -> list[list[int]]:
    """Return runs of neighbouring stages of a replica that one group could hold as a single stage.

    A stage with several chunks (an interleaved schedule) forms a run of its own.
    """
    runs: list[list[int]] = []
    for s in stages:
        stage = plan.layout.replicas[d].stages[s]
        before = plan.layout.replicas[d].stages[runs[-1][-1]] if runs else None
        joins = (
            before is not None
            and len(stage.chunks) == len(before.chunks) == 1
            and runs[-1][-1] == s - 1
            and before.chunks[0][1] + 1 == stage.chunks[0][0]
        )
        if joins:
            runs[-1].append(s)
        else:
            runs.append([s])
    return runs


def _cut(plan: Plan, sources: Sequence[Run], pieces: int) -> list[Run]:
    """Return the stages to be copied, in `pieces` runs of neighbouring stages, runs with most layers first."""
    runs = [(d, run) for d, stages in sources for run in _joinable_runs(plan, d, stages)]
    while len(runs) < pieces:
        longest = max(range(len(runs)), key=lambda i: (len(runs[i][1]), -i))
        d, run = runs[longest]
        half = (len(run) + 1) // 2
        runs[longest : longest + 1] = [(d, run[:half]), (d, run[half:])]
    runs.sort(key=lambda run: -_layers(plan, *run))
    return runs


def _layers(plan: Plan, d: int, run: Sequence[int]) -> int:
    return sum(len(plan.layout.replicas[d].stages[s].layers) for s in run)


def _groups(situation: Situation, idle: Sequence[int], tp: int) -> list[Group]:
    """Return disjoint groups of `tp` ranks; groups within one node come first."""
    by_node: dict[str, list[int]] = {}
    for rank in idle:
        by_node.setdefault(situation.nodes[rank], []).append(rank)
    groups: list[Group] = []
    leftover_ranks: list[int] = []
    for ranks in by_node.values():
        full = len(ranks) // tp * tp
        groups += [tuple(ranks[i : i + tp]) for i in range(0, full, tp)]
        leftover_ranks += ranks[full:]
    groups += [tuple(leftover_ranks[i : i + tp]) for i in range(0, len(leftover_ranks) // tp * tp, tp)]
    return groups


def _is_too_large(plan: Plan, situation: Situation, run: Run, tp: int) -> bool:
    """Return whether the state of a run exceeds the memory of each of `tp` ranks."""
    if situation.room_bytes is None:
        return False
    stages = [plan.layout.replicas[run[0]].stages[s] for s in run[1]]
    layers = {layer for stage in stages for layer in stage.layers}
    outside, per_layer, _ = tensor_bytes.stage_bytes(
        situation.model,
        tp,
        0,
        first=0 in layers,
        last=situation.model.layers - 1 in layers,
        state_bytes=situation.state_bytes_of(2),
    )
    return outside + len(layers) * per_layer > situation.room_bytes


def _slowdown_s(plan: Plan, candidate: Plan, situation: Situation) -> float:
    """Return the time that mirrors add to an iteration, by longer gradient sums and by steps on slow devices.

    The unit is that of `Situation.times`.
    """
    sums_s = [after_backward_s(plan_or_candidate.layout.replicas, situation) for plan_or_candidate in (plan, candidate)]
    slowest = min(1.0, *(situation.speeds.get(rank, 1.0) for rank in candidate.mirroring))
    return sums_s[1] - sums_s[0] + situation.times.step_s * (1 / slowest - 1)


def _mirrored(
    plan: Plan, situation: Situation, runs: Sequence[Run], groups: Sequence[Group], state_of_rank: dict[int, HeldState]
) -> Plan:
    """Return the plan with one mirror for each run of stages, on the group that suits the run best."""
    free = list(groups)
    mirrors: list[Replica] = []
    for d, run in runs:
        source = plan.layout.replicas[d]
        ranks = min(free, key=lambda group: _unsuited(group, source, run, situation, state_of_rank))
        free.remove(ranks)
        mirrors.append(Replica(_stages(source, run, ranks)))
    mirrors.sort(key=lambda mirror: mirror.ranks)
    mirroring = {rank for mirror in mirrors for rank in mirror.ranks}
    standby = tuple(rank for rank in plan.layout.standby if rank not in mirroring)
    nothing = tuple(() for _ in mirrors)
    idle_orders = tuple(tuple(() for _ in mirror.stages) for mirror in mirrors)
    return msgspec.structs.replace(
        plan,
        layout=Layout((*plan.layout.replicas, *mirrors), standby),
        assignment=(*plan.assignment, *nothing),
        orders=(*plan.orders, *idle_orders) if plan.orders else (),
    )


def _stages(source: Replica, run: Sequence[int], ranks: Group) -> tuple[Stage, ...]:
    """Return the stages of a mirror: the stages of `run` as one stage on `ranks`, all other stages of `source` without
    ranks."""
    chunks: tuple[LayerSpan, ...] = source.stages[run[0]].chunks
    if len(run) > 1:
        chunks = ((chunks[0][0], source.stages[run[-1]].chunks[0][1]),)
    before, after = source.stages[: run[0]], source.stages[run[-1] + 1 :]
    return (*_vacated(before), Stage(ranks, chunks), *_vacated(after))


def _vacated(stages: Sequence[Stage]) -> Iterator[Stage]:
    return (Stage((), stage.chunks) for stage in stages)


def _unsuited(
    group: Group, source: Replica, run: Sequence[int], situation: Situation, state_of_rank: dict[int, HeldState]
) -> tuple[float, int, int, float, Group]:
    """Return a sort key of groups for a run of stages, the best group first.

    The key prefers a fast link to the holder, then fewer bytes to receive, then another node than the holder's, then
    speed.
    """
    wanted = {layer for s in run for layer in source.stages[s].layers}
    stays = sum(
        len(wanted & state_of_rank[rank].layers)
        for rank in group
        if rank in state_of_rank and rank not in situation.stale
    )
    holders = tuple(rank for s in run for rank in source.stages[s].ranks)
    holding_nodes = {situation.nodes[rank] for rank in holders}
    beside = sum(situation.nodes[rank] in holding_nodes for rank in group)
    return -situation.link(group, holders), -stays, beside, -situation.speed(group), group


def _possible(plan: Plan, situation: Situation) -> bool:
    """Return whether all ranks have memory for a plan with mirrors, and for the transition to it, and its layout is
    valid."""
    if overfull(plan, situation) is not None or transition_obstacle(situation, plan) is not None:
        return False
    try:
        validate(plan.layout, situation.model)
    except LayoutError:
        return False
    return True


def newly_held_twice(before: Layout, after: Layout) -> frozenset[int]:
    """Return the layers that have one holder in `before` and several in `after`."""
    return layers_held_once(before) - layers_held_once(after)
