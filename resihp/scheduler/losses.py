"""Possible next losses: each device with work, and each node with such devices, grouped into equal kinds. Pure.

Two losses are of one kind if they make no difference to the planner: equally fast devices, in the same stage of equally
cut replicas, with equal speeds and an equal distribution over nodes. The module also finds state that has a single
holder. It never decides how to react to a loss (`resihp.scheduler.planner`).

Called by `resihp.controller.ahead`, which requests plans in advance and warns, and by `resihp.scheduler.what_if`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

import msgspec

from resihp.parallelism import transfers
from resihp.parallelism.layout import LayerSpan, Layout, Replica, spans
from resihp.parallelism.ownership import ParameterSpec
from resihp.parallelism.transfers import Base
from resihp.scheduler.situation import Situation

MAX_LOSSES = 256
"""Maximum number of losses for which plans are requested while one plan is in effect."""

Shape = tuple[tuple[tuple[LayerSpan, ...], tuple[Hashable, ...]], ...]
"""For each stage of a replica: its layers, and the properties of each of its devices that matter to the planner."""


class PossibleLoss(msgspec.Struct, frozen=True):
    """A possible next loss: one device, or a node with all its available ranks."""

    ranks: tuple[int, ...]
    """Ranks that are lost, in ascending order."""
    node: str | None = None
    """Node that is lost with all these ranks; None for the loss of a single device."""


def to_ask(situation: Situation) -> tuple[PossibleLoss, ...]:
    """Return the possible losses of the layout in effect (`base`) to plan for.

    These are all of them, or one of each kind if there are more than `MAX_LOSSES`.
    """
    possible = possible_losses(situation)
    if len(possible) <= MAX_LOSSES:
        return possible
    return tuple(group[0] for group in kinds(possible, situation))[:MAX_LOSSES]


def possible_losses(situation: Situation) -> tuple[PossibleLoss, ...]:
    """Return one loss for each device with work, then one for each node with such devices: all available ranks on the
    node."""
    ranks_of_node: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(situation.available):
        ranks_of_node[situation.nodes[rank]].append(rank)
    available = set(situation.available)
    active = [rank for rank in situation.base.active if rank in available]
    nodes = dict.fromkeys(situation.nodes[rank] for rank in active)
    return (
        *(PossibleLoss((rank,)) for rank in active),
        *(PossibleLoss(tuple(ranks_of_node[node]), node) for node in nodes),
    )


def kinds(possible: Iterable[PossibleLoss], situation: Situation) -> tuple[tuple[PossibleLoss, ...], ...]:
    """Group equal losses, in the order of the first loss of each kind."""
    nodes = _nodes(situation.base, situation)
    shapes = [_shape(replica, situation, nodes) for replica in situation.base.replicas]
    number_of_shape = {shape: number for number, shape in enumerate(dict.fromkeys(shapes))}
    kind_of_replica = [number_of_shape[shape] for shape in shapes]
    place_of_rank = {rank: (place.replica, place.stage, place.t) for rank, place in situation.base.places()}

    def kind(loss: PossibleLoss) -> Hashable:
        if loss.node is None:
            d, s, t = place_of_rank[loss.ranks[0]]
            return kind_of_replica[d], s, shapes[d][s][1][t]
        parts: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for rank in loss.ranks:
            if rank in place_of_rank:
                d, s, t = place_of_rank[rank]
                parts[d].append((s, t))
        return tuple(sorted((kind_of_replica[d], tuple(places)) for d, places in parts.items())), len(loss.ranks)

    losses_of_kind: dict[Hashable, list[PossibleLoss]] = defaultdict(list)
    for loss in possible:
        losses_of_kind[loss.node is None, kind(loss)].append(loss)
    return tuple(tuple(group) for group in losses_of_kind.values())


def sole_holders(layout: Layout, specs: Sequence[ParameterSpec]) -> dict[int, frozenset[str]]:
    """Return the ranks of a layout in effect that are the only holders of some state, each with its units
    ("layer.7")."""
    if layout.whole > 1:
        return {}
    return transfers.sole_holders(Base(epoch=0, layout=layout, survivors=layout.active), specs)


def held_alone(holders: Mapping[int, Collection[str]], *, saved: bool = True) -> str:
    """Describe the result of `sole_holders` in a sentence without a full stop.

    `saved`: whether checkpoints exist or will be made.
    """
    units = {unit for rank_units in holders.values() for unit in rank_units}
    layers = sorted(int(unit.removeprefix("layer.")) for unit in units if unit.startswith("layer."))
    parts = [f"{'layer' if len(layers) == 1 else 'layers'} {spans(layers)}"] if layers else []
    parts += [f"the {name}" for name in ("embedding", "head") if name in units]
    if "final" in units and "head" not in units:
        parts.append("the last norm")
    *other_parts, last_part = parts
    subject = f"{', '.join(other_parts)} and {last_part}" if other_parts else last_part
    verb = "is" if len(parts) == 1 and len(layers) < 2 else "are"
    noun, lost_rank = ("rank", "it") if len(holders) == 1 else ("ranks", "one of these")
    ranks = f"{noun} {spans(holders)}"
    consequence = (
        "training goes back to the last checkpoint" if saved else "so is all training: --checkpoint-every N saves it"
    )
    return f"{subject} {verb} held by {ranks} alone: if {lost_rank} is lost, {consequence}"


def _nodes(layout: Layout, situation: Situation) -> dict[str, Hashable]:
    """Return, for each node: its number of ranks with work, its number of available ranks, and its slow links."""
    available_count: dict[str, int] = defaultdict(int)
    working_count: dict[str, int] = defaultdict(int)
    slow_links: dict[str, list[tuple[str, float]]] = defaultdict(list)
    active = set(layout.active)
    for rank in situation.available:
        available_count[situation.nodes[rank]] += 1
        working_count[situation.nodes[rank]] += rank in active
    for (a, b), speed in sorted(situation.links.items()):
        slow_links[a].append((b, speed))
        slow_links[b].append((a, speed))
    return {node: (working_count[node], count, tuple(slow_links[node])) for node, count in available_count.items()}


def _shape(replica: Replica, situation: Situation, nodes: dict[str, Hashable]) -> Shape:
    """Return a key that is equal for replicas between which the planner sees no difference."""
    order: dict[str, int] = {}

    def device(rank: int) -> Hashable:
        node = situation.nodes.get(rank, "")
        return situation.speeds.get(rank, 1.0), order.setdefault(node, len(order)), nodes.get(node)

    return tuple((stage.chunks, tuple(device(rank) for rank in stage.ranks)) for stage in replica.stages)
