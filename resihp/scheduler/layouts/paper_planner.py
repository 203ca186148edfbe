"""The paper's planner: TP, then PP, then DP, each step for the imbalance that the previous steps left. Pure.

Selective exclusion shrinks tensor-parallel groups (Eq. 3-4). Layer repartition gives slow stages fewer layers, equally
for all replicas. Progress-aware migration moves micro-batches at single stages (Algorithm 1,
`resihp.scheduler.orders.migration`). No step is undone if a later step shows that another choice would have been
better; the weaknesses that the paper names are kept. The planner is the baseline for measurements of our planner, and a
policy of the simulator; ablations leave out the later steps.

A stage for which K of Eq. 3 is empty is lost. It stays in the layout as a vacant stage, and all its work migrates.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from resihp.errors import PlanError
from resihp.parallelism.layout import LayerSpan, Layout, Replica, Stage, validate
from resihp.parallelism.plan import Plan, spread
from resihp.scheduler.cost import memory
from resihp.scheduler.cost.prices import iteration_seconds
from resihp.scheduler.layouts import tp_groups
from resihp.scheduler.orders.lanes import overfull
from resihp.scheduler.orders.migration import DEFAULT_DELTA, migrate
from resihp.scheduler.situation import Decision, Situation

STEP_NAMES = ("exclude", "repartition", "migrate")

Groups = dict[tuple[int, int], tuple[int, ...]]
"""Ranks of each (replica, stage) of the base; () for a lost stage."""


def progressive(situation: Situation, steps: Sequence[str] = STEP_NAMES, *, delta: int = DEFAULT_DELTA) -> Decision:
    """Return the decision of the paper's planner. Ranks that lost their state (`stale`) count as lost, and are on
    standby.

    `steps`: the first, the first two or all of `STEP_NAMES`. Without "migrate", a replica that lost a stage is given
    up. `alternatives` of the result contains the predictions after fewer steps. Deterministic.

    Raises PlanError, naming the constraint: if no replica has ranks for some stage, if memory or the number of layers
    allows no plan, for speeds that are not above 0 and finite, and for unknown ranks.
    """
    if tuple(steps) not in (STEP_NAMES[:1], STEP_NAMES[:2], STEP_NAMES):
        raise PlanError(
            f"steps {', '.join(steps) or 'none'}: choose the first one, two or all of {', '.join(STEP_NAMES)}"
        )
    _check(situation)
    plans: list[tuple[str, Plan, float]] = []
    obstacle: PlanError | None = None
    for n in range(1, len(steps) + 1):
        try:
            plan = _plan(situation, steps[:n], delta)
            plans.append((", ".join(steps[:n]), plan, iteration_seconds(plan, situation)))
        except PlanError as error:
            if n == len(steps):
                raise
            obstacle = error
    name, plan, seconds = plans[-1]
    with_fewer_steps = tuple((step_names, before) for step_names, _, before in plans[:-1])
    comparison = "".join(f", {before:.4g} after {step_names}" for step_names, before in with_fewer_steps)
    comparison += "" if obstacle is None else f", not possible with fewer steps ({obstacle})"
    reason = f"paper's planner ({name}): predicted {seconds:.4g} {situation.unit} per iteration{comparison}"
    empty = plan.layout.vacant
    if empty:
        places = ", ".join(f"replica {d} stage {s}" for d, s in empty)
        reason += f"; without ranks, so that their work migrates: {places}"
    return Decision(plan=plan, seconds=seconds, reason=reason, alternatives=with_fewer_steps)


def exclude(situation: Situation, replicas: int) -> Groups:
    """Return the ranks of every stage by step 1, Eq. 3-4: the best of its own live ranks; the others are on standby.

    `replicas`: the number of replicas that share state. G of Eq. 3 includes standby ranks on the stage's node that
    earlier exclusions left over: a stage takes them if they make it faster, the weakest stage first. A stage that was
    lost before has no node, and may take idle ranks on any node.
    """
    live = set(situation.available).difference(situation.stale)
    setups = {
        (d, s): (stage, _k_min(situation, s, len(replica.stages), replicas))
        for d, replica in enumerate(situation.base.replicas)
        for s, stage in enumerate(replica.stages)
    }

    def choice(place: tuple[int, int], candidates: Sequence[int]) -> tuple[int, ...]:
        stage, k_min = setups[place]
        return tp_groups.exclude(
            [(rank, situation.speeds.get(rank, 1.0)) for rank in candidates],
            k_min,
            started_with=situation.tp,
            obstacle=situation.model.tensor_parallel_obstacle,
            before=stage.ranks,
        )

    groups = {place: choice(place, [r for r in stage.ranks if r in live]) for place, (stage, _) in setups.items()}
    idle = _idle_ranks(situation, live, groups.values())
    changed = any(idle.values())
    while changed:
        changed = False
        for place in sorted(setups, key=lambda place: (situation.speed(groups[place]), place)):
            ranks, stage = groups[place], setups[place][0]
            home_nodes = {situation.nodes[rank] for rank in ranks or stage.ranks if rank in situation.nodes}
            for node in sorted(home_nodes or (node for node, idle_ranks in idle.items() if idle_ranks)):
                candidate = choice(place, (*ranks, *sorted(idle[node])))
                if situation.speed(candidate) > situation.speed(ranks):
                    for rank in set(ranks).difference(candidate):
                        idle[situation.nodes[rank]].add(rank)
                    idle[node].difference_update(candidate)
                    groups[place] = ranks = candidate
                    changed = True
                    if not home_nodes:
                        break  # a group is on one node
    return groups


def _idle_ranks(situation: Situation, live: set[int], groups: Iterable[tuple[int, ...]]) -> defaultdict[str, set[int]]:
    """Return the live ranks that are in no group, by node."""
    idle: defaultdict[str, set[int]] = defaultdict(set)
    for rank in live.difference(rank for ranks in groups for rank in ranks):
        idle[situation.nodes[rank]].add(rank)
    return idle


def proportional(
    layers: int, speeds: Sequence[float], *, least: int = 1, limits: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Return the number of layers of each stage by step 2: proportional to speed, at least `least`, at most the stage's
    limit.

    (4, 4, 4) at speeds 1, 0.4, 1 becomes (5, 2, 5). The largest remainders are rounded up; among equal remainders the
    first. Embedding and head do not count, and no better balance is searched for afterwards. Raises PlanError if there
    is no solution.
    """
    max_counts = [layers] * len(speeds) if limits is None else list(limits)
    if least * len(speeds) > layers:
        raise PlanError(f"{layers} layers are too few for {len(speeds)} stages of at least {least}; lower --pp")
    if sum(max_counts) < layers or min(max_counts) < least:
        raise PlanError(
            f"{layers} layers do not fit the memory of {len(speeds)} stages, which have room for {max_counts}; "
            f"make micro-batches shorter, or bring ranks back"
        )
    exact_counts = [layers * speed / math.fsum(speeds) for speed in speeds]
    counts = [min(max(int(share), least), limit) for share, limit in zip(exact_counts, max_counts, strict=True)]
    while sum(counts) < layers:
        candidates = [s for s in range(len(exact_counts)) if counts[s] < max_counts[s]]
        counts[max(candidates, key=lambda s: (exact_counts[s] - counts[s], -s))] += 1
    while sum(counts) > layers:
        candidates = [s for s in range(len(exact_counts)) if counts[s] > least]
        counts[min(candidates, key=lambda s: (exact_counts[s] - counts[s], -s))] -= 1
    return tuple(counts)


