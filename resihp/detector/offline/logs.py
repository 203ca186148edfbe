"""Iteration times in what people already have: Megatron-LM logs and CSV files. Pure functions of bytes; no files.

A Megatron-LM log line, in the forms of its versions and forks, behind whatever a launcher puts before it:

    [default7]: [2024-05-01 12:00:00] iteration       10/  500000 | consumed samples: ... |
        elapsed time per iteration (ms): 1234.5 | ... | global batch size:   128 | ... (one line)

Milliseconds or seconds; the time is a mean over the iterations since the line before (`--log-interval`). Lines that
are torn, of several ranks, repeated, or without a usable time are left out and counted: `Recording.remarks` says so.
"""

from __future__ import annotations

import csv
import difflib
import itertools
import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec

from resihp.detector.offline.iteration_model import Point
from resihp.detector.offline.series import TimedRun
from resihp.detector.offline.workers import without_peers
from resihp.errors import UsageError

PARQUET = b"PAR1"
COLUMNS = ("iteration", "seconds", "milliseconds", "rank", "tokens", "sum_squared_lengths")
MOST_SPEAKERS = 64
ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[@-_]|[\x07\x08]")
HEAD = re.compile(r"\biteration\s+(\d{1,15})\s*/\s*(\d{1,15})\s*\|", re.IGNORECASE)
NUMBER = r"[-+]?(?:nan|inf(?:inity)?|\d+\.?\d*(?:e[-+]?\d+)?|\.\d+)"
ELAPSED = re.compile(
    rf"\belapsed\s+time\s+per\s+iteration\s*\(\s*(ms|s)\s*\)\s*:\s*({NUMBER})(?=\s|\||$)", re.IGNORECASE
)
BATCH = re.compile(r"\b(?:global|gloabl) batch size:\s*(\d+)\s*(?:\||$)", re.IGNORECASE)
LENGTH = re.compile(r"\b(?:actual|curriculum) seqlen:\s*(\d+)\s*(?:\||$)", re.IGNORECASE)
SPEAKER = re.compile(r"\[\s*(?:default|rank)\s*(\d+)|^\s*(\d+)\s*:\s|^\s*([A-Za-z][\w.-]*)\s*:\s", re.IGNORECASE)
"""Marks of a rank before a line: torchrun's `[default7]:` or `[rank7]:`, `[Rank 7 | ...]`, srun's `7: `, `host: `."""


class Recording(msgspec.Struct, frozen=True):
    """What a file holds, and what a reader must know of how it was read."""

    kind: Literal["megatron-log", "series"]
    runs: tuple[TimedRun, ...]
    remarks: tuple[str, ...] = ()


def recognise(content: bytes) -> Literal["parquet", "megatron-log", "series"]:
    """What a file is, by its content. Raises UsageError with what was expected and the nearest thing found."""
    if content[:4] == PARQUET:
        return "parquet"
    text = _text(content)
    if not text.strip():
        raise UsageError("the file is empty; expected a Megatron-LM log, a CSV of iteration times, or a parquet trace")
    header = _table(text).header
    if "iteration" in header and ("seconds" in header or "milliseconds" in header):
        return "series"
    if any(HEAD.search(line) and ELAPSED.search(line) for line in _lines(text)):
        return "megatron-log"
    raise UsageError(
        "neither a Megatron-LM log (`iteration N/ M | ... elapsed time per iteration (ms): X | ...`), nor a CSV with "
        "columns `iteration` and `seconds` or `milliseconds`, nor a parquet trace; " + _nearest(text, header)
    )


def read(content: bytes) -> Recording:
    """A log or a CSV. Raises UsageError where it is neither, or holds no usable iteration time."""
    kind = recognise(content)
    if kind == "parquet":
        raise UsageError("a parquet file is no text; it is read as a per-operation trace")
    recording = read_log(content) if kind == "megatron-log" else read_csv(content)
    if not any(run.points or run.ranks for run in recording.runs):
        raise UsageError(f"no iteration has a usable time: {'; '.join(recording.remarks) or 'nothing was read'}")
    return recording


# --- Megatron-LM logs -----------------------------------------------------------------------------------------------


class _Line(msgspec.Struct, frozen=True):
    speaker: str
    point: Point
    closed: bool
    """A bar follows the time, so that the number is whole."""


