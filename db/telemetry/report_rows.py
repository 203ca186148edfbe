"""Writing of rank reports in bulk: COPY or arrays on PostgreSQL, multi-row statements on SQLite. Also writes scores of
ranks and quantiles of iterations, of which there are few.

Called by `resihp.db.writing.transactions`, `queue` and `resihp.db.exchange`. A report is identified by job, iteration,
rank and epoch, a score by job, iteration and rank, and quantiles by job, iteration and epoch; writing one of them twice
changes nothing. Decides only which rows fit the table; telemetry may be lost.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from math import isfinite
from operator import itemgetter
from typing import Any, NamedTuple, cast

from sqlalchemy import Connection, Table
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError, IntegrityError

from resihp.db.models import RankQuantilesRow, RankScoreRow

Report = tuple[int, int, int, float | None, float | None]
"""(iteration, epoch, rank, seconds, compute_seconds)."""
COLUMNS = ("iteration", "epoch", "rank", "seconds", "compute_seconds")
Score = tuple[int, int, float | None, float]
"""(iteration, rank, level, evidence)."""
SCORE_COLUMNS = ("iteration", "rank", "level", "evidence")
Quantiles = tuple[Any, ...]
"""Values in the order of `QUANTILE_COLUMNS`."""
QUANTILE_COLUMNS = tuple(column.name for column in RankQuantilesRow.__table__.columns if column.name != "job_id")
ROWS_IN_STATEMENT = 64
"""For SQLite, where each statement costs a switch between Python and the database."""
ROWS_IN_MESSAGE = 512
ROWS_IN_BATCH = 20_000
MOST_INTEGER, MOST_BIG_INTEGER = (1 << 31) - 1, (1 << 63) - 1

_fields = itemgetter(*COLUMNS)
_TARGET = f"rank_reports (job_id, {', '.join(COLUMNS)})"
_COPY = f"COPY {_TARGET} FROM STDIN (FORMAT BINARY)"
_ARRAYS = (
    f"INSERT INTO {_TARGET} SELECT {{job}}, * FROM unnest("
    "%s::bigint[], %s::integer[], %s::integer[], %s::float8[], %s::float8[]) ON CONFLICT DO NOTHING"
)
# PostgreSQL's "COPY", "Binary Format": a row is its number of fields, then the length and the bytes of each field.
_HEADER = b"PGCOPY\n\xff\r\n\0" + struct.pack("!ii", 0, 0)
_TRAILER = struct.pack("!h", -1)
_ROW = struct.Struct("!hiiiqiiiiidid")
_KEY = struct.Struct("!hiiiqiiii")
_NUMBER, _NULL = struct.Struct("!id"), struct.pack("!i", -1)


def as_reports(rows: Iterable[Mapping[str, Any]] | Iterable[Report]) -> list[Report]:
    """Convert mappings with the keys `COLUMNS` (missing keys become null) to tuples in this order; tuples stay
    unchanged."""
    given = list(rows)
    if given and isinstance(given[0], tuple):
        return cast(list[Report], given)
    named = cast(list[Mapping[str, Any]], given)
    try:
        return [_fields(row) for row in named]
    except KeyError:
        return [cast(Report, tuple(row.get(column) for column in COLUMNS)) for row in named]


def sound(reports: Sequence[Report]) -> list[Report]:
    """Return the reports that fit the table. Seconds that are not finite become null."""
    kept: list[Report] = []
    for report in reports:
        iteration, epoch, rank, seconds, compute = report
        try:
            if not (0 <= iteration <= MOST_BIG_INTEGER and 0 <= epoch <= MOST_INTEGER and 0 <= rank <= MOST_INTEGER):
                continue
            if seconds is None or compute is None or not (isfinite(seconds) and isfinite(compute)):
                report = (int(iteration), int(epoch), int(rank), _finite(seconds), _finite(compute))
            kept.append(report)
        except (TypeError, ValueError, OverflowError):
            continue
    return kept


def _finite(seconds: float | None) -> float | None:
    return float(seconds) if seconds is not None and isfinite(seconds) else None


def sound_scores(scores: Iterable[Score]) -> list[Score]:
    """Return the scores that fit the table. A level that is not finite becomes null."""
    return [
        (iteration, rank, _finite(level), evidence)
        for iteration, rank, level, evidence in scores
        if None not in (iteration, rank, evidence)
        and 0 <= iteration <= MOST_BIG_INTEGER
        and 0 <= rank <= MOST_INTEGER
        and isfinite(evidence)
    ]


class Telemetry(NamedTuple):
    """Rows that are written together. All of them must fit the tables (`sound`)."""

    reports: Sequence[Report] = ()
    scores: Sequence[Score] = ()
    quantiles: Sequence[Quantiles] = ()


def insert_all(connection: Connection, job_id: int, telemetry: Telemetry) -> None:
    """Write all rows of `telemetry`. Raises SQLAlchemy's errors."""
    insert_reports(connection, job_id, telemetry.reports)
    insert_scores(connection, job_id, telemetry.scores)
    insert_quantiles(connection, job_id, telemetry.quantiles)


def insert_scores(connection: Connection, job_id: int, scores: Sequence[Score]) -> None:
    """Write scores that fit the table (`sound_scores`). Raises SQLAlchemy's errors."""
    _insert(connection, job_id, cast(Table, RankScoreRow.__table__), SCORE_COLUMNS, scores)