def _check(situation: Situation) -> None:
    """Raise PlanError for input that the paper's rules do not cover."""
    for rank in situation.available:
        if rank not in situation.nodes:
            raise PlanError(f"rank {rank}: it is available, but on no known node; name its node")
    known_ranks = {*situation.available, *situation.base.ranks, *situation.nodes}
    for rank, speed in sorted(situation.speeds.items()):
        if rank not in known_ranks:
            raise PlanError(f"rank {rank}: its speed is given, but the job has no such rank")
        if rank in situation.available and not (math.isfinite(speed) and speed > 0):
            raise PlanError(
                f"rank {rank}: its speed is {speed}; speeds are above 0 and finite, and a rank that has stopped is lost"
            )
    if situation.micro_batches < 1:
        raise PlanError(f"{situation.micro_batches} micro-batches an iteration; at least 1 is needed")


def _plan(situation: Situation, steps: Sequence[str], delta: int) -> Plan:
    """Return the plan after `steps`. Raises PlanError if there is none."""
    sharing, fewer = len(situation.base.replicas) + 1, len(situation.base.replicas)
    while fewer < sharing:  # the more replicas share state, the less each holds: their number is known only at the end
        sharing = fewer
        groups = exclude(situation, sharing)
        groups = _within_memory(situation, groups, sharing) if "repartition" in steps else groups
        kept = _kept(situation, groups, may_migrate="migrate" in steps)
        fewer = _holders(situation, groups, kept) if situation.zero_1 else sharing
    partitions = _partitions(situation, groups, kept, sharing) if "repartition" in steps else {}
    replicas = []
    for d in kept:
        stages = situation.base.replicas[d].stages
        chunks = partitions.get(len(stages), tuple(stage.chunks for stage in stages))
        replicas.append(Replica(tuple(Stage(groups[d, s], chunks[s]) for s in range(len(stages)))))
    used = {rank for replica in replicas for rank in replica.ranks}
    plan = Plan(
        epoch=situation.epoch,
        layout=Layout(tuple(replicas), tuple(sorted(set(situation.available).difference(used)))),
        assignment=spread(situation.micro_batches, len(replicas)),
        schedule=situation.schedule,
        sequence_parallel=situation.sequence_parallel,
    )
    if "migrate" in steps:
        plan = migrate(plan, situation, delta=delta)
    validate(plan.layout, situation.model)
    obstacle = overfull(plan, situation)
    if obstacle:
        raise PlanError(f"{obstacle}; allow more steps, or make micro-batches shorter")
    return plan


