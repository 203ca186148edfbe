"""What is slow beside the work of ranks and links: collectives of a tensor-parallel group, sums of gradients, data.

A lane is a tensor-parallel group of a stage. Each kind of wait (`plan_arrays.LaneTimes`) is tested lane by lane, less
what all lanes have in common, against its own past; and so is what they have in common: all in one test
(`resihp.detector.sequential.peer_cusum`). Waits are taken as shares of a usual iteration, so that a shift is what it
costs; where everybody's work is slower by a common factor, sums and collectives may be, too.

One failure is one finding: what became longer when a rank or a link became slow has its cause there, and is told only
if it outlasts it. Pure, no clock; called by `resihp.detector.online.beside`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import msgspec
import numpy as np

from resihp.detector.findings import Component, Finding
from resihp.detector.observation import Floats
from resihp.detector.online.plan_arrays import LONGEST_S, LaneTimes, Stacked
from resihp.detector.sequential.peer_cusum import PeerTest, Shift
from resihp.detector.sequential.shifts import Alarm
from resihp.detector.sequential.window import low_median
from resihp.pipeline.compiled import Ints

LEARNING = 5
"""Iterations whose median is the usual one, which waits are shares of."""
FINE = 3.0
"""Waits count in shares of an iteration over this: the test's least shifts, of 3 %, are then of 1 %."""
LEAST = 0.01
"""Smallest share of an iteration whose loss is a finding."""
LEAST_S = 1.5e-3
"""What clocks of 1 ms, and ranks that begin iterations 0.5 ms apart, do not resolve."""
ALIKE = 0.6
"""A lane with this share of a shift has it from the same cause."""
NEAR = 8
"""Iterations between onsets that may still have one cause."""
LASTING = 20
"""Iterations after which it is told, and for which it has to outlast a cause: no plan acts on it, and what is over by
then is not worth anybody's time."""
QUORUM = 0.2
CERTAIN = 0.99
"""Confidence that a wait is over which is not there under another plan."""
WAITS: Mapping[Component, str] = {
    "collective": "tensor-parallel collectives",
    "reduction": "sums of gradients",
    "data": "the wait for the first micro-batch",
}

Key = tuple[Component, tuple[int, ...]]
"""What waits, under any plan: the kind, and a lane's ranks, or none for what all lanes have in common."""
Causes = Callable[[], Mapping[int, Sequence[int]]]
"""Iterations in which what is slow now became so, by lane; -1 for what is no rank's."""


class _Kind:
    """The series of one kind of wait: one for each of `lanes`, then one for what they have in common."""

    def __init__(self, component: Component, lanes: Ints, first: int) -> None:
        self.component: Component = component
        self.lanes = lanes
        self.rows = slice(first, first + lanes.size)
        self.common = first + lanes.size

    def lanes_of(self, series: Iterable[int]) -> list[int]:
        """Of some series; all for what they have in common."""
        if self.common in series:
            return [int(lane) for lane in self.lanes]
        return [int(self.lanes[one - self.rows.start]) for one in series]


class _Raised(msgspec.Struct):
    """A series that is longer than it was."""

    onset: int
    before: float
    confidence: float
    alarm: Alarm | None
    together: int
    """Those of one number shifted together."""
    waits: int
    """Before this iteration it is not told."""
    due: bool = True
    """It is to be told, should it last."""
    told: bool = False
    """Its end is to be told."""
    caused: bool = False
    """Something else that is slow is its cause."""


