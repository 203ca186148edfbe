"""Reads a CSV of iteration times, and turns rows of any table into runs. Pure."""

from __future__ import annotations

import csv
import difflib
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from resihp.detector.offline.iteration_model import Point
from resihp.detector.offline.recordings.recording import (
    Recording,
    counted,
    interval_remarks,
    log_interval,
    optional_in,
    split_runs,
    text_of,
)
from resihp.detector.offline.recordings.values import number_in
from resihp.detector.offline.series import TimedRun
from resihp.detector.offline.workers import without_peers
from resihp.errors import UsageError

COLUMNS = ("iteration", "seconds", "milliseconds", "rank", "tokens", "sum_squared_lengths")


class Measured(NamedTuple):
    """The numbers in a row of a table, NaN if invalid. `line`: number of the row; `label`: its iteration."""

    line: int
    label: float
    seconds: float
    rank: float = 0.0
    tokens: float | None = None
    squares: float | None = None


class CsvTable(msgspec.Struct, frozen=True):
    header: tuple[str, ...]
    rows: list[tuple[int, list[str]]]
    """Each row with the number of its line."""
    delimiter: str = ","


def with_point(cell: str) -> str:
    """Convert `1.234,5` or `1,5` to Python's form, in tables with another column separator than a comma."""
    if not re.fullmatch(r"[-+]?\d[\d.]*,\d+(?:[eE][-+]?\d+)?", cell):
        return cell
    return cell.replace(".", "").replace(",", ".")


def read_csv(content: bytes) -> Recording:
    """Read a CSV with the columns `iteration` and `seconds` or `milliseconds`; with `rank`, one series per rank.

    Raises UsageError for missing columns.
    """
    table = table_of(text_of(content))
    columns = {name: table.header.index(name) for name in COLUMNS if name in table.header}
    if "iteration" not in columns or not ("seconds" in columns or "milliseconds" in columns):
        raise UsageError(
            f"a CSV needs columns `iteration` and `seconds` or `milliseconds`; {describe_columns(table.header)}"
        )
    unit, factor = ("seconds", 1.0) if "seconds" in columns else ("milliseconds", 1e-3)
    short: list[int] = []
    rows: list[Measured] = []
    for line, row in table.rows:
        if len(row) <= max(columns[name] for name in ("iteration", unit)):
            short.append(line)
            continue
        cells = {name: row[at].strip() if at < len(row) else "" for name, at in columns.items()}
        if table.delimiter != ",":
            cells = {name: with_point(cell) for name, cell in cells.items()}
        rank = number_in(cells["rank"]) if "rank" in columns else 0.0
        tokens, squares = (optional_in(cells.get(name)) for name in ("tokens", "sum_squared_lengths"))
        seconds = number_in(cells[unit]) * factor
        rows.append(Measured(line, number_in(cells["iteration"]), seconds, rank, tokens, squares))
    recording = recording_of(rows, by_rank="rank" in columns)
    return msgspec.structs.replace(recording, remarks=(*counted(short, "row cut short"), *recording.remarks))


def _usable_rows(measured: Sequence[Measured]) -> tuple[list[tuple[int, Point]], list[float], list[int]]:
    """Return (rank, point) and the label of each row with a usable time, and the numbers of all other rows."""
    bad: list[int] = []
    rows: list[tuple[int, Point]] = []
    labels: list[float] = []
    for line, label, seconds, rank, tokens, squares in measured:
        if not (math.isfinite(seconds) and seconds > 0 and rank >= 0 and rank == int(rank if rank < 1e9 else 0)):
            bad.append(line)
            continue
        labels.append(label)
        whole = int(label) if math.isfinite(label) and abs(label) < 2**62 and label == int(label) else -1
        rows.append((int(rank), Point(whole, seconds, tokens=tokens, squares=squares)))
    return rows, labels, bad


