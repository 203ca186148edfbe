"""The output of `resihp jobs` on a terminal: for each job a row of columns, and its folder below; on a narrow terminal,
wrapped words.

Called by `resihp.wrapper.commands.jobs.command`. Rows in, lines out; names are shown literally.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from rich.text import Text

from resihp.wrapper.output.progress import ago, of_target
from resihp.wrapper.output.render import duration, one_line
from resihp.wrapper.output.tables import lines as broken_lines
from resihp.wrapper.registry import QUEUED

Row = dict[str, Any]

COLUMN_HEADINGS = ("job", "state", "nodes", "iteration", "last", "ETA", "loss")
COLUMN_GAP = "  "
STATE_COLOURS = {"running": "green", "completed": "green", "cancelled": "yellow", "starting": "cyan", QUEUED: "cyan"}
STATE_COLUMN = 1
"""Index of the column with the job's state."""


def lines(rows: Sequence[Row], width: int | None, now: datetime | None = None) -> list[Text]:
    """Return the output of `jobs`, in lines of `width` columns; None: as wide as necessary."""
    now = now or datetime.now(UTC)
    cells = [_cells(row, now) for row in rows]
    headings: tuple[str, ...] = COLUMN_HEADINGS
    if any(row["folder"] is None for row in rows):  # jobs of all users
        cells = [[*cell, one_line(row["user"])] for row, cell in zip(rows, cells, strict=True)]
        headings = (*COLUMN_HEADINGS, "user")
    widths = [max(map(len, column)) for column in zip(headings, *cells, strict=True)]
    fits = width is None or sum(widths) + len(COLUMN_GAP) * (len(widths) - 1) <= width
    text_lines = [_line(headings, widths, "bold", "bold")] if fits else []
    for row, cell in zip(rows, cells, strict=True):
        colour = "bold yellow" if row["stuck"] else STATE_COLOURS.get(row["state"], "bold red")
        if fits:
            text_lines.append(_line(cell, widths, "", colour))
        else:
            labelled_cells = [
                f"{heading} {text}" if heading in ("last", "ETA", "loss", "iteration", "user") else text
                for heading, text in zip(headings, cell, strict=True)
                if text != "-"
            ]
            text_lines += _wrapped(labelled_cells, width or 0)
        where = [one_line(row[key]) for key in ("layout", "folder", "event") if row.get(key)]
        text_lines += [Text(line.plain, style="dim") for line in _wrapped(["", *where], width)]
    return text_lines


def _after_requeue(row: Row) -> str:
    """Return what happens to an ended job that is in Slurm's queue again. A held job waits until it is released: an
    administrator held it, or a prolog failed on its nodes."""
    reason = one_line(row["slurm_reason"] or "pending")
    if "held" in reason.lower():
        return f"held by Slurm ({reason}): scontrol release {one_line(row['slurm_job'])}"
    return f"runs again ({reason})"


def _cells(row: Row, now: datetime) -> list[str]:
    state = one_line(row["state"])
    if row["stuck"]:
        state = "stuck?"
    elif state == "failed" and row["exit_code"] is not None:
        state = f"failed {row['exit_code']}"
    if state == QUEUED:
        state += f" ({one_line(row['slurm_reason'])})" if row["slurm_reason"] else ""
    elif row["ended_at"] is not None and row["slurm_state"] == "pending":
        state += f", {_after_requeue(row)}"
    elif row["slurm_state"] not in (None, "running"):
        state += f", Slurm: {one_line(row['slurm_state'])}"
    nodes = "-" if row["nodes"] is None else f"{row['nodes']} x {row['gpus_per_node']}"
    last = row["last_iteration_at"]
    return [
        one_line(row["job"]),
        state,
        nodes,
        of_target(row) if row["iteration"] or row["target"] else "-",
        "-" if last is None else ago(max((now - last).total_seconds(), 0.0)),
        duration(row["eta_seconds"]),
        "-" if row["loss"] is None else f"{row['loss']:.4f}",
    ]


def _line(cells: Sequence[str], widths: Sequence[int], style: str, colour: str) -> Text:
    line = Text()
    for number, (cell, width) in enumerate(zip(cells, widths, strict=True)):
        line.append(cell.ljust(width), colour if number == STATE_COLUMN else style).append(COLUMN_GAP)
    line.rstrip()
    return line


def _wrapped(words: Sequence[str], width: int | None) -> list[Text]:
    """Return the words, two blanks apart, in lines of `width` columns. All lines except the first are indented.

    Words that are too long are broken. `width` None: one line.
    """
    if width is None:
        return [Text(COLUMN_GAP.join(words))]
    finished_lines, line = [], ""
    for number, word in enumerate(words):
        joined = f"{line}{COLUMN_GAP}{word}" if number else word
        if len(joined) <= width:
            line = joined
            continue
        if line.strip():
            finished_lines.append(line)
        *whole, rest = (COLUMN_GAP + part.plain for part in broken_lines(Text(word), max(width - len(COLUMN_GAP), 1)))
        finished_lines, line = [*finished_lines, *whole], rest
    return [Text(text) for text in [*finished_lines, line]]
