"""The screen of `status --watch`: a job's state, fitted into a window. Pure.

Called by `resihp.wrapper.commands.watch.command`.

If a layout has more ranks than fit, a run of fully active replicas is one line, and every other replica has a row with
a sign for each rank. Colour is never the only hint: letters and words carry the same information.
"""

from __future__ import annotations

import json
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from datetime import UTC
from typing import TYPE_CHECKING, Any

import msgspec

from resihp.db.layouts import from_json
from resihp.parallelism.layout import Layout
from resihp.record.describe import rank_list
from resihp.wrapper.commands.status.tables import goodput_line, progress_line
from resihp.wrapper.output.progress import of_target
from resihp.wrapper.output.render import (
    HEALTH_LETTERS,
    HEALTH_STYLES,
    Health,
    duration,
    layout_grid,
    legend,
    literal,
    one_line,
)

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

SIDE_BY_SIDE_COLUMNS = 130
"""Smallest width of the window, in columns, for which events are shown beside the layout and not below it."""
MIN_LAYOUT_COLUMNS = 44
"""Smallest width, in columns, of a layout that has events beside it."""
MAX_REPLICAS_NUMBERED = 8
"""Most replicas for which every rank is shown by its number."""
MIN_EVENT_LINES = 6
"""Number of lines that are reserved for events below a large layout."""
FINAL_EVENT_LINES = 12
"""Number of lines for events in the picture that stays after the job's end."""
UNICODE_BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-=+*%#"
MEDIAN_BLOCK = 2
"""Height, as an index into the blocks, of the block for an iteration of median time."""
STEPS_PER_RATIO = 6.0
"""Number of blocks by which an iteration of twice the median time is higher; 1.5 times the median is three blocks
higher."""


class Watched(msgspec.Struct, frozen=True):
    """The data on the screen: the content of `status --json`, and the times of the last iterations."""

    status: Mapping[str, Any]
    times: Sequence[tuple[int, float | None, float | None]]
    """(iteration, seconds, predicted seconds), oldest first."""
    trouble: str = ""
    """Reason why the last reading of the ledger failed; empty if it worked."""


