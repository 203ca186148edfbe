"""What a layout takes that the search is looking at: layers of each stage, micro-batches of each replica. Pure.

A pipeline is known by its *kind*, what counts of it for its time, and is cut once for each kind; one of a kind and with
so many layers on each stage is a *row* of tables, on which the machine code works (`resihp.scheduler.search.kernels`).
Times are those of `resihp.scheduler.cost.prices`, to rounding, limits those of `resihp.scheduler.cost.memory`. Called
by `resihp.scheduler.search.annealing`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import msgspec
import numpy as np

from resihp.parallelism.layout import Replica, Stage
from resihp.parallelism.plan import Order, Primitive
from resihp.pipeline.compiled import KINDS
from resihp.pipeline.parts import PARTS
from resihp.scheduler.cost import memory
from resihp.scheduler.cost.gradient_sync import BUCKET_BYTES, GRADIENT_BYTES
from resihp.scheduler.cost.held_state import holdings
from resihp.scheduler.cost.prices import after_backward_s
from resihp.scheduler.cost.transition_memory import layers_beside
from resihp.scheduler.search import kernels
from resihp.scheduler.situation import Situation

OFFERS = 5
"""Partitions of a pipeline whose neighbours are looked at."""
MOST_CHUNKS = 4000
"""Of all micro-batches, up to which pipelines may have orders of their own, as these are part of a plan."""
DEPTHS = (-1, *range(8))
"""See `kernels.limited`; PATIENCE `kernels.scheduled`."""
PATIENCE = (0.0, 0.25, 0.5, 0.75, 1.0)
MOST_BYTES = 64_000_000
"""Of the tables; they are begun anew then."""

Ranks = tuple[int, ...]
Pipe = tuple[Ranks, ...]
"""The groups of a replica, in pipeline order."""


class Laid(msgspec.Struct, frozen=True, eq=False):
    """A replica: its groups, how many layers each holds, and its row in the tables."""

    groups: Pipe
    counts: tuple[int, ...]
    row: int

    @property
    def replica(self) -> Replica:
        first, stages = 0, []
        for ranks, count in zip(self.groups, self.counts, strict=True):
            stages.append(Stage(ranks, ((first, first + count - 1),)))
            first += count
        return Replica(tuple(stages))


class Score(msgspec.Struct, frozen=True):
    """Of a layout; infinite where there is no memory for it."""

    seconds: float
    """Of an iteration."""
    parts_s: float
    """What they were if micro-batches could be shared out in parts: falls with whatever makes any replica faster."""
    counts: tuple[int, ...]
    """Micro-batches of each replica."""


WORST = Score(math.inf, math.inf, ())


class Pipelines:
    """Kinds, rows and their times, of one situation. `most_stages`: of a replica; `beside`: each rank has room for its
    state as it is beside that to come, about (`transition_memory.layers_beside`)."""

    def __init__(self, situation: Situation, most_stages: int, *, beside: bool = False) -> None:
        self._situation, self.most_stages = situation, most_stages
        survivors = set(situation.available).difference(situation.stale)
        held = holdings(situation.base.replicas) if beside else ()
        self._held = {rank: state for rank, state in held if rank in survivors}
        self._layers_beside: dict[tuple[Ranks, bool, bool], int] = {}
        times = situation.times
        columns = [(layer.f, layer.b, layer.w) for layer in times.layers]
        self._costs = kernels.Costs(
            np.array([[0.0, *itertools.accumulate(column)] for column in zip(*columns, strict=True)]),
            np.array([[t.f, t.b, t.w] for t in (times.embedding, times.head)]),
            situation.schedule == "zero-bubble",
            PARTS,
        )
        self._far = bool(times.transfer_s or times.inside_s)
        self._linked = bool(situation.links and times.gradient_s)
        self._own = situation.micro_batches * most_stages <= MOST_CHUNKS
        names = sorted(set(situation.nodes.values()))
        self._nodes = {name: i for i, name in enumerate(names)}
        self._links = np.ones((len(names), len(names)) if self._linked else (1, 1))
        if self._linked:
            for (a, b), speed in situation.links.items():
                if a in self._nodes and b in self._nodes:
                    i, j = self._nodes[a], self._nodes[b]
                    self._links[i, j] = self._links[j, i] = speed
        self._groups: dict[Ranks, tuple[int, float, tuple[str, ...]]] = {}
        self._ways: dict[tuple[tuple[str, ...], tuple[str, ...]], float] = {}
        self._room: dict[tuple[int, int, int, int, int | None], int] = {}
        self._rooms_of: dict[tuple[tuple[int, ...], int, int | None], list[int]] = {}
        self._alive: dict[tuple[bool, bool, int, int, int | None], int] = {}
        self.clear()

    def clear(self) -> None:
        """Forget all rows."""
        self._number: dict[Pipe, int] = {}
        self._kinds: dict[object, int] = {}
        self._of_kind: list[tuple[tuple[int, ...], kernels.PipeKind, list[int], list[int]]] = []
        """Degree of each stage, what the machine code is told, number of its node, where nodes matter, and most layers
        beside what its ranks hold, where that matters."""
        self._cut: dict[tuple[int, int, int | None], tuple[int, ...] | None] = {}
        self._rows: dict[tuple[int, tuple[int, ...], int | None], int] = {}
        self._allot(64)

    @property
    def full(self) -> bool:
        return self._tables.times.nbytes > MOST_BYTES or len(self._number) > MOST_BYTES // 1000

    # --- one replica ----------------------------------------------------------------------------------------------

    def cut(self, groups: Pipe, micro_batches: int, replicas: int) -> Laid | None:
        """With the layers that make it fastest for so many micro-batches, one of so many replicas; None where they do
        not fit, or a group stands still."""
        if len(groups) > self.most_stages:
            return None
        kind = self._kind_of(groups)
        state = self._state_bytes(replicas)
        key = (kind, micro_batches, state)
        if key not in self._cut:
            self._cut[key] = self._partition(kind, micro_batches, state)
        counts = self._cut[key]
        return None if counts is None else Laid(groups, counts, self._row(kind, counts, state))

    def kept(self, groups: Pipe, counts: tuple[int, ...], replicas: int) -> Laid:
        """With these layers."""
        return Laid(groups, counts, self._row(self._kind_of(groups), counts, self._state_bytes(replicas)))

    def _partition(self, kind: int, micro_batches: int, state: int | None) -> tuple[int, ...] | None:
        degrees, told, _, beside = self._of_kind[kind]
        counts = np.empty(len(degrees), np.int64)
        limits = np.array(self._rooms(degrees, micro_batches, state))
        if beside:
            limits = np.minimum(limits, beside)
        found = kernels.partitioned(micro_batches, told, limits, self._costs, OFFERS, counts)
        return tuple(counts.tolist()) if math.isfinite(found) else None

    def _rooms(self, degrees: tuple[int, ...], micro_batches: int, state: int | None) -> list[int]:
        """Most layers of each stage."""
        stages, situation = len(degrees), self._situation
        if situation.room_bytes is None:
            return [situation.model.layers] * stages
        all_of = (degrees, min(micro_batches, stages), state)
        if all_of in self._rooms_of:
            return self._rooms_of[all_of]
        found = self._rooms_of[all_of] = []
        for s, tp in enumerate(degrees):
            key = (s, stages, tp, min(micro_batches, stages), state)
            if key not in self._room:
                post = msgspec.structs.replace(
                    situation.post(s, stages, tp, 1), micro_batches=micro_batches, state_bytes=state
                )
                self._room[key] = memory.capacity(situation.model, post, self._room_bytes, situation.tokens)
            found.append(self._room[key])
        return found

    @property
    def _room_bytes(self) -> int:
        assert self._situation.room_bytes is not None
        return self._situation.room_bytes

    def _state_bytes(self, replicas: int) -> int | None:
        return self._situation.state_bytes_of(replicas)

    def _kind_of(self, groups: Pipe) -> int:
        found = self._number.get(groups)
        if found is None:
            known = [self._groups.get(ranks) or self._group(ranks) for ranks in groups]
            late = [self._way(a[2], b[2], i, groups) for i, (a, b) in enumerate(itertools.pairwise(known))]
            homes = [self._nodes[at[2][0]] if len(at[2]) == 1 else -1 for at in known] if self._linked else []
            beside = [self._beside(groups, s) for s in range(len(groups))] if self._held else []
            key = (tuple(at[:2] for at in known), tuple(late) if self._far else (), tuple(homes), tuple(beside))
            found = self._kinds.get(key)
            if found is None:
                found = self._kinds[key] = len(self._of_kind)
                gradient_s = self._situation.times.gradient_s
                layer_bytes = GRADIENT_BYTES * self._situation.model.parameters_per_layer
                degrees = tuple(at[0] for at in known)
                told = kernels.PipeKind(
                    np.array([at[1] for at in known]),
                    np.array([*late, 0.0]),
                    np.array([gradient_s / tp for tp in degrees]),
                    np.array([-(-BUCKET_BYTES * tp // layer_bytes) for tp in degrees]),
                )
                self._of_kind.append((degrees, told, homes, beside))
            self._number[groups] = found
        return found

    def _beside(self, groups: Pipe, s: int) -> int:
        situation, ranks, first, last = self._situation, groups[s], s == 0, s == len(groups) - 1
        found = self._layers_beside.get((ranks, first, last))
        if found is None:
            assert situation.room_bytes is not None
            replicas = len(situation.base.replicas)
            found = self._layers_beside[ranks, first, last] = layers_beside(
                [self._held.get(rank) for rank in ranks],
                situation.model,
                situation.room_bytes,
                first=first,
                last=last,
                sharing=(replicas, replicas) if situation.zero_1 else None,
            )
        return found

    def _group(self, ranks: Ranks) -> tuple[int, float, tuple[str, ...]]:
        situation = self._situation
        nodes = tuple(sorted({situation.nodes[rank] for rank in ranks}))
        found = self._groups[ranks] = (len(ranks), situation.speed(ranks), nodes)
        return found

    def _way(self, a: tuple[str, ...], b: tuple[str, ...], s: int, groups: Pipe) -> float:
        if not self._far:
            return 0.0
        found = self._ways.get((a, b))
        if found is None:
            found = self._ways[a, b] = self._situation.transfer_s(groups[s], groups[s + 1])
        return found

    # --- rows -----------------------------------------------------------------------------------------------------

    def _allot(self, rows: int) -> None:
        shape = (rows, self.most_stages)
        self._tables = kernels.Tables(
            stages=np.zeros(rows, np.int64),
            most=np.zeros(rows, np.int64),
            f=np.zeros(shape),
            b=np.zeros(shape),
            w=np.zeros(shape),
            late=np.zeros(shape),
            caps=np.zeros(shape, np.int64),
            held=np.zeros(shape, np.int64),
            each=np.zeros(shape),
            bucket=np.zeros(shape, np.int64),
            homes=np.zeros(shape, np.int64),
            exposed=np.zeros(rows),
            ramp=np.zeros(rows),
            pace=np.ones(rows),
            times=np.full((rows, self._situation.micro_batches + 2), np.nan),
        )

    def _grow(self) -> None:
        old = self._tables
        self._allot(2 * old.stages.size)
        for values, before in zip(self._tables, old, strict=True):
            values[: len(before)] = before

    def _row(self, number: int, counts: tuple[int, ...], state: int | None) -> int:
        key = (number, counts, state)
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = len(self._rows)
            if row == self._tables.stages.size:
                self._grow()
            (degrees, told, homes, beside), stages, tables = self._of_kind[number], len(counts), self._tables
            tables.stages[row], tables.most[row] = stages, self._most_micro_batches(degrees, counts, state)
            if any(count > most for count, most in zip(counts, beside, strict=False)):
                tables.most[row] = 0
            if self._own:
                tables.caps[row, :stages] = self._caps(degrees, counts, state)
            held = tables.held[row, :stages]
            held[:] = counts
            kernels.price(held, told.speeds, self._costs, tables.f[row], tables.b[row], tables.w[row])
            for values, given in ((tables.late, told.late), (tables.each, told.each), (tables.bucket, told.bucket)):
                values[row, :stages] = given
            tables.homes[row, :stages] = homes or 0
            split, parts = self._costs.split, self._costs.parts
            work = (tables.w if split else tables.b)[row, :stages]
            tables.exposed[row] = kernels.exposed(held, work, told.each, told.bucket, np.ones(stages), split, parts)
            f, b, w, late = tables.f[row], tables.b[row], tables.w[row], tables.late[row]
            tables.ramp[row], tables.pace[row] = kernels.line(stages, f, b, w, late, split)
        return row

    def _most_micro_batches(self, degrees: tuple[int, ...], counts: tuple[int, ...], state: int | None) -> int:
        """That there is memory for; as many as stages take as much as any number beyond."""
        for most in range(len(counts), 0, -1):
            if all(n <= room for n, room in zip(counts, self._rooms(degrees, most, state), strict=True)):
                return self._situation.micro_batches if most == len(counts) else most
        return 0

    def _caps(self, degrees: tuple[int, ...], counts: tuple[int, ...], state: int | None) -> list[int]:
        """Most micro-batches that each stage has memory for at once."""
        situation, stages, found = self._situation, len(counts), []
        for s, (tp, held) in enumerate(zip(degrees, counts, strict=True)):
            key = (s == 0, s == stages - 1, tp, held, state)
            if key not in self._alive:
                alive = memory.alive(
                    situation.model,
                    tp,
                    held,
                    situation.room_bytes,
                    situation.tokens,
                    first=s == 0,
                    last=s == stages - 1,
                    sequence_parallel=situation.sequence_parallel,
                    state_bytes=state,
                )
                self._alive[key] = int(min(max(alive, 0), situation.micro_batches))
            found.append(self._alive[key])
        return found

    # --- a layout -------------------------------------------------------------------------------------------------

    def score(self, pipes: Sequence[Laid], below: float = math.inf) -> Score:
        """`below`: what clearly takes more is not looked at any further."""
        total = self._situation.micro_batches
        if not pipes or len(pipes) > total:
            return WORST
        rows = np.array([one.row for one in pipes])
        counts = np.empty(len(pipes), np.int64)
        below -= self._situation.times.step_s
        seconds, parts_s = kernels.shared(total, rows, self._tables, self._costs.split, self._own, below, counts)
        if not math.isfinite(seconds):
            return WORST
        after = self._after_s(pipes, rows)
        return Score(seconds + after, parts_s + after, tuple(counts.tolist()))

    def orders(self, pipe: Laid, share: Sequence[int]) -> tuple[tuple[Order, ...] | None, float]:
        """Of a pipeline's own, for these micro-batches, None where those of the schedule are as good; what it takes."""
        tables, row, stages, count = self._tables, pipe.row, len(pipe.counts), len(share)
        f, b, w, late = tables.f[row], tables.b[row], tables.w[row], tables.late[row]
        usual = kernels.played(stages, count, f, b, w, late, self._costs.split)
        if not self._own or stages == 1:
            return None, usual
        best = usual * (1.0 - kernels.WORTH)
        found, limits = None, np.empty(stages, np.int64)
        order = np.empty((stages, count * (3 if self._costs.split else 2)), np.int64)
        for further, patience in itertools.product(DEPTHS, PATIENCE if self._costs.split else PATIENCE[:1]):
            kernels.limited(stages, count, further, limits)
            seconds = kernels.scheduled(
                stages, count, f, b, w, late, self._costs.split, limits, tables.caps[row], patience, order
            )
            if seconds < best:
                best, found = seconds, order.tolist()
        if found is None:
            return None, usual
        return tuple(tuple(Primitive(KINDS[at % 3], share[at // 3]) for at in lane) for lane in found), best

    def seconds(self, pipes: Sequence[Laid], ends: Sequence[float]) -> float:
        """Of an iteration whose pipelines take so long."""
        return max(ends) + self._after_s(pipes, np.array([one.row for one in pipes]))

    def _after_s(self, pipes: Sequence[Laid], rows: kernels.Ints) -> float:
        """What `prices.after_backward_s` says."""
        times = self._situation.times
        if len(pipes) < 2 or not times.gradient_s:
            return times.step_s
        if not self._linked:
            return times.step_s + float(self._tables.exposed[rows].max())
        found = kernels.exposed_over_links(rows, self._tables, self._costs, self._links)
        if found < 0.0:  # a group is on several nodes
            return after_backward_s([one.replica for one in pipes], self._situation)
        return times.step_s + found
