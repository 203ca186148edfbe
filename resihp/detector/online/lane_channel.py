"""Finds slow waits: of tensor-parallel collectives, of gradient sums, and for data.

A lane is the tensor-parallel group of a stage. Each kind of wait (`plan_arrays.LaneTimes`) of each lane is a series. It
is compared with its own past, after the part that all lanes share is subtracted. This shared part is one more series of
the same test (`resihp.detector.sequential.peer_cusum`). Waits are expressed as shares of a usual iteration, so that the
size of a shift is its cost. If all work is slower by a common factor, collectives and gradient sums are expected to be
slower by this factor, too.

One failure makes one finding: if a wait grew when a rank or link became slow, that rank or link is its cause, and the
wait is reported only if it outlasts the cause. Pure, no clock; called by `resihp.detector.online.beside`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import msgspec
import numpy as np

from resihp.detector.findings import Component, Finding
from resihp.detector.observation import Floats
from resihp.detector.online.plan_arrays import MAX_CHUNK_S, LaneTimes, Stacked
from resihp.detector.sequential.peer_cusum import PeerTest, Shift
from resihp.detector.sequential.shifts import Alarm
from resihp.detector.sequential.window import low_median
from resihp.pipeline.compiled import Ints

LEARNING_ITERATIONS = 5
"""Number of first iterations; the median of their times is the usual iteration time."""
SHIFT_SCALE = 3.0
"""Factor on the log of waits, because the test's smallest shift is 3 %: it then is 1 % of an iteration."""
MIN_COST_SHARE = 0.01
"""Smallest reported loss per iteration, as a share of the iteration."""
MIN_COST_S = 1.5e-3
"""Smallest reported loss per iteration, in seconds: clocks resolve 1 ms, and ranks begin iterations up to 0.5 ms
apart."""
ALIKE_SHARE = 0.6
"""A lane with at least this share of another lane's shift has the same cause."""
SAME_CAUSE_ITERATIONS = 8
"""Largest distance of onsets, in iterations, at which two slow-downs may have the same cause."""
LASTING_ITERATIONS = 20
"""Number of iterations that a slow wait must last before it is reported, and must outlast another cause. No plan
depends on it, and nobody would examine a shorter problem."""
QUORUM_SHARE = 0.2
"""Share of the series that an iteration must have measured to count."""
RECOVERY_CONFIDENCE = 0.99
"""Confidence of a recovery that is found because the wait is absent under a new plan."""
WAIT_NAMES: Mapping[Component, str] = {
    "collective": "tensor-parallel collectives",
    "reduction": "sums of gradients",
    "data": "the wait for the first micro-batch",
}

Key = tuple[Component, tuple[int, ...]]
"""Identity of a series under any plan: kind of wait, and the lane's ranks; no ranks for the part that all lanes
share."""
Causes = Callable[[], Mapping[int, Sequence[int]]]
"""Function that returns, for each lane, the onsets (iterations) of its slow ranks; lane -1: of slow links and the
job."""


class _Kind:
    """The series of one kind of wait: one for each of `lanes`, then one for the part that all lanes share."""

    def __init__(self, component: Component, lanes: Ints, first: int) -> None:
        self.component: Component = component
        self.lanes = lanes
        self.rows = slice(first, first + lanes.size)
        self.common = first + lanes.size

    def lanes_of(self, series: Iterable[int]) -> list[int]:
        """Return the lanes of some series; all lanes if the shared part is among them."""
        if self.common in series:
            return [int(lane) for lane in self.lanes]
        return [int(self.lanes[index - self.rows.start]) for index in series]


class _Raised(msgspec.Struct):
    """State of a series with waits that became longer."""

    onset: int
    """First iteration with longer waits."""
    before: float
    """Shift before the onset."""
    confidence: float
    alarm: Alarm | None
    together: int
    """Number that all series which shifted together share."""
    waits: int
    """First iteration in which the shift may be reported."""
    due: bool = True
    """Whether the shift is still to be reported, if it lasts."""
    reported: bool = False
    """Whether the shift was reported, so that its end has to be reported as well."""
    caused: bool = False
    """Whether a slow rank, link or job is the cause."""


