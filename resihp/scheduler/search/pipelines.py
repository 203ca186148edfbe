"""A situation and its layouts as arrays for the machine code, and back; ranks are numbers in the arrays. Pure.

Times equal those of `resihp.scheduler.cost.prices` up to rounding; limits are those of `resihp.scheduler.cost.memory`
and `transition_memory`. Facts about pipelines are in tables. Full tables are rebuilt; the first rebuild makes them
larger. Called by `resihp.scheduler.search.annealing`.
"""

from __future__ import annotations

import itertools
import math
import mmap
from collections.abc import Iterable, Sequence

import numpy as np

from resihp.parallelism.layout import Replica, Stage
from resihp.parallelism.plan import Order, Primitive
from resihp.pipeline.compiled import PRIMITIVE_KINDS
from resihp.pipeline.parts import MAX_PARTS
from resihp.scheduler.cost import tensor_bytes, transition_memory
from resihp.scheduler.cost.gradient_sync import BUCKET_BYTES, GRADIENT_BYTES
from resihp.scheduler.cost.held_state import holdings
from resihp.scheduler.layouts import tp_groups
from resihp.scheduler.search.kernels.arrays import (
    FORMER,
    LAYERS,
    MAX_BESIDE,
    ROW,
    SHARE,
    SIZE,
    STAGES,
    Costs,
    Ints,
    Job,
    Layouts,
    Tables,
)
from resihp.scheduler.search.kernels.layouts import after_s, write_layout
from resihp.scheduler.search.kernels.own_orders import write_best_order
from resihp.scheduler.search.kernels.tables import is_full
from resihp.scheduler.situation import Situation

MAX_CHUNKS = 4000
"""Maximum number of chunks of all micro-batches for which pipelines may have orders of their own, because orders are
part of a plan."""
MAX_TABLE_BYTES = 64_000_000
"""Approximate maximum size of the table of rows, in bytes."""
FIRST_ROWS, MAX_ROWS = 2048, 32_768
"""Number of rows of the first tables, and of rebuilt tables; also the number of groups."""
MAX_KEPT_LAYOUTS = 10
"""Maximum number of layouts kept in rebuilt tables, which have room for one more."""
EXTRA_REPLICAS = 64
"""Number of replicas beyond those of the layouts that a search begins with."""

Ranks = tuple[int, ...]
Pipe = Sequence[tuple[Ranks, int]]
"""The groups of a replica, in pipeline order, each with its number of layers; all numbers are 0 if layers are still to
be chosen."""


