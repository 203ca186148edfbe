"""The computation rules of the checker: each micro-batch passes each of its stops, in a possible order.

The module computes the requirements of a plan once, and checks the orders of the stages against them. It never checks
communication (`resihp.pipeline.communication_rules`). Called by `resihp.pipeline.checker`.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NoReturn

from resihp.errors import PlanError
from resihp.parallelism.plan import Order, Plan, Primitive, Stop
from resihp.pipeline.program import Bucket, Compute, Instruction, Program, Transmit
from resihp.pipeline.rendezvous import spoken_parcel
from resihp.pipeline.timeline import Node, Orders, spoken, virtual_stages


class PlanFacts:
    """The requirements of a plan, computed once, and the rules for its computations.

    `kinds` contains the kinds of primitives that the programs must carry out: "FBW", or "F" for an evaluation.
    """

    def __init__(self, plan: Plan, buckets: Sequence[Bucket], kinds: str) -> None:
        self.plan, self.buckets = plan, buckets
        self.learns = "B" in kinds
        """Whether micro-batches also pass backward; false for an evaluation."""
        self.paths = plan.paths()
        self._check_vacant_stages()
        self.at = virtual_stages(self.paths)
        self.stage_of = {rank: (place.replica, place.stage) for rank, place in plan.layout.places()}
        for b, bucket in enumerate(buckets):
            strange = [rank for rank in bucket.owners if rank not in self.stage_of]
            if strange or len(set(bucket.owners)) < len(bucket.owners):
                self.refuse(f"bucket {b} is of ranks {list(bucket.owners)}, which are not different ranks with work")
        self.gradients_of: dict[tuple[int, int, int], int] = defaultdict(int)
        """Number of Bs and Ws of each (replica, stage, chunk)."""

    def _check_vacant_stages(self) -> None:
        vacant = set(self.plan.layout.vacant)
        for m, path in self.paths.items() if vacant else ():
            for stop in path:
                if (stop.replica, stop.stage) in vacant:
                    self.refuse(
                        f"micro-batch {m} passes replica {stop.replica} stage {stop.stage}, which has no rank; it must "
                        f"migrate there"
                    )

    def refuse(self, fault: str) -> NoReturn:
        raise PlanError(f"plan of epoch {self.plan.epoch}: {fault}")

    def ranks(self, stop: Stop) -> tuple[int, ...]:
        return self.plan.layout.replicas[stop.replica].stages[stop.stage].ranks

    def orders_in(self, programs: Mapping[int, Program]) -> Orders:
        """Return the order of each stage, as the programs of its ranks have it. Refuses the plan if ranks of a stage
        disagree.
        """
        for rank in sorted(set(self.stage_of).symmetric_difference(programs)):
            fault = "has no program" if rank in self.stage_of else "has a program, but no work in this layout"
            self.refuse(f"rank {rank} {fault}")
        order_of_stage: dict[tuple[int, int], tuple[int, Order]] = {}
        for rank, place in self.stage_of.items():
            order = self._order(rank, programs[rank])
            first_rank, expected = order_of_stage.setdefault(place, (rank, order))
            if order != expected:
                k, mine, others = difference(order, expected)
                self.refuse(
                    f"computation {k} is {mine} on rank {rank}, but {others} on rank {first_rank} of the same stage; "
                    f"tensor-parallel ranks must compute the same"
                )
        shape = [len(replica.stages) for replica in self.plan.layout.replicas]
        nothing: tuple[int, Order] = (0, ())
        return tuple(
            tuple(order_of_stage.get((d, s), nothing)[1] for s in range(stages)) for d, stages in enumerate(shape)
        )

    def _order(self, rank: int, program: Program) -> Order:
        """Return the computations of a program as primitives, with the parts of a primitive joined.

        Refuses parts that do not go from the chunk's last layer to its first.
        """
        d, s = self.stage_of[rank]
        chunks = self.plan.layout.replicas[d].stages[s].chunks
        order: list[Primitive] = []
        unfinished: tuple[Primitive, int] | None = None
        """The primitive of which some parts were computed, and its next layer; None between primitives."""
        for index, entry in enumerate(program):
            if not isinstance(entry, Compute):
                continue
            p, layers = entry.primitive, entry.layers
            if layers is not None or unfinished is not None:
                first, last = chunks[p.chunk] if 0 <= p.chunk < len(chunks) else (0, -1)
                due = unfinished or (p, last)
                if layers is None or (p, layers[1]) != due or not first <= layers[0] <= layers[1]:
                    where = f"rank {rank}, instruction {index} ({instruction_text(entry)})"
                    self.refuse(f"{where}: layer {due[1]} of {spoken(due[0])} is due")
                unfinished = (p, layers[0] - 1) if layers[0] > first else None
            if unfinished is None:
                order.append(p)
        if unfinished is not None:
            self.refuse(f"rank {rank} never computes layer {unfinished[1]} of {spoken(unfinished[0])}")
        return tuple(order)

    def orders(self, orders: Orders) -> None:
        """Check that each primitive occurs once, on the path of its micro-batch, and after its dependencies on the same
        stage.
        """
        done: set[Node] = set()
        weights: dict[tuple[int, int, int], set[int]] = defaultdict(set)
        for d, replica in enumerate(orders):
            for s, order in enumerate(replica):
                for k, p in enumerate(order):
                    v = self.at.get((d, s, p.chunk, p.micro_batch))
                    fault = self._misplaced(d, s, p) if v is None else self._untimely(p, v, done)
                    if fault or v is None:
                        ranks = self.plan.layout.replicas[d].stages[s].ranks
                        rank_name = f"rank {ranks[0]}" if ranks else "no rank"
                        self.refuse(f"{rank_name} (replica {d} stage {s}), computation {k} ({spoken(p)}): {fault}")
                    done.add((p.kind, p.micro_batch, v))
                    if p.kind == "W":
                        weights[d, s, p.chunk].add(p.micro_batch)
                    if p.kind != "F":
                        self.gradients_of[d, s, p.chunk] += 1
        for m, path in self.paths.items():
            for v, stop in enumerate(path):
                with_weights = weights.get((stop.replica, stop.stage, stop.chunk), ())
                required = [("F", True), ("B", self.learns), ("W", bool(with_weights))]
                for kind, needed in required:
                    if needed and (kind, m, v) not in done:
                        why = ", though others of this chunk have theirs" if kind == "W" else ""
                        self.refuse(
                            f"rank {self.ranks(stop)[0]} (replica {stop.replica} stage {stop.stage}) lacks {kind} of "
                            f"micro-batch {m} in chunk {stop.chunk}{why}"
                        )

    def _misplaced(self, d: int, s: int, p: Primitive) -> str:
        if p.micro_batch not in self.paths:
            return f"there is no micro-batch {p.micro_batch}"
        if not 0 <= p.chunk < len(self.plan.layout.replicas[d].stages[s].chunks):
            return f"the stage has no chunk {p.chunk}"
        return f"wrong stop, micro-batch {p.micro_batch} does not pass chunk {p.chunk} there"

    def _untimely(self, p: Primitive, v: int, done: set[Node]) -> str | None:
        m = p.micro_batch
        if (p.kind, m, v) in done:
            return "comes twice"
        if p.kind == "W":
            return None if ("B", m, v) in done else "comes before its B"
        if p.kind == "B" and ("F", m, v) not in done:
            return "comes before its F"
        before = v - 1 if p.kind == "F" else v + 1
        path = self.paths[m]
        if 0 <= before < len(path) and same_stage(path[before], path[v]) and (p.kind, m, before) not in done:
            return f"comes before {spoken(Primitive(p.kind, m, path[before].chunk))}, which this stage hands over to it"
        return None


def difference(order: Order, expected: Order) -> tuple[int, str, str]:
    """Return the first position at which two orders differ, and the text of each order's primitive there."""
    pairs = itertools.zip_longest(order, expected)
    k, pair = next((k, pair) for k, pair in enumerate(pairs) if pair[0] != pair[1])
    own_text, expected_text = ("nothing" if p is None else spoken(p) for p in pair)
    return k, own_text, expected_text


def same_stage(a: Stop, b: Stop) -> bool:
    """Return whether two stops of a micro-batch are on the same stage, so that nothing is sent between them."""
    return (a.replica, a.stage) == (b.replica, b.stage)


def instruction_text(entry: Instruction) -> str:
    """Return the text that names an instruction in a message."""
    if isinstance(entry, Compute):
        part = f" in layers {entry.layers[0]} to {entry.layers[1]}" if entry.layers else ""
        return f"{spoken(entry.primitive)}{part}"
    if isinstance(entry, Transmit):
        return spoken_parcel(entry.parcel.direction, entry.parcel.micro_batch, entry.parcel.boundary)
    return f"sum of bucket {entry.bucket}"
