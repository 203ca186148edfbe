"""Reads a CSV with other column names than resihp's: exports of TensorBoard and Weights & Biases, loggers' files. Pure.

    Wall time,Step,Value
    Step,run-1 - perf/step_time,run-1 - perf/step_time__MIN,run-1 - perf/step_time__MAX

The rows are read by `fields`, which knows the usual names. This module chooses the column with a run's time, and
refuses a file with several runs; the error names these runs."""

from __future__ import annotations

from collections.abc import Sequence

from resihp.detector.offline.recordings.fields import (
    NamedRow,
    read_rows,
)
from resihp.detector.offline.recordings.names import has_iteration, has_time, usual_name
from resihp.detector.offline.recordings.recording import Recording, short, text_of
from resihp.detector.offline.recordings.tables import CsvTable, table_of, with_point
from resihp.errors import UsageError

RUN_SEPARATOR = " - "
"""Separator between a run's name and a metric's, as Weights & Biases writes it."""
BOUND_SUFFIXES = ("__min", "__max")
"""Suffixes of Weights & Biases columns that hold no values of their own."""
MAX_NAMED_COLUMNS = 3


def is_table(header: Sequence[str]) -> bool:
    """Return whether there is a column with an iteration and one with a time in any form."""
    names = {_metric(column) for column in header}
    return len(header) > 1 and has_iteration(names) and has_time(names)


def export_without_times(header: Sequence[str]) -> str:
    """Return the reason why a Weights & Biases or TensorBoard export without a time cannot be read, with the
    alternative; empty for other files."""
    names = {_metric(column) for column in header}
    is_export = any(column.endswith(BOUND_SUFFIXES) or RUN_SEPARATOR in column for column in header)
    if not is_export or not has_iteration(names) or has_time(names):
        return ""
    columns_text = ", ".join(f"`{short(column)}`" for column in header if not column.endswith(BOUND_SUFFIXES))
    return (
        f"a Weights & Biases export without a time ({columns_text}); export the chart of a step's time, or a table of "
        "the run with `_step` and `_timestamp`"
    )


def read_table(content: bytes) -> Recording:
    """Read a table. Raises UsageError if one file has several runs, or no row is usable."""
    table = table_of(text_of(content))
    columns = _columns(table)
    rows = []
    for line, row in table.rows:
        cells = {name: row[place].strip() for name, place in columns.items() if place < len(row)}
        if table.delimiter != ",":
            cells = {name: with_point(cell) for name, cell in cells.items()}
        rows.append(NamedRow(line, {name: cell for name, cell in cells.items() if cell}))
    return read_rows(rows, "line")


def _columns(table: CsvTable) -> dict[str, int]:
    """Return the index of each column by its usual name. Raises UsageError if two runs have the same time metric."""
    columns: dict[str, int] = {}
    runs: dict[str, list[str]] = {}
    for place, column in enumerate(table.header):
        if column.endswith(BOUND_SUFFIXES):
            continue
        name = _metric(column)
        if not name:
            continue  # the index column of pandas
        if RUN_SEPARATOR in column and has_time((name,)):
            runs.setdefault(name, []).append(column)
        columns.setdefault(name, place)
    for name, of_runs in runs.items():
        if len(of_runs) > 1:
            columns_text = [f"`{short(column)}`" for column in of_runs[:MAX_NAMED_COLUMNS]]
            if len(of_runs) > MAX_NAMED_COLUMNS:
                columns_text.append("...")
            raise UsageError(
                f"`{name}` of {len(of_runs)} runs is in one table ({', '.join(columns_text)}); "
                "export one run, or keep the column of one"
            )
    return columns


def _metric(column: str) -> str:
    return usual_name(column.rpartition(RUN_SEPARATOR)[2])
