"""What a layout costs: predicted time of an iteration, and bytes that must move to get there. Pure.

Times are those of `resihp.pipeline.timeline`, in units of one layer's forward on one healthy device: a chunk takes its
layers (with what the embedding and the head add) divided by the speed of its group; F, B and W take the same, a B
without a W takes both. Transfers, gradient synchronisation and the step are left out: they are about the same for
all that is compared. Replicas wait for each other only at the end, so each is played alone, and equal ones once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction

import msgspec

from resihp.layout import Layout, Replica, Stage
from resihp.outline import layer_outline, outline
from resihp.ownership import ParameterSpec
from resihp.pipeline.schedules import orders_of
from resihp.pipeline.timeline import Orders, Seconds, play
from resihp.plan import Plan, Primitive, Stop
from resihp.scheduler import shares
from resihp.scheduler.layers import Ends, ends_of
from resihp.scheduler.situation import Situation
from resihp.scheduler.tensor import overlap
from resihp.transfers import TENSORS

Shape = tuple[tuple[float, ...], ...]
"""Cost of each chunk of each stage of a replica, one way."""


class Priced(msgspec.Struct, frozen=True):
    """A replica with what matters for its time."""

    replica: Replica
    shape: Shape

    @property
    def slowest(self) -> float:
        """Time of its slowest stage for one micro-batch one way."""
        return max(sum(chunks) for chunks in self.shape)

    @property
    def pace(self) -> shares.Seconds:
        """A rough time, for a first guess."""
        return shares.estimate(len(self.shape), self.slowest)


class Prices:
    """Prices of one situation; remembers every replica that it has played."""

    def __init__(self, situation: Situation) -> None:
        self._situation = situation
        self._ends = ends_of(situation.model)
        self._played: dict[tuple[Shape, int], float] = {}

    def priced(self, replica: Replica) -> Priced:
        virtual = replica.virtual_stages
        return Priced(
            replica,
            tuple(
                tuple(
                    _chunk_layers(stage, c, (s, c) == virtual[0], (s, c) == virtual[-1], self._ends) / speed
                    if (speed := self._situation.speed(stage.ranks))
                    else math.inf
                    for c in range(len(stage.chunks))
                )
                for s, stage in enumerate(replica.stages)
            ),
        )

    def seconds(self, priced: Priced, micro_batches: int) -> float:
        """Time of one replica for so many micro-batches, played."""
        key = (priced.shape, micro_batches)
        found = self._played.get(key)
        if found is None:
            plan = Plan(
                epoch=self._situation.epoch,
                layout=Layout((priced.replica,)),
                assignment=(tuple(range(micro_batches)),),
                schedule=self._situation.schedule,
            )
            orders = orders_of(plan)
            found = self._played[key] = play(plan, orders, _costs((priced.shape,), orders)).makespan
        return found

    def iteration(self, replicas: Sequence[Priced]) -> tuple[tuple[int, ...], float]:
        """Micro-batches of each replica, and the time of the iteration. Raises PlanError if some would get none."""
        guess = shares.split(self._situation.micro_batches, [priced.pace for priced in replicas])
        played = [self._clock(priced) for priced in replicas]
        counts = shares.improved(guess, played)
        return counts, max(seconds(m) for seconds, m in zip(played, counts, strict=True))

    def _clock(self, priced: Priced) -> shares.Seconds:
        return lambda micro_batches: self.seconds(priced, micro_batches)


def costs(plan: Plan, situation: Situation, orders: Orders) -> Seconds:
    """Cost of every primitive of a plan, for `resihp.pipeline.timeline.play`."""
    prices = Prices(situation)
    return _costs(tuple(prices.priced(replica).shape for replica in plan.layout.replicas), orders)


def _costs(shapes: tuple[Shape, ...], orders: Orders) -> Seconds:
    split = any(p.kind == "W" for replica in orders for order in replica for p in order)

    def seconds(stop: Stop, primitive: Primitive) -> float:
        one_way = shapes[stop.replica][stop.stage][stop.chunk]
        return one_way if split or primitive.kind == "F" else 2 * one_way

    return seconds


def _chunk_layers(stage: Stage, chunk: int, first: bool, last: bool, ends: Ends) -> float:
    begin, end = stage.chunks[chunk]
    return end - begin + 1 + (ends.embedding if first else 0.0) + (ends.head if last else 0.0)


class _Holding(msgspec.Struct, frozen=True):
    """What a rank holds: index `t` of its stage's group, and what the stage has outside its layers."""

    stage: Stage
    t: int
    units: frozenset[str]


def bytes_to_move(situation: Situation, layout: Layout, element: int = 4) -> int:
    """What all ranks of `layout` need and do not hold: what `resihp.transfers.moves` moves, without making the list.

    Loss of state is not noticed here (`resihp.transfers.missing`).
    """
    inside = layer_outline(situation.model, 0)
    outside = outline(msgspec.structs.replace(situation.model, layers=0))
    survivors = set(situation.available).difference(situation.stale)
    before = {rank: holding for rank, holding in _holdings(situation.base) if rank in survivors}
    total = Fraction(0)
    for rank, now in _holdings(layout):
        old = before.get(rank)
        if old == now:
            continue
        shared = Fraction(0) if old is None else overlap(now.t, now.stage.tp, old.t, old.stage.tp)
        kept = 0 if old is None else len(set(now.stage.layers).intersection(old.stage.layers))
        for spec in inside:
            total += (len(now.stage.layers) - kept) * _lacking(spec, now, None) + kept * _lacking(spec, now, shared)
        for spec in outside:
            if now.units.intersection(spec.units):
                has = old is not None and bool(old.units.intersection(spec.units))
                total += _lacking(spec, now, shared if has else None)
    return int(total) * TENSORS * element


def _holdings(layout: Layout) -> Iterator[tuple[int, _Holding]]:
    for replica in layout.replicas:
        virtual = replica.virtual_stages
        for s, stage in enumerate(replica.stages):
            units = {"embedding"} if s == virtual[0][0] else set()
            units |= {"final", "head"} if s == virtual[-1][0] else set()
            for t, rank in enumerate(stage.ranks):
                yield rank, _Holding(stage, t, frozenset(units))


def _lacking(spec: ParameterSpec, now: _Holding, shared: Fraction | None) -> Fraction:
    """Elements of a parameter that a rank needs; `shared` is the part that it has already, None for a new one."""
    if spec.axis is None:
        return Fraction(spec.elements if shared is None else 0)
    return spec.elements * (Fraction(1, now.stage.tp) - (shared or 0))
