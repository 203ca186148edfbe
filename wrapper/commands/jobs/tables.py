"""A user's jobs on a terminal: a line of columns for each, and below it where it is; in few columns, wrapped words.

Called by `wrapper.commands.jobs.command`. Rows in, lines out; names are shown literally.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from rich.text import Text

from wrapper.output.progress import ago, of_target
from wrapper.output.render import duration, one_line
from wrapper.output.tables import lines as broken
from wrapper.registry import QUEUED

Row = dict[str, Any]

HEADINGS = ("job", "state", "nodes", "iteration", "last", "ETA", "loss")
GAP = "  "
COLOURS = {"running": "green", "completed": "green", "cancelled": "yellow", "starting": "cyan", QUEUED: "cyan"}
STATE = 1


def lines(rows: Sequence[Row], width: int | None, now: datetime | None = None) -> list[Text]:
    """What `jobs` prints in so many columns; None: in as many as it takes."""
    now = now or datetime.now(UTC)
    cells = [_cells(row, now) for row in rows]
    widths = [max(map(len, column)) for column in zip(HEADINGS, *cells, strict=True)]
    fits = width is None or sum(widths) + len(GAP) * (len(widths) - 1) <= width
    found = [_line(HEADINGS, widths, "bold", "bold")] if fits else []
    for row, cell in zip(rows, cells, strict=True):
        colour = "bold yellow" if row["stuck"] else COLOURS.get(row["state"], "bold red")
        if fits:
            found.append(_line(cell, widths, "", colour))
        else:
            named = [
                f"{heading} {text}" if heading in ("last", "ETA", "loss", "iteration") else text
                for heading, text in zip(HEADINGS, cell, strict=True)
                if text != "-"
            ]
            found += _wrapped(named, width or 0)
        where = [one_line(row["layout"])] if row["layout"] else []
        found += [Text(line.plain, style="dim") for line in _wrapped(["", *where, one_line(row["folder"])], width)]
    return found


def _cells(row: Row, now: datetime) -> list[str]:
    state = one_line(row["state"])
    if row["stuck"]:
        state = "stuck?"
    elif state == "failed" and row["exit_code"] is not None:
        state = f"failed {row['exit_code']}"
    if state == QUEUED:
        state += f" ({one_line(row['slurm_reason'])})" if row["slurm_reason"] else ""
    elif row["ended_at"] is not None and row["slurm_state"] == "pending":
        state += f", runs again ({one_line(row['slurm_reason'] or 'pending')})"
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
        line.append(cell.ljust(width), colour if number == STATE else style).append(GAP)
    line.rstrip()
    return line


def _wrapped(words: Sequence[str], width: int | None) -> list[Text]:
    """Words two blanks apart, in lines of so many columns, the later ones indented; longer ones are broken."""
    if width is None:
        return [Text(GAP.join(words))]
    done, line = [], ""
    for number, word in enumerate(words):
        joined = f"{line}{GAP}{word}" if number else word
        if len(joined) <= width:
            line = joined
            continue
        if line.strip():
            done.append(line)
        *whole, rest = (GAP + part.plain for part in broken(Text(word), max(width - len(GAP), 1)))
        done, line = [*done, *whole], rest
    return [Text(each) for each in [*done, line]]