class LaneTests:
    """Sequential tests of all kinds of waits under one plan.

    `before`: the tests under the previous plan. A slow wait that continues under the new plan is not reported again.
    """

    def __init__(self, stacked: Stacked, before: LaneTests | None, *, false_alarms_per: int, patience: int) -> None:
        self._stacked, self._false_alarms_per, self._patience = stacked, false_alarms_per, patience
        self._before: LaneTests | None = before if before is None or before.test.ready else before._before
        self._kinds = list(_kinds(stacked))
        self._keys = [
            (kind.component, self._ranks(kind.lanes_of([series])) if series != kind.common else ())
            for kind in self._kinds
            for series in range(kind.rows.start, kind.common + 1)
        ]
        self.test: PeerTest = self._made({})
        self._raised: dict[int, _Raised] = {}
        self._number = 0
        self._faster: dict[int, tuple[int, float]] = {}
        """For each shared part that became shorter: the iteration in which it did, and its former level."""
        self._first: list[tuple[int, LaneTimes, float, float]] = []
        self.usual_s = math.nan
        """Usual iteration time in seconds; NaN while it is unknown."""

    @property
    def slow(self) -> dict[Key, float]:
        """Shift of each slow wait without another cause, in log units times `SHIFT_SCALE`."""
        return {self._keys[i]: self.test.shift(i) for i, wait in self._raised.items() if not wait.caused}

    @property
    def added_s(self) -> float:
        """Upper bound of the seconds by which the slow waits lengthen an iteration."""
        if math.isnan(self.usual_s):
            return 0.0 if self._before is None else self._before.added_s
        shifts = dict.fromkeys([(kind.component, common) for kind in self._kinds for common in (False, True)], 0.0)
        for (component, ranks), shift in self.slow.items():
            shifts[component, not ranks] = max(shifts[component, not ranks], shift)
        return float(np.expm1(np.array([*shifts.values()]) / SHIFT_SCALE).sum()) * self.usual_s

    @property
    def suspects(self) -> bool:
        """Whether an alarm or a report about some wait may be imminent."""
        return self.test.suspects or any(wait.due and not wait.caused for wait in self._raised.values())

    def update(
        self, iteration: int, times: LaneTimes, healthy_s: float, common: float, causes: Causes
    ) -> list[Finding]:
        """Test an iteration and return the findings.

        `healthy_s`: predicted healthy seconds of the iteration; `common`: median time of the ranks' own work, over its
        healthy time.
        """
        if not (0.0 < healthy_s < MAX_CHUNK_S and 0.0 < common < math.inf):
            return []
        if not math.isnan(self.usual_s):
            return self._test(iteration, times, healthy_s, common, causes)
        self._first.append((iteration, times, healthy_s, common))
        if len(self._first) < LEARNING_ITERATIONS:
            return []
        self.usual_s = float(np.median([seconds for _, _, seconds, _ in self._first]))
        buffered, self._first = self._first, []
        findings = self._go_on(iteration, [self._values(*sample[1:]) for sample in buffered])
        return findings + [finding for sample in buffered for finding in self._test(*sample, causes)]

    # --- from plan to plan ----------------------------------------------------------------------------------------

    def _made(self, known_shifts: Mapping[int, float]) -> PeerTest:
        groups = [
            (i, int(self._stacked.group[self._stacked.first_row[lane]]) if lane >= 0 else -1)
            for i, kind in enumerate(self._kinds)
            for lane in (*kind.lanes.tolist(), -1)
        ]
        order = {group: i for i, group in enumerate(dict.fromkeys(groups))}
        return PeerTest(
            [order[group] for group in groups],
            known_shifts=known_shifts,
            spread=np.inf,  # lanes have different work and may share processors: compare with their own past only
            least=SHIFT_SCALE * MIN_COST_SHARE,
            false_alarms_per=3 * self._false_alarms_per,
            quorum=QUORUM_SHARE,
        )

    def _go_on(self, iteration: int, first: Sequence[Floats]) -> list[Finding]:
        """Check, by the first values under this plan, which slow waits of the previous plan continue.

        Returns the recoveries of the others.
        """
        before, self._before = self._before, None
        if before is None or not before._raised:
            return []
        index = {key: i for i, key in enumerate(self._keys)}
        now = np.median(np.array(first), axis=0)
        healthy, known_shifts = before.test.levels(healthy=True), dict[int, float]()
        recovered: dict[int, list[int]] = {}
        for former, wait in before._raised.items():
            i, shift = index.get(before._keys[former]), before.test.shift(former)
            if i is None:
                continue  # this lane no longer exists
            if now[i] - healthy[former] >= ALIKE_SHARE * shift:
                known_shifts[i], self._raised[i] = shift, wait
            elif wait.reported:
                recovered.setdefault(wait.together, []).append(i)
        self._number = before._number
        self.test = self._made(known_shifts)
        return [self._finding(iteration, series, iteration, 0.0, None) for series in recovered.values()]

    # --- an iteration ---------------------------------------------------------------------------------------------

    def _test(self, iteration: int, times: LaneTimes, healthy_s: float, common: float, causes: Causes) -> list[Finding]:
        ready, before = self.test.ready, self.test.levels(healthy=True)
        shifts = self.test.update(iteration, self._values(times, healthy_s, common))
        fell = before - self.test.levels(healthy=True)
        for kind in self._kinds if ready else ():
            if fell[kind.common] >= SHIFT_SCALE * MIN_COST_SHARE:
                self._faster[kind.common] = (iteration, float(before[kind.common]))
        findings: list[Finding] = []
        done: set[int] = set()
        for shift in sorted(shifts, key=lambda shift: -shift.after):
            if shift.series not in done:
                alike = {other_shift.series for other_shift in shifts if other_shift.kind == shift.kind} - done
                done.update(
                    self._ended(shift, alike, findings) if shift.kind == "recovered" else self._begun(shift, alike)
                )
        return findings + self._lasting_findings(iteration, causes) if self._raised else findings

    def _values(self, times: LaneTimes, healthy_s: float, common: float) -> Floats:
        """Return (series,): the wait of each lane minus the shared part, and the shared part, as scaled logs."""
        slower = max(common, 1.0)
        waits = {
            "collective": times.collective / (healthy_s * slower),  # grows with the work
            "reduction": times.reduction / (self.usual_s * slower),
            "data": times.data / self.usual_s,
        }
        values = np.full(self.test.size, np.nan)
        levels, noise = self.test.levels(healthy=False), self.test.noise
        slow = np.zeros(self.test.size, dtype=bool)
        slow[list(self.test.slow)] = True
        for kind in self._kinds:
            own = SHIFT_SCALE * np.log1p(waits[kind.component][kind.lanes])
            deviations = own - levels[kind.rows]
            finite = np.isfinite(deviations)
            healthy = finite & ~slow[kind.rows]  # an end in slow lanes must not look like a beginning everywhere else
            if finite.any():
                middle = low_median(deviations[healthy if healthy.any() else finite], 4 * low_median(noise[kind.rows]))
                values[kind.rows], values[kind.common] = own - middle, middle
        return values

    def _begun(self, shift: Shift, alike: set[int]) -> list[int]:
        """Mark the series of `shift`, and all series that shifted with it, as raised, and return all of them.

        `alike`: series with an alarm of the same kind in this iteration.
        """
        kind, since, slow = self._kind(shift.series), self.test.mean_since(shift.onset), set(self.test.slow)
        rows = range(kind.rows.start, kind.rows.stop) if shift.series != kind.common else ()
        near = [i for i in rows if i in alike or (i not in slow and since[i] >= ALIKE_SHARE * shift.after)]
        named = [shift.series, *(i for i in near if i != shift.series)]
        self._number += 1
        for i in named:
            if i not in alike:
                self.test.accept(i, float(since[i]), slow=True)
            former = self._raised.get(i)
            less = former is not None and shift.after < shift.before
            onset = former.onset if former is not None and less else shift.onset
            self._raised[i] = _Raised(
                onset=onset,
                before=shift.before,
                confidence=shift.confidence,
                alarm=shift.alarm,
                together=self._number,
                waits=shift.onset + LASTING_ITERATIONS,
                reported=former is not None and former.reported,
            )
        return named

    def _ended(self, shift: Shift, alike: set[int], findings: list[Finding]) -> list[int]:
        """Return the series of `shift` and all series that recovered with it; add findings for the reported ones."""
        wait = self._raised.get(shift.series)
        since = self.test.mean_since(shift.onset)
        ended = [shift.series]
        for i, wait_of_series in self._raised.items():
            if wait is not None and wait_of_series.together == wait.together and i != shift.series:
                if i in alike:
                    ended.append(i)
                elif since[i] < 0.5 * self.test.shift(i):
                    self.test.accept(i, 0.0, slow=False)
                    ended.append(i)
        reported = [i for i in ended if i in self._raised and self._raised[i].reported]
        for i in ended:
            self._raised.pop(i, None)
        if reported:
            findings.append(self._finding(shift.detected, reported, shift.onset, shift.after, shift))
        return ended

    def _lasting_findings(self, iteration: int, causes: Causes) -> list[Finding]:
        """Return the findings of slow waits that lasted for long enough and have no other cause."""
        due = [i for i, wait in self._raised.items() if wait.due]
        known_causes = causes() if due else {}
        everywhere = {cause_onset for onsets in known_causes.values() for cause_onset in onsets}
        lasting: dict[int, list[int]] = {}
        for i in due:
            wait = self._raised[i]
            wait.caused = self._is_caused(i, wait.onset, known_causes, everywhere)
            if wait.caused:
                wait.waits = max(wait.waits, iteration + LASTING_ITERATIONS)
            elif iteration >= wait.waits:
                lasting.setdefault(wait.together, []).append(i)
        findings = []
        late = self.test.mean_since(iteration - LASTING_ITERATIONS + 1) if lasting else np.zeros(0)
        certain = 4.0 * self.test.noise / math.sqrt(LASTING_ITERATIONS)
        for series in lasting.values():
            still_longer = []
            for i in series:
                if self._is_negligible(i, self._raised[i].onset):
                    del self._raised[i]
                    self.test.explain(i, self.test.shift(i))
                elif late[i] >= max(ALIKE_SHARE * self.test.shift(i), certain[i]):
                    still_longer.append(i)
            if still_longer:
                still_longer.sort(key=lambda i: (-self.test.shift(i), i))
                first = self._raised[still_longer[0]]
                findings.append(
                    self._finding(iteration, still_longer, first.onset, self.test.shift(still_longer[0]), first)
                )
                for i in still_longer:
                    self._raised[i].due, self._raised[i].reported = False, True
        return findings

    def _is_negligible(self, series: int, onset: int) -> bool:
        """Return whether a shift is too small to be reported, or only apparent.

        It is apparent if the other lanes became faster, or if the wait only returned to its former length.
        """
        kind, shift = self._kind(series), self.test.shift(series)
        if self._cost(shift) * self.usual_s < MIN_COST_S:
            return True
        if series != kind.common and self.test.moved(kind.common, onset) <= -ALIKE_SHARE * shift:
            return True  # with two lanes, a longer one and a shorter one look alike
        since, before = self._faster.get(kind.common, (-math.inf, 0.0))
        if abs(onset - since) > self._patience:
            return False
        longer = float(self.test.levels(healthy=False)[kind.common]) - before
        return longer + (shift if series != kind.common else 0.0) < (1.0 - ALIKE_SHARE) * shift

    def _is_caused(
        self, series: int, onset: int, causes: Mapping[int, Sequence[int]], everywhere: Collection[int]
    ) -> bool:
        """Return whether another finding with about the same onset may be the cause of a slow wait.

        For a wait of one lane, the cause is one of the lane's ranks. For gradient sums and for the shared part, in
        which all lanes wait for each other, it is any slow rank, link or job; for the shared part also any slow
        lane."""
        kind = self._kind(series)
        other_onsets = everywhere
        if series == kind.common:
            lanes = (wait.onset for i, wait in self._raised.items() if kind.rows.start <= i < kind.rows.stop)
            other_onsets = {*everywhere, *lanes}
        elif kind.component != "reduction":
            other_onsets = causes.get(kind.lanes_of([series])[0], ())
        return any(abs(other_onset - onset) <= SAME_CAUSE_ITERATIONS for other_onset in other_onsets)

    def _finding(
        self, iteration: int, series: Sequence[int], onset: int, shift: float, source: Shift | _Raised | None
    ) -> Finding:
        """Return a finding about several series. `source`: the shift or slow wait behind it; None for a recovery that
        is found because the wait is absent under a new plan."""
        kind = self._kind(series[0])
        lanes = kind.lanes_of(series)
        ranks = self._ranks(lanes)
        cost = self._cost(shift)
        subject = "of all" if kind.common in series else f"of {_named(ranks)}"
        before = "" if source is None else f", before {self._cost(source.before):+.1%}"
        return Finding(
            kind="fail-slow" if isinstance(source, _Raised) else "recovered",
            iteration=onset,
            detected=iteration,
            change=cost,
            confidence=RECOVERY_CONFIDENCE if source is None else source.confidence,
            alarm=None if source is None else source.alarm,
            ranks=ranks,
            link=None,
            component=kind.component,
            evidence=(
                f"{WAIT_NAMES[kind.component]} {subject}: {cost * self.usual_s:+.4f} s since iteration {onset}, "
                f"{cost:+.1%} of an iteration{before}; compared with "
                f"{kind.lanes.size - len(lanes)} other groups; noise {self.test.noise[series[0]] / SHIFT_SCALE:.1%}"
            ),
        )

    @staticmethod
    def _cost(shift: float) -> float:
        return math.expm1(shift / SHIFT_SCALE)

    def _kind(self, series: int) -> _Kind:
        return next(kind for kind in self._kinds if series <= kind.common)

    def _ranks(self, lanes: Sequence[int]) -> tuple[int, ...]:
        first, ranks = self._stacked.first_row, self._stacked.ranks
        return tuple(rank for lane in lanes for rank in ranks[first[lane] : first[lane + 1]].tolist())


def _kinds(stacked: Stacked) -> Iterator[_Kind]:
    """Yield each kind of wait that occurs under the plan, with its series."""
    busy = stacked.lengths[stacked.first_row[:-1]] > 0
    lanes: dict[Component, Ints] = {
        "collective": np.flatnonzero(busy & (np.diff(stacked.first_row) > 1)),
        "reduction": np.flatnonzero(busy),
        "data": np.flatnonzero(busy & np.array([stage == 0 for _, stage in stacked.places])),
    }
    first = 0
    for component, lanes_of_kind in lanes.items():
        if lanes_of_kind.size:
            yield _Kind(component, lanes_of_kind, first)
            first += lanes_of_kind.size + 1


def _named(ranks: Sequence[int]) -> str:
    return f"ranks {', '.join(map(str, ranks[:8]))}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
