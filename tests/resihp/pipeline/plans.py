"""Random plans that can be carried out: any layout of a few ranks, any schedule, migrations, orders of any kind."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import msgspec

from resihp.parallelism.layout import Layout, Replica, Stage
from resihp.parallelism.ownership import ParameterSpec
from resihp.parallelism.plan import Kind, Migration, Plan, Primitive
from resihp.pipeline.schedules import SCHEDULE_NAMES
from resihp.pipeline.timeline import Node, Orders, needs

EXTENT = 24
"""Rows of every matrix: divisible by every degree that `random_layout` uses."""


def model(layers: int, *, tied: bool = False, partial: bool = False) -> tuple[ParameterSpec, ...]:
    """Parameters of a small model; `tied`: the head uses the embedding, `partial`: norms see part of the sequence."""
    per_layer = [
        spec
        for i in range(layers)
        for spec in (
            ParameterSpec(f"layers.{i}.norm", f"layer.{i}", (8,), partial=partial),
            ParameterSpec(f"layers.{i}.fc1", f"layer.{i}", (2 * EXTENT, 8), 0, 2),
            ParameterSpec(f"layers.{i}.fc2", f"layer.{i}", (8, EXTENT), 1),
        )
    ]
    head = () if tied else (ParameterSpec("output", "head", (EXTENT, 8), 0),)
    return (
        ParameterSpec("words", "embedding", (EXTENT, 8), 0, tied="head" if tied else None),
        *per_layer,
        ParameterSpec("last_norm", "final", (8,), partial=partial),
        *head,
    )


def random_plan(rng: random.Random) -> tuple[Plan, tuple[ParameterSpec, ...]]:
    """A valid plan on 2 to 8 ranks, and the parameters of its model."""
    layout = random_layout(rng)
    layers = 1 + max(last for stage in layout.replicas[0].stages for _, last in stage.chunks)
    plan = Plan(
        epoch=rng.randint(1, 9),
        layout=layout,
        assignment=random_assignment(rng, len(layout.replicas)),
        schedule=rng.choice(SCHEDULE_NAMES),
        sequence_parallel=rng.random() < 0.3,
    )
    if rng.random() < 0.5:
        plan = msgspec.structs.replace(plan, migrations=random_migrations(rng, plan))
    if rng.random() < 0.3:
        plan = vacated(rng, plan)
    if rng.random() < 0.3:
        plan = msgspec.structs.replace(plan, orders=random_orders(rng, plan))
    return plan, model(layers, tied=rng.random() < 0.2, partial=plan.sequence_parallel)


def vacated(rng: random.Random, plan: Plan) -> Plan:
    """Without the ranks of some stages, as far as other replicas hold their layers; as it is where none do."""
    layout = plan.layout
    places = [(d, s) for d, replica in enumerate(layout.replicas) for s in range(len(replica.stages))]
    for d, s in rng.sample(places, rng.randint(1, len(places))):
        replica = layout.replicas[d]
        stage = replica.stages[s]
        alone = [
            span for r in layout.replicas for held in r.stages for span in held.chunks if layout.hosts(span) == (d,)
        ]
        if set(stage.chunks).intersection(alone) or set(replica.ranks) == set(stage.ranks):
            continue
        stages = (*replica.stages[:s], Stage((), stage.chunks), *replica.stages[s + 1 :])
        replicas = (*layout.replicas[:d], Replica(stages), *layout.replicas[d + 1 :])
        layout = Layout(replicas, tuple(sorted((*layout.standby, *stage.ranks))))
    chosen = {(migration.micro_batch, migration.virtual_stage): migration.replica for migration in plan.migrations}
    for home, share in enumerate(plan.assignment):
        for v, (s, c) in enumerate(layout.replicas[home].virtual_stages):
            stage = layout.replicas[home].stages[s]
            hosts = layout.hosts(stage.chunks[c])
            for m in share:
                if chosen.get((m, v), home) not in hosts:
                    chosen[m, v] = rng.choice(hosts)
    migrations = tuple(Migration(m, v, replica) for (m, v), replica in chosen.items())
    return msgspec.structs.replace(plan, layout=layout, migrations=migrations)


def random_layout(rng: random.Random) -> Layout:
    """Replicas of unequal shape, or of one shape with unequal degrees (which can migrate to each other)."""
    free = list(range(rng.randint(2, 8)))
    rng.shuffle(free)
    layers = rng.randint(4, 8)
    wanted = min(rng.choice((1, 2, 2, 3, 4)), len(free))
    replicas: list[Replica] = []
    shape: list[int] = []
    spans: list[tuple[int, int]] = []
    while len(replicas) < wanted:
        room = len(free) // (wanted - len(replicas))
        if not shape or len(shape) > room or rng.random() < 0.4:
            shape = [rng.choice((1, 1, 1, 2, 2, 3)) for _ in range(rng.randint(1, min(room, 4)))]
            while sum(shape) > layers:
                shape.pop()
            cuts = [0, *sorted(rng.sample(range(1, layers), sum(shape) - 1)), layers]
            spans = [(first, after - 1) for first, after in itertools.pairwise(cuts)]
        degrees = [rng.choice((1, 1, 2, 2, 3, 4)) for _ in shape]
        while sum(degrees) > room:
            degrees[degrees.index(max(degrees))] -= 1
        replicas.append(_replica(shape, spans, [tuple(free.pop() for _ in range(tp)) for tp in degrees]))
    return Layout(tuple(replicas), tuple(sorted(free)))


def _replica(shape: Sequence[int], spans: Sequence[tuple[int, int]], ranks: Sequence[tuple[int, ...]]) -> Replica:
    blank = Replica(tuple(Stage((), ((0, 0),) * chunks) for chunks in shape))
    at = dict(zip(blank.virtual_stages, spans, strict=True))
    return Replica(
        tuple(
            Stage(group, tuple(at[s, c] for c in range(chunks)))
            for s, (chunks, group) in enumerate(zip(shape, ranks, strict=True))
        )
    )


def random_assignment(rng: random.Random, replicas: int) -> tuple[tuple[int, ...], ...]:
    """Unequal shares, some empty, in any order."""
    counts = [rng.choice((0, 1, 2, 3, 4, 5, 6)) for _ in range(replicas)]
    if not any(counts):
        counts[0] = rng.randint(1, 6)
    left = list(range(sum(counts)))
    if rng.random() < 0.5:
        rng.shuffle(left)
    return tuple(tuple(left.pop(0) for _ in range(count)) for count in counts)


def random_migrations(rng: random.Random, plan: Plan) -> tuple[Migration, ...]:
    """A few, wherever another replica holds the same layers in one chunk."""
    replicas = plan.layout.replicas
    held = [{span for stage in replica.stages for span in stage.chunks} for replica in replicas]
    possible = [
        Migration(m, v, other)
        for home, share in enumerate(plan.assignment)
        for m in share
        for v, (s, c) in enumerate(replicas[home].virtual_stages)
        for other in range(len(replicas))
        if other != home and replicas[home].stages[s].chunks[c] in held[other]
    ]
    rng.shuffle(possible)
    chosen = {(migration.micro_batch, migration.virtual_stage): migration for migration in possible}
    return tuple(list(chosen.values())[: rng.randint(0, 6)])


def random_orders(rng: random.Random, plan: Plan) -> Orders:
    """Any orders that can be carried out: whatever is possible next, by chance. Some chunks have W apart."""
    paths = plan.paths()
    split = {
        (d, s, c)
        for d, replica in enumerate(plan.layout.replicas)
        for s, c in replica.virtual_stages
        if rng.random() < 0.3
    }
    left: list[Node] = []
    for m, path in paths.items():
        for v, stop in enumerate(path):
            kinds: tuple[Kind, ...] = ("F", "B", "W") if (stop.replica, stop.stage, stop.chunk) in split else ("F", "B")
            left += [(kind, m, v) for kind in kinds]
    orders: list[list[list[Primitive]]] = [[[] for _ in replica.stages] for replica in plan.layout.replicas]
    done: set[Node] = set()
    while left:
        possible = [node for node in left if done.issuperset(needs(node, len(paths[node[1]]) - 1))]
        node = rng.choice(possible)
        left.remove(node)
        done.add(node)
        stop = paths[node[1]][node[2]]
        orders[stop.replica][stop.stage].append(Primitive(node[0], node[1], stop.chunk))
    return tuple(tuple(tuple(order) for order in replica) for replica in orders)
