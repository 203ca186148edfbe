"""What may be lost next: each device that has work and each node that has such; which of them are alike, and with which
of them state would be lost that nobody else holds. Pure.

Two places are alike where the planner is told the same of them: as fast, in the same stage of replicas that are cut
alike, as fast, and spread over nodes in the same way. Decides nothing about what would be done
(`resihp.scheduler.planner`).

Called by `resihp.controller.ahead`, which asks for plans beforehand and warns, and by `resihp.scheduler.what_if`.
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

MOST_ASKED = 256
"""Losses that are asked for under one plan."""

Shape = tuple[tuple[tuple[LayerSpan, ...], tuple[Hashable, ...]], ...]
"""Of each stage of a replica: its layers, and of each of its devices all that makes a difference."""


class PossibleLoss(msgspec.Struct, frozen=True):
    """Something that may happen next."""

    ranks: tuple[int, ...]
    """That are gone then, ascending."""
    node: str | None = None
    """That they are lost with; None for a single device."""


def to_ask(situation: Situation) -> tuple[PossibleLoss, ...]:
    """What may be lost of the layout in effect (`base`): all of it, or where that is too much, one of each kind."""
    possible = possible_losses(situation)
    if len(possible) <= MOST_ASKED:
        return possible
    return tuple(group[0] for group in kinds(possible, situation))[:MOST_ASKED]


def possible_losses(situation: Situation) -> tuple[PossibleLoss, ...]:
    """Each device with work, then each node that has such, with all that is available there."""
    on: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(situation.available):
        on[situation.nodes[rank]].append(rank)
    available = set(situation.available)
    active = [rank for rank in situation.base.active if rank in available]
    nodes = dict.fromkeys(situation.nodes[rank] for rank in active)
    return (
        *(PossibleLoss((rank,)) for rank in active),
        *(PossibleLoss(tuple(on[node]), node) for node in nodes),
    )


def kinds(possible: Iterable[PossibleLoss], situation: Situation) -> tuple[tuple[PossibleLoss, ...], ...]:
    """Those that are alike together, in order of the first of each kind."""
    nodes = _nodes(situation.base, situation)
    shapes = [_shape(replica, situation, nodes) for replica in situation.base.replicas]
    numbers = {shape: number for number, shape in enumerate(dict.fromkeys(shapes))}
    numbered = [numbers[shape] for shape in shapes]
    at = {rank: (place.replica, place.stage, place.t) for rank, place in situation.base.places()}

    def kind(loss: PossibleLoss) -> Hashable:
        if loss.node is None:
            d, s, t = at[loss.ranks[0]]
            return numbered[d], s, shapes[d][s][1][t]
        parts: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for rank in loss.ranks:
            if rank in at:
                d, s, t = at[rank]
                parts[d].append((s, t))
        return tuple(sorted((numbered[d], tuple(held)) for d, held in parts.items())), len(loss.ranks)

    found: dict[Hashable, list[PossibleLoss]] = defaultdict(list)
    for loss in possible:
        found[loss.node is None, kind(loss)].append(loss)
    return tuple(tuple(group) for group in found.values())


def sole_holders(layout: Layout, specs: Sequence[ParameterSpec]) -> dict[int, frozenset[str]]:
    """Ranks of a layout in effect that hold state alone, each with the units of it ("layer.7")."""
    if layout.whole > 1:
        return {}
    return transfers.sole_holders(Base(epoch=0, layout=layout, survivors=layout.active), specs)


def held_alone(holders: Mapping[int, Collection[str]], *, saved: bool = True) -> str:
    """A sentence about `sole_holders`, without its full stop. `saved`: whether there are checkpoints, or will be."""
    units = {unit for held in holders.values() for unit in held}
    layers = sorted(int(unit.removeprefix("layer.")) for unit in units if unit.startswith("layer."))
    told = [f"{'layer' if len(layers) == 1 else 'layers'} {spans(layers)}"] if layers else []
    told += [f"the {name}" for name in ("embedding", "head") if name in units]
    if "final" in units and "head" not in units:
        told.append("the last norm")
    *others, last = told
    what = f"{', '.join(others)} and {last}" if others else last
    are = "is" if len(told) == 1 and len(layers) < 2 else "are"
    who, one = ("rank", "it") if len(holders) == 1 else ("ranks", "one of these")
    ranks = f"{who} {spans(holders)}"
    then = "training goes back to the last checkpoint" if saved else "so is all training: --checkpoint-every N saves it"
    return f"{what} {are} held by {ranks} alone: if {one} is lost, {then}"


def _nodes(layout: Layout, situation: Situation) -> dict[str, Hashable]:
    """Of each node: how many work there, how many could, and its slow links."""
    could: dict[str, int] = defaultdict(int)
    work: dict[str, int] = defaultdict(int)
    slow: dict[str, list[tuple[str, float]]] = defaultdict(list)
    active = set(layout.active)
    for rank in situation.available:
        could[situation.nodes[rank]] += 1
        work[situation.nodes[rank]] += rank in active
    for (a, b), speed in sorted(situation.links.items()):
        slow[a].append((b, speed))
        slow[b].append((a, speed))
    return {node: (work[node], number, tuple(slow[node])) for node, number in could.items()}


def _shape(replica: Replica, situation: Situation, nodes: dict[str, Hashable]) -> Shape:
    """Equal for replicas that are alike."""
    order: dict[str, int] = {}

    def device(rank: int) -> Hashable:
        node = situation.nodes.get(rank, "")
        return situation.speeds.get(rank, 1.0), order.setdefault(node, len(order)), nodes.get(node)

    return tuple((stage.chunks, tuple(device(rank) for rank in stage.ranks)) for stage in replica.stages)