def recording_of(measured: Sequence[Measured], *, by_rank: bool, unit: str = "line") -> Recording:
    """Return the runs in `measured`, rows in any order. `unit`: the word for a row's number in remarks.

    If the iteration falls, and iterations then repeat with other times, a new run begins. Other repeated rows are left
    out.
    """
    rows, labels, bad = _usable_rows(measured)
    remarks = counted(bad, "row without a usable time", unit)
    if any(not (math.isfinite(label) and label == math.floor(label)) for label in labels):
        remarks.append("column `iteration` does not hold whole numbers; rows are numbered from 0 instead")
        counts: Counter[int] = Counter()
        for number, (worker, point) in enumerate(rows):
            rows[number] = worker, msgspec.structs.replace(point, iteration=counts[worker])
            counts[worker] += 1
    of_rank: dict[int, list[Point]] = {}
    for worker, point in rows:
        of_rank.setdefault(worker, []).append(point)
    if by_rank and len(of_rank) > 1:
        kept = {worker: _sorted(points) for worker, points in sorted(of_rank.items())}
        repeated = sum(len(of_rank[worker]) - len(kept[worker]) for worker in kept)
        interval = log_interval(max(kept.values(), key=len))
        runs: tuple[TimedRun, ...] = (TimedRun(ranks=kept, interval=interval),)
    else:
        points = next(iter(of_rank.values()), [])
        runs, repeated = _runs(points)
        if by_rank and of_rank:
            remarks += without_peers({next(iter(of_rank)): {point.iteration for point in points}})
    if repeated:
        remarks.append(f"{repeated} repeated row{'s' * (repeated > 1)} left out")
    remarks += interval_remarks(runs)
    return Recording("series", runs, tuple(remarks))


def _runs(points: Sequence[Point]) -> tuple[tuple[TimedRun, ...], int]:
    parts, repeated = split_runs(points)
    seen_iterations: set[int] = set()
    again = 0
    for part in parts:
        again += sum(point.iteration in seen_iterations for point in part)
        seen_iterations.update(point.iteration for point in part)
    if again and 20 * (len(parts) - 1) <= len(points) and len(set(points)) == len(points):
        return tuple(map(_run, parts)), repeated
    ordered = _sorted(points)
    return ((_run(ordered),) if ordered else ()), len(points) - len(ordered)


def _run(points: tuple[Point, ...]) -> TimedRun:
    return TimedRun(points=points, interval=log_interval(points))


def _sorted(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return the points by ascending iteration; of points with equal iterations, only the first."""
    first: dict[int, Point] = {}
    for point in points:
        first.setdefault(point.iteration, point)
    return tuple(first[iteration] for iteration in sorted(first))


def table_of(text: str) -> CsvTable:
    """Return the header, in lower case, and the rows of a table. Comment lines are skipped.

    The delimiter is the most frequent one in the header.
    """
    lines = _lines_of_table(text)
    try:
        rows = list(_rows_of_table(lines))
    except csv.Error:
        return CsvTable((), [])
    return CsvTable(_header(rows[0][1]), rows[1:], _delimiter(lines[0][1])) if rows else CsvTable((), [])


def header_of(text: str) -> tuple[str, ...]:
    """Return the header that `table_of` would return, without reading the rows."""
    try:
        _, header = next(_rows_of_table(_lines_of_table(text)), (0, []))
    except csv.Error:
        return ()
    return _header(header)


def _header(row: Sequence[str]) -> tuple[str, ...]:
    return tuple(name.strip().strip("'\"").lower() for name in row)


def _lines_of_table(text: str) -> list[tuple[int, str]]:
    return [
        (number, line)
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]


def _rows_of_table(lines: Sequence[tuple[int, str]]) -> Iterator[tuple[int, list[str]]]:
    """Yield each row with the number of its last line. Raises csv.Error."""
    if not lines or len(lines[0][1]) > 10_000:
        return
    reader = csv.reader((line for _, line in lines), delimiter=_delimiter(lines[0][1]))
    for row in reader:
        yield lines[reader.line_num - 1][0], row


def _delimiter(header: str) -> str:
    return max(",;\t", key=header.count)


def describe_columns(header: Sequence[str]) -> str:
    names = [name for name in header if name]
    columns_text = ", ".join(f"`{name[:40]}`" for name in names[:12])
    close = [
        f"`{name[:40]}` for `{wanted}`"
        for wanted in ("iteration", "seconds", "milliseconds")
        if wanted not in names
        for name in difflib.get_close_matches(wanted, names, 1, 0.6)
    ]
    return f"found columns {columns_text}" + (f"; did you mean {', '.join(close)}?" if close else "")
