"""Plays programs under NCCL's rules, before anyone acts on them. Pure; it refuses programs, it never repairs them.

Computation: every micro-batch passes each of its stops once forward and, unless the programs are an evaluation's, once
backward, in an order that respects the dependencies. Communication: every parcel is sent once, after it is computed and
before it is used; every bucket is summed once, after its gradients are complete. Termination: the programs finish under
the strictest reading of NCCL's rules (`resihp.pipeline.rendezvous`), computations of a tensor-parallel group included.

Called by the controller before it proposes a plan, and by each rank before it confirms one.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NoReturn

import msgspec

from resihp.errors import PlanError
from resihp.parallelism.layout import Layout
from resihp.parallelism.plan import Order, Plan, Primitive, Stop
from resihp.pipeline import program as compiled
from resihp.pipeline.parts import depths
from resihp.pipeline.program import Bucket, Compute, Instruction, Parcel, Program, Reduce, Transmit
from resihp.pipeline.rendezvous import Rendezvous, spoken_parcel
from resihp.pipeline.schedules import orders_of
from resihp.pipeline.timeline import Node, Orders, spoken, virtual_stages

_Edge = tuple[str, int, int]
"""Direction, micro-batch and boundary, which identify a parcel."""


def check(plan: Plan, programs: Mapping[int, Program] | None = None, buckets: Sequence[Bucket] = ()) -> None:
    """Raise PlanError if `programs` (by default the programs that follow from the plan) must not be carried out.

    The message names rank, instruction and fault, or the ranks that wait for each other. Linear in the number of
    instructions; of several replicas that share nothing and do the same work, only one is played.
    """
    _shares(plan)
    if programs is None and not buckets and not plan.migrations:
        try:
            _judge(_one_of_each(plan), None, ())
            return
        except PlanError:
            pass  # the error is raised below, with the numbers of the whole plan
    _judge(plan, programs, buckets)


def check_forward_only(plan: Plan, programs: Mapping[int, Program]) -> None:
    """Raise PlanError as `check` does, for the programs of an evaluation (`program.forward_only`) of a valid plan."""
    _judge(plan, programs, (), kinds="F")


def _one_of_each(plan: Plan) -> Plan:
    """Return the plan without replicas that repeat another replica's work under other rank and micro-batch numbers.

    Nothing passes between replicas if nothing migrates and no gradients are summed, and the work of each follows from
    its stages, its share and its orders alone.
    """
    orders = orders_of(plan)
    if len(set(plan.layout.active)) < len(plan.layout.active):
        return plan
    kinds: dict[object, int] = {}
    for d, (replica, share) in enumerate(zip(plan.layout.replicas, plan.assignment, strict=True)):
        place = {m: i for i, m in enumerate(sorted(share))}
        ascending = {rank: i for i, rank in enumerate(sorted(replica.ranks))}
        stages = tuple((tuple(ascending[rank] for rank in stage.ranks), stage.chunks) for stage in replica.stages)
        work = tuple(tuple((p.kind, place.get(p.micro_batch, p), p.chunk) for p in order) for order in orders[d])
        kinds.setdefault((stages, tuple(place[m] for m in share), work), d)
    kept = sorted(kinds.values())
    return msgspec.structs.replace(
        plan,
        layout=Layout(tuple(plan.layout.replicas[d] for d in kept)),
        assignment=tuple(plan.assignment[d] for d in kept),
        orders=tuple(orders[d] for d in kept),
    )


def _judge(plan: Plan, programs: Mapping[int, Program] | None, buckets: Sequence[Bucket], kinds: str = "FBW") -> None:
    facts = _Facts(plan, buckets, kinds)
    if programs is None:
        facts.orders(orders_of(plan))
        programs = compiled.programs(plan, buckets)
    else:
        orders = facts.orders_in(programs)
        facts.orders(orders)
        for replica, due, shape in zip(orders, orders_of(plan), plan.layout.replicas, strict=True):
            for order, planned_order, stage in zip(replica, due, shape.stages, strict=True):
                expected = tuple(p for p in planned_order if p.kind in kinds)
                if order != expected:
                    k, mine, planned = _difference(order, expected)
                    rank_name = f"rank {stage.ranks[0]}" if stage.ranks else "no rank"
                    facts.refuse(f"computation {k} is {mine} on {rank_name}, but {planned} in the plan")
    _Wire(facts, programs).judge()


def _shares(plan: Plan) -> None:
    """Check that each micro-batch has one home, and migrates to existing replicas, at most once at each virtual
    stage."""
    subject = f"plan of epoch {plan.epoch}: "
    replicas = plan.layout.replicas
    if len(plan.assignment) != len(replicas):
        raise PlanError(f"{subject}{len(plan.assignment)} shares of micro-batches for {len(replicas)} replicas")
    homes = {m: d for d, share in enumerate(plan.assignment) for m in share}
    if sorted(m for share in plan.assignment for m in share) != list(range(len(homes))):
        raise PlanError(f"{subject}shares {list(map(list, plan.assignment))} do not give each micro-batch one home")
    migrated: set[tuple[int, int]] = set()
    for migration in plan.migrations:
        m, v = migration.micro_batch, migration.virtual_stage
        if m not in homes or not 0 <= v < len(replicas[homes[m]].virtual_stages):
            raise PlanError(f"{subject}micro-batch {m} has no virtual stage {v} that could migrate")
        if not 0 <= migration.replica < len(replicas):
            raise PlanError(f"{subject}micro-batch {m} migrates to replica {migration.replica}, which does not exist")
        if (m, v) in migrated:
            raise PlanError(f"{subject}micro-batch {m} migrates twice at virtual stage {v}")
        migrated.add((m, v))


class _Facts:
    """The requirements of a plan, computed once, and the rules for computation."""

    def __init__(self, plan: Plan, buckets: Sequence[Bucket], kinds: str) -> None:
        self.plan, self.buckets = plan, buckets
        self.learns = "B" in kinds
        """Whether micro-batches also pass backward."""
        self.paths = plan.paths()
        self._check_vacant_stages()
        self.at = virtual_stages(self.paths)
        self.stage_of = {rank: (place.replica, place.stage) for rank, place in plan.layout.places()}
        for b, bucket in enumerate(buckets):
            strange = [rank for rank in bucket.owners if rank not in self.stage_of]
            if strange or len(set(bucket.owners)) < len(bucket.owners):
                self.refuse(f"bucket {b} is of ranks {list(bucket.owners)}, which are not different ranks with work")
        self.gradients_of: dict[tuple[int, int, int], int] = defaultdict(int)
        """B and W of each (replica, stage, chunk)."""

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
        """Return the order of each stage by the programs of its ranks. Refuses the plan if the ranks of a stage
        disagree."""
        for rank in sorted(set(self.stage_of).symmetric_difference(programs)):
            fault = "has no program" if rank in self.stage_of else "has a program, but no work in this layout"
            self.refuse(f"rank {rank} {fault}")
        order_of_stage: dict[tuple[int, int], tuple[int, Order]] = {}
        for rank, place in self.stage_of.items():
            order = self._order(rank, programs[rank])
            first_rank, expected = order_of_stage.setdefault(place, (rank, order))
            if order != expected:
                k, mine, others = _difference(order, expected)
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
        """Return the computations of a program, with the parts of a primitive put together.

        Parts go from the last layer to the first.
        """
        d, s = self.stage_of[rank]
        chunks = self.plan.layout.replicas[d].stages[s].chunks
        order: list[Primitive] = []
        unfinished: tuple[Primitive, int] | None = None
        """The primitive that is being computed in parts, and its next layer."""
        for index, entry in enumerate(program):
            if not isinstance(entry, Compute):
                continue
            p, layers = entry.primitive, entry.layers
            if layers is not None or unfinished is not None:
                first, last = chunks[p.chunk] if 0 <= p.chunk < len(chunks) else (0, -1)
                due = unfinished or (p, last)
                if layers is None or (p, layers[1]) != due or not first <= layers[0] <= layers[1]:
                    where = f"rank {rank}, instruction {index} ({_instruction(entry)})"
                    self.refuse(f"{where}: layer {due[1]} of {spoken(due[0])} is due")
                unfinished = (p, layers[0] - 1) if layers[0] > first else None
            if unfinished is None:
                order.append(p)
        if unfinished is not None:
            self.refuse(f"rank {rank} never computes layer {unfinished[1]} of {spoken(unfinished[0])}")
        return tuple(order)

    def orders(self, orders: Orders) -> None:
        """Check that each primitive occurs once, on the path of its micro-batch, and after its dependencies on that
        stage."""
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
        if 0 <= before < len(path) and _same_stage(path[before], path[v]) and (p.kind, m, before) not in done:
            return f"comes before {spoken(Primitive(p.kind, m, path[before].chunk))}, which this stage hands over to it"
        return None


class _Wire:
    """The rules for communication: each rank's operations in the order in which it begins them."""

    def __init__(self, facts: _Facts, programs: Mapping[int, Program]) -> None:
        self._facts, self._programs = facts, programs
        self._owners = [tuple(sorted(bucket.owners)) for bucket in facts.buckets]
        self._depths: dict[tuple[int, int, tuple[str, ...]], dict[int, int]] = {}
        self._sound: dict[tuple[object, ...], str | None] = {}
        self._parcels: dict[_Edge, tuple[int, Parcel]] = {}
        self._handled: dict[_Edge, set[int]] = defaultdict(set)
        self._rendezvous = Rendezvous(programs)

    def judge(self) -> None:
        """Check each instruction by itself, then all of them together."""
        for rank in self._programs:
            self._read(rank)
        for m, path in self._facts.paths.items():
            for b in range(len(path) - 1):
                if not _same_stage(path[b], path[b + 1]):
                    self._check_complete(("forward", m, b))
                    if self._facts.learns:
                        self._check_complete(("backward", m, b))
        fault = self._rendezvous.mismatch() or self._rendezvous.deadlock()
        if fault:
            self._facts.refuse(fault)

    def _read(self, rank: int) -> None:
        facts, rendezvous = self._facts, self._rendezvous
        place = d, s = facts.stage_of[rank]
        stage = facts.plan.layout.replicas[d].stages[s]
        gradients_left = {c: facts.gradients_of.get((d, s, c), 0) for c in range(len(stage.chunks))}
        reached = {c: last + 1 if gradients_left[c] else first for c, (first, last) in enumerate(stage.chunks)}
        entered: set[Node] = set()
        computed: set[Node] = set()
        received: dict[_Edge, list[int]] = {}
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
                begun = [
                    rendezvous.operation(
                        (edge[0], (piece.sender, piece.receiver)), rank, (*edge, piece.start, piece.stop, piece.of)
                    )
                    for piece in entry.parcel.pieces
                    if rank in (piece.sender, piece.receiver)
                ]
                rendezvous.step(rank, index, begun, [])
                if self._ends(edge)[1] == place:
                    received[edge] = begun
            else:
                self._check_reduce(rank, index, entry, reached, summed)
                if len(self._owners[entry.bucket]) > 1:
                    channel = ("group", self._facts.buckets[entry.bucket].owners)
                    rendezvous.step(rank, index, [rendezvous.operation(channel, rank, ("bucket", entry.bucket))], [])
        for b, owners in enumerate(self._owners):
            if rank in owners and b not in summed:
                facts.refuse(f"rank {rank} owns bucket {b} and never begins to sum it")

    def _ends(self, edge: _Edge) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the stage that sends a parcel and the stage that receives it."""
        direction, m, b = edge
        first, second = ((stop.replica, stop.stage) for stop in self._facts.paths[m][b : b + 2])
        return (first, second) if direction == "forward" else (second, first)

    def _check_parcel(
        self, rank: int, index: int, entry: Transmit, edge: _Edge, entered: set[Node], computed: set[Node]
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
        """Return why the pieces do not give each receiver exactly what it needs from the right ranks, or None if they
        do."""
        split = self._facts.plan.sequence_parallel
        replicas = self._facts.plan.layout.replicas
        senders, receivers = (replicas[d].stages[s].ranks for d, s in (source, target))
        if split and parcel.gathered:
            return "under sequence parallelism receivers keep their parts, but this is to be gathered"
        brought: dict[int, list[tuple[Fraction, Fraction]]] = defaultdict(list)
        for piece in parcel.pieces:
            if piece.sender not in senders or piece.receiver not in receivers:
                wrong = piece.sender if piece.sender not in senders else piece.receiver
                return f"a piece goes from rank {piece.sender} to rank {piece.receiver}, but rank {wrong} has no part"
            if not 0 <= piece.start < piece.stop <= piece.of:
                return f"a piece has the elements {piece.start} to {piece.stop} of {piece.of}"
            extent = Fraction(piece.start, piece.of), Fraction(piece.stop, piece.of)
            t = senders.index(piece.sender)
            if split and not Fraction(t, len(senders)) <= extent[0] < extent[1] <= Fraction(t + 1, len(senders)):
                return f"rank {piece.sender} does not hold elements {piece.start} to {piece.stop} of {piece.of}"
            brought[piece.receiver].append(extent)
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

    def _check_complete(self, edge: _Edge) -> None:
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
        self._facts.refuse(f"rank {rank}, instruction {index} ({_instruction(entry)}): {fault}")


def _difference(order: Order, expected: Order) -> tuple[int, str, str]:
    """Return the position at which two orders begin to differ, and what each has there."""
    pairs = itertools.zip_longest(order, expected)
    k, pair = next((k, pair) for k, pair in enumerate(pairs) if pair[0] != pair[1])
    own_text, expected_text = ("nothing" if p is None else spoken(p) for p in pair)
    return k, own_text, expected_text


def _same_stage(a: Stop, b: Stop) -> bool:
    return (a.replica, a.stage) == (b.replica, b.stage)


def _instruction(entry: Instruction) -> str:
    if isinstance(entry, Compute):
        part = f" in layers {entry.layers[0]} to {entry.layers[1]}" if entry.layers else ""
        return f"{spoken(entry.primitive)}{part}"
    if isinstance(entry, Transmit):
        return spoken_parcel(entry.parcel.direction, entry.parcel.micro_batch, entry.parcel.boundary)
    return f"sum of bucket {entry.bucket}"


def _stages(*places: tuple[int, int]) -> str:
    return " and ".join(f"replica {d} stage {s}" for d, s in places)