def read_log(content: bytes) -> Recording:
    """Runs of a Megatron-LM log: where the iteration number falls, a new one begins.

    One rank speaks, as a rule. Where several speak at the same time, the one with most lines is heard: all measure the
    same iteration. Where the global batch size varies, it is the workload (`Point.tokens`, up to a factor).
    """
    found: list[_Line] = []
    torn = bad = 0
    for line in _lines(_text(content)):
        heads = list(HEAD.finditer(line))
        if not heads:
            continue
        # Lines of two ranks may stand in one: each part reaches to the next head.
        for head, end in zip(heads, [h.start() for h in heads[1:]] + [len(line)], strict=True):
            part = line[head.end() : end]
            elapsed = ELAPSED.search(part)
            if elapsed is None:
                torn += 1
                continue
            seconds = _number(elapsed[2]) / (1000 if elapsed[1].lower() == "ms" else 1)
            iteration = int(head[1])
            if not (math.isfinite(seconds) and seconds > 0):
                bad += 1
                continue
            batch, length = BATCH.search(part), LENGTH.search(part)
            tokens = None if batch is None else float(batch[1]) * (1.0 if length is None else float(length[1]))
            marks = SPEAKER.findall(line[: heads[0].start()])
            speaker = " ".join("".join(mark) for mark in marks)
            found.append(_Line(speaker, Point(iteration, seconds, tokens=tokens), "|" in part[elapsed.end() :]))
    if 2 * sum(line.closed for line in found) > len(found):
        torn += sum(not line.closed for line in found)
        found = [line for line in found if line.closed]
    heard = _heard(found)
    runs, repeated = _split([line.point for line in heard])
    made = tuple(TimedRun(points=points, interval=_interval(points)) for points in runs)
    remarks = [
        *_counted(torn, "torn log line"),
        *_counted(bad, "iteration without a usable time"),
        *_counted(len(found) - len(heard), "line of other ranks"),
        *_counted(repeated, "repeated iteration"),
    ]
    means = sorted({run.interval for run in made if run.interval > 1})
    if means:
        shown = " or ".join(map(str, means))
        remarks.append(f"each time is a mean over {shown} iterations (log interval); onsets are known no better")
    return Recording("megatron-log", made, tuple(remarks + _gaps(made)))


def _heard(found: Sequence[_Line]) -> list[_Line]:
    """Lines of one speaker at a time: of two whose lines interleave, those of the one with more."""
    spans: dict[str, list[int]] = {}
    for position, line in enumerate(found):
        spans.setdefault(line.speaker, []).append(position)
    if not 1 < len(spans) <= MOST_SPEAKERS:
        return list(found)
    chosen: list[str] = []
    for speaker in sorted(spans, key=lambda name: -len(spans[name])):
        first, last = spans[speaker][0], spans[speaker][-1]
        if all(last < spans[other][0] or first > spans[other][-1] for other in chosen):
            chosen.append(speaker)
    return [line for line in found if line.speaker in chosen]


def _split(points: Sequence[Point]) -> tuple[list[tuple[Point, ...]], int]:
    """Runs, and how many points repeat an iteration. A single late line between newer ones begins no run."""
    runs: list[list[Point]] = []
    repeated = 0
    for number, point in enumerate(points):
        last = runs[-1][-1].iteration if runs else -1
        if not runs or point.iteration < last:
            following = points[number + 1].iteration if number + 1 < len(points) else -1
            if runs and following > last and last - point.iteration <= 2 and following - point.iteration > 1:
                repeated += 1
                continue
            runs.append([point])
        elif point.iteration == last:
            repeated += 1
        else:
            runs[-1].append(point)
    return [tuple(run) for run in runs], repeated


def _interval(points: Sequence[Point]) -> int:
    """The log interval: the usual distance of two lines."""
    if len(points) < 3:
        return 1
    steps = Counter(after.iteration - before.iteration for before, after in itertools.pairwise(points))
    step, times = steps.most_common(1)[0]
    return step if 2 * times > len(points) - 1 else 1