class Pipelines:
    """Several layouts, and tables of facts about their pipelines.

    `starts`: layouts that a search begins with. `slots`: number of layouts besides those that `kernels.arrays` names.
    `beside`: whether each rank must have room for its present state beside its new state, approximately
    (`transition_memory.layers_beside`).
    """

    def __init__(
        self, situation: Situation, starts: Sequence[Sequence[Replica]], most_stages: int, slots: int, *, beside: bool
    ) -> None:
        stages = [stage for start in starts for replica in start for stage in replica.stages]
        self._situation, self._ranks = situation, sorted(situation.available)
        self._number = {rank: i for i, rank in enumerate(self._ranks)}
        self.most_stages = max([most_stages, *(len(replica.stages) for start in starts for replica in start)])
        self.degrees = tp_groups.degrees(
            situation.tp, 1, started_with=situation.tp, obstacle=situation.model.tensor_parallel_obstacle
        )
        largest = max([situation.tp, *(stage.tp for stage in stages)])
        replicas = max(len(situation.base.replicas), *(len(start) for start in starts), 1)
        pipes = min(situation.micro_batches, len(self._ranks), replicas + EXTRA_REPLICAS)
        self.most_pipes = max([pipes, *(len(start) for start in starts)])
        sizes = sorted({*self.degrees, *(stage.tp for stage in stages)})
        self.job = self._job(sizes, largest, beside)
        self.tables = self._empty(largest, FIRST_ROWS)
        shape = (FORMER + slots, self.most_pipes)
        self.layouts = Layouts(
            pipes=np.zeros(shape[0], np.int64),
            pipe=np.zeros((*shape, 3), np.int64),
            groups=np.zeros((*shape, self.most_stages), np.int64),
            score=np.full((shape[0], 2), np.inf),
        )
        self._orders: dict[tuple[int, int], tuple[list[list[int]] | None, float]] = {}

    # --- a situation ----------------------------------------------------------------------------------------------

    def _costs(self) -> Costs:
        times = self._situation.times
        columns = [(layer.f, layer.b, layer.w) for layer in times.layers]
        return Costs(
            np.array([[0.0, *itertools.accumulate(column)] for column in zip(*columns, strict=True)]),
            np.array([[t.f, t.b, t.w] for t in (times.embedding, times.head)], np.float64),
            self._situation.schedule == "zero-bubble",
            MAX_PARTS,
        )

    def _job(self, sizes: Sequence[int], largest: int, beside: bool) -> Job:
        situation = self._situation
        times, model, room = situation.times, situation.model, situation.room_bytes
        assert room is not None
        speed = np.array([situation.speeds.get(rank, 1.0) for rank in self._ranks], np.float64)
        speeds = np.unique(speed)[::-1]
        names = sorted(set(map(situation.nodes.__getitem__, self._ranks)))
        node = {name: i for i, name in enumerate(names)}
        links = np.ones((len(names), len(names)))
        for (a, b), link in situation.links.items():
            if a in node and b in node:
                links[node[a], node[b]] = links[node[b], node[a]] = link
        way_s = times.transfer_s / links
        np.fill_diagonal(way_s, times.inside_s)
        late, transfers = np.unique(way_s, return_inverse=True)
        layer_bytes = GRADIENT_BYTES * model.parameters_per_layer
        sum_seconds, bucket = np.zeros(largest + 1), np.ones(largest + 1, np.int64)
        state_bytes = [situation.state_bytes_of(replicas) for replicas in range(self.most_pipes + 1)]
        states = [*dict.fromkeys(state_bytes)]
        needs = np.zeros((len(states), largest + 1, 4, 3), np.int64)
        for size in sizes:
            sum_seconds[size], bucket[size] = times.gradient_s / size, -(-BUCKET_BYTES * size // layer_bytes)
            for (i, state), kind in itertools.product(enumerate(states), range(4)):
                needs[i, size, kind] = tensor_bytes.stage_bytes(
                    model,
                    size,
                    situation.tokens,
                    first=kind >= 2,
                    last=kind % 2 == 1,
                    sequence_parallel=situation.sequence_parallel,
                    state_bytes=state,
                )
        left_bytes, seats, carried, kept_factor = self._held(sizes if beside else (), largest, room)
        return Job(
            costs=self._costs(),
            speed=np.searchsorted(-speeds, -speed).astype(np.int64),
            speeds=speeds.copy(),
            node=np.array([node[situation.nodes[rank]] for rank in self._ranks], np.int64),
            links=links,
            transfers=transfers.reshape(way_s.shape).astype(np.int64),
            late=late,
            degrees=np.array(self.degrees, np.int64),
            layer_sum_s=sum_seconds,
            bucket=bucket,
            state=np.array([states.index(state) for state in state_bytes], np.int64),
            needs=needs,
            left_bytes=left_bytes,
            seat=seats,
            carried=carried,
            kept_factor=kept_factor,
            room=room,
            micro_batches=situation.micro_batches,
            step_s=float(times.step_s),
            linked=bool(situation.links and times.gradient_s),
            beside=beside,
            own=situation.micro_batches * self.most_stages <= MAX_CHUNKS,
        )

    def _held(self, sizes: Sequence[int], largest: int, room: int) -> tuple[Ints, Ints, Ints, float]:
        """Return `left_bytes`, `seat`, `carried` and `kept_factor` of a `Job`; `sizes` is empty if they do not
        matter."""
        situation, model = self._situation, self._situation.model
        left_bytes, seats = np.zeros(len(self._ranks), np.int64), np.zeros((len(self._ranks), 6), np.int64)
        carried = np.ones((largest + 1, 4, 2), np.int64)
        replicas = len(situation.base.replicas)
        sharing = (replicas, replicas) if situation.zero_1 else None
        for rank, held_state in holdings(situation.holding.replicas) if sizes else ():
            if rank in self._number and rank not in situation.stale:
                i = self._number[rank]
                left_bytes[i] = transition_memory.left_bytes(held_state, model, room, sharing)
                seats[i] = (
                    held_state.t,
                    held_state.tp,
                    *held_state.chunks[0],
                    "embedding" in held_state.units,
                    "head" in held_state.units,
                )
        for size, kind in itertools.product(sizes, range(4)):
            carried[size, kind] = transition_memory.carried_bytes(
                model, size, first=kind >= 2, last=kind % 2 == 1, sharing=sharing
            )
        kept_factor = (
            1.0 if sharing is None else transition_memory.VALUE_BYTES / transition_memory.carried_each(model, sharing)
        )
        return left_bytes, seats, carried, kept_factor

    def _empty(self, largest: int, rows: int) -> Tables:
        stages, times = self.most_stages, self._situation.micro_batches + 2
        rows = min(rows, MAX_TABLE_BYTES // (8 * (times + 10 * stages + 8)))
        rows = max(rows, (MAX_KEPT_LAYOUTS + 6) * self.most_pipes + 64)
        groups = max(rows, (MAX_KEPT_LAYOUTS + 1) * len(self._ranks) + 64)
        shapes = {
            "used": (3,),
            "group_index": (2 * groups + 1,),
            "ranks": (groups, largest),
            "group": (groups, MAX_BESIDE + 4),
            "cut_index": (4 * rows + 1,),
            "cut_keys": (2 * rows, stages + 1),
            "cut_row": (2 * rows,),
            "row_index": (2 * rows + 1,),
            "row_keys": (rows, 2 * stages + 1),
            "row": (rows, 3),
            "row_s": (rows, 3),
            "stage": (rows, 3, stages),
            "stage_s": (rows, 5, stages),
            "times": (rows, times),
        }
        # Untouched pages take neither memory nor time, whatever the allocator does with its memory.
        pages = mmap.mmap(-1, 8 * sum(map(math.prod, shapes.values())))
        arrays, begin = {}, 0
        for name, shape in shapes.items():
            kind = np.float64 if name in ("row_s", "stage_s", "times") else np.int64
            arrays[name] = np.ndarray(shape, kind, pages, begin)
            begin += arrays[name].nbytes
        return Tables(**arrays)

    # --- layouts --------------------------------------------------------------------------------------------------

    def write(self, k: int, pipes: Sequence[Pipe]) -> bool:
        """Write layout `k` with its score. Return whether it is possible."""
        shape = (len(pipes), self.most_stages)
        sizes, layer_counts = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        ranks = np.zeros((*shape, self.tables.ranks.shape[1]), np.int64)
        for d, pipe in enumerate(pipes):
            for s, (group, layers) in enumerate(pipe):
                sizes[d, s], layer_counts[d, s] = len(group), layers
                ranks[d, s, : len(group)] = [self._number[rank] for rank in group]
        return write_layout(self.job, self.tables, self.layouts, k, sizes, ranks, layer_counts)

    def read(self, k: int) -> list[Pipe]:
        pipes: list[Pipe] = []
        for d in range(self.layouts.pipes[k]):
            stages, row, _ = self.layouts.pipe[k, d].tolist()
            groups = self.layouts.groups[k, d, :stages]
            sizes, layer_counts = (
                self.tables.group[groups, SIZE],
                self.tables.stage[row, LAYERS, :stages],
            )
            ranks = self.tables.ranks[groups].tolist()
            pipes.append(
                [
                    (tuple(self._ranks[i] for i in group_ranks[:size]), layers)
                    for group_ranks, size, layers in zip(ranks, sizes.tolist(), layer_counts.tolist(), strict=True)
                ]
            )
        return pipes

    def counts(self, k: int) -> list[int]:
        """Return the number of micro-batches of each replica of layout `k`."""
        counts: list[int] = self.layouts.pipe[k, : self.layouts.pipes[k], SHARE].tolist()
        return counts

    def begin_anew(self, kept: Iterable[int]) -> None:
        """Rebuild the tables with only the facts that the layouts `kept` need; at most `MAX_KEPT_LAYOUTS` layouts."""
        pipes = {k: self.read(k) for k in kept}
        self._orders.clear()
        self.tables = self._empty(self.tables.ranks.shape[1], MAX_ROWS)
        for k, layout in pipes.items():
            self.write(k, layout)

    @property
    def full(self) -> bool:
        return is_full(self.tables, self.most_pipes, len(self._ranks))

    def orders(self, k: int, d: int, share: Sequence[int]) -> tuple[tuple[Order, ...] | None, float]:
        """Return a replica's own orders for the micro-batches of `share`, and its time; None if the schedule's are as
        good."""
        row, count = int(self.layouts.pipe[k, d, ROW]), len(share)
        if (row, count) not in self._orders:
            split = self.job.costs.split
            lanes = np.empty((self.layouts.pipe[k, d, STAGES], count * (3 if split else 2)), np.int64)
            seconds, own = write_best_order(row, count, self.tables, split, self.job.own, lanes)
            self._orders[row, count] = lanes.tolist() if own else None, seconds
        primitive_numbers, seconds = self._orders[row, count]
        if primitive_numbers is None:
            return None, seconds
        return tuple(
            tuple(Primitive(PRIMITIVE_KINDS[number % 3], share[number // 3]) for number in lane)
            for lane in primitive_numbers
        ), seconds

    def after_s(self, k: int) -> float:
        """Return the seconds of layout `k` after the last backward pass (`prices.after_backward_s`)."""
        return after_s(self.job, self.tables, self.layouts, k)


def replica_of(pipe: Pipe) -> Replica:
    first, stages = 0, []
    for ranks, count in pipe:
        stages.append(Stage(ranks, ((first, first + count - 1),)))
        first += count
    return Replica(tuple(stages))


def pipe_of(replica: Replica) -> Pipe:
    return [(stage.ranks, len(stage.layers)) for stage in replica.stages]
