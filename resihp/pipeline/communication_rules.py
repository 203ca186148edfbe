"""The communication rules of the checker, under the strictest reading of NCCL's rules.

Every parcel is sent once, after its computation and before its use. Every bucket is summed once, after its gradients
are complete. All operations together can complete (`resihp.pipeline.rendezvous`). The order of computations is not
checked here (`resihp.pipeline.computation_rules`). Called by `resihp.pipeline.checker`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from fractions import Fraction
from typing import NoReturn

from resihp.pipeline.computation_rules import PlanFacts, instruction_text, same_stage
from resihp.pipeline.parts import depths
from resihp.pipeline.program import Compute, Instruction, Parcel, Program, Reduce, TensorRange, Transmit
from resihp.pipeline.rendezvous import Rendezvous, spoken_parcel
from resihp.pipeline.timeline import Node

Edge = tuple[str, int, int]
"""Identity of a parcel: direction, micro-batch and boundary."""


class CommunicationRules:
    """The communication rules, applied to each rank's operations in the order in which the rank begins them."""

    def __init__(self, facts: PlanFacts, programs: Mapping[int, Program]) -> None:
        self._facts, self._programs = facts, programs
        self._owners = [tuple(sorted(bucket.owners)) for bucket in facts.buckets]
        self._depths: dict[tuple[int, int, tuple[str, ...]], dict[int, int]] = {}
        self._sound: dict[tuple[object, ...], str | None] = {}
        self._parcels: dict[Edge, tuple[int, Parcel]] = {}
        self._handled: dict[Edge, set[int]] = defaultdict(set)
        self._rendezvous = Rendezvous(programs)

    def judge(self) -> None:
        """Check each instruction by itself, then that all operations together can complete."""
        for rank in self._programs:
            self._read(rank)
        for m, path in self._facts.paths.items():
            for b in range(len(path) - 1):
                if not same_stage(path[b], path[b + 1]):
                    self._check_complete(("forward", m, b))
                    if self._facts.learns:
                        self._check_complete(("backward", m, b))
        fault = self._rendezvous.mismatch() or self._rendezvous.deadlock()
        if fault:
            self._facts.refuse(fault)

    def _read(self, rank: int) -> None:
        """Check the instructions of a rank in order, and register its operations for the rendezvous."""
        facts, rendezvous = self._facts, self._rendezvous
        place = d, s = facts.stage_of[rank]
        stage = facts.plan.layout.replicas[d].stages[s]
        gradients_left = {c: facts.gradients_of.get((d, s, c), 0) for c in range(len(stage.chunks))}
        reached = {c: last + 1 if gradients_left[c] else first for c, (first, last) in enumerate(stage.chunks)}
        entered: set[Node] = set()
        computed: set[Node] = set()
        received: dict[Edge, list[int]] = {}
        summed: set[int] = set()
        for index, entry in enumerate(self._programs[rank]):
            if isinstance(entry, Compute):
                p = entry.primitive
                v = facts.at[d, s, p.chunk, p.micro_batch]
                node = (p.kind, p.micro_batch, v)
                low, high = entry.layers or stage.chunks[p.chunk]
                if entry.layers and (p.kind == "F" or gradients_left[p.chunk] != 1):
                    self._refuse(rank, index, entry, "in parts, though it does not complete its chunk's gradients")
                if p.kind != "F" and gradients_left[p.chunk] == 1:
                    reached[p.chunk] = low
                entered.add(node)
                if low == stage.chunks[p.chunk][0]:
                    computed.add(node)
                    gradients_left[p.chunk] -= p.kind != "F"
                arrival = received.get(("forward" if p.kind == "F" else "backward", p.micro_batch, v - (p.kind == "F")))
                if arrival and p.kind != "W":
                    rendezvous.step(rank, index, [], arrival)
                if stage.tp > 1:
                    together = [rendezvous.operation(("group", stage.ranks), rank, (*node, low, high))]
                    rendezvous.step(rank, index, together, together)
            elif isinstance(entry, Transmit):
                edge = (entry.parcel.direction, entry.parcel.micro_batch, entry.parcel.boundary)
                self._check_parcel(rank, index, entry, edge, entered, computed)
                begun = self._begin(rank, index, entry.parcel, edge)
                if self._ends(edge)[1] == place:
                    received[edge] = begun
            else:
                self._check_reduce(rank, index, entry, reached, summed)
                if len(self._owners[entry.bucket]) > 1:
                    channel = ("group", self._facts.buckets[entry.bucket].owners)
                    rendezvous.step(rank, index, [rendezvous.operation(channel, rank, ("bucket", entry.bucket))], [])
        self._check_summed(rank, summed)

    def _begin(self, rank: int, index: int, parcel: Parcel, edge: Edge) -> list[int]:
        """Register this rank's pieces of a parcel as begun, and return the numbers of their operations."""
        begun = [
            self._rendezvous.operation(
                (edge[0], (piece.sender, piece.receiver)), rank, (*edge, piece.start, piece.stop, piece.of)
            )
            for piece in parcel.pieces
            if rank in (piece.sender, piece.receiver)
        ]
        self._rendezvous.step(rank, index, begun, [])
        return begun

    def _check_summed(self, rank: int, summed: set[int]) -> None:
        """Check that a rank sums each bucket of which it is an owner."""
        for b, owners in enumerate(self._owners):
            if rank in owners and b not in summed:
                self._facts.refuse(f"rank {rank} owns bucket {b} and never begins to sum it")

    def _ends(self, edge: Edge) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the stage that sends a parcel and the stage that receives it."""
        direction, m, b = edge
        first, second = ((stop.replica, stop.stage) for stop in self._facts.paths[m][b : b + 2])
        return (first, second) if direction == "forward" else (second, first)

    def _check_parcel(
        self, rank: int, index: int, entry: Transmit, edge: Edge, entered: set[Node], computed: set[Node]
    ) -> None:
        direction, m, b = edge
        parcel, path = entry.parcel, self._facts.paths.get(m, ())
        if not 0 <= b < len(path) - 1:
            self._refuse(rank, index, entry, "there is no such boundary")
        source, target = self._ends(edge)
        place = self._facts.stage_of[rank]
        if source == target:
            self._refuse(rank, index, entry, "both sides are the same stage, which hands over without a parcel")
        if place not in (source, target):
            self._refuse(rank, index, entry, f"it is for the ranks of {_stages(source, target)}, not for this one")
        key = (source, target, parcel.pieces, parcel.gathered)
        if key not in self._sound:
            self._sound[key] = self._unsound(source, target, parcel)
        fault = self._sound[key]
        if fault:
            self._refuse(rank, index, entry, fault)
        first_rank, first_parcel = self._parcels.setdefault(edge, (rank, parcel))
        if first_parcel is not parcel and first_parcel != parcel:
            self._refuse(rank, index, entry, f"its pieces are not those that rank {first_rank} has")
        if rank in self._handled[edge]:
            self._refuse(rank, index, entry, "a second time")
        self._handled[edge].add(rank)
        forward = direction == "forward"
        if place == source and ("F" if forward else "B", m, b if forward else b + 1) not in computed:
            self._refuse(rank, index, entry, "sent before it is computed")
        if place == target and ("F" if forward else "B", m, b + 1 if forward else b) in entered:
            self._refuse(rank, index, entry, "received after its use")

    def _unsound(self, source: tuple[int, int], target: tuple[int, int], parcel: Parcel) -> str | None:
        """Return why the pieces of a parcel do not bring each receiver exactly the elements that it needs from the
        right ranks.

        None if they do.
        """
        split = self._facts.plan.sequence_parallel
        replicas = self._facts.plan.layout.replicas
        senders, receivers = (replicas[d].stages[s].ranks for d, s in (source, target))
        if split and parcel.gathered:
            return "under sequence parallelism receivers keep their parts, but this is to be gathered"
        brought: dict[int, list[tuple[Fraction, Fraction]]] = defaultdict(list)
        for piece in parcel.pieces:
            fault = _unsound_piece(piece, senders, receivers, split)
            if fault:
                return fault
            brought[piece.receiver].append(_extent(piece))
        for rank in senders:
            if all(piece.sender != rank for piece in parcel.pieces):
                return f"rank {rank} has nothing to send"
        in_parts = split or parcel.gathered
        for t, rank in enumerate(receivers):
            start, stop = (Fraction(t + i, len(receivers)) if in_parts else Fraction(i) for i in (0, 1))
            for here, after in sorted(brought[rank]):
                if here != start:
                    break
                start = after
            else:
                if start == stop:
                    continue
            return f"its pieces do not bring rank {rank} just the elements that it needs"
        return None

    def _check_complete(self, edge: Edge) -> None:
        source, target = self._ends(edge)
        replicas = self._facts.plan.layout.replicas
        for action, (d, s) in (("sends", source), ("receives", target)):
            for rank in replicas[d].stages[s].ranks:
                if rank not in self._handled[edge]:
                    self._facts.refuse(f"rank {rank} never {action} the {spoken_parcel(*edge)}")

    def _check_reduce(self, rank: int, index: int, entry: Reduce, reached: dict[int, int], summed: set[int]) -> None:
        b = entry.bucket
        if not 0 <= b < len(self._owners):
            self._refuse(rank, index, entry, "there is no such bucket")
        if rank not in self._owners[b]:
            self._refuse(rank, index, entry, "the rank does not own it")
        if b in summed:
            self._refuse(rank, index, entry, "a second time")
        summed.add(b)
        d, s = self._facts.stage_of[rank]
        key = (d, s, self._facts.buckets[b].units)
        if key not in self._depths:
            self._depths[key] = depths(self._facts.plan.layout, *key)
        for chunk, depth in self._depths[key].items():
            if reached[chunk] > depth:
                self._refuse(rank, index, entry, f"too early, gradients of chunk {chunk} are not complete yet")

    def _refuse(self, rank: int, index: int, entry: Instruction, fault: str) -> NoReturn:
        self._facts.refuse(f"rank {rank}, instruction {index} ({instruction_text(entry)}): {fault}")


def _unsound_piece(piece: TensorRange, senders: tuple[int, ...], receivers: tuple[int, ...], split: bool) -> str | None:
    """Return why a piece cannot go from its sender to its receiver, or None if it can.

    `split`: whether the plan has sequence parallelism, under which a sender holds only its part of the tensor.
    """
    if piece.sender not in senders or piece.receiver not in receivers:
        wrong = piece.sender if piece.sender not in senders else piece.receiver
        return f"a piece goes from rank {piece.sender} to rank {piece.receiver}, but rank {wrong} has no part"
    if not 0 <= piece.start < piece.stop <= piece.of:
        return f"a piece has the elements {piece.start} to {piece.stop} of {piece.of}"
    if not split:
        return None
    start, stop = _extent(piece)
    t = senders.index(piece.sender)
    if not Fraction(t, len(senders)) <= start < stop <= Fraction(t + 1, len(senders)):
        return f"rank {piece.sender} does not hold elements {piece.start} to {piece.stop} of {piece.of}"
    return None


def _extent(piece: TensorRange) -> tuple[Fraction, Fraction]:
    """Return start and end of a piece as fractions of the tensor."""
    return Fraction(piece.start, piece.of), Fraction(piece.stop, piece.of)


def _stages(*places: tuple[int, int]) -> str:
    return " and ".join(f"replica {d} stage {s}" for d, s in places)
