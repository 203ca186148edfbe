"""A plan's ranks, work and links as arrays, and an iteration's measurements as sums over them. Pure, no clock.

Built once for each plan that takes effect (`resihp.detector.online.monitor` does it); what it gives for an iteration
are a few numpy calls over all ranks. Ranks are *rows*: by replica, stage and place in the tensor-parallel group. A
rank's measurements are *columns*, one for each primitive of its stage's order, row after row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
import numpy as np

from resihp.detector.observation import CHUNKS, Floats, RankTimes
from resihp.detector.online.predictor import Key, Predictor, keys
from resihp.parallelism.plan import Plan
from resihp.pipeline.compiled import KINDS, CompiledOrders, Ints

STARTS, SPANS, COMPUTE, TOKENS, SQUARES = range(len(CHUNKS))
LONGEST_S = 1e5
"""A chunk that takes longer was timed by a clock that jumped."""


class Sums(msgspec.Struct, frozen=True, eq=False):
    """One iteration of M micro-batches on R ranks with L links, NaN where nothing (sound) was measured. Seconds.

    This is all that the detector needs of an iteration once chunk times are learnt: where ranks add up what they
    measured themselves, a job of 16,384 of them reports a few numbers each.
    """

    tokens: Floats
    """(M,): N of each micro-batch of the global batch, by its index; likewise S below."""
    squares: Floats
    compute: Floats
    """(R,): a rank's own work in all its chunks, rows as in `Stacked.ranks`."""
    delays: Floats
    """(L,): geometric mean of the transfers that the receiver had to wait for, links as in `Links.pairs`."""
    delay_tokens: Floats
    """(L,): geometric mean of N of the micro-batches that these transfers carried."""
    delay_counts: Floats
    """(L,): how many transfers these means are of."""
    busy_s: float
    """When the last rank had done its last chunk, from the iteration's beginning."""