def insert_quantiles(connection: Connection, job_id: int, quantiles: Sequence[Quantiles]) -> None:
    """Write quantiles of iterations. Raises SQLAlchemy's errors."""
    _insert(connection, job_id, cast(Table, RankQuantilesRow.__table__), QUANTILE_COLUMNS, quantiles)


def _insert(
    connection: Connection, job_id: int, table: Table, columns: tuple[str, ...], rows: Sequence[tuple[Any, ...]]
) -> None:
    if rows:
        named = [{"job_id": job_id, **dict(zip(columns, row, strict=True))} for row in rows]
        into = postgresql if connection.dialect.name == "postgresql" else sqlite
        connection.execute(into.insert(table).on_conflict_do_nothing(), named)


class Waiting:
    """Queue of at most `most` reports. Not thread-safe: the owner does the locking."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._parts: deque[list[Report]] = deque()
        self._count = 0

    def __bool__(self) -> bool:
        return bool(self._parts)

    def __len__(self) -> int:
        return self._count

    def put(self, reports: list[Report]) -> int:
        """Add as many reports as fit; return the number of reports that did not fit."""
        kept = reports[: max(self._most - self._count, 0)]
        for at in range(0, len(kept), ROWS_IN_BATCH):
            self._parts.append(kept[at : at + ROWS_IN_BATCH])
        self._count += len(kept)
        return len(reports) - len(kept)

    def batch(self) -> list[list[Report]]:
        """Return the oldest parts, about `ROWS_IN_BATCH` rows in total; they stay in the queue until `remove`."""
        parts: list[list[Report]] = []
        count = 0
        for part in self._parts:
            count += len(part)
            if parts and count > ROWS_IN_BATCH:
                break
            parts.append(part)
        return parts

    def take(self) -> list[list[Report]]:
        """Remove and return all parts."""
        parts = list(self._parts)
        self._parts.clear()
        self._count = 0
        return parts

    def remove(self, parts: list[list[Report]]) -> None:
        for _ in parts:
            self._count -= len(self._parts.popleft())


def insert_reports(connection: Connection, job_id: int, reports: Sequence[Report]) -> None:
    """Write reports that fit the table (`sound`). Raises SQLAlchemy's errors."""
    if not reports:
        return
    if connection.dialect.name != "postgresql":
        _by_statement(connection, job_id, reports)
        return
    # PostgreSQL refuses COPY to users bound by row-level security: all but the owner of a shared ledger.
    if connection.exec_driver_sql("SELECT row_security_active('rank_reports')").scalar_one():
        _by_arrays(connection, job_id, reports)
        return
    try:
        with connection.begin_nested():
            _by_copy(connection, job_id, reports)
    except IntegrityError:  # some rows exist already, and COPY cannot skip them
        _by_arrays(connection, job_id, reports)


def _by_arrays(connection: Connection, job_id: int, reports: Sequence[Report]) -> None:
    columns = tuple(list(column) for column in zip(*reports, strict=True))
    connection.exec_driver_sql(_ARRAYS.format(job=int(job_id)), columns)


def _by_statement(connection: Connection, job_id: int, reports: Sequence[Report]) -> None:
    row = f"({int(job_id)}, {', '.join(['?'] * len(COLUMNS))})"
    # OR IGNORE also skips rows with a NULL in the key, but sound reports have none.
    verb = "INSERT OR IGNORE"
    values = list(chain.from_iterable(reports))
    width = len(COLUMNS) * ROWS_IN_STATEMENT
    whole = len(values) - len(values) % width
    if whole:
        many = f"{verb} INTO {_TARGET} VALUES {', '.join([row] * ROWS_IN_STATEMENT)}"
        connection.exec_driver_sql(many, [tuple(values[at : at + width]) for at in range(0, whole, width)])
    rest = values[whole:]
    if rest:
        rows = ", ".join([row] * (len(rest) // len(COLUMNS)))
        connection.exec_driver_sql(f"{verb} INTO {_TARGET} VALUES {rows}", tuple(rest))


def _by_copy(connection: Connection, job_id: int, reports: Sequence[Report]) -> None:
    def packed(report: Report) -> bytes:
        iteration, epoch, rank, seconds, compute = report
        if seconds is not None and compute is not None:
            return pack(6, 4, job_id, 8, iteration, 4, epoch, 4, rank, 8, seconds, 8, compute)
        parts = [_NULL if value is None else _NUMBER.pack(8, value) for value in (seconds, compute)]
        return _KEY.pack(6, 4, job_id, 8, iteration, 4, epoch, 4, rank) + parts[0] + parts[1]

    pack = _ROW.pack
    driver = connection.dialect.loaded_dbapi
    session: Any = connection.connection.driver_connection
    try:
        with session.cursor() as cursor, cursor.copy(_COPY) as copy:
            copy.write(_HEADER)
            for at in range(0, len(reports), ROWS_IN_MESSAGE):  # the server works on one message while we pack the next
                copy.write(b"".join(map(packed, reports[at : at + ROWS_IN_MESSAGE])))
            copy.write(_TRAILER)
    except driver.Error as error:
        raise DBAPIError.instance(_COPY, None, error, driver.Error, dialect=connection.dialect) from error
