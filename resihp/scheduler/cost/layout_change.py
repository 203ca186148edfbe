"""Work of a transition between two layouts: bytes in total, bytes of the busiest rank, and communicators. Pure.

The transfers are defined by `resihp.parallelism.transfers` alone. Here it is called for whole layers instead of single
parameters. In a large job, it is called only for replicas that change and for enough others to send them state: the
choice among equal senders affects balance, not bytes.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator

import msgspec

from resihp.parallelism.layout import Layout, Replica
from resihp.parallelism.model import ModelSpec
from resihp.parallelism.ownership import ParameterSpec
from resihp.parallelism.parameter_outline import layer_outline, outline
from resihp.parallelism.transfers import Base, bytes_of, moves
from resihp.scheduler.cost.lacking_state import bytes_to_move
from resihp.scheduler.situation import Situation
from resihp.scheduler.transition_cost import Movement

INSIDE_WEIGHT = 1 / 12
"""Weight of a byte within a node, relative to a byte between nodes: NVLink compared with a 200 or 400 Gb/s adapter
(`resihp.scheduler.what_if.catalogue`)."""
MAX_FULLY_COMPARED_REPLICAS = 8
"""Maximum number of replicas of a job for which all replicas are considered as senders."""
SENDERS_PER_REPLICA = 3
"""Number of replicas that may send the state that one replica lacks, in a larger job. More make no difference, because
receiving takes longest."""


def movement(
    situation: Situation, layout: Layout, *, inside_weight: float = INSIDE_WEIGHT, element: int = 4
) -> Movement:
    """Return the work of the transition from a situation's base to `layout`. All communicators count as new.

    `inside_weight`: weight of a byte within a node. `element`: bytes of a number of state; a parameter has three (its
    value, which is float32 also under mixed precision, and two moments). Raises LayoutError, naming state that no rank
    holds any more.
    """
    survivors = set(situation.available).difference(situation.stale)
    if layout.replicas == situation.holding.replicas and survivors.issuperset(layout.active):
        return Movement(groups=communicators(layout))
    specs = _blocks(situation.model)
    by_name = {spec.name: spec for spec in specs}
    sent: defaultdict[int, float] = defaultdict(float)
    received: defaultdict[int, float] = defaultdict(float)
    for targets, sources in _asked(situation, layout, survivors):
        base = Base(epoch=situation.epoch, layout=Layout(sources), survivors=tuple(sorted(survivors)))
        for move in moves(base, Layout(targets), specs, situation.nodes):
            weight = _weight(situation, move.source, move.target, inside_weight)
            bytes_moved = bytes_of(move, by_name, element) * weight
            sent[move.source] += bytes_moved
            received[move.target] += bytes_moved
    return Movement(
        total_bytes=bytes_to_move(situation, layout, element),
        busiest_bytes=max((*sent.values(), *received.values()), default=0.0),
        groups=communicators(layout),
    )


def state_bytes(model: ModelSpec, layout: Layout, element: int = 4) -> tuple[int, int]:
    """Return the bytes read from a checkpoint: by all ranks of a layout together, and by the rank that reads most."""
    specs = _blocks(model)
    bytes_of_rank: defaultdict[int, int] = defaultdict(int)
    for replica in layout.replicas:
        virtual = replica.virtual_stages
        for s, stage in enumerate(replica.stages):
            units = {f"layer.{layer}" for layer in stage.layers}
            units |= {"embedding"} if s == virtual[0][0] else set()
            units |= {"final", "head"} if s == virtual[-1][0] else set()
            own = sum(spec.elements for spec in specs if units.intersection(spec.units)) // max(1, stage.tp)
            for rank in stage.ranks:
                bytes_of_rank[rank] = own * 3 * element
    return sum(bytes_of_rank.values()), max(bytes_of_rank.values(), default=0)


def communicators(layout: Layout) -> int:
    """Return the number of communicators that the rank with most of them has to build; all are new after a transition.

    A rank has one communicator of all ranks, one of its stage, one for each direction and each rank of another stage
    that it exchanges activations with, and one for each further set of ranks with which it sums gradients. The result
    equals that of `resihp.pipeline.program.memberships`, but needs no programs. Plans with migrations have a few
    communicators more.
    """
    stages_of_layer: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for d, replica in enumerate(layout.replicas):
        for s, stage in enumerate(replica.stages):
            for layer in stage.layers if stage.ranks else ():
                stages_of_layer[layer].append((d, s, stage.tp))
    holders_of_layer = {layer: tuple(stages) for layer, stages in stages_of_layer.items()}
    max_tp = {holder_set: max(tp for _, _, tp in holder_set) for holder_set in set(holders_of_layer.values())}
    active = layout.active
    all_sum = all(len(replica.stages) == 1 and replica.stages[0].tp == 1 for replica in layout.replicas)
    most_communicators = 0
    for replica in layout.replicas:
        pairs = _pairs(replica)
        for stage in (stage for stage in replica.stages if stage.ranks):
            sums = (
                {holders_of_layer[layer] for layer in stage.layers}
                if len(layout.replicas) > 1 and not all_sum
                else set()
            )
            gradients = sum(-(-max_tp[holder_set] // stage.tp) for holder_set in sums)
            own = max((pairs[rank] for rank in stage.ranks), default=0)
            most_communicators = max(most_communicators, 1 + (stage.tp > 1 and stage.ranks != active) + own + gradients)
    return most_communicators


def _pairs(replica: Replica) -> defaultdict[int, int]:
    """Return, for each rank, the number of peers in its replica with which it exchanges activations, counted per
    direction."""
    edges: set[tuple[str, int, int]] = set()
    path = [replica.stages[s] for s, _ in replica.virtual_stages]
    for a, b in itertools.pairwise(path):
        chunks = max(a.tp, b.tp)
        if a is not b and a.ranks and b.ranks:
            for c in range(chunks):
                sender, receiver = a.ranks[c * a.tp // chunks], b.ranks[c * b.tp // chunks]
                edges |= {("forward", sender, receiver), ("backward", receiver, sender)}
    peers: defaultdict[int, int] = defaultdict(int)
    for _, sender, receiver in edges:
        peers[sender] += 1
        peers[receiver] += 1
    return peers


def _asked(
    situation: Situation, layout: Layout, survivors: set[int]
) -> Iterator[tuple[tuple[Replica, ...], tuple[Replica, ...]]]:
    """Yield replicas of `layout` that change, with replicas of the base that can send the state that they lack.

    In a small job: all of them together. In a large job: one changed replica at a time, with the replicas in which its
    ranks were, and with `SENDERS_PER_REPLICA` complete surviving replicas, nearest first and in rotation.
    """
    base = situation.holding.replicas
    before = {replica for replica in base if survivors.issuperset(replica.ranks)}
    changed = tuple(replica for replica in layout.replicas if replica not in before)
    used = {rank for replica in changed for rank in replica.ranks}
    whole = [r for r in base if r in before and not r.vacant and not used.intersection(r.ranks)]
    if len(base) <= MAX_FULLY_COMPARED_REPLICAS or not whole:
        yield changed, base
        return
    home = {rank: replica for replica in base for rank in replica.ranks}
    _sort_nearest_first(situation, whole, used)
    for i, replica in enumerate(changed):
        former = dict.fromkeys(home[rank] for rank in replica.ranks if rank in home)
        senders = [whole[(SENDERS_PER_REPLICA * i + k) % len(whole)] for k in range(SENDERS_PER_REPLICA)]
        yield (replica,), (*former, *dict.fromkeys(senders))


def _sort_nearest_first(situation: Situation, replicas: list[Replica], ranks: set[int]) -> None:
    """Sort replicas by the number of nodes that they share with `ranks`, most shared nodes first."""
    target_nodes = {situation.nodes[rank] for rank in ranks}
    replicas.sort(key=lambda replica: -len(target_nodes.intersection(situation.nodes[rank] for rank in replica.ranks)))


def _blocks(model: ModelSpec) -> tuple[ParameterSpec, ...]:
    """Return one parameter for each layer, which stands for all of the layer's parameters, and the parameters outside
    the layers.

    The one parameter of a layer can be cut by the same degrees as the real ones.
    """
    elements = sum(spec.elements for spec in layer_outline(model, 0))
    rows = model.kv_groups  # every degree divides them
    outside = outline(msgspec.structs.replace(model, layers=0))
    return (
        *(ParameterSpec(f"layers.{i}", f"layer.{i}", (rows, elements // rows), 0) for i in range(model.layers)),
        *outside,
    )


def _weight(situation: Situation, source: int, target: int, inside: float) -> float:
    if situation.nodes[source] == situation.nodes[target]:
        return inside
    return 1.0 / situation.link((source,), (target,))