class LaneTests:
    """Sequential tests of all kinds of waits. `before`: those under the plan before; what was longer there, and is
    still, is no news."""

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
        """Since when what all have in common is less than it was, and what it was, by series."""
        self._first: list[tuple[int, LaneTimes, float, float]] = []
        self.usual_s = math.nan
        """What an iteration usually takes; NaN while it is not known."""

    @property
    def slow(self) -> dict[Key, float]:
        """Shift of each wait that is longer than it was, and has no other cause; `FINE` log units."""
        return {self._keys[i]: self.test.shift(i) for i, one in self._raised.items() if not one.caused}

    @property
    def added_s(self) -> float:
        """Seconds by which an iteration is longer for it, at most."""
        if math.isnan(self.usual_s):
            return 0.0 if self._before is None else self._before.added_s
        shifts = dict.fromkeys([(kind.component, common) for kind in self._kinds for common in (False, True)], 0.0)
        for (component, ranks), shift in self.slow.items():
            shifts[component, not ranks] = max(shifts[component, not ranks], shift)
        return float(np.expm1(np.array([*shifts.values()]) / FINE).sum()) * self.usual_s

    @property
    def suspects(self) -> bool:
        """Some lane has gathered a good part of the evidence for an alarm, or is about to be told."""
        return self.test.suspects or any(one.due and not one.caused for one in self._raised.values())

    def update(
        self, iteration: int, times: LaneTimes, healthy_s: float, common: float, causes: Causes
    ) -> list[Finding]:
        """Take an iteration that should have taken `healthy_s`; everybody's work took `common` times as long as it
        should."""
        if not (0.0 < healthy_s < LONGEST_S and 0.0 < common < math.inf):
            return []
        if not math.isnan(self.usual_s):
            return self._test(iteration, times, healthy_s, common, causes)
        self._first.append((iteration, times, healthy_s, common))
        if len(self._first) < LEARNING:
            return []
        self.usual_s = float(np.median([seconds for _, _, seconds, _ in self._first]))
        buffered, self._first = self._first, []
        findings = self._go_on(iteration, [self._values(*one[1:]) for one in buffered])
        return findings + [found for one in buffered for found in self._test(*one, causes)]

    # --- from plan to plan ----------------------------------------------------------------------------------------

    def _made(self, known: Mapping[int, float]) -> PeerTest:
        groups = [
            (i, int(self._stacked.group[self._stacked.first_row[lane]]) if lane >= 0 else -1)
            for i, kind in enumerate(self._kinds)
            for lane in (*kind.lanes.tolist(), -1)
        ]
        order = {group: i for i, group in enumerate(dict.fromkeys(groups))}
        return PeerTest(
            [order[group] for group in groups],
            known=known,
            spread=np.inf,  # lanes have more or less to do, and share their processors or not: own pasts alone
            least=FINE * LEAST,
            false_alarms_per=3 * self._false_alarms_per,
            quorum=QUORUM,
        )

    def _go_on(self, iteration: int, first: Sequence[Floats]) -> list[Finding]:
        """What was longer under the plan before: is it still, by the first values under this one?"""
        before, self._before = self._before, None
        if before is None or not before._raised:
            return []
        index = {key: i for i, key in enumerate(self._keys)}
        now = np.median(np.array(first), axis=0)
        healthy, known = before.test.levels(healthy=True), dict[int, float]()
        over: dict[int, list[int]] = {}
        for then, one in before._raised.items():
            i, shift = index.get(before._keys[then]), before.test.shift(then)
            if i is None:
                continue  # a lane that is no more
            if now[i] - healthy[then] >= ALIKE * shift:
                known[i], self._raised[i] = shift, one
            elif one.told:
                over.setdefault(one.together, []).append(i)
        self._number = before._number
        self.test = self._made(known)
        return [self._finding(iteration, series, iteration, 0.0, None) for series in over.values()]

    # --- an iteration ---------------------------------------------------------------------------------------------

    def _test(self, iteration: int, times: LaneTimes, healthy_s: float, common: float, causes: Causes) -> list[Finding]:
        ready, before = self.test.ready, self.test.levels(healthy=True)
        shifts = self.test.update(iteration, self._values(times, healthy_s, common))
        fell = before - self.test.levels(healthy=True)
        for kind in self._kinds if ready else ():
            if fell[kind.common] >= FINE * LEAST:
                self._faster[kind.common] = (iteration, float(before[kind.common]))
        findings: list[Finding] = []
        done: set[int] = set()
        for shift in sorted(shifts, key=lambda one: -one.after):
            if shift.series not in done:
                alike = {one.series for one in shifts if one.kind == shift.kind} - done
                done.update(
                    self._ended(shift, alike, findings) if shift.kind == "recovered" else self._begun(shift, alike)
                )
        return findings + self._told(iteration, causes) if self._raised else findings

    def _values(self, times: LaneTimes, healthy_s: float, common: float) -> Floats:
        """(series,): lanes' waits less what they have in common, and that."""
        slower = max(common, 1.0)
        waits = {
            "collective": times.collective / (healthy_s * slower),  # as long as there is work
            "reduction": times.reduction / (self.usual_s * slower),
            "data": times.data / self.usual_s,
        }
        values = np.full(self.test.size, np.nan)
        levels, noise = self.test.levels(healthy=False), self.test.noise
        slow = np.zeros(self.test.size, dtype=bool)
        slow[list(self.test.slow)] = True
        for kind in self._kinds:
            own = FINE * np.log1p(waits[kind.component][kind.lanes])
            away = own - levels[kind.rows]
            known = np.isfinite(away)
            well = known & ~slow[kind.rows]  # what ends there is not what begins everywhere else
            if known.any():
                middle = low_median(away[well if well.any() else known], 4 * low_median(noise[kind.rows]))
                values[kind.rows], values[kind.common] = own - middle, middle
        return values

    def _begun(self, shift: Shift, alike: set[int]) -> list[int]:
        """Series that became longer with this one, it included."""
        kind, since, slow = self._kind(shift.series), self.test.mean_since(shift.onset), set(self.test.slow)
        rows = range(kind.rows.start, kind.rows.stop) if shift.series != kind.common else ()
        near = [i for i in rows if i in alike or (i not in slow and since[i] >= ALIKE * shift.after)]
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
                waits=shift.onset + LASTING,
                told=former is not None and former.told,
            )
        return named

    def _ended(self, shift: Shift, alike: set[int], findings: list[Finding]) -> list[int]:
        """Series that are well again with this one, it included; it is told of those that were told."""
        one = self._raised.get(shift.series)
        since = self.test.mean_since(shift.onset)
        ended = [shift.series]
        for i, other in self._raised.items():
            if one is not None and other.together == one.together and i != shift.series:
                if i in alike:
                    ended.append(i)
                elif since[i] < 0.5 * self.test.shift(i):
                    self.test.accept(i, 0.0, slow=False)
                    ended.append(i)
        told = [i for i in ended if i in self._raised and self._raised[i].told]
        for i in ended:
            self._raised.pop(i, None)
        if told:
            findings.append(self._finding(shift.detected, told, shift.onset, shift.after, shift))
        return ended

    def _told(self, iteration: int, causes: Causes) -> list[Finding]:
        """What has lasted, and has no other cause."""
        due = [i for i, one in self._raised.items() if one.due]
        known = causes() if due else {}
        everywhere = {then for onsets in known.values() for then in onsets}
        lasting: dict[int, list[int]] = {}
        for i in due:
            one = self._raised[i]
            one.caused = self._is_caused(i, one.onset, known, everywhere)
            if one.caused:
                one.waits = max(one.waits, iteration + LASTING)
            elif iteration >= one.waits:
                lasting.setdefault(one.together, []).append(i)
        findings = []
        late = self.test.mean_since(iteration - LASTING + 1) if lasting else np.zeros(0)
        certain = 4.0 * self.test.noise / math.sqrt(LASTING)
        for series in lasting.values():
            left = []
            for i in series:
                if self._is_none(i, self._raised[i].onset):
                    del self._raised[i]
                    self.test.explain(i, self.test.shift(i))
                elif late[i] >= max(ALIKE * self.test.shift(i), certain[i]):
                    left.append(i)
            if left:
                left.sort(key=lambda i: (-self.test.shift(i), i))
                first = self._raised[left[0]]
                findings.append(self._finding(iteration, left, first.onset, self.test.shift(left[0]), first))
                for i in left:
                    self._raised[i].due, self._raised[i].told = False, True
        return findings

    def _is_none(self, series: int, onset: int) -> bool:
        """Whether a shift is too slight to count, or is none: others are faster, or it is as before they were."""
        kind, shift = self._kind(series), self.test.shift(series)
        if self._cost(shift) * self.usual_s < LEAST_S:
            return True
        if series != kind.common and self.test.moved(kind.common, onset) <= -ALIKE * shift:
            return True  # of two nobody can tell
        since, before = self._faster.get(kind.common, (-math.inf, 0.0))
        if abs(onset - since) > self._patience:
            return False
        longer = float(self.test.levels(healthy=False)[kind.common]) - before
        return longer + (shift if series != kind.common else 0.0) < (1.0 - ALIKE) * shift

    def _is_caused(
        self, series: int, onset: int, causes: Mapping[int, Sequence[int]], everywhere: Collection[int]
    ) -> bool:
        """Whether something else became slow at about the same time: of its ranks; anywhere for who waits for all."""
        kind = self._kind(series)
        others = everywhere
        if series == kind.common:
            lanes = (one.onset for i, one in self._raised.items() if kind.rows.start <= i < kind.rows.stop)
            others = {*everywhere, *lanes}
        elif kind.component != "reduction":
            others = causes.get(kind.lanes_of([series])[0], ())
        return any(abs(then - onset) <= NEAR for then in others)

    def _finding(
        self, iteration: int, series: Sequence[int], onset: int, shift: float, of: Shift | _Raised | None
    ) -> Finding:
        """`of`: how it came to this; None for what is over under another plan."""
        kind = self._kind(series[0])
        lanes = kind.lanes_of(series)
        ranks = self._ranks(lanes)
        cost = self._cost(shift)
        who = "of all" if kind.common in series else f"of {_named(ranks)}"
        before = "" if of is None else f", before {self._cost(of.before):+.1%}"
        return Finding(
            kind="fail-slow" if isinstance(of, _Raised) else "recovered",
            iteration=onset,
            detected=iteration,
            change=cost,
            confidence=CERTAIN if of is None else of.confidence,
            alarm=None if of is None else of.alarm,
            ranks=ranks,
            link=None,
            component=kind.component,
            evidence=(
                f"{WAITS[kind.component]} {who}: {cost * self.usual_s:+.4f} s since iteration {onset}, "
                f"{cost:+.1%} of an iteration{before}; relative to "
                f"{kind.lanes.size - len(lanes)} other groups; noise {self.test.noise[series[0]] / FINE:.1%}"
            ),
        )

    @staticmethod
    def _cost(shift: float) -> float:
        return math.expm1(shift / FINE)

    def _kind(self, series: int) -> _Kind:
        return next(kind for kind in self._kinds if series <= kind.common)

    def _ranks(self, lanes: Sequence[int]) -> tuple[int, ...]:
        first, ranks = self._stacked.first_row, self._stacked.ranks
        return tuple(rank for lane in lanes for rank in ranks[first[lane] : first[lane + 1]].tolist())


def _kinds(stacked: Stacked) -> Iterator[_Kind]:
    """Kinds of wait that lanes of the plan have, with their series."""
    busy = stacked.lengths[stacked.first_row[:-1]] > 0
    lanes: dict[Component, Ints] = {
        "collective": np.flatnonzero(busy & (np.diff(stacked.first_row) > 1)),
        "reduction": np.flatnonzero(busy),
        "data": np.flatnonzero(busy & np.array([stage == 0 for _, stage in stacked.places])),
    }
    first = 0
    for component, of in lanes.items():
        if of.size:
            yield _Kind(component, of, first)
            first += of.size + 1


def _named(ranks: Sequence[int]) -> str:
    return f"ranks {', '.join(map(str, ranks[:8]))}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
