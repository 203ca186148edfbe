"""Reads rows of named fields, as programs log them: JSON, a Parquet table, a CSV, lines of a trainer's log. Pure.

Each row has an iteration and its duration, or the number of iterations per second, or the moment at which it ended;
names are those of `names`. Lines that are not such a row are left out and counted; the first of them is named.
"""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from resihp.detector.offline.recordings.moments import COARSE_CLOCK_WINDOW_S, between_moments, far_apart
from resihp.detector.offline.recordings.names import (
    COMPUTE_SECONDS,
    EPOCH_NAMES,
    ITERATION_NAMES,
    JOB_NAMES,
    MOMENT_NAMES,
    RANK_NAMES,
    SQUARED_LENGTH_NAMES,
    TOKENS_NAMES,
    WINDOW_SECONDS,
    duration_of,
    is_known,
    is_rate,
)
from resihp.detector.offline.recordings.recording import Recording, counted, short
from resihp.detector.offline.recordings.tables import Measured, recording_of
from resihp.detector.offline.recordings.values import in_whole_seconds, least_0, moment_in, number_of
from resihp.errors import UsageError

MIN_MOMENTS = 8
SINCE_1970_S = 1e8
CLOCK_FACTOR = 3.0
"""Times that disagree with the clock by more than this factor are in another unit than their name says."""
SUSPICIOUS_SECONDS = 300.0
"""Without a clock, durations in seconds above this may be milliseconds."""


class NamedRow(NamedTuple):
    line: int
    fields: Mapping[str, Any]


def read_rows(rows: Sequence[NamedRow], unit: str = "row") -> Recording:
    """Read rows of one job, or of several jobs one after the other; `unit`: the word for a row's number.

    Raises UsageError that says which field is missing, and where.
    """
    usable, counts, iteration, name, factor = _time_of(rows, unit)
    job = counts.column(JOB_NAMES, text=True)
    rank, tokens, squares = (counts.column(names) for names in (RANK_NAMES, TOKENS_NAMES, SQUARED_LENGTH_NAMES))
    remarks: list[str] = []
    usable, epochs = _counted_on(usable, iteration, counts.column(EPOCH_NAMES), rank, job)
    if epochs > 1:
        remarks.append(f"`{iteration}` restarts in each of {epochs} epochs; numbered continuously here")
    if rank and counts.column((COMPUTE_SECONDS,)) and name == "seconds":
        name = COMPUTE_SECONDS
        remarks.append(f"used `{COMPUTE_SECONDS}`: `seconds` is the same on all ranks, since all wait for the slowest")
    clock = name in MOMENT_NAMES or (_may_be_clock(name) and _is_clock(usable, iteration, name, rank))
    if not clock:
        usable, factor, words = _in_seconds(usable, counts, iteration, name, factor, (rank, job))
        remarks += words
    columns = _Columns(iteration, name, job, rank, tokens, squares)
    of_job, without = _measured_by_job(usable, columns, factor, clock=clock)
    if clock:
        of_job, words = _times_between_lines(of_job, usable, name)
        remarks += words
    recordings = [recording_of(measured, by_rank=bool(rank), unit=unit) for measured in of_job.values()]
    if len(recordings) > 1:
        remarks.append(f"the file has {len(recordings)} jobs; each is analysed as its own run")
    remarks += [remark for recording in recordings for remark in recording.remarks]
    remarks += counted(without, "row without its time", unit)
    remarks += counted(
        [row.line for row in rows if row.fields.get(iteration) is None], "row without its iteration", unit
    )
    return Recording("series", tuple(run for recording in recordings for run in recording.runs), tuple(remarks))


class _Columns(NamedTuple):
    """Names of the fields with each quantity; empty for a quantity that the rows lack."""

    iteration: str
    time: str
    job: str
    rank: str
    tokens: str
    squares: str


def _measured_by_job(
    rows: Sequence[NamedRow], columns: _Columns, factor: float, *, clock: bool
) -> tuple[dict[str, list[Measured]], list[int]]:
    """Return rows as numbers, by job, and the numbers of rows without iteration or time.

    `factor` converts times to seconds; `clock`: times are moments.
    """
    of_job: dict[str, list[Measured]] = {}
    without: list[int] = []
    for line, fields in rows:
        time = fields.get(columns.time)
        if time is None or fields.get(columns.iteration) is None:
            without.append(line)
            continue
        of_job.setdefault(str(fields.get(columns.job)), []).append(
            Measured(
                line,
                number_of(fields[columns.iteration]),
                moment_in(time, factor) if clock else number_of(time) * factor,
                number_of(fields.get(columns.rank, 0)) if columns.rank else 0.0,
                least_0(fields.get(columns.tokens)),
                least_0(fields.get(columns.squares)),
            )
        )
    return of_job, without


