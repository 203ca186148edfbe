"""Converts a plan to arrays over its ranks, and the measurements of an iteration to sums over these arrays.

`resihp.detector.online.monitor` builds the arrays once for each adopted plan; an iteration then costs a few numpy calls
over all ranks. Each rank is a *row*, ordered by replica, stage and place in the tensor-parallel group. A *lane* is the
tensor-parallel group of a stage. Measurements are *columns*: one for each primitive of a rank's order, rank after rank.
A *slot* is a primitive of a stage for one micro-batch and chunk (`pipeline.compiled`). Judges nothing; pure, no clock.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np

from resihp.detector.observation import CHUNKS, Floats, RankTimes
from resihp.detector.online.predictor import Key, Predictor, keys
from resihp.parallelism.layout import Layout
from resihp.parallelism.plan import Plan
from resihp.pipeline.compiled import PRIMITIVE_KINDS, CompiledOrders, Ints

STARTS, SPANS, COMPUTE, TOKENS, SQUARES = range(len(CHUNKS))
SAME_END_SHARE, SAME_END_S = 1e-3, 1e-3
"""If the gradient sums of all lanes end within this share of the time of the latest one, or within this many seconds,
all lanes waited for each other."""
MAX_CHUNK_S = 1e5
"""Longest credible duration of a chunk, in seconds; a longer one means that a clock jumped."""


class LaneTimes(msgspec.Struct, frozen=True, eq=False):
    """Seconds that lanes (tensor-parallel groups) waited in one iteration, apart from their work and transfers.

    All arrays have shape (lanes,), in the order of `Stacked.places`; NaN for a lane without measurements or without
    this kind of wait.
    """

    collective: Floats
    """Waits in collectives, summed over chunks: from the moment at which the last rank had its inputs to the end of the
    chunk, minus the longest own work of a rank."""
    reduction: Floats
    """Gradient sums: from the moment at which the last lane with the same layers had finished its last chunk."""
    data: Floats
    """Wait of a first stage before its first chunk."""


class Sums(msgspec.Struct, frozen=True, eq=False):
    """Sums of the measurements of one iteration, with M micro-batches, R ranks and L links. Times in seconds.

    NaN marks missing or impossible measurements. Once chunk times are learnt, the detector needs no other data of an
    iteration: in a job of 16,384 ranks, each rank can sum its measurements and report a few numbers.
    """

    tokens: Floats
    """(M,): token count N of each micro-batch of the global batch."""
    squares: Floats
    """(M,): sum of squared lengths S of each micro-batch of the global batch."""
    compute: Floats
    """(R,): each rank's own work in all its chunks, in the order of `Stacked.ranks`."""
    delays: Floats
    """(L,): geometric mean of the transfers that the receiver had to wait for, in the order of `Links.pairs`."""
    delay_tokens: Floats
    """(L,): geometric mean of N of the micro-batches that these transfers carried."""
    delay_counts: Floats
    """(L,): number of transfers in these means."""
    busy_s: float
    """End of the last chunk of all ranks, in seconds since the iteration began."""
    lanes: LaneTimes | None = None
    """Waits of lanes; None if they were not summed, and then lanes are not tested."""


def _stages_with_ranks(layout: Layout) -> list[tuple[tuple[int, int], tuple[int, ...]]]:
    """Return (replica, stage) and ranks of each stage that has ranks."""
    return [
        ((d, s), stage.ranks)
        for d, replica in enumerate(layout.replicas)
        for s, stage in enumerate(replica.stages)
        if stage.ranks
    ]


