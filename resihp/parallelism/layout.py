"""The assignment of layers to ranks: replicas of stages of ranks. A layout is data; everything else is derived from it.

TP, PP and DP degrees are not global numbers. Each replica has its own stages; each stage has its own ranks (the
tensor-parallel group, in order) and its own layer chunks. Megatron's uniform grid is `Layout.uniform`. A stage that has
lost all its ranks may stay in the layout as a *vacant* stage: it holds no state, and the micro-batches of its replica
pass its layers in other replicas (ResiHP, Algorithm 1). This module validates and identifies layouts; it never decides
which layout is good (`resihp.scheduler`), and never puts one into effect.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import msgspec

from resihp.errors import LayoutError
from resihp.parallelism.model import ModelSpec

LayerSpan = tuple[int, int]
"""First and last layer, both inclusive, counted from 0."""


class Stage(msgspec.Struct, frozen=True):
    """One pipeline stage of one replica: the ranks of a tensor-parallel group and the layers that they hold.

    `chunks` are spans of consecutive layers, more than one under interleaving. A stage without ranks is vacant: no rank
    holds its layers in this replica, and no micro-batch passes it.
    """

    ranks: tuple[int, ...]
    chunks: tuple[LayerSpan, ...]

    @property
    def tp(self) -> int:
        return len(self.ranks)

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(layer for first, last in self.chunks for layer in range(first, last + 1))


class Replica(msgspec.Struct, frozen=True):
    """One copy of the model, spread over stages in pipeline order."""

    stages: tuple[Stage, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(rank for stage in self.stages for rank in stage.ranks)

    @property
    def vacant(self) -> bool:
        """Whether any stage has no ranks, so that the replica holds only a part of the model."""
        return not all(stage.ranks for stage in self.stages)

    @property
    def virtual_stages(self) -> tuple[tuple[int, int], ...]:
        """(stage, chunk) of each chunk in layer order, which is the order in which a micro-batch passes them."""
        stops = [(chunk[0], s, c) for s, stage in enumerate(self.stages) for c, chunk in enumerate(stage.chunks)]
        return tuple((s, c) for _, s, c in sorted(stops))


class Place(msgspec.Struct, frozen=True):
    """Position of a rank: replica, stage, and index `t` within the tensor-parallel group."""

    replica: int
    stage: int
    t: int


class Layout(msgspec.Struct, frozen=True):
    """All replicas, and the standby ranks: live ranks without work."""

    replicas: tuple[Replica, ...]
    standby: tuple[int, ...] = ()

    @classmethod
    def uniform(
        cls, *, tp: int, pp: int, dp: int, layers: int, chunks: int = 1, standby: tuple[int, ...] = ()
    ) -> Layout:
        """Return Megatron's grid: rank = (replica * pp + stage) * tp + t, with layers spread evenly and the remainder
        given to the first stages.

        With `chunks` above 1, each stage holds `chunks` spans of layers (Megatron's virtual pipeline): virtual stage v
        is chunk v // pp of stage v % pp. Raises LayoutError if a degree is below 1 or there are fewer layers than
        virtual stages.
        """
        if min(tp, pp, dp, chunks) < 1:
            raise LayoutError(f"layout tp={tp} pp={pp} dp={dp} chunks={chunks}: every degree must be at least 1")
        if layers < pp * chunks:
            fewer = f"choose --pp {layers} or fewer" if chunks == 1 else "choose fewer stages or virtual stages"
            raise LayoutError(f"layout pp={pp}: the model has only {layers} layers; {fewer}")
        depth = pp * chunks
        spans: list[LayerSpan] = []
        for v in range(depth):
            first = spans[-1][1] + 1 if spans else 0
            spans.append((first, first + layers // depth + (v < layers % depth) - 1))
        return cls(
            replicas=tuple(
                Replica(
                    stages=tuple(
                        Stage(ranks=tuple((d * pp + s) * tp + t for t in range(tp)), chunks=tuple(spans[s::pp]))
                        for s in range(pp)
                    )
                )
                for d in range(dp)
            ),
            standby=standby,
        )

    @property
    def active(self) -> tuple[int, ...]:
        """Ranks with work, in ascending order."""
        return tuple(sorted(rank for replica in self.replicas for rank in replica.ranks))

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, standby included, in ascending order."""
        return tuple(sorted((*self.active, *self.standby)))

    @property
    def whole(self) -> int:
        """Number of replicas without a vacant stage: each of them holds all of the model's state."""
        return sum(not replica.vacant for replica in self.replicas)

    @property
    def vacant(self) -> tuple[tuple[int, int], ...]:
        """(replica, stage) of every stage without ranks."""
        return tuple((d, s) for d, r in enumerate(self.replicas) for s, stage in enumerate(r.stages) if not stage.ranks)

    def places(self) -> Iterator[tuple[int, Place]]:
        """Yield (rank, place) for every active rank."""
        for d, replica in enumerate(self.replicas):
            for s, stage in enumerate(replica.stages):
                for t, rank in enumerate(stage.ranks):
                    yield rank, Place(d, s, t)

    def place(self, rank: int) -> Place | None:
        """Return the place of `rank`, or None for a standby or unknown rank."""
        return next((place for candidate, place in self.places() if candidate == rank), None)

    def stage_of(self, rank: int) -> Stage | None:
        place = self.place(rank)
        return None if place is None else self.replicas[place.replica].stages[place.stage]

    def without(self, lost_ranks: frozenset[int]) -> Layout:
        """Return the layout without every replica that has a lost rank or a vacant stage; live ranks of these replicas
        become standby.
        """
        kept = tuple(r for r in self.replicas if not r.vacant and not lost_ranks.intersection(r.ranks))
        standby = {*self.standby, *self.active}.difference(lost_ranks, *(r.ranks for r in kept))
        return Layout(replicas=kept, standby=tuple(sorted(standby)))

    def hosts(self, span: LayerSpan) -> tuple[int, ...]:
        """Return the replicas that hold the layers of `span` as exactly one chunk."""
        return tuple(d for d, r in enumerate(self.replicas) if any(s.ranks and span in s.chunks for s in r.stages))

    def model_copy(self, replica: int) -> Replica:
        """Return a replica in which each layer occurs once: the layers of `replica`, with the layers of its vacant
        stages taken from the first other replica that holds them.

        Together, the ranks of the result hold all of the model's state, so they can write a checkpoint.
        """
        own = self.replicas[replica]
        taken = {stage.ranks: [*stage.chunks] for stage in own.stages if stage.ranks}
        for span in (span for stage in own.stages if not stage.ranks for span in stage.chunks):
            host = self.replicas[self.hosts(span)[0]]
            (ranks,) = (stage.ranks for stage in host.stages if span in stage.chunks)
            taken.setdefault(ranks, []).append(span)
        return Replica(tuple(Stage(ranks, tuple(chunks)) for ranks, chunks in taken.items()))

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical encoding; equal layouts have equal digests on every machine."""
        return hashlib.sha256(msgspec.msgpack.encode(self, order="deterministic")).hexdigest()

    def describe(self) -> str:
        """Describe the layout in a few words: `DP3 x PP2 x TP2` if it is uniform, otherwise the TP degrees of each
        replica's stages, `2x TP4,4 | TP2,1`.
        """
        shapes = [tuple(stage.tp for stage in replica.stages) for replica in self.replicas]
        tail = f" + {len(self.standby)} standby" if self.standby else ""
        if not shapes:
            return f"no replica{tail}"
        if len(set(shapes)) == 1 and len(set(shapes[0])) == 1:
            return f"DP{len(shapes)} x PP{len(shapes[0])} x TP{shapes[0][0]}{tail}"
        words = {shape: "TP" + ",".join(map(str, shape)) for shape in shapes}  # in order of their first replica
        counts = {shape: shapes.count(shape) for shape in words}
        return " | ".join(f"{n}x {words[shape]}" if n > 1 else words[shape] for shape, n in counts.items()) + tail


def spans(numbers: Iterable[int]) -> str:
    """Format ascending numbers of ranks, stages or layers, with consecutive numbers as a range: `0-3 6 8`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return " ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def validate(layout: Layout, model: ModelSpec) -> None:
    """Raise LayoutError, naming the replica, stage or rank at fault, if a layout is not valid.

    In a valid layout, each replica has every layer once and in order, each rank is in one place, the tensor-parallel
    degrees divide the tensors, and another replica holds each chunk of a vacant stage in one chunk.
    """
    if not layout.replicas:
        raise LayoutError("layout: no replica; at least one is needed")
    _validate_ranks(layout)
    for d, replica in enumerate(layout.replicas):
        _validate_replica(layout, d, replica, model)


def _validate_ranks(layout: Layout) -> None:
    """Check that each rank is in one place."""
    placed_ranks: set[int] = set()
    for rank in (*(r for replica in layout.replicas for r in replica.ranks), *layout.standby):
        if rank < 0:
            raise LayoutError(f"layout: rank {rank} is negative")
        if rank in placed_ranks:
            raise LayoutError(f"layout: rank {rank} stands in two places")
        placed_ranks.add(rank)


def _validate_replica(layout: Layout, d: int, replica: Replica, model: ModelSpec) -> None:
    """Check the layers and the stages of replica `d`."""
    if not replica.ranks:
        raise LayoutError(f"replica {d}: no {'rank' if replica.stages else 'stage'}")
    present = [
        layer
        for s, c in replica.virtual_stages
        for layer in range(replica.stages[s].chunks[c][0], replica.stages[s].chunks[c][1] + 1)
    ]
    if present != list(range(model.layers)):
        raise LayoutError(f"replica {d}: layers {present} instead of 0 to {model.layers - 1}, each once and in order")
    for s, stage in enumerate(replica.stages):
        if not stage.chunks or any(first > last for first, last in stage.chunks):
            raise LayoutError(f"replica {d} stage {s}: empty layer chunk in {list(stage.chunks)}")
        for first, last in () if stage.ranks else stage.chunks:
            if not layout.hosts((first, last)):
                raise LayoutError(
                    f"replica {d} stage {s}: no rank, and no other replica holds layers {first} to {last} in one chunk"
                )
        obstacle = model.tensor_parallel_obstacle(stage.tp) if stage.ranks else None
        if obstacle:
            raise LayoutError(f"replica {d} stage {s}: {obstacle}")