def _times_between_lines(
    of_job: dict[str, list[Measured]], rows: Sequence[NamedRow], name: str
) -> tuple[dict[str, list[Measured]], list[str]]:
    """Return rows with times instead of the moments in field `name`, and remarks about this."""
    coarse = all(in_whole_seconds(fields[name]) for _, fields in rows if fields.get(name) is not None)
    remarks = [
        f"each time is the difference of two lines' `{name}`; evaluation and checkpoints in between are included"
    ]
    if coarse:
        of_job = {job: far_apart(measured) for job, measured in of_job.items()}
        remarks.append(f"`{name}` has whole seconds only: times are means over at least {COARSE_CLOCK_WINDOW_S:g} s")
    return {job: between_moments(measured) for job, measured in of_job.items()}, remarks


def _in_seconds(
    rows: Sequence[NamedRow], counts: _Counts, iteration: str, name: str, factor: float, series: tuple[str, str]
) -> tuple[Sequence[NamedRow], float, list[str]]:
    """Return rows with times of one iteration, the factor that converts them to seconds, and remarks about this."""
    moment = counts.column(MOMENT_NAMES, text=True)
    scaled = _scaled(rows, iteration, name, factor, moment, series)
    if scaled is not None:
        rows, words = scaled
        return rows, 1.0, [words]
    if name in WINDOW_SECONDS or is_rate(name):
        return _per_iteration(rows, iteration, name, series), 1.0, [f"times are computed from `{name}`"]
    duration = duration_of(name)
    if duration is not None and not duration.has_unit and not moment:
        values = [number_of(fields.get(name)) for _, fields in rows]
        values = [value for value in values if math.isfinite(value)]
        if values and median(values) > SUSPICIOUS_SECONDS:
            return rows, factor, [f"`{name}` was taken for seconds; if it is milliseconds, rename it to `milliseconds`"]
    return rows, factor, []


class _Counts:
    """For each field, the number of rows that have it, and the number of rows with a number in it."""

    def __init__(self, rows: Iterable[NamedRow]) -> None:
        self._any: Counter[str] = Counter()
        self._numbers: Counter[str] = Counter()
        for _, fields in rows:
            for name, value in fields.items():
                if value is not None and is_known(name):
                    self._any[name] += 1
                    if _may_be_clock(name) or math.isfinite(number_of(value)):
                        self._numbers[name] += 1

    def often(self, names: Sequence[str]) -> list[str]:
        """Return the fields of `names`, in order, that occur at least nine tenths as often as the most frequent one."""
        most = max(self._numbers[name] for name in names) or max(self._any[name] for name in names)
        counts = self._numbers if max(self._numbers[name] for name in names) else self._any
        return [name for name in names if most and 10 * counts[name] >= 9 * most]

    def column(self, names: Sequence[str], *, text: bool = False) -> str:
        """Return the field of `names` that most rows have, the first of equally frequent ones; empty without any."""
        counts = self._any if text else self._numbers
        best = max(names, key=lambda name: counts[name])
        return best if counts[best] else ""

    def duration(self) -> str:
        """Return the best field for an iteration's duration, of those in at least nine tenths of the rows of the
        most frequent one; empty without any."""
        orders = {
            name: (duration.order, -duration.unit_s)
            for name in self._numbers
            if (duration := duration_of(name)) is not None
        }
        most = max((self._numbers[name] for name in orders), default=0)
        often = [name for name in orders if 10 * self._numbers[name] >= 9 * most]
        return min(often, key=lambda name: orders[name], default="")

    def rate(self) -> str:
        """Return the rate of iterations that most rows have; empty without any."""
        rates = [name for name in self._numbers if is_rate(name)]
        return max(rates, key=lambda name: self._numbers[name], default="")


