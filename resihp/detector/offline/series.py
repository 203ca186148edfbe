"""Slow-downs in a series of iteration times, where nothing else is known. Online, pure; called for each iteration.

Without chunk times the healthy time cannot be predicted, so `ChangeDetector` is run on the logarithm of plain times
against a robust running level; where tokens or the sum of squared lengths of each iteration are known, on what they
leave unexplained (`IterationModel`). What plain times show and the workload explains is a `workload` event. Which of
the two it was is said (`known`). Times of several ranks are compared with those of the peers in the same iteration.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np

from resihp.detector.offline.analysis import Analysis, Kind, SpeedChange, Verdict, Where
from resihp.detector.offline.hindsight import SeenTimes, State, Turn, judged
from resihp.detector.offline.iteration_model import IterationModel, Point
from resihp.detector.offline.workers import common_of_healthy, together, without_peers
from resihp.detector.sequential.changes import WARM_UP, ChangeDetector, ChangePoint
from resihp.detector.sequential.densities import Floats

LEAST = 0.1
"""Smallest change of plain times that is told, in log units: below it, a change of the data is as likely."""
FALSE_ALARMS_PER = 2_000
"""Iterations between false alarms at least; one in 1,000 is asked for."""
NOTICED_PER = 100
"""The same where a file is read to its end: what is noticed too early does not stand."""
SETTLING = 40
"""Times in which a fall is the end of the start (caches fill, kernels are tuned), not a recovery."""
PATIENCE = 6
"""Iterations until what plain times show counts as explained by the workload."""
SKIPPED = 3
"""First iterations that no level is taken from."""
LEAST_OF_PEERS = 0.1
"""Smallest change of a rank against its peers that is told, in log units."""
BLIP = 4
"""What lasts no longer is a hiccup: an evaluation, a checkpoint, a stall of the file system."""
AIM = math.log(1.2)
"""Change that is to be found within three iterations."""
FALL = 0.1
"""A fall below what was healthy so far is told from here on: the run was slow from its start."""


class TimedRun(msgspec.Struct, frozen=True):
    """One run, iterations in ascending order: of the whole job (`points`), or of each rank (`ranks`), not both."""

    points: tuple[Point, ...] = ()
    ranks: Mapping[int, tuple[Point, ...]] = {}
    interval: int = 1
    """Iterations that a time is the mean of."""


class SeriesDetector:
    """Slow-downs and recoveries of one run, one iteration after the other.

    Times that are not positive numbers are left out; iterations have to increase. `events` holds what was found so
    far, `end` and verdict as they are known by now.
    """

    def __init__(
        self,
        *,
        run: int = 0,
        where: Where | None = None,
        least: float = LEAST,
        false_alarms_per: int = FALSE_ALARMS_PER,
        workload: bool = False,
    ) -> None:
        self.events: list[SpeedChange] = []
        self._run, self._where, self._least = run, where, least
        self._plain = ChangeDetector(least=least, false_alarms_per=false_alarms_per, aim=AIM, several_levels=True)
        self._rest = (
            ChangeDetector(least=least, false_alarms_per=false_alarms_per, aim=AIM, several_levels=True)
            if workload
            else None
        )
        self._workload = IterationModel()
        self._pending: deque[Point] = deque()
        self._open: int | None = None
        self._points: list[Point] = []
        self._turns: list[Turn] = []
        self._slow_since = 0
        self._unexplained: list[tuple[int, ChangePoint]] = []
        self._iterations: list[int] = []
        self._beyond = -(10**9)

    @property
    def known(self) -> str:
        """What healthy times are told from: `warming up`, `plain times` or `workload`."""
        if not (self._rest or self._plain).ready:
            return "warming up"
        return "plain times" if self._rest is None else "workload"

    def update(self, point: Point) -> SpeedChange | None:
        """Take the next iteration; what was found with it, if anything."""
        seconds = point.seconds
        if not (math.isfinite(seconds) and seconds > 0):
            return None
        self._iterations.append(point.iteration)
        self._points.append(point)
        change = self._plain.update(point.iteration, math.log(seconds))
        if self._rest is None:
            return None if change is None else self._tell(change, self._plain)
        return self._explain(point, change, self._rest)

    def judged(self, *, among: int = 1, less: Mapping[int, float] | None = None) -> list[SpeedChange]:
        """What stands of the events, now that all times are known (`hindsight`); of the workload's, those beside it.

        `among`: series of which this is one. `less`: by iteration, what is to be taken from the logs of its times.
        """
        if not self._points:
            return []
        points = self._points
        seconds = np.array([point.seconds for point in points])
        values = np.log(seconds)
        if less is not None:
            values = values - [less.get(iteration, 0.0) for iteration in self._iterations]
            seconds = np.exp(values)
        if self._rest is not None:
            values = values - self._expected()
        iterations = np.array([point.iteration for point in points], dtype=np.int64)
        seen = SeenTimes(iterations, values, seconds)
        found = judged(self._turns, seen, self._least, among=among, run=self._run, where=self._where)
        slow = [(e.iteration - PATIENCE, e.end or math.inf) for e in found if e.verdict == "fail-slow"]
        if self._rest is not None:
            found += [
                event
                for event in self.events
                if event.verdict == "workload" and not any(first <= event.iteration < end for first, end in slow)
            ]
        return sorted(found, key=lambda event: (event.detected_at, event.iteration))

    def _expected(self) -> Floats:
        """Logs of seconds that the workload explains, by one model for all times."""
        calm = np.ones(len(self._points), dtype=np.bool_)
        for turn in self._turns:
            calm[bisect_left(self._iterations, turn.onset) :] = turn.state == "healthy"
        calm[:SKIPPED] = False
        model = IterationModel(history=len(self._points))
        for place in np.flatnonzero(calm).tolist():
            model.take(self._points[place])
        model.fit()
        predicted = [model.predict(point) for point in self._points]
        typical = float(np.median([point.seconds for point in self._points]))
        return np.log([typical if seconds is None else max(seconds, 1e-3 * typical) for seconds in predicted])

    # --- with the workload ------------------------------------------------------------------------------------------

    def _explain(self, point: Point, plain: ChangePoint | None, rest: ChangeDetector) -> SpeedChange | None:
        number = len(self._iterations)
        if plain is not None and plain.after > plain.before:
            self._unexplained.append((number, plain))
        predicted = self._workload.predict(point)
        found = None
        if predicted is not None and predicted > 0:
            if self._workload.beyond(point):
                self._beyond = point.iteration
            change = rest.update(point.iteration, math.log(point.seconds / predicted))
            if change is not None:
                found = self._tell(change, rest)
        self._learn(point, rest)
        while self._unexplained and number - self._unexplained[0][0] >= PATIENCE:
            _, change = self._unexplained.pop(0)
            if not any(abs(e.iteration - change.onset) <= 2 * PATIENCE or e.end is None for e in self.events):
                event = self._event(change, math.expm1(change.after - change.before), "workload")
                self.events.append(event)
                found = found or event
        return found

    def _learn(self, point: Point, rest: ChangeDetector) -> None:
        """The workload's model follows healthy iterations that are too old for a change not yet found."""
        if rest.changed:
            self._pending.clear()
            return
        self._pending.append(point)
        while len(self._pending) > (PATIENCE if rest.ready else 0):
            self._workload.learn(self._pending.popleft())

    # --- events -----------------------------------------------------------------------------------------------------

    def _tell(self, change: ChangePoint, of: ChangeDetector) -> SpeedChange | None:
        """What a change means: slower than healthy, as fast as before, or faster than it ever was."""
        opened = None if self._open is None else self.events[self._open]
        new_work = 0 <= change.onset - self._beyond <= PATIENCE or 0 <= change.detected - self._beyond <= PATIENCE
        verdict: Verdict = "workload" if new_work and self._rest is not None else "fail-slow"
        state: State = "healthy" if not of.changed else "slow" if verdict == "fail-slow" else "excused"
        self._turns.append(
            Turn(onset=change.onset, detected_at=change.detected, state=state, confidence=change.confidence)
        )
        if opened is not None:
            assert self._open is not None
            if of.changed and opened.verdict == verdict:
                return self._resize(change, opened, math.expm1(change.after - of.healthy))
            short = not of.changed and self._values_between(self._slow_since, change.onset) <= BLIP
            told: Verdict = "workload" if short else opened.verdict
            self.events[self._open] = msgspec.structs.replace(opened, end=change.onset, verdict=told)
            self._open = None
            if short:
                return None
        event = None
        if of.changed:
            event = self._event(change, math.expm1(change.after - of.healthy), verdict)
            self._open = len(self.events)
            self._slow_since = change.onset if opened is None else self._slow_since
        elif opened is not None or (len(self._iterations) > SETTLING and change.after - change.before < -FALL):
            event = self._event(change, math.expm1(change.after - change.before), "recovered")
        if event is not None:
            self.events.append(event)
        return event

    def _resize(self, change: ChangePoint, opened: SpeedChange, size: float) -> SpeedChange:
        """A step within a slow-down: the same one, with a new size."""
        assert self._open is not None
        sizes = (*(opened.sizes or ((opened.iteration, opened.change),)), (change.onset, size))
        self.events[self._open] = msgspec.structs.replace(opened, change=size, sizes=sizes)
        return self.events[self._open]

    def _event(self, change: ChangePoint, size: float, verdict: Verdict) -> SpeedChange:
        return SpeedChange(
            run=self._run,
            iteration=change.onset,
            detected_at=change.detected,
            change=size,
            verdict=verdict,
            where=self._where,
            confidence=change.confidence,
        )

    def _values_between(self, first: int, end: int) -> int:
        return bisect_left(self._iterations, end) - bisect_left(self._iterations, first)