def picture(state: Watched, width: int, height: int | None, *, unicode: bool = True) -> RenderableType:
    """Return the picture of a job's state, `width` columns wide and, unless `height` is None, at most `height` lines
    high."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    status = state.status
    tops = _top(state, width, unicode)
    lines_left = None if height is None else max(height - len(tops) - 1, 1)
    if width < SIDE_BY_SIDE_COLUMNS:
        layout = _layout(status, width, None if lines_left is None else max(lines_left - MIN_EVENT_LINES, 4), unicode)
        event_lines = FINAL_EVENT_LINES if lines_left is None else max(lines_left - len(layout) - 1, 0)
        lines = [*tops, Text(), *layout, Text(), *_events(status["events"], width, event_lines)]
        return Group(*_fitted(lines[:height], width, unicode))
    side = width * 11 // 20
    layout = _layout(status, side - 2, lines_left, unicode)[:lines_left]
    side = min(max(max(line.cell_len for line in layout) + 4, MIN_LAYOUT_COLUMNS), side)
    events = _events(
        status["events"], width - side, max(len(layout), FINAL_EVENT_LINES) if lines_left is None else lines_left
    )
    both = Table.grid(padding=0)
    both.add_column(width=side)
    both.add_column(width=width - side)
    both.add_row(
        Group(*_fitted(layout, side - 2, unicode)),
        Group(*_fitted(events, width - side, unicode)),
    )
    return Group(*_fitted([*tops, Text()], width, unicode), both)


def _fitted(lines: list[Text], width: int, unicode: bool) -> list[Text]:
    for line in lines:
        line.truncate(width, overflow="ellipsis" if unicode else "crop")
    return lines


def _top(state: Watched, width: int, unicode: bool) -> list[Text]:
    from rich.text import Text

    status = state.status
    colour = {"running": "green", "completed": "green", "cancelled": "yellow"}.get(status["state"], "bold red")
    job, state_word, *rest = headline(status)
    head = Text.assemble((literal(job), "bold"), "  ", (state_word, colour), "  ", "  ".join(rest))
    lines = [head]
    if state.trouble:
        lines.append(Text(one_line(state.trouble), style="bold yellow"))
    elif status["state"] not in ("running", "completed") and status["reason"]:
        lines.append(Text(one_line(status["reason"]), style=colour))
    if moves := progress_line(status):
        lines.append(Text(moves, style="bold yellow" if status["stuck"] else ""))
    lines += [Text(words) for words in textwrap.wrap(goodput_line(dict(status)), width)[:2]]
    if status["idle_line"]:
        lines.append(Text(one_line(status["idle_line"]), style="yellow"))
    lines += _times(state.times, width, unicode)
    return lines


def _times(times: Sequence[tuple[int, float | None, float | None]], width: int, unicode: bool) -> list[Text]:
    """Return a caption and a line of blocks, one block per iteration. A block's height shows observed divided by
    predicted time or, without predictions, the observed time."""
    from rich.text import Text

    measured = [(number, seconds, predicted) for number, seconds, predicted in times if seconds is not None]
    ratios = [(number, seconds / predicted) for number, seconds, predicted in measured if predicted]
    quantity, unit = "observed/predicted", ""
    if not ratios:
        ratios = [(number, seconds) for number, seconds, _ in measured]
        quantity, unit = "iteration times", " s"
    if not ratios:
        return []
    recent = ratios[-width:]
    values = [value for _, value in recent]
    usual = statistics.median(values)
    blocks = UNICODE_BLOCKS if unicode else ASCII_BLOCKS
    line = Text()
    for value in values:
        over = value / usual - 1.0 if usual > 0 else 0.0
        level = min(max(round(MEDIAN_BLOCK + STEPS_PER_RATIO * over), 0), len(blocks) - 1)
        line.append(blocks[level], "bold red" if over > 0.5 else "yellow" if over > 0.2 else "green")
    now, middle, least, most = (f"{value:.2f}{unit}" for value in (values[-1], usual, min(values), max(values)))
    words = f"{quantity} {now}, median {middle}, {least} to {most}"
    return [Text(f"{words}, iterations {recent[0][0]} to {recent[-1][0]}"), line]


def _events(events: Sequence[Mapping[str, Any]], width: int, room: int) -> list[Text]:
    """Return the last events in at most `room` lines, with at most two lines for each event."""
    from rich.text import Text

    lines: list[Text] = []
    for event in reversed(events):
        clock = f"{event['at'].astimezone(UTC):%H:%M:%S}  "
        words = textwrap.wrap(one_line(event["text"]), max(width - len(clock), 20), break_on_hyphens=False) or [""]
        if len(words) > 2:
            words = [words[0], words[1][: width - len(clock) - 4] + " ..."]
        if len(lines) + len(words) > room:
            break
        event_lines = [Text.assemble((clock, "dim"), words[0]), *(Text(" " * len(clock) + more) for more in words[1:])]
        lines = [*event_lines, *lines]
    return lines


def _layout(status: Mapping[str, Any], width: int, max_lines: int | None, unicode: bool) -> list[Text]:
    """Return the layout in at most `max_lines` lines: every rank by its number if there is room, otherwise as one
    sign."""
    from rich.text import Text

    if status["layout"] is None:
        return [Text("no plan yet", style="dim")]
    layout = from_json(json.dumps(status["layout"]))
    health: dict[int, Health] = {int(rank): value for rank, value in status["health"].items()}
    lines = [Text(f"epoch {status['epoch']}: {status['description']}", style="bold")]
    if len(layout.replicas) <= MAX_REPLICAS_NUMBERED:
        grid = list(layout_grid(layout, health, width).split("\n", allow_blank=True))
        heads = sum("stage 0" in line.plain for line in grid[:1]) + sum("stage" in line.plain for line in grid[1:])
        if heads <= 1 and (max_lines is None or len(grid) + 2 <= max_lines):
            lines += grid
            if meaning := legend(health.values()):
                lines.append(Text(meaning, style="dim"))
            return lines
    return [*lines, *signs(layout, health, width, None if max_lines is None else max_lines - 1, unicode=unicode)]


def signs(
    layout: Layout, health: Mapping[int, Health], width: int, max_lines: int | None, *, unicode: bool = True
) -> list[Text]:
    """Return a row of signs for each replica that is not fully active, and one line for each run of active replicas.

    There are at most `max_lines` lines. At the end are the numbers of all ranks that are not active, including ranks
    outside the layout, and a legend.
    """
    from rich.text import Text

    active_sign = "■" if unicode else "o"
    sign = {state: letter or active_sign for state, letter in HEALTH_LETTERS.items()}
    inactive_replicas = [
        d
        for d, replica in enumerate(layout.replicas)
        if replica.vacant or any(health.get(rank, "active") != "active" for rank in replica.ranks)
    ]
    below = _by_number(layout, health)
    meaning = legend(health.values())
    foot = [*below, Text(f"{active_sign} active{', ' if meaning else ''}{meaning}", style="dim")]
    rows: dict[int, list[Text]] = {}
    used = 0
    for d in inactive_replicas:
        row = _row(layout, d, health, sign, width)
        # A line each for active replicas before and after it, and one for the replicas that do not fit.
        if max_lines is not None and used + len(row) + 3 > max_lines - len(foot) and rows:
            break
        rows[d] = row
        used += len(row) + 1
    lines: list[Text] = []
    first = 0
    left_out = [d for d in inactive_replicas if d not in rows]
    end = left_out[0] if left_out else len(layout.replicas)
    for d in [*rows, end]:
        if d > first:
            lines.append(_active_replicas(layout, first, d - 1))
        if d in rows:
            lines += rows[d]
        first = d + 1
    if left_out:
        rest = len(layout.replicas) - end
        lines.append(Text(f"and {rest} more replicas, {len(left_out)} of them not fully active", style="yellow"))
    return [*lines, *foot]


def _active_replicas(layout: Layout, first: int, last: int) -> Text:
    """Return one line for a run of fully active replicas."""
    from rich.text import Text

    ranks = sum(len(layout.replicas[d].ranks) for d in range(first, last + 1))
    name = f"replica {first}" if first == last else f"replicas {first} to {last}"
    return Text.assemble(f"{name}: ", (f"all {ranks:,} ranks active", HEALTH_STYLES["active"]))


def _row(layout: Layout, d: int, health: Mapping[int, Health], sign: Mapping[Health, str], width: int) -> list[Text]:
    """Return one replica: the ranks of its stages as signs, on as many lines as necessary."""
    from rich.text import Text

    label = f"replica {d} "
    lines = [Text(label)]
    for stage in layout.replicas[d].stages:
        if lines[-1].cell_len + len(stage.ranks) > width and lines[-1].plain.strip():
            lines.append(Text(" " * len(label)))
        if not stage.ranks:
            lines[-1].append("none", HEALTH_STYLES["dead"])
        for rank in stage.ranks:
            state = health.get(rank, "active")
            lines[-1].append(sign[state], HEALTH_STYLES[state])
        lines[-1].append(" ")
    return lines


def _by_number(layout: Layout, health: Mapping[int, Health]) -> list[Text]:
    """Return a line for each state other than active, with the numbers of its ranks: `dead: ranks 5, 17-24`."""
    from rich.text import Text

    ranks_of_state: dict[Health, list[int]] = {}
    for rank, state in health.items():
        ranks_of_state.setdefault(state, []).append(rank)
    ranks_of_state.setdefault("standby", []).extend(rank for rank in layout.standby if rank not in health)
    lines = []
    for state in ("dead", "suspected", "slow", "standby", "starting"):
        if ranks := sorted(ranks_of_state.get(state, [])):
            lines.append(Text(f"{len(ranks):,} {state}: {rank_list(ranks)}", style=HEALTH_STYLES[state]))
    return lines


def headline(status: Mapping[str, Any]) -> list[str]:
    """Return the parts of the first line: job, state, iteration, loss, seconds per iteration."""
    parts = [f"job {status['job']}", status["state"], f"iteration {of_target(status)}"]
    if status["loss"] is not None:
        parts.append(f"loss {status['loss']:.4f}")
    if status["iteration_seconds"] is not None:
        parts.append(f"{duration(status['iteration_seconds'])} an iteration")
    return parts