def _time_of(rows: Sequence[NamedRow], unit: str) -> tuple[Sequence[NamedRow], _Counts, str, str, float]:
    """Return the rows with an iteration, and their counts; the names of their iterations and times, and the factor that
    converts times to seconds. Raises UsageError."""
    counts = _Counts(rows)
    iteration = _iteration_of(rows, counts)
    usable = [row for row in rows if iteration and row.fields.get(iteration) is not None]
    if not usable:
        raise UsageError(_lacking(rows, unit, "iteration", ("iteration", "iter", "step", "global_step")))
    if len(usable) < len(rows):
        counts = _Counts(usable)
    name = counts.duration()
    if (duration := duration_of(name)) is not None:
        return usable, counts, iteration, name, duration.unit_s
    if name := counts.column(WINDOW_SECONDS) or counts.rate() or counts.column(MOMENT_NAMES, text=True):
        return usable, counts, iteration, name, 1.0
    raise UsageError(_lacking(usable, unit, "time", ("seconds", "step_time", "milliseconds", "timestamp")))


def _iteration_of(rows: Sequence[NamedRow], counts: _Counts) -> str:
    """Return the name of the field that numbers iterations; empty without any.

    A counter within epochs starts again and again. Of the fields in at least nine tenths of the rows of the most
    frequent one, this returns the first, in the order of `ITERATION_NAMES`, with at least nine tenths of the number of
    different values that any of them has.
    """
    present = counts.often(ITERATION_NAMES)
    if len(present) < 2:
        return present[0] if present else ""
    different = {name: len({str(row.fields.get(name)) for row in rows}) for name in present}
    return next(name for name in present if 10 * different[name] >= 9 * max(different.values()))


def _counted_on(
    rows: Sequence[NamedRow], iteration: str, epoch: str, rank: str, job: str
) -> tuple[Sequence[NamedRow], int]:
    """Number iterations through all epochs if the counter begins again with each; return the rows, and how many epochs
    there are: 1 if the counter goes on anyway, or falls for another reason."""
    if not epoch:
        return rows, 1
    counters: dict[tuple[str, str], _Counter] = {}
    labels = []
    for row in rows:
        counter = counters.setdefault((str(row.fields.get(rank)), str(row.fields.get(job))), _Counter())
        label = counter.take(number_of(row.fields[iteration]), number_of(row.fields.get(epoch)))
        if label is None:
            return rows, 1
        labels.append(label)
    if not any(counter.offset for counter in counters.values()):
        return rows, 1
    numbered = [row._replace(fields={**row.fields, iteration: label}) for row, label in zip(rows, labels, strict=True)]
    return numbered, len({number_of(row.fields.get(epoch)) for row in rows})


class _Counter:
    """One rank's counter of iterations within epochs."""

    def __init__(self) -> None:
        self.offset = 0.0
        self._first = self._last = self._rise = self._epoch = math.nan

    def take(self, label: float, epoch: float) -> float | None:
        """Return the iteration's number over all epochs; None if the counter falls without a new epoch."""
        if math.isnan(self._first):
            self._first = label
        elif label < self._last:
            if epoch != self._epoch + 1 or label > self._first or math.isnan(self._rise):
                return None
            self.offset += self._last + self._rise - label
        elif label > self._last:
            self._rise = label - self._last
        self._last, self._epoch = label, epoch
        return label + self.offset


def _steps(
    rows: Sequence[NamedRow], iteration: str, series: tuple[str, str]
) -> Iterable[tuple[int, NamedRow, NamedRow, float]]:
    """Yield consecutive rows of the same rank and job with a rising iteration: index of the later row, both rows, and
    the rise."""
    last: dict[tuple[str, str], NamedRow] = {}
    for place, row in enumerate(rows):
        key = str(row.fields.get(series[0])), str(row.fields.get(series[1]))
        before = last.get(key)
        last[key] = row
        if before is not None:
            rise = number_of(row.fields[iteration]) - number_of(before.fields[iteration])
            if rise > 0:
                yield place, before, row, rise