def detect(points: Iterable[Point], *, run: int = 0) -> tuple[list[SpeedChange], str]:
    """Events of one run whose times are those of whole iterations, and what healthy was told from."""
    usable = [p for p in points if math.isfinite(p.seconds) and p.seconds > 0]
    detector = SeriesDetector(run=run, workload=_has_workload(usable), false_alarms_per=NOTICED_PER)
    for point in usable:
        detector.update(point)
    return detector.judged(), detector.known


def detect_ranks(ranks: Mapping[int, Sequence[Point]], *, run: int = 0) -> tuple[list[SpeedChange], str]:
    """Events of one run with a time for each rank: each rank against its peers, and what slows most of them at once.

    That a rank is slower than others all the time is its nature and no change. Ranks that become slow together are one
    event. An iteration that a rank has alone says nothing of it.
    """
    rows: dict[int, dict[int, float]] = {}
    for rank, points in ranks.items():
        for point in points:
            if math.isfinite(point.seconds) and point.seconds > 0:
                rows.setdefault(point.iteration, {})[rank] = math.log(point.seconds)
    iterations = sorted(rows)
    nature = {
        rank: float(np.median([rows[i][rank] for i in iterations if rank in rows[i]][SKIPPED : SKIPPED + 3 * WARM_UP]))
        for rank in ranks
        if sum(rank in row for row in rows.values()) > SKIPPED
    }
    everybody = SeriesDetector(run=run, false_alarms_per=NOTICED_PER)
    each = {
        rank: SeriesDetector(
            run=run, where=Where(rank=rank), least=LEAST_OF_PEERS, false_alarms_per=NOTICED_PER * len(nature)
        )
        for rank in sorted(nature)
    }
    typical = float(np.median(list(nature.values()))) if nature else 0.0
    commons: dict[int, float] = {}
    for iteration in iterations:
        row = rows[iteration] = {
            rank: value - nature[rank] for rank, value in rows[iteration].items() if rank in nature
        }
        if not row:
            continue
        # Of an even number the faster of the middle two: one slow rank of two must not make the other look fast.
        common = commons[iteration] = sorted(row.values())[(len(row) - 1) // 2]
        everybody.update(Point(iteration, math.exp(typical + common)))
        if len(row) > 1:
            for rank, deviation in row.items():
                each[rank].update(Point(iteration, math.exp(nature[rank] + deviation - common)))
    found = [event for detector in each.values() for event in detector.judged(among=len(each))]
    if found:  # what healthy ranks have in common is known better once it is known who is healthy
        better = common_of_healthy(rows, found)
        shifts = {iteration: better[iteration] - common for iteration, common in commons.items() if iteration in better}
        found = [event for detector in each.values() for event in detector.judged(among=len(each), less=shifts)]
        whole = everybody.judged(less={iteration: -shift for iteration, shift in shifts.items()})
    else:
        whole = everybody.judged()
    found = whole + together(_without_falls(found))
    found.sort(key=lambda event: (event.detected_at, event.iteration))
    return found, "peers" if len(nature) > 1 else everybody.known


def analyse(kind: Kind, runs: Sequence[TimedRun], remarks: Sequence[str] = ()) -> Analysis:
    """Events of all runs of a file; each run starts afresh, as layout and nodes may have changed in between."""
    events: list[SpeedChange] = []
    known: list[str] = []
    healthy: list[Floats] = []
    notes = list(remarks)
    iterations = 0
    for number, run in enumerate(runs):
        if run.ranks:
            found, told = detect_ranks(run.ranks, run=number)
            notes += without_peers({rank: {p.iteration for p in points} for rank, points in run.ranks.items()})
            points = [point for of_rank in run.ranks.values() for point in of_rank]
        else:
            points = list(run.points)
            found, told = detect(points, run=number)
        if run.interval > 1:
            found = [_began_after(event, run) for event in found]
        events += found
        known.append(told)
        healthy.append(_healthy_seconds(points, found))
        if points:
            labels = [point.iteration for point in points]
            iterations += max(labels) - min(labels) + run.interval
    short = sum(told == "warming up" for told in known)
    if short:
        runs_named = "the run is" if len(runs) == 1 else f"{short} of {len(runs)} runs are"
        notes.append(f"{runs_named} too short to tell slow from healthy: fewer than {WARM_UP} times")
    seconds = np.concatenate([np.empty(0), *healthy])
    return Analysis(
        kind=kind,
        runs=len(runs),
        iterations=iterations,
        healthy_seconds=float(np.median(seconds)) if seconds.size else math.nan,
        events=tuple(events),
        known=next((told for told in known if told != "warming up"), "plain times"),
        remarks=tuple(notes),
    )


def _began_after(event: SpeedChange, run: TimedRun) -> SpeedChange:
    """Of times that are means over an interval: the first iteration of the first slow interval."""
    before = run.interval - 1
    return msgspec.structs.replace(
        event,
        iteration=event.iteration - before,
        end=None if event.end is None else event.end - before,
        sizes=tuple((iteration - before, size) for iteration, size in event.sizes),
    )


def _healthy_seconds(points: Sequence[Point], events: Sequence[SpeedChange]) -> Floats:
    """Times of iterations in which nothing was wrong, the first few left out."""
    seconds = np.array([point.seconds for point in points])
    iterations = np.array([point.iteration for point in points], dtype=np.int64)
    usable = np.isfinite(seconds) & (seconds > 0)
    seconds, iterations = seconds[usable], iterations[usable]
    wrong = [e for e in events if e.verdict != "recovered" and (e.end is None or e.end > e.iteration)]
    begun, over = (
        np.searchsorted(np.sort(np.array(bounds, dtype=np.int64)), iterations, side="right")
        for bounds in ([e.iteration for e in wrong], [e.end for e in wrong if e.end is not None])
    )
    good = begun == over
    settled = good & (iterations >= (int(iterations.min()) if iterations.size else 0) + SKIPPED)
    return next((seconds[which] for which in (settled, good) if which.any()), seconds)


def _has_workload(points: Sequence[Point]) -> bool:
    """Every iteration has one, and it varies."""
    if not points or any(p.tokens is None and p.squares is None for p in points):
        return False
    work = np.array([(p.tokens or 0.0, p.squares or 0.0) for p in points])
    return bool(np.isfinite(work).all() and (work >= 0).all() and (np.ptp(work, axis=0) > 0).any())


def _without_falls(events: Sequence[SpeedChange]) -> list[SpeedChange]:
    """Without recoveries from what was never told: a rank that gets faster than its peers."""
    ends = {(event.where, event.end) for event in events}
    return [event for event in events if event.verdict != "recovered" or (event.where, event.iteration) in ends]