def _gaps(runs: Sequence[TimedRun]) -> list[str]:
    missing = 0
    for run in runs:
        for before, after in itertools.pairwise(run.points):
            missing += max(0, (after.iteration - before.iteration) // run.interval - 1)
    return [] if not missing else [f"{missing} iterations are missing"]


# --- CSV ------------------------------------------------------------------------------------------------------------


class _Table(msgspec.Struct, frozen=True):
    header: tuple[str, ...]
    rows: list[list[str]]


def read_csv(content: bytes) -> Recording:
    """A CSV with `iteration` and `seconds` or `milliseconds`; with `rank`, a series for each.

    Rows may come in any order. Iterations that repeat with other times after the number fell are a new run; other
    repetitions are left out. Raises UsageError for columns that are missing.
    """
    table = _table(_text(content))
    columns = {name: table.header.index(name) for name in COLUMNS if name in table.header}
    if "iteration" not in columns or not ("seconds" in columns or "milliseconds" in columns):
        raise UsageError(f"a CSV needs columns `iteration` and `seconds` or `milliseconds`; {_columns(table.header)}")
    unit, factor = ("seconds", 1.0) if "seconds" in columns else ("milliseconds", 1e-3)
    short = bad = 0
    rows: list[tuple[int, Point]] = []
    labels: list[float] = []
    for row in table.rows:
        if len(row) <= max(columns[name] for name in ("iteration", unit)):
            short += 1
            continue
        cells = {name: row[at].strip() if at < len(row) else "" for name, at in columns.items()}
        seconds, label = _number(cells[unit]) * factor, _number(cells["iteration"])
        rank = _number(cells["rank"]) if "rank" in columns else 0.0
        if not (math.isfinite(seconds) and seconds > 0 and rank >= 0 and rank == int(rank if rank < 1e9 else 0)):
            bad += 1
            continue
        tokens, squares = (_optional(cells.get(name)) for name in ("tokens", "sum_squared_lengths"))
        labels.append(label)
        whole = int(label) if math.isfinite(label) and abs(label) < 2**62 and label == int(label) else -1
        rows.append((int(rank), Point(whole, seconds, tokens=tokens, squares=squares)))
    remarks = [*_counted(short, "row cut short"), *_counted(bad, "row without a usable time")]
    if any(not (math.isfinite(label) and label == math.floor(label)) for label in labels):
        remarks.append("column `iteration` does not hold whole numbers; rows are numbered from 0 instead")
        counts: Counter[int] = Counter()
        for number, (rank, point) in enumerate(rows):
            rows[number] = rank, msgspec.structs.replace(point, iteration=counts[rank])
            counts[rank] += 1
    of_rank: dict[int, list[Point]] = {}
    for rank, point in rows:
        of_rank.setdefault(rank, []).append(point)
    if "rank" in columns and len(of_rank) > 1:
        kept = {rank: _sorted(points) for rank, points in sorted(of_rank.items())}
        repeated = sum(len(of_rank[rank]) - len(kept[rank]) for rank in kept)
        runs: tuple[TimedRun, ...] = (TimedRun(ranks=kept),)
    else:
        points = next(iter(of_rank.values()), [])
        runs, repeated = _csv_runs(points)
        if "rank" in columns and of_rank:
            remarks += without_peers({next(iter(of_rank)): {point.iteration for point in points}})
    return Recording("series", runs, (*remarks, *_counted(repeated, "repeated row")))


def _csv_runs(points: Sequence[Point]) -> tuple[tuple[TimedRun, ...], int]:
    parts, repeated = _split(points)
    seen: set[int] = set()
    again = 0
    for part in parts:
        again += sum(point.iteration in seen for point in part)
        seen.update(point.iteration for point in part)
    if again and 20 * (len(parts) - 1) <= len(points) and len(set(points)) == len(points):
        return tuple(TimedRun(points=part) for part in parts), repeated
    ordered = _sorted(points)
    return ((TimedRun(points=ordered),) if ordered else ()), len(points) - len(ordered)


def _sorted(points: Sequence[Point]) -> tuple[Point, ...]:
    """In ascending order of iterations, of equal ones the first."""
    first: dict[int, Point] = {}
    for point in points:
        first.setdefault(point.iteration, point)
    return tuple(first[iteration] for iteration in sorted(first))


def _table(text: str) -> _Table:
    """Header (lower case) and rows, by the delimiter that the header has most of; lines of comment are skipped."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if not lines or len(lines[0]) > 10_000:
        return _Table((), [])
    delimiter = max(",;\t", key=lines[0].count)
    try:
        rows = list(csv.reader(lines, delimiter=delimiter))
    except csv.Error:
        return _Table((), [])
    return _Table(tuple(name.strip().strip("'\"").lower() for name in rows[0]), rows[1:])


# --- text -----------------------------------------------------------------------------------------------------------


def _text(content: bytes) -> str:
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return content.decode("utf-16", errors="replace")
    return content.decode("utf-8-sig", errors="replace").replace("\0", "")


def _lines(text: str) -> list[str]:
    return re.split(r"[\r\n]+", ANSI.sub("", text))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _optional(text: str | None) -> float | None:
    number = math.nan if text is None else _number(text)
    return number if math.isfinite(number) and number >= 0 else None


def _counted(count: int, what: str) -> list[str]:
    if not count:
        return []
    head, _, tail = what.partition(" ")
    if tail.startswith(("of", "without", "cut")):
        head += "s" * (count > 1)
    elif count > 1:
        tail += "s"
    return [f"{count} {head} {tail} left out"]


def _columns(header: Sequence[str]) -> str:
    names = [name for name in header if name]
    shown = ", ".join(f"`{name[:40]}`" for name in names[:12])
    close = [
        f"`{name[:40]}` for `{wanted}`"
        for wanted in ("iteration", "seconds", "milliseconds")
        if wanted not in names
        for name in difflib.get_close_matches(wanted, names, 1, 0.6)
    ]
    return f"found columns {shown}" + (f"; did you mean {', '.join(close)}?" if close else "")


def _nearest(text: str, header: Sequence[str]) -> str:
    """What comes closest to something readable."""
    lines = _lines(text)
    for pattern, lacks in ((ELAPSED, "no `iteration N/ M |` before it"), (HEAD, "no `elapsed time per iteration`")):
        near = next((line for line in lines if pattern.search(line)), None)
        if near is not None:
            return f"nearest: `{_short(near)}`, with {lacks}"
    near = next((line for line in lines if re.search(r"\b(iter|step)\w*\b", line, re.IGNORECASE)), None)
    if len(header) > 1 and (near is None or near.strip().lower().startswith(header[0])):
        return _columns(header)
    first = near if near is not None else next(line for line in lines if line.strip())
    return f"nearest: `{_short(first)}`"


def _short(line: str) -> str:
    shown = "".join(c if c.isprintable() else "?" for c in line.strip())
    return shown if len(shown) <= 80 else shown[:77] + "..."