def _scaled(
    rows: Sequence[NamedRow], iteration: str, name: str, factor: float, moment: str, series: tuple[str, str]
) -> tuple[Sequence[NamedRow], str] | None:
    """Compare times with the clock in the field `moment`, and return corrected rows and a remark; None if they agree.

    If another unit, or a time of several iterations, does not explain the difference, the times are not corrected.
    """
    if not moment or is_rate(name):
        return None
    ratios, rises = [], []
    for _, before, row, rise in _steps(rows, iteration, series):
        passed_s = moment_in(row.fields.get(moment)) - moment_in(before.fields.get(moment))
        seconds = number_of(row.fields.get(name)) * factor
        if passed_s > 0 and seconds > 0 and math.isfinite(passed_s + seconds):
            ratios.append(seconds * rise / passed_s)
            rises.append(rise)
    if len(ratios) < MIN_MOMENTS:
        return None
    ratio, rise = median(ratios), median(rises)
    if 1 / CLOCK_FACTOR < ratio < CLOCK_FACTOR:
        return None
    readings = [
        (factor / unit_s, f"`{name}` holds {word}, as `{moment}` shows", False)
        for word, unit_s in (("seconds", 1.0), ("milliseconds", 1e-3), ("microseconds", 1e-6))
        if unit_s != factor
    ]
    if rise > 1:
        window_words = f"of all {rise:g} iterations since the row before"
        readings.append((rise, f"`{name}` is the time {window_words}", True))
        readings.append((1e3 * factor * rise, f"`{name}` holds milliseconds {window_words}", True))
    scale, words, window = min(readings, key=lambda reading: abs(math.log(ratio / reading[0])))
    if not 1 / CLOCK_FACTOR < ratio / scale < CLOCK_FACTOR:
        scale, window = 1.0, False
        words = f"`{name}` is {ratio:.2g} times the time that passed by `{moment}`; is it the time of whole iterations?"
    unit_s = factor / (scale / rise if window else scale)
    rows = [row._replace(fields={**row.fields, name: number_of(row.fields.get(name)) * unit_s}) for row in rows]
    return (_per_iteration(rows, iteration, name, series) if window else rows), words


def _per_iteration(rows: Sequence[NamedRow], iteration: str, name: str, series: tuple[str, str]) -> list[NamedRow]:
    """Return rows with the seconds of one iteration, from a rate, or from the time of all since the previous row."""
    if is_rate(name):
        rates = ((row, number_of(row.fields.get(name))) for row in rows)
        return [row._replace(fields={**row.fields, name: 1 / rate if rate else math.nan}) for row, rate in rates]
    made = []
    for _, _, row, rise in _steps(rows, iteration, series):
        made.append(row._replace(fields={**row.fields, name: number_of(row.fields.get(name)) / rise}))
    return made


def _lacking(rows: Sequence[NamedRow], unit: str, quantity: str, names: Sequence[str]) -> str:
    where = f"{unit} {rows[0].line}" if rows else "the file"
    keys = list(rows[0].fields) if rows else []
    near = [key for key in keys if difflib.get_close_matches(key, names, 1, 0.8)]
    hint = f"; is it `{short(near[0])}`? Rename that" if near else ""
    return (
        f"{where} has no field for the {quantity} ({', '.join(names[:4])}, ...); it has "
        f"{', '.join(f'`{short(key)}`' for key in keys[:12]) or 'none'}{hint}"
    )


def _may_be_clock(name: str) -> bool:
    duration = duration_of(name)
    return duration is not None and duration.may_be_clock


def _is_clock(rows: Sequence[NamedRow], iteration: str, name: str, rank: str) -> bool:
    """Decide whether `time` is a clock: a text, seconds since 1970, or a value that only grows from one iteration to
    the next.

    A clock that starts again with a requeued job falls to about its first value; between such falls it rises most of
    the time, which the times of iterations do not.
    """
    values = [number_of(fields[name]) for _, fields in rows if fields.get(name) is not None]
    if not all(map(math.isfinite, values)) or values[-1] > SINCE_1970_S:
        return True
    first: dict[str, float] = {}
    last: dict[str, tuple[float, float]] = {}
    rises = falls = 0
    for _, fields in rows:
        if fields.get(name) is None:
            continue
        series_key, label, now = str(fields.get(rank)), number_of(fields[iteration]), number_of(fields[name])
        before = last.get(series_key)
        last[series_key] = (label, now)
        if before is None or label <= before[0]:
            first.setdefault(series_key, now)
        elif now < before[1]:
            if now > max(2 * first[series_key], before[1] / 10):
                return False
            falls += 1
        else:
            rises += now > before[1]
    if falls and (rises < MIN_MOMENTS * falls or 2 * rises < len(values)):
        return False
    return len(values) >= MIN_MOMENTS and max(values) > 2 * values[0]
