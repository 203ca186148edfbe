"""Finds slow-downs in the iteration times of a run, without measurements of chunks. Pure.

Without chunk times the healthy time cannot be predicted. `ChangeDetector` therefore tests the logarithm of plain times
against a robust running level. If token counts or sums of squared lengths are known, it tests the part of the times
that this workload does not explain (`IterationModel`); a change of plain times that the workload explains is a
`workload` event. Times of several ranks are compared with those of the other ranks in the same iteration. The result
says on which basis healthy times were found (`known`). Called by `resihp analyze`; reads no file."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec
import numpy as np

from resihp.detector.offline.analysis import Analysis, Kind, SpeedChange, Verdict, Where
from resihp.detector.offline.background import SeenTimes, State
from resihp.detector.offline.hindsight import Turn, judged
from resihp.detector.offline.iteration_model import IterationModel, Point
from resihp.detector.offline.workers import common_of_healthy, log_times_of_ranks, together, without_peers
from resihp.detector.sequential.changes import WARM_UP, ChangeDetector
from resihp.detector.sequential.densities import Floats
from resihp.detector.sequential.levels import ChangePoint

MIN_CHANGE = 0.1
"""Smallest reported change of plain times, log units: a smaller one may as well be a change of the data."""
FALSE_ALARMS_PER = 2_000
"""Lower bound of the mean number of iterations between false alarms; the requirement is 1,000."""
NOTICED_PER = 100
"""As `FALSE_ALARMS_PER`, for a file that is read to its end: `hindsight` then drops false alarms."""
SETTLING_TIMES = 40
"""Number of first times in which a fall is the end of the start-up (caches fill, kernels are tuned), not a recovery."""
EXPLANATION_DELAY = 6
"""Number of iterations after which a change of plain times counts as explained by the workload."""
SKIPPED_ITERATIONS = 3
"""Number of first iterations that are not used to estimate a level."""
MIN_PEER_CHANGE = 0.1
"""Smallest reported change of a rank relative to its peers, log units."""
MAX_HICCUP_TIMES = 4
"""A change that lasts for at most this many times is a hiccup: an evaluation, a checkpoint, a file system stall."""
AIMED_CHANGE = math.log(1.2)
"""Size of a change, in log units, that should be found within three iterations."""
MIN_FALL = 0.1
"""Smallest reported fall below the healthy level so far, log units; it means that the run was slow from its start."""


class TimedRun(msgspec.Struct, frozen=True):
    """The times of one run in ascending order of iterations: of the whole job (`points`) or of each rank (`ranks`)."""

    points: tuple[Point, ...] = ()
    ranks: Mapping[int, tuple[Point, ...]] = {}
    interval: int = 1
    """Number of iterations over which each time is a mean."""


class SeriesDetector:
    """Finds slow-downs and recoveries of one series, one iteration after the other.

    Iterations must increase. Times that are not positive numbers are ignored. `events`: the findings so far; their
    `end` and `verdict` may still change.
    """

    def __init__(
        self,
        *,
        run: int = 0,
        where: Where | None = None,
        least: float = MIN_CHANGE,
        false_alarms_per: int = FALSE_ALARMS_PER,
        workload: bool = False,
    ) -> None:
        self.events: list[SpeedChange] = []
        self._run, self._where, self._least = run, where, least
        self._plain = ChangeDetector(
            least=least, false_alarms_per=false_alarms_per, aim=AIMED_CHANGE, several_levels=True
        )
        self._rest = (
            ChangeDetector(least=least, false_alarms_per=false_alarms_per, aim=AIMED_CHANGE, several_levels=True)
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
        """Basis of healthy times: `warming up` (too little data), `plain times` or `workload`."""
        if not (self._rest or self._plain).ready:
            return "warming up"
        return "plain times" if self._rest is None else "workload"

    def update(self, point: Point) -> SpeedChange | None:
        """Test the next iteration and return its finding, if any."""
        seconds = point.seconds
        if not (math.isfinite(seconds) and seconds > 0):
            return None
        self._iterations.append(point.iteration)
        self._points.append(point)
        change = self._plain.update(point.iteration, math.log(seconds))
        if self._rest is None:
            return None if change is None else self._interpret(change, self._plain)
        return self._explain(point, change, self._rest)

    def judged(self, *, among: int = 1, less: Mapping[int, float] | None = None) -> list[SpeedChange]:
        """Return the final events after the last time: slow-downs and recoveries (`hindsight`), and workload events.

        `among`: number of series that are tested, including this one. `less`: value to subtract from the log time of
        each iteration.
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
        seen_times = SeenTimes(iterations, values, seconds)
        events = judged(self._turns, seen_times, self._least, among=among, run=self._run, where=self._where)
        slow = [(e.iteration - EXPLANATION_DELAY, e.end or math.inf) for e in events if e.verdict == "fail-slow"]
        if self._rest is not None:
            events += [
                event
                for event in self.events
                if event.verdict == "workload" and not any(first <= event.iteration < end for first, end in slow)
            ]
        return sorted(events, key=lambda event: (event.detected_at, event.iteration))

    def _expected(self) -> Floats:
        """Return the log of the seconds of each iteration that the workload explains, by one model of all times."""
        calm = np.ones(len(self._points), dtype=np.bool_)
        for turn in self._turns:
            calm[bisect_left(self._iterations, turn.onset) :] = turn.state == "healthy"
        calm[:SKIPPED_ITERATIONS] = False
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
        finding = None
        if predicted is not None and predicted > 0:
            if self._workload.beyond(point):
                self._beyond = point.iteration
            change = rest.update(point.iteration, math.log(point.seconds / predicted))
            if change is not None:
                finding = self._interpret(change, rest)
        self._learn(point, rest)
        while self._unexplained and number - self._unexplained[0][0] >= EXPLANATION_DELAY:
            _, change = self._unexplained.pop(0)
            if not any(abs(e.iteration - change.onset) <= 2 * EXPLANATION_DELAY or e.end is None for e in self.events):
                event = self._event(change, math.expm1(change.after - change.before), "workload")
                self.events.append(event)
                finding = finding or event
        return finding

    def _learn(self, point: Point, rest: ChangeDetector) -> None:
        """Learn the model of the workload from earlier healthy iterations: the latest may belong to a change not found
        yet."""
        if rest.changed:
            self._pending.clear()
            return
        self._pending.append(point)
        while len(self._pending) > (EXPLANATION_DELAY if rest.ready else 0):
            self._workload.learn(self._pending.popleft())

    # --- events -----------------------------------------------------------------------------------------------------

    def _interpret(self, change: ChangePoint, detector: ChangeDetector) -> SpeedChange | None:
        """Return the event of a change: a slow-down, a recovery, or a fall below the healthy level; None for a
        hiccup."""
        opened = None if self._open is None else self.events[self._open]
        new_work = (
            0 <= change.onset - self._beyond <= EXPLANATION_DELAY
            or 0 <= change.detected - self._beyond <= EXPLANATION_DELAY
        )
        verdict: Verdict = "workload" if new_work and self._rest is not None else "fail-slow"
        state: State = "healthy" if not detector.changed else "slow" if verdict == "fail-slow" else "excused"
        self._turns.append(
            Turn(onset=change.onset, detected_at=change.detected, state=state, confidence=change.confidence)
        )
        if opened is not None:
            assert self._open is not None
            if detector.changed and opened.verdict == verdict:
                return self._resize(change, opened, math.expm1(change.after - detector.healthy))
            short = not detector.changed and self._values_between(self._slow_since, change.onset) <= MAX_HICCUP_TIMES
            closing_verdict: Verdict = "workload" if short else opened.verdict
            self.events[self._open] = msgspec.structs.replace(opened, end=change.onset, verdict=closing_verdict)
            self._open = None
            if short:
                return None
        event = None
        if detector.changed:
            event = self._event(change, math.expm1(change.after - detector.healthy), verdict)
            self._open = len(self.events)
            self._slow_since = change.onset if opened is None else self._slow_since
        elif opened is not None or (
            len(self._iterations) > SETTLING_TIMES and change.after - change.before < -MIN_FALL
        ):
            event = self._event(change, math.expm1(change.after - change.before), "recovered")
        if event is not None:
            self.events.append(event)
        return event

    def _resize(self, change: ChangePoint, opened: SpeedChange, size: float) -> SpeedChange:
        """Update the open slow-down `opened` after a change of its size to `size`."""
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
    """Return the events of one run with times of the whole job, and the basis of healthy times."""
    usable = [p for p in points if math.isfinite(p.seconds) and p.seconds > 0]
    detector = SeriesDetector(run=run, workload=_has_workload(usable), false_alarms_per=NOTICED_PER)
    for point in usable:
        detector.update(point)
    return detector.judged(), detector.known