def _depths(situation: Situation, replicas: Sequence[int]) -> dict[int, list[int]]:
    """Return the replicas grouped by their number of stages; each group gets one partition. The paper has one number
    for all."""
    replicas_of_depth: dict[int, list[int]] = {}
    for d in replicas:
        replicas_of_depth.setdefault(len(situation.base.replicas[d].stages), []).append(d)
    return replicas_of_depth


def _kept(situation: Situation, groups: Groups, *, may_migrate: bool) -> list[int]:
    """Return the replicas that continue: complete ones and, if work may migrate, those with lost stages that other
    replicas hold.

    Raises PlanError if no replica continues.
    """
    replicas = range(len(situation.base.replicas))
    whole = [d for d in replicas if all(groups[d, s] for s in range(len(situation.base.replicas[d].stages)))]
    kept = list(whole)
    lost_stages: list[str] = []
    for depth, same_depth in _depths(situation, replicas).items():
        missing_stages = [s for s in range(depth) if not any(groups[d, s] for d in same_depth)]
        partial = [d for d in same_depth if any(groups[d, s] for s in range(depth))]
        lost_stages += [f"stage {s} of {depth}" for s in missing_stages]
        if may_migrate and not missing_stages:
            kept += [d for d in partial if d not in whole]
    if kept:
        return sorted(kept)
    if lost_stages:
        raise PlanError(
            f"{', '.join(lost_stages)}: no replica holds it any more ({len(situation.available)} ranks are left, and K "
            f"of Eq. 3 is empty there in all {len(replicas)} replicas); bring ranks back on its nodes, or restart from "
            f"a checkpoint with a lower --tp or --pp"
        )
    raise PlanError(
        "every replica has lost a stage, and micro-batches may not migrate: allow the step migrate, or bring ranks back"
    )


