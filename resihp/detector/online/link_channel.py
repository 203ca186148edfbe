"""Finds slow links between stages by their transfer times, relative to the link's past and to its peers. Pure, no
clock.

A link leads from a rank to the rank that receives from it, so that each rank of a tensor-parallel group has links of
its own. The time of a transfer is measured only if the receiver had to wait for it: from the end of the sender's
primitive to the start of the receiver's. If the receiver was busy, that time is only an upper bound, and is left out.
The test is that of ranks (`resihp.detector.sequential.peer_cusum`). Called by `resihp.detector.online.monitor`; never
decides on a reaction.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Mapping

import numpy as np

from resihp.detector.findings import Finding
from resihp.detector.observation import Floats
from resihp.detector.online.plan_arrays import MAX_CHUNK_S, SPANS, STARTS, TOKENS, Stacked
from resihp.detector.sequential.peer_cusum import LEARNING_ITERATIONS, PeerTest, Shift
from resihp.detector.sequential.window import medians
from resihp.pipeline.compiled import Ints

MIN_IDLE_SHARE = 0.25
"""A receiver waited for a transfer if it was idle for at least this share of the transfer, and for MIN_WAIT_S
seconds."""
MIN_WAIT_S = 20e-6
MAX_HEALTHY_SPREAD = 0.25
"""Largest difference between healthy links of one kind (between nodes, or within them), log units."""
TOKEN_EXPONENTS = (0.0, 0.5, 1.0)
"""Powers of N with which the time of a transfer may grow: 0 for latency, 1 for bandwidth, 0.5 for both."""
QUORUM_SHARE = 0.2
"""Share of the links that an iteration must have measured to count."""
MIN_SHIFT = 0.05
"""Smallest slow-down of a link that is reported, log units."""
ALIKE_SHARE = 0.6
"""A link between the same stages, or of the same rank, with at least this share of another link's shift has the same
cause."""
RESOLUTION_ITERATIONS, RESOLUTION_STARTS = 16, 4096
"""Number of first iterations, and approximate number of start times in each, from which the clocks' resolution is
read."""
MAX_COUNTED_TRANSFERS = 4.0
"""Number of transfers in one iteration above which their mean does not become more precise, because they share their
noise."""
RECENT_ITERATIONS = 64
"""Number of latest iterations for which the seconds of transfers are kept."""
MIN_CLOCK_ERRORS = 4.0
"""Smallest slow-down of a transfer, as a multiple of the scatter that clocks and skewed starts cause."""
MIN_STARTS = 16
"""Smallest number of different start times from which a resolution can be read."""
EQUAL_STARTS_S = 1e-7
"""Start times that differ by less than this are equal, seconds."""
SAME_CAUSE_ITERATIONS = 8
"""Largest distance of onsets, in iterations, at which two slow-downs may have the same cause."""


class Links:
    """The L links of a plan, and the computation of transfer times from the measurements of ranks.

    `nodes`: the node of each rank; None if unknown.
    """

    def __init__(self, stacked: Stacked, nodes: Mapping[int, Hashable] | None = None) -> None:
        self._stacked = stacked
        compiled = stacked.compiled
        stage_count = 1 + max((stage for _, stage in stacked.places), default=0)
        lanes = np.zeros((1 + max((replica for replica, _ in stacked.places), default=0), stage_count), dtype=np.intp)
        for i, (replica, stage) in enumerate(stacked.places):
            lanes[replica, stage] = i
        ends = lanes[compiled.replica[compiled.edges], compiled.stage[compiled.edges]]
        code, self._way = np.unique(ends[0] * len(stacked.places) + ends[1], return_inverse=True)
        """The way of each edge (transfer); a way is a pair of lanes, sender and receiver."""
        self._senders, self._receivers = (side.astype(np.intp) for side in np.divmod(code, max(len(stacked.places), 1)))
        widths = np.diff(stacked.first_row)
        self._widths = np.maximum(widths[self._senders], widths[self._receivers])
        self._first: Ints = np.concatenate([[0], np.cumsum(self._widths)])
        self.way: Ints = np.repeat(np.arange(len(code)), self._widths)
        """(L,): the way of each link; links of one way join the same two stages in the same direction."""
        self.lanes: Ints = np.stack([self._senders[self.way], self._receivers[self.way]])
        """(2, L): the lanes of sender and receiver."""
        turn = np.arange(self.way.size) - self._first[:-1][self.way]
        wide = self._widths[self.way]
        self._rows = np.stack(
            [
                stacked.first_row[lane] + turn * widths[lane] // np.maximum(wide, 1)
                for lane in (self._senders[self.way], self._receivers[self.way])
            ]
        )
        self.pairs: Ints = stacked.ranks[self._rows].reshape(2, -1).T
        """(L, 2): sending and receiving rank of each link. Between groups of U and D ranks there are max(U, D) links;
        link c leads from rank c * U // max(U, D) of one group to rank c * D // max(U, D) of the other."""
        self.comparable = nodes is not None
        self.kind: Ints = np.zeros(len(self.pairs), dtype=np.intp)
        """(L,): 1 for a link within a node, 0 for a link between nodes; 0 for all links if nodes are unknown."""
        between: set[frozenset[Hashable]] = set()
        if nodes is not None:
            ends_at = [
                (nodes.get(sender, sender), nodes.get(receiver, receiver)) for sender, receiver in self.pairs.tolist()
            ]
            self.kind[:] = [a == b for a, b in ends_at]
            between = {frozenset(both) for both in ends_at if both[0] != both[1]}
        self.one_path: bool = len(between) == 1
        """Whether there are links between nodes, all of which join the same two nodes."""
        self._transfers: tuple[Ints, Ints, Ints, Ints] | None = None
        self.resolution_s = 0.0
        self._looks = 0
        """Number of iterations from which the clocks' resolution (`resolution_s`) was read so far."""

    @property
    def size(self) -> int:
        return len(self.pairs)

    def measured(self, columns: Floats) -> tuple[Floats, Floats, Floats]:
        """Return, for each link, the transfers of an iteration that the receiver had to wait for, as three arrays (L,).

        The arrays are the geometric mean of the seconds, the geometric mean of N, and the number of transfers. Means
        are NaN for a link without such transfers. `columns`: result of `Stacked.columns`.
        """
        send, receive, previous, link = self._of_transfers()
        starts = columns[STARTS]
        if self._looks < RESOLUTION_ITERATIONS:
            self._looks += 1
            self.resolution_s = _resolution(starts[:: max(starts.size // RESOLUTION_STARTS, 1)])
        ends = np.append(starts + columns[SPANS], 0.0)  # index -1: the beginning of the iteration
        start = starts[receive]
        with np.errstate(invalid="ignore", divide="ignore"):
            gap = start - ends[send]
            visible = (gap > 0.0) & (start - ends[previous] > np.maximum(MIN_IDLE_SHARE * gap, MIN_WAIT_S))
            link = link[visible]
            counts = np.bincount(link, minlength=self.size).astype(np.float64)
            delays = np.exp(np.bincount(link, np.log(gap[visible]), self.size) / counts)
            tokens = np.exp(np.bincount(link, np.log(columns[TOKENS, receive[visible]]), self.size) / counts)
        return delays, tokens, counts

    def edge_seconds(self, seconds: Floats) -> Floats:
        """Return (E,): the seconds of each transfer, from the seconds of links (L,).

        The slowest of the links between both lanes counts.
        """
        if not self.size:
            return np.zeros(self._way.size)
        return np.asarray(np.fmax.reduceat(seconds, self._first[:-1])[self._way])

    def _of_transfers(self) -> tuple[Ints, Ints, Ints, Ints]:
        """Return, for each part of each transfer, four indices: the column of the sender's primitive, the column of the
        receiver's primitive, the column before the receiver's (-1 for the first), and the link. Computed on first
        use."""
        if self._transfers is None:
            compiled = self._stacked.compiled
            wide = self._widths[self._way]
            edge = np.repeat(np.arange(self._way.size), wide)
            turn = np.arange(edge.size) - np.repeat(np.cumsum(wide) - wide, wide)
            link = self._first[:-1][self._way[edge]] + turn
            source, target = (compiled.position[side][edge] for side in compiled.edges)
            send, receive = (self._stacked.first_column[rows[link]] for rows in self._rows)
            previous = np.where(target > 0, receive + target - 1, -1)
            self._transfers = send + source, receive + target, previous, link
        return self._transfers


class LinkTest:
    """Sequential tests of all links of a plan.

    `known_shifts`: slow-downs that were already reported, log units, by (sender, receiver). `false_alarms_per`,
    `patience`, `least`: as in `PeerTest`.
    """

    def __init__(
        self,
        links: Links,
        known_shifts: Mapping[tuple[int, int], float],
        false_alarms_per: int,
        patience: int,
        least: float = MIN_SHIFT,
    ) -> None:
        self.links = links
        self._names = [(sender, receiver) for sender, receiver in links.pairs.tolist()]
        self.names = frozenset(self._names)
        self._index = {name: i for i, name in enumerate(self._names)}
        self._exponent = 0.0
        self._usual = np.zeros(links.size)
        self._tokens = 1.0
        self._first: list[tuple[int, Floats, Floats, Floats]] = []
        self._recent: deque[tuple[int, Floats]] = deque(maxlen=RECENT_ITERATIONS)
        self._seen: tuple[Floats, Floats] | None = None
        """Logs of the seconds and N that the latest iteration measured, (L,) both; NaN for links without a
        measurement."""
        self._together: dict[int, tuple[int, ...]] = {}
        self.test = PeerTest(
            links.kind,
            known_shifts={self._index[name]: shift for name, shift in known_shifts.items() if name in self._index},
            spread=MAX_HEALTHY_SPREAD if links.comparable else np.inf,
            least=max(MIN_SHIFT, least),
            false_alarms_per=false_alarms_per,
            quorum=QUORUM_SHARE,
            patience=patience,
        )

    @property
    def ready(self) -> bool:
        """Whether the usual duration of transfers is learnt."""
        return len(self._first) >= LEARNING_ITERATIONS

    @property
    def slow(self) -> dict[tuple[int, int], float]:
        """Slow-down of each slow link, log units."""
        return {self._names[i]: self.test.shift(i) for i in self.test.slow}

    @property
    def apart_from_healthy(self) -> Floats:
        """(L,): log of the latest transfer time over the healthy transfer time of each link.

        NaN for a link without a measured transfer, and for all links until levels are learnt.
        """
        if self._seen is None or not (self.ready and self.test.ready):
            return np.full(self.links.size, np.nan)
        return self._apart(*self._seen) - self.test.levels(healthy=True)

    def _apart(self, delay: Floats, token: Floats) -> Floats:
        """Return (L,): log of each delay relative to the usual delay for this kind of link and N; arguments are
        logs."""
        return delay - self._exponent * token - self._usual

    def seconds(self, *, healthy: bool) -> Floats:
        """Return (L,): seconds of a transfer of usual size over each link, at present or when healthy; 0 while
        unknown."""
        if not self.ready:
            return np.zeros(self.links.size)
        usual = self._usual + self._exponent * np.log(self._tokens)
        return np.asarray(np.exp(usual + self.test.levels(healthy=healthy)))

    def clear(self, name: tuple[int, int], iteration: int) -> None:
        """Note that a probe found the link `name` healthy. Links that were found slow together with it are cleared,
        too."""
        if name in self._index:
            series = self._index[name]
            for i in {series, *self._together.pop(series, ())} & {series, *self.test.slow}:
                self.test.clear(i, iteration)

    def update(
        self, iteration: int, delays: Floats, tokens: Floats, counts: Floats, excused: Mapping[int, int]
    ) -> tuple[Finding, ...]:
        """Test an iteration and return the findings.

        `delays`, `tokens`, `counts`: results of `Links.measured`. `excused`: onset of each slow rank; the slow rank may
        be the cause of late transfers from and to it, so that these make no finding.
        """
        self._seen = None
        sound = (delays > 0.0) & (delays < MAX_CHUNK_S) & (tokens > 0.0)
        if not sound.any():
            return ()
        delay, token = np.full((2, self.links.size), np.nan)
        delay[sound], token[sound] = np.log(delays[sound]), np.log(tokens[sound])
        self._recent.append((iteration, np.where(sound, delays, np.nan)))
        self._seen = delay, token
        width = 1 / np.sqrt(np.clip(counts, 1.0, MAX_COUNTED_TRANSFERS))
        if self.ready:
            shifts = self.test.update(iteration, self._apart(delay, token), width)
        else:
            self._first.append((iteration, delay, token, width))
            shifts = self._begin() if self.ready else []
        findings = []
        slow = sorted((shift for shift in shifts if shift.kind == "slow"), key=lambda shift: -shift.after)
        recovered = [shift for shift in shifts if shift.kind == "recovered"]
        done: set[int] = set()
        for shift in slow + recovered:
            if shift.series in done:
                continue
            named = self._joined(
                shift, {other_shift.series for other_shift in (slow if shift in slow else recovered)} - done
            )
            done.update(named)
            blurred = shift in slow and not self._beyond_clocks(shift)
            late = any(
                abs(excused.get(rank, -SAME_CAUSE_ITERATIONS) - shift.onset) < SAME_CAUSE_ITERATIONS
                for rank in self._ends(shift)
            )
            if blurred or (shift in slow and late):
                for i in named:
                    self.test.explain(i, self.test.shift(i))
            else:
                findings.append(self._finding(iteration, shift, named))
        return tuple(findings)

    def _ends(self, shift: Shift) -> tuple[int, int]:
        return self._names[shift.series]

    def _beyond_clocks(self, shift: Shift) -> bool:
        """Return whether transfers became longer by more than clock errors and skewed starts can explain.

        If two ranks begin an iteration s seconds apart, transfers in one direction seem s longer, and those in the
        other direction s shorter. The difference of both directions then scatters more than their sum. If only the
        difference shifts, no link became slower."""
        i = shift.series
        iterations = np.array([iteration for iteration, _ in self._recent])
        back = self._index.get(self._names[i][::-1])
        ways = [i] if back is None else [i, back]  # only these two of thousands
        rows = np.array([delays[ways] for _, delays in self._recent])
        before, after = rows[iterations < shift.onset], rows[iterations >= shift.onset]
        if (
            len(before) < LEARNING_ITERATIONS
            or not np.isfinite(before[:, 0]).any()
            or not np.isfinite(after[:, 0]).any()
        ):
            return True
        moved = float(np.nanmedian(after[:, 0]) - np.nanmedian(before[:, 0]))
        skew = 0.0
        if back is not None and np.isfinite(before[:, 0] + before[:, 1]).sum() >= LEARNING_ITERATIONS:
            difference, total = before[:, 0] - before[:, 1], before[:, 0] + before[:, 1]
            skew = math.sqrt(max(_scatter(difference) ** 2 - _scatter(total) ** 2, 0.0)) / 2
            if np.isfinite(after[:, 1]).any():
                shortened = float(np.nanmedian(before[:, 1]) - np.nanmedian(after[:, 1]))
                if shortened > 0.5 * moved > 0:
                    return False
        # Both a start and an end are rounded, each evenly within the resolution.
        return moved >= MIN_CLOCK_ERRORS * math.hypot(skew, self.links.resolution_s / math.sqrt(6))

    def _begin(self) -> list[Shift]:
        """Learn the usual duration of transfers of each kind of link, and its power of N; return the first shifts.

        The power with the least spread of durations is chosen.
        """
        delays = np.array([delay for _, delay, _, _ in self._first])
        tokens = np.array([token for _, _, token, _ in self._first])
        spreads = []
        for exponent in TOKEN_EXPONENTS:
            rest = delays - exponent * tokens
            spreads.append(float(np.nanmedian(np.abs(rest - medians(rest)))))
        best = int(np.argmin(spreads))
        self._exponent = TOKEN_EXPONENTS[best] if spreads[best] < 0.8 * spreads[0] else 0.0
        self._tokens = float(np.exp(np.nanmedian(tokens)))
        rest = delays - self._exponent * tokens
        for kind in np.unique(self.links.kind):
            of_kind = rest[:, self.links.kind == kind]
            usual = of_kind if np.isfinite(of_kind).any() else rest
            self._usual[self.links.kind == kind] = np.nanmedian(usual)
        shifts: list[Shift] = []
        for iteration, delay, token, width in self._first:
            shifts += self.test.update(iteration, self._apart(delay, token), width)
        return shifts

    def _joined(self, shift: Shift, raised: set[int]) -> list[int]:
        """Return the link of `shift` and all links that shifted with it, and mark them slow or recovered.

        Candidates are the links between the same two stages, in either direction, and the links of its two ranks.
        """
        if shift.kind == "recovered":
            near = [i for i in self._together.pop(shift.series, ()) if i != shift.series]
        else:
            sender, receiver = self._ends(shift)
            lanes = {*self.links.lanes[:, shift.series].tolist()}
            near = [
                i
                for i, name in enumerate(self._names)
                if i != shift.series and ({sender, receiver} & {*name} or {*self.links.lanes[:, i].tolist()} == lanes)
            ]
        since = self.test.mean_since(shift.onset)
        named = [shift.series]
        for i in near:
            if shift.kind == "recovered":
                joins = i in raised or (self.test.is_slow(i) and since[i] < 0.5 * self.test.shift(i))
                level = 0.0
            else:
                joins = i in raised or (not self.test.is_slow(i) and since[i] >= ALIKE_SHARE * shift.after)
                level = float(since[i])
            if joins:
                named.append(i)
                if i not in raised:
                    self.test.accept(i, level, slow=shift.kind == "slow")
        if shift.kind == "slow":
            self._together |= {i: tuple(named) for i in named}
        return named

    def _finding(self, iteration: int, shift: Shift, named: list[int]) -> Finding:
        sender, receiver = self._ends(shift)
        shared = [rank for rank in (sender, receiver) if all(rank in self._names[i] for i in named)]
        more = f", and {len(named) - 1} related links" if len(named) > 1 else ""
        return Finding(
            kind="fail-slow" if shift.kind == "slow" else "recovered",
            iteration=shift.onset,
            detected=iteration,
            change=math.expm1(shift.after),
            confidence=shift.confidence,
            alarm=shift.alarm,
            ranks=tuple(shared) if len(shared) == 1 else (),
            link=(sender, receiver),
            evidence=(
                f"link from rank {sender} to rank {receiver}{more}: transfers take {math.exp(shift.after):.2f} times "
                f"their healthy time since iteration {shift.onset}, before {math.exp(shift.before):.2f} times; "
                f"compared with {self.links.size - 1} other links; noise {self.test.noise[shift.series]:.1%}"
            ),
        )


def _resolution(starts: Floats) -> float:
    """Return the clock's resolution: the step, in seconds, of which all start times are multiples; 0 if there is
    none."""
    distinct_starts = np.unique(starts[np.isfinite(starts) & (starts > 0.0) & (starts < MAX_CHUNK_S)])
    if distinct_starts.size < MIN_STARTS:
        return 0.0
    steps = np.diff(distinct_starts)
    step = float(steps[steps > EQUAL_STARTS_S].min(initial=math.inf))
    if not math.isfinite(step):
        return 0.0
    multiples = distinct_starts / step
    return step if bool((np.abs(multiples - np.round(multiples)) < 0.02).all()) else 0.0


def _scatter(values: Floats) -> float:
    """Return a robust standard deviation of the finite values, from the median of their absolute deviations."""
    finite = values[np.isfinite(values)]
    return 1.4826 * float(np.median(np.abs(finite - np.median(finite))))