def _judged_against(
    better: Mapping[int, float],
    commons: Mapping[int, float],
    detectors: Collection[SeriesDetector],
    whole_job: SeriesDetector,
) -> tuple[list[SpeedChange], list[SpeedChange]]:
    """Return the events of ranks and of the whole job, with the common parts `better` instead of `commons`."""
    shifts = {iteration: better[iteration] - common for iteration, common in commons.items() if iteration in better}
    events = [event for detector in detectors for event in detector.judged(among=len(detectors), less=shifts)]
    return events, whole_job.judged(less={iteration: -shift for iteration, shift in shifts.items()})


def _usual_log_time(times: Sequence[float]) -> float:
    """Return the level of a rank's first times; `times` are logs."""
    return float(np.median(times[SKIPPED_ITERATIONS : SKIPPED_ITERATIONS + 3 * WARM_UP]))


def detect_ranks(ranks: Mapping[int, Sequence[Point]], *, run: int = 0) -> tuple[list[SpeedChange], str]:
    """Return the events of one run with times of several ranks, and the basis of healthy times.

    Finds slow-downs of ranks relative to their peers, and slow-downs that all ranks share. A rank that is always slower
    than others has no change. Ranks that become slow together are one event. In an iteration with the time of a single
    rank, that rank is not judged.
    """
    rows = log_times_of_ranks(ranks)
    iterations = sorted(rows)
    nature = {
        rank: _usual_log_time([rows[i][rank] for i in iterations if rank in rows[i]])
        for rank in ranks
        if sum(rank in row for row in rows.values()) > SKIPPED_ITERATIONS
    }
    whole_job = SeriesDetector(run=run, false_alarms_per=NOTICED_PER)
    detectors = {
        rank: SeriesDetector(
            run=run, where=Where(rank=rank), least=MIN_PEER_CHANGE, false_alarms_per=NOTICED_PER * len(nature)
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
        # Of an even number, the faster of the middle two: one slow rank of two must not make the other look fast.
        common = commons[iteration] = sorted(row.values())[(len(row) - 1) // 2]
        whole_job.update(Point(iteration, math.exp(typical + common)))
        if len(row) > 1:
            for rank, deviation in row.items():
                detectors[rank].update(Point(iteration, math.exp(nature[rank] + deviation - common)))
    events = [event for detector in detectors.values() for event in detector.judged(among=len(detectors))]
    if events:  # the common part of healthy ranks is more precise once the slow ranks are known
        better = common_of_healthy(rows, events)
        events, whole = _judged_against(better, commons, detectors.values(), whole_job)
    else:
        whole = whole_job.judged()
    events = whole + together(_without_falls(events))
    events.sort(key=lambda event: (event.detected_at, event.iteration))
    return events, "peers" if len(nature) > 1 else whole_job.known


def analyse(kind: Kind, runs: Sequence[TimedRun], remarks: Sequence[str] = ()) -> Analysis:
    """Return the analysis of all runs of a file. Each run is analysed alone, because layout and nodes may differ."""
    events: list[SpeedChange] = []
    bases: list[str] = []
    healthy: list[Floats] = []
    notes = list(remarks)
    iterations = 0
    for number, run in enumerate(runs):
        if run.ranks:
            run_events, basis = detect_ranks(run.ranks, run=number)
            notes += without_peers({rank: {p.iteration for p in points} for rank, points in run.ranks.items()})
            points = [point for of_rank in run.ranks.values() for point in of_rank]
        else:
            points = list(run.points)
            run_events, basis = detect(points, run=number)
        if run.interval > 1:
            run_events = [_began_after(event, run) for event in run_events]
        events += run_events
        bases.append(basis)
        healthy.append(_healthy_seconds(points, run_events))
        if points:
            labels = [point.iteration for point in points]
            iterations += max(labels) - min(labels) + run.interval
    short = sum(basis == "warming up" for basis in bases)
    if short:
        runs_named = "the run is" if len(runs) == 1 else f"{short} of {len(runs)} runs are"
        notes.append(f"{runs_named} too short to distinguish slow from healthy: fewer than {WARM_UP} times")
    seconds = np.concatenate([np.empty(0), *healthy])
    return Analysis(
        kind=kind,
        runs=len(runs),
        iterations=iterations,
        healthy_seconds=float(np.median(seconds)) if seconds.size else math.nan,
        events=tuple(events),
        known=next((basis for basis in bases if basis != "warming up"), "plain times"),
        remarks=tuple(notes),
    )


def _began_after(event: SpeedChange, run: TimedRun) -> SpeedChange:
    """Move the onset of an event to the first iteration of its interval, if times are means over an interval."""
    before = run.interval - 1
    return msgspec.structs.replace(
        event,
        iteration=event.iteration - before,
        end=None if event.end is None else event.end - before,
        sizes=tuple((iteration - before, size) for iteration, size in event.sizes),
    )


def _healthy_seconds(points: Sequence[Point], events: Sequence[SpeedChange]) -> Floats:
    """Return the times of iterations outside of all events, without the first few; all times if there are none."""
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
    settled = good & (iterations >= (int(iterations.min()) if iterations.size else 0) + SKIPPED_ITERATIONS)
    return next((seconds[mask] for mask in (settled, good) if mask.any()), seconds)


def _has_workload(points: Sequence[Point]) -> bool:
    """Return whether every iteration has a workload, and the workload varies."""
    if not points or any(p.tokens is None and p.squares is None for p in points):
        return False
    work = np.array([(p.tokens or 0.0, p.squares or 0.0) for p in points])
    return bool(np.isfinite(work).all() and (work >= 0).all() and (np.ptp(work, axis=0) > 0).any())


def _without_falls(events: Sequence[SpeedChange]) -> list[SpeedChange]:
    """Drop recoveries without a reported slow-down: the rank only became faster than its peers."""
    ends = {(event.where, event.end) for event in events}
    return [event for event in events if event.verdict != "recovered" or (event.where, event.iteration) in ends]