def _holders(situation: Situation, groups: Groups, kept: Sequence[int]) -> int:
    """Return a lower bound on the number of kept replicas that hold the layer with the fewest holders."""
    return sum(
        min(sum(bool(groups[d, s]) for d in same_depth) for s in range(depth))
        for depth, same_depth in _depths(situation, kept).items()
    )


def _within_memory(situation: Situation, groups: Groups, replicas: int) -> Groups:
    """Return the groups without the stages that have too little memory, if other replicas have more there.

    There is one partition for all replicas, so the smallest group of a stage limits the number of its layers. Stages
    are removed until all layers fit.
    """
    if situation.room_bytes is None:
        return groups
    remaining = dict(groups)
    for depth, same_depth in _depths(situation, range(len(situation.base.replicas))).items():
        while True:
            rooms = [
                sorted(
                    (capacity(situation, s, depth, len(remaining[d, s]), replicas), d)
                    for d in same_depth
                    if remaining[d, s]
                )
                for s in range(depth)
            ]
            if not all(rooms) or sum(room[0][0] for room in rooms) >= situation.model.layers:
                break
            tight = [(room[0], s) for s, room in enumerate(rooms) if room[0][0] < room[-1][0]]
            if not tight:
                break
            (_, d), s = min(tight)
            remaining[d, s] = ()
    return remaining


def _partitions(
    situation: Situation, groups: Groups, kept: Sequence[int], replicas: int
) -> dict[int, tuple[tuple[LayerSpan, ...], ...]]:
    """Return the chunks of each stage, by the number of stages; the slowest replica at each stage determines the
    stage's speed."""
    partition_of_depth: dict[int, tuple[tuple[LayerSpan, ...], ...]] = {}
    for depth, same_depth in _depths(situation, kept).items():
        groups_of_stage = [[groups[d, s] for d in same_depth if groups[d, s]] for s in range(depth)]
        speeds = [min(situation.speed(ranks) for ranks in stage_groups) for stage_groups in groups_of_stage]
        limits = None
        if situation.memory_bytes is not None:
            limits = [
                min(capacity(situation, s, depth, len(ranks), replicas) for ranks in stage_groups)
                for s, stage_groups in enumerate(groups_of_stage)
            ]
        counts = proportional(situation.model.layers, speeds, least=situation.chunks, limits=limits)
        partition_of_depth[depth] = spans(counts, situation.chunks)
    return partition_of_depth


def spans(counts: Sequence[int], chunks: int) -> tuple[tuple[LayerSpan, ...], ...]:
    """Return each stage's spans of layers.

    Layers are dealt in pipeline order: the first chunk of every stage, then the second. The chunks of a stage differ by
    at most one layer.
    """
    spans_of_stage: list[list[LayerSpan]] = [[] for _ in counts]
    first = 0
    for c in range(chunks):
        for s, count in enumerate(counts):
            size = count // chunks + (c < count % chunks)
            spans_of_stage[s].append((first, first + size - 1))
            first += size
    return tuple(tuple(stage_spans) for stage_spans in spans_of_stage)


def _k_min(situation: Situation, stage: int, stages: int, replicas: int) -> int:
    setup = situation.stage_setup(stage, stages, situation.tp, replicas)
    return memory.smallest_degree(situation.model, setup, situation.room_bytes, situation.tokens)


def capacity(situation: Situation, stage: int, stages: int, tp: int, replicas: int) -> int:
    """Return the number of layers that fit into the memory of a group of `tp` ranks, at stage `stage` of `stages`."""
    if situation.room_bytes is None:
        return situation.model.layers
    setup = situation.stage_setup(stage, stages, tp, replicas)
    return memory.capacity(situation.model, setup, situation.room_bytes, situation.tokens)