class Stacked:
    """Plan `plan` as arrays; `compiled` are its orders."""

    def __init__(self, plan: Plan, compiled: CompiledOrders) -> None:
        self.plan, self.compiled = plan, compiled
        stages = [
            ((d, s), stage.ranks)
            for d, replica in enumerate(plan.layout.replicas)
            for s, stage in enumerate(replica.stages)
        ]
        empty = slice(0, 0)
        lanes = [(place, ranks, compiled.lanes.get(place, empty)) for place, ranks in stages]
        self.places = tuple(place for place, _, _ in lanes)
        """(replica, stage) of each lane, that is: tensor-parallel group."""
        widths = np.array([len(ranks) for _, ranks, _ in lanes])
        self.ranks: Ints = np.array([rank for _, ranks, _ in lanes for rank in ranks], dtype=np.intp)
        """(R,): the rank of each row."""
        self.row = {rank: i for i, rank in enumerate(self.ranks.tolist())}
        self.lane: Ints = np.repeat(np.arange(len(lanes)), widths)
        """(R,): the lane of each row."""
        self.first_row: Ints = np.concatenate([[0], np.cumsum(widths)])
        """(lanes + 1,): rows of a lane are first_row[lane]:first_row[lane + 1]."""
        self.lengths: Ints = np.array([where.stop - where.start for _, _, where in lanes])[self.lane]
        """(R,): primitives, that is columns, of each row."""
        self.first_column: Ints = np.concatenate([[0], np.cumsum(self.lengths)])
        self._busy = self.lengths > 0
        self._columns: tuple[Ints, Ints] | None = None
        self._lane_starts = np.array([where.start for _, _, where in lanes])
        self._lane_busy = np.array([where.stop > where.start for _, _, where in lanes])

        of_stop = keys(plan.layout)
        weights_apart = set(compiled.stop[compiled.kind == KINDS.index("W")].tolist())
        stop_rows = [(of_stop[stop], i in weights_apart) for i, stop in enumerate(compiled.stops)]
        self._rows = tuple(dict.fromkeys(stop_rows))
        """What chunks there are: key, and whether W is apart from B."""
        rows = [self._rows.index(row) for row in stop_rows]
        self._price_at = compiled.index(rows)
        codes = np.unique(self._price_at // compiled.micro_batches)
        self._work = tuple((*divmod(code, len(KINDS)), *self._named(code)) for code in codes.tolist())
        chunks: dict[tuple[int, int], list[Key]] = {place: [] for place in self.places}
        for stop, key in of_stop.items():
            chunks[stop.replica, stop.stage].append(key)
        alike = [tuple(chunks[place]) for place in self.places]
        order = {signature: i for i, signature in enumerate(dict.fromkeys(alike))}
        self.group: Ints = np.array([order[signature] for signature in alike], dtype=np.intp)[self.lane]
        """(R,): rows of one group hold chunks of the same keys, and are peers."""

    def _named(self, code: int) -> tuple[Key, str]:
        """As the predictor knows a kind of work: a B without W does the work of both, and is called BW."""
        row, kind = divmod(code, len(KINDS))
        key, apart = self._rows[row]
        return key, "BW" if KINDS[kind] == "B" and not apart else KINDS[kind]

    @property
    def work(self) -> tuple[tuple[Key, str], ...]:
        """Every key with every kind of work that occurs, by the names that the predictor knows."""
        return tuple((key, name) for _, _, key, name in self._work)

    # --- what is expected ------------------------------------------------------------------------------------------

    def seconds(self, predictor: Predictor, tokens: Floats, squares: Floats) -> Floats | None:
        """(V,): healthy seconds of each slot for micro-batches of N and S (M,); None while something is unknown."""
        table = np.zeros((len(self._rows), len(KINDS), self.compiled.micro_batches))
        count = min(len(tokens), self.compiled.micro_batches)
        for row, kind, key, name in self._work:
            seconds = predictor.predict(key, name, tokens[:count], squares[:count])
            if seconds is None:
                return None
            table[row, kind, :count] = seconds
        return np.asarray(table.reshape(-1).take(self._price_at))

    def totals(self, seconds: Floats) -> Floats:
        """(R,): seconds of all chunks of each row from those of slots (V,); NaN for a row without work."""
        in_order = seconds[self.compiled.in_order]
        totals = np.full(len(self.places), np.nan)
        if in_order.size:
            totals[self._lane_busy] = np.add.reduceat(in_order, self._lane_starts[self._lane_busy])
        return totals[self.lane]

    def factors(self, slower: Mapping[int, float]) -> Floats:
        """(V,): how many times as long slots last where some ranks do; a group waits for its slowest."""
        of_lane = np.ones(len(self.places))
        for rank, factor in slower.items():
            if rank in self.row:
                lane = self.lane[self.row[rank]]
                of_lane[lane] = max(of_lane[lane], factor)
        factors = np.ones(self.compiled.size)
        for lane in np.flatnonzero(of_lane > 1.0).tolist():
            factors[self.compiled.slots(*self.places[lane])] = of_lane[lane]
        return factors

    # --- what was measured -----------------------------------------------------------------------------------------

    def columns(self, times: Mapping[int, RankTimes]) -> Floats:
        """(5, columns), rows as in `observation.CHUNKS`, NaN for ranks that did not report, or not as many primitives,
        and for chunks whose times cannot be."""
        blocks = []
        for rank, length in zip(self.ranks.tolist(), self.lengths.tolist(), strict=True):
            own = times.get(rank)
            if own is not None and own.chunks.shape == (len(CHUNKS), length):
                blocks.append(own.chunks)
            else:
                blocks.append(np.full((len(CHUNKS), length), np.nan))
        found = np.concatenate(blocks, axis=1) if blocks else np.empty((len(CHUNKS), 0))
        with np.errstate(invalid="ignore"):
            sound = (found > 0.0) & (found < LONGEST_S)
            found[COMPUTE, ~sound[COMPUTE]] = np.nan
            placed = sound[SPANS] & (found[STARTS] >= 0.0) & (found[STARTS] < LONGEST_S)
            found[:2, ~placed] = np.nan
            known = np.isfinite(found[TOKENS]) & (found[TOKENS] > 0.0)
            known &= np.isfinite(found[SQUARES]) & (found[SQUARES] >= 0.0)
            found[TOKENS:, ~known] = np.nan
        return found

    def workload(self, columns: Floats) -> tuple[Floats, Floats]:
        """N and S (M,) of the micro-batches that some rank told of; NaN for the others."""
        _, micro_batch = self._column_slots()
        workload = np.full((2, self.compiled.micro_batches), np.nan)
        told = np.isfinite(columns[TOKENS])
        workload[:, micro_batch[told]] = columns[TOKENS:, told]
        return workload[0], workload[1]

    def compute(self, columns: Floats) -> Floats:
        """(R,): seconds of each row's own work; NaN where a chunk's is missing."""
        sums = np.full(self.ranks.size, np.nan)
        if columns.shape[1]:
            sums[self._busy] = np.add.reduceat(columns[COMPUTE], self.first_column[:-1][self._busy])
        return sums

    def busy_s(self, columns: Floats) -> float:
        """When the last chunk of all was done; NaN where nobody can tell."""
        ends = columns[STARTS] + columns[SPANS]
        return float(np.fmax.reduce(ends)) if ends.size else np.nan

    def teach(self, predictor: Predictor, iteration: int, columns: Floats, rows: Iterable[int]) -> None:
        """Let `predictor` learn from this iteration's chunks of the ranks of some rows."""
        slot, _ = self._column_slots()
        codes = (self._price_at // self.compiled.micro_batches)[slot]
        for i in rows:
            rank = int(self.ranks[i])
            where = slice(self.first_column[i], self.first_column[i + 1])
            own, code = columns[:, where], codes[where]
            for one in dict.fromkeys(code.tolist()):
                _, _, seconds, tokens, squares = own[:, code == one]
                predictor.observe(*self._named(one), tokens, squares, seconds, rank=rank, iteration=iteration)

    def _column_slots(self) -> tuple[Ints, Ints]:
        """(columns,): the slot of each column, and its micro-batch. Made when first needed."""
        if self._columns is None:
            slots: list[Ints] = [np.empty(0, dtype=np.intp)]
            for lane, busy in zip(self.lane.tolist(), self._busy.tolist(), strict=True):
                slots += [self.compiled.slots(*self.places[lane])] if busy else []
            flat = np.concatenate(slots)
            self._columns = flat, self.compiled.micro_batch[flat]
        return self._columns