def _layers_of_lanes(layout: Layout, places: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return (lane, layer) for each layer of each lane."""
    return [
        (lane, layer)
        for lane, (d, s) in enumerate(places)
        for first, last in layout.replicas[d].stages[s].chunks
        for layer in range(first, last + 1)
    ]


class Stacked:
    """A plan as arrays over ranks, lanes, columns and slots. `compiled`: the plan's orders."""

    def __init__(self, plan: Plan, compiled: CompiledOrders) -> None:
        self.plan, self.compiled = plan, compiled
        empty = slice(0, 0)
        lanes = [(place, ranks, compiled.lanes.get(place, empty)) for place, ranks in _stages_with_ranks(plan.layout)]
        self.places = tuple(place for place, _, _ in lanes)
        """(replica, stage) of each lane, that is, of each tensor-parallel group."""
        widths = np.array([len(ranks) for _, ranks, _ in lanes])
        self.ranks: Ints = np.array([rank for _, ranks, _ in lanes for rank in ranks], dtype=np.intp)
        """(R,): the rank of each row."""
        self.row = {rank: i for i, rank in enumerate(self.ranks.tolist())}
        self.lane: Ints = np.repeat(np.arange(len(lanes)), widths)
        """(R,): the lane of each row."""
        self.first_row: Ints = np.concatenate([[0], np.cumsum(widths)])
        """(lanes + 1,): rows of a lane are first_row[lane]:first_row[lane + 1]."""
        self.lengths: Ints = np.array(
            [columns_of_lane.stop - columns_of_lane.start for _, _, columns_of_lane in lanes]
        )[self.lane]
        """(R,): number of primitives, and therefore of columns, of each row; 0 for a rank without work."""
        self.first_column: Ints = np.concatenate([[0], np.cumsum(self.lengths)])
        self._busy = self.lengths > 0
        self._columns: tuple[Ints, Ints] | None = None
        self._lane_order: tuple[Ints, Ints, Ints, Ints] | None = None
        self._lane_starts = np.array([columns_of_lane.start for _, _, columns_of_lane in lanes])
        self._lane_busy = np.array([columns_of_lane.stop > columns_of_lane.start for _, _, columns_of_lane in lanes])
        self._alone = widths < 2
        self._later = np.array([stage > 0 for _, stage in self.places], dtype=bool)
        """(lanes,): whether the lane is not a first stage. `_alone`, (lanes,): whether the lane has a single rank."""
        layers = _layers_of_lanes(plan.layout, self.places)
        self._layers: Ints = np.array(layers, dtype=np.intp).reshape(-1, 2).T
        """(2, n): pairs of a lane and a layer that the lane has."""

        key_of_stop = keys(plan.layout)
        weights_apart = set(compiled.stop[compiled.kind == PRIMITIVE_KINDS.index("W")].tolist())
        stop_rows = [(key_of_stop[stop], i in weights_apart) for i, stop in enumerate(compiled.stops)]
        self._rows = tuple(dict.fromkeys(stop_rows))
        """The different kinds of chunks: key, and whether weight gradients (W) are separate from B."""
        rows = [self._rows.index(row) for row in stop_rows]
        self._price_at = compiled.index(rows)
        codes = np.unique(self._price_at // compiled.micro_batches)
        self._work = tuple((*divmod(code, len(PRIMITIVE_KINDS)), *self._named(code)) for code in codes.tolist())
        chunks: dict[tuple[int, int], list[Key]] = {place: [] for place in self.places}
        for stop, key in key_of_stop.items():
            chunks[stop.replica, stop.stage].append(key)
        alike = [tuple(chunks[place]) for place in self.places]
        order = {signature: i for i, signature in enumerate(dict.fromkeys(alike))}
        self.group: Ints = np.array([order[signature] for signature in alike], dtype=np.intp)[self.lane]
        """(R,): group of each row. Rows of one group have chunks of the same keys, and are peers."""

    def _named(self, code: int) -> tuple[Key, str]:
        """Return the key and the predictor's name of a kind of work. A B that does the work of a W as well is BW."""
        row, kind = divmod(code, len(PRIMITIVE_KINDS))
        key, apart = self._rows[row]
        return key, "BW" if PRIMITIVE_KINDS[kind] == "B" and not apart else PRIMITIVE_KINDS[kind]

    @property
    def work(self) -> tuple[tuple[Key, str], ...]:
        """All pairs of key and kind of work in the plan, with the predictor's names."""
        return tuple((key, name) for _, _, key, name in self._work)

    # --- expectations ----------------------------------------------------------------------------------------------

    def seconds(self, predictor: Predictor, tokens: Floats, squares: Floats) -> Floats | None:
        """Return (V,): the healthy seconds of each slot; None while the time of any kind of work is unknown.

        `tokens`, `squares`: N and S of each micro-batch, (M,) both.
        """
        table = np.zeros((len(self._rows), len(PRIMITIVE_KINDS), self.compiled.micro_batches))
        count = min(len(tokens), self.compiled.micro_batches)
        for row, kind, key, name in self._work:
            seconds = predictor.predict(key, name, tokens[:count], squares[:count])
            if seconds is None:
                return None
            table[row, kind, :count] = seconds
        return np.asarray(table.reshape(-1).take(self._price_at))

    def covered(self, predictor: Predictor, tokens: Floats, squares: Floats) -> bool:
        """Return whether the micro-batches, with N and S of shape (M,), are within the learnt range of all kinds of
        work."""
        return predictor.covers(self.work, tokens, squares)

    def totals(self, seconds: Floats) -> Floats:
        """Return (R,): the sum of each row's slots, from `seconds` of slots (V,); NaN for a row without work."""
        in_order = seconds[self.compiled.in_order]
        totals = np.full(len(self.places), np.nan)
        if in_order.size:
            totals[self._lane_busy] = np.add.reduceat(in_order, self._lane_starts[self._lane_busy])
        return totals[self.lane]

    def factors(self, slower: Mapping[int, float]) -> Floats:
        """Return (V,): the factor by which each slot takes longer, from the factors of slow ranks.

        A lane waits for its slowest rank, so that the largest factor of its ranks applies.
        """
        of_lane = np.ones(len(self.places))
        for rank, factor in slower.items():
            if rank in self.row:
                lane = self.lane[self.row[rank]]
                of_lane[lane] = max(of_lane[lane], factor)
        factors = np.ones(self.compiled.size)
        for lane in np.flatnonzero(of_lane > 1.0).tolist():
            factors[self.compiled.slots(*self.places[lane])] = of_lane[lane]
        return factors

    # --- measurements ----------------------------------------------------------------------------------------------

    def columns(self, times: Mapping[int, RankTimes]) -> Floats:
        """Return the measurements of all ranks as (5, columns), with the rows of `observation.CHUNKS`.

        NaN for ranks that did not report or reported another number of primitives, and for impossible values.
        """
        blocks = []
        for rank, length in zip(self.ranks.tolist(), self.lengths.tolist(), strict=True):
            own = times.get(rank)
            if own is not None and own.chunks.shape == (len(CHUNKS), length):
                blocks.append(own.chunks)
            else:
                blocks.append(np.full((len(CHUNKS), length), np.nan))
        columns = np.concatenate(blocks, axis=1) if blocks else np.empty((len(CHUNKS), 0))
        with np.errstate(invalid="ignore"):
            sound = (columns > 0.0) & (columns < MAX_CHUNK_S)
            placed = sound[SPANS] & (columns[STARTS] >= 0.0) & (columns[STARTS] < MAX_CHUNK_S)
            workload_sound = np.isfinite(columns[TOKENS]) & (columns[TOKENS] > 0.0)
            workload_sound &= np.isfinite(columns[SQUARES]) & (columns[SQUARES] >= 0.0)
        for rows, sound_columns in (
            (COMPUTE, sound[COMPUTE]),
            (slice(2), placed),
            (slice(TOKENS, None), workload_sound),
        ):
            if not sound_columns.all():
                columns[rows, ~sound_columns] = np.nan
        return columns

    def workload(self, columns: Floats) -> tuple[Floats, Floats]:
        """Return N and S of each micro-batch, (M,) both; NaN for micro-batches that no rank reported."""
        _, micro_batch = self._column_slots()
        workload = np.full((2, self.compiled.micro_batches), np.nan)
        reported = np.isfinite(columns[TOKENS])
        workload[:, micro_batch[reported]] = columns[TOKENS:, reported]
        return workload[0], workload[1]

    def compute(self, columns: Floats) -> Floats:
        """Return (R,): seconds of each rank's own work; NaN if the measurement of one of its chunks is missing."""
        sums = np.full(self.ranks.size, np.nan)
        if columns.shape[1]:
            sums[self._busy] = np.add.reduceat(columns[COMPUTE], self.first_column[:-1][self._busy])
        return sums

    def busy_s(self, columns: Floats) -> float:
        """Return the end of the last chunk of all ranks, in seconds since the iteration began; NaN if unknown."""
        ends = columns[STARTS] + columns[SPANS]
        return float(np.fmax.reduce(ends)) if ends.size else np.nan

    def lane_times(self, columns: Floats, times: Mapping[int, RankTimes]) -> LaneTimes:
        """Return the waits of lanes. NaN for a lane if a rank's report is missing.

        Gradient sums are then NaN also for the lanes with layers of that lane.
        """
        columns_of, begins, firsts, lasts = self._lane_columns()
        starts, ends, work = (
            np.maximum.reduceat(row[columns_of], begins) if begins.size else np.empty(0)
            for row in (columns[STARTS], columns[STARTS] + columns[SPANS], columns[COMPUTE])
        )
        busy = self._lane_busy
        collective, data, last = np.full((3, len(self.places)), np.nan)
        if begins.size:
            collective[busy] = np.add.reduceat(ends - starts - work, firsts)
            last[busy], data[busy] = ends[lasts], starts[firsts]
        collective[self._alone] = data[self._later] = np.nan
        return LaneTimes(
            collective=np.maximum(collective, 0.0), reduction=self._summing(last, times), data=np.maximum(data, 0.0)
        )

    def _summing(self, last: Floats, times: Mapping[int, RankTimes]) -> Floats:
        """Return (lanes,): seconds of gradient sums; `last` (lanes,): ends of the lanes' last chunks."""
        of_rank = [times[rank].reduced if rank in times else np.nan for rank in self.ranks.tolist()]
        reduced = np.maximum.reduceat(np.array(of_rank), self.first_row[:-1])
        with np.errstate(invalid="ignore"):
            reduced[~((reduced > 0.0) & (reduced < MAX_CHUNK_S))] = np.nan
        finite = reduced[np.isfinite(reduced)]
        if finite.size and np.ptp(finite) <= max(SAME_END_S, SAME_END_SHARE * float(finite.max())):
            return np.maximum(reduced - np.max(last, initial=0.0, where=self._lane_busy), 0.0)
        lane, layer = self._layers
        of_layer = np.zeros(int(layer.max(initial=0)) + 1)
        begun = np.zeros(len(self.places))
        with np.errstate(invalid="ignore"):  # NaN of one lane makes NaN of the lanes that wait for it
            np.maximum.at(of_layer, layer, last[lane])
            np.maximum.at(begun, lane, of_layer[layer])
        return np.maximum(reduced - begun, 0.0)

    def _lane_columns(self) -> tuple[Ints, Ints, Ints, Ints]:
        """Return all columns ordered by lane, chunk and rank; the beginning of each chunk in this order; and, for each
        lane with work, its first and its last chunk. Computed on first use."""
        if self._lane_order is None:
            order, widths, counts = [np.empty(0, dtype=np.intp)], [], []
            for row, end in itertools.pairwise(self.first_row.tolist()):
                chunks = int(self.lengths[row])
                first = int(self.first_column[row])
                order.append((first + np.arange((end - row) * chunks)).reshape(end - row, chunks).T.reshape(-1))
                widths += [end - row] * chunks
                counts += [chunks] if chunks else []
            ends = np.cumsum(np.array(counts, dtype=np.intp))
            begins = np.cumsum([0, *widths])[:-1]
            self._lane_order = np.concatenate(order), begins, ends - np.array(counts, dtype=np.intp), ends - 1
        return self._lane_order

    def teach(self, predictor: Predictor, iteration: int, columns: Floats, rows: Iterable[int]) -> None:
        """Pass the chunks of the ranks in `rows` to the predictor, to learn from them."""
        slot, _ = self._column_slots()
        codes = (self._price_at // self.compiled.micro_batches)[slot]
        for i in rows:
            rank = int(self.ranks[i])
            columns_of_row = slice(self.first_column[i], self.first_column[i + 1])
            own, code = columns[:, columns_of_row], codes[columns_of_row]
            for chunk_code in dict.fromkeys(code.tolist()):
                _, _, seconds, tokens, squares = own[:, code == chunk_code]
                predictor.observe(*self._named(chunk_code), tokens, squares, seconds, rank=rank, iteration=iteration)

    def _column_slots(self) -> tuple[Ints, Ints]:
        """Return the slot and the micro-batch of each column, (columns,) both. Computed on first use."""
        if self._columns is None:
            slots: list[Ints] = [np.empty(0, dtype=np.intp)]
            for lane, busy in zip(self.lane.tolist(), self._busy.tolist(), strict=True):
                slots += [self.compiled.slots(*self.places[lane])] if busy else []
            flat = np.concatenate(slots)
            self._columns = flat, self.compiled.micro_batch[flat]
        return self._columns
