"""What `status --watch` shows: a job's state as something that fits a window. Pure. Called by
`wrapper.commands.watch.command`.

Of a layout with more ranks than fit, replicas that are all active are told in a line, and every other one has a row
with a sign for each rank. Colour is a second hint everywhere: letters and words tell the same.
"""

from __future__ import annotations

import json
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from datetime import UTC
from typing import TYPE_CHECKING, Any

import msgspec

from db.layouts import from_json
from resihp.parallelism.layout import Layout
from resihp.record.describe import rank_list
from wrapper.commands.status.tables import goodput_line, progress_line
from wrapper.output.progress import of_target
from wrapper.output.render import (
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

WIDE = 130
"""Columns from which events stand beside the layout."""
NARROWEST = 44
"""Columns of a small layout beside events."""
WHOLE_GRID = 8
"""Replicas up to which every rank has its number."""
EVENTS_AT_LEAST = 6
"""Lines kept for events below a large layout."""
EVENTS_AT_END = 12
"""Lines of events in the picture that stays when all is over."""
BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-=+*%#"
MIDDLE = 2
"""The block of a usual iteration."""
STEPS_PER_RATIO = 6.0
"""Blocks for each time that an iteration is longer than usual: half as long again is three blocks up."""


class Watched(msgspec.Struct, frozen=True):
    """What is shown: the status of `status --json`, and times of the last iterations."""

    status: Mapping[str, Any]
    times: Sequence[tuple[int, float | None, float | None]]
    """(iteration, seconds, predicted seconds) of each, oldest first."""
    trouble: str = ""
    """Why the ledger could not be read just now."""


def picture(state: Watched, width: int, height: int | None, *, unicode: bool = True) -> RenderableType:
    """The state in `width` columns and, unless None, at most `height` lines. Colour is a second hint only."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    status = state.status
    tops = _top(state, width, unicode)
    room = None if height is None else max(height - len(tops) - 1, 1)
    if width < WIDE:
        layout = _layout(status, width, None if room is None else max(room - EVENTS_AT_LEAST, 4), unicode)
        left = EVENTS_AT_END if room is None else max(room - len(layout) - 1, 0)
        lines = [*tops, Text(), *layout, Text(), *_events(status["events"], width, left)]
        return Group(*_fitted(lines[:height], width, unicode))
    side = width * 11 // 20
    layout = _layout(status, side - 2, room, unicode)[:room]
    side = min(max(max(line.cell_len for line in layout) + 4, NARROWEST), side)
    events = _events(status["events"], width - side, max(len(layout), EVENTS_AT_END) if room is None else room)
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
    job, how, *rest = headline(status)
    head = Text.assemble((literal(job), "bold"), "  ", (how, colour), "  ", "  ".join(rest))
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
    """Observed over predicted time of the last iterations, one block each; seconds where nothing was predicted."""
    from rich.text import Text

    known = [(number, seconds, predicted) for number, seconds, predicted in times if seconds is not None]
    ratios = [(number, seconds / predicted) for number, seconds, predicted in known if predicted]
    what, unit = "observed/predicted", ""
    if not ratios:
        ratios = [(number, seconds) for number, seconds, _ in known]
        what, unit = "iteration times", " s"
    if not ratios:
        return []
    shown = ratios[-width:]
    values = [value for _, value in shown]
    usual = statistics.median(values)
    blocks = BLOCKS if unicode else ASCII_BLOCKS
    line = Text()
    for value in values:
        over = value / usual - 1.0 if usual > 0 else 0.0
        level = min(max(round(MIDDLE + STEPS_PER_RATIO * over), 0), len(blocks) - 1)
        line.append(blocks[level], "bold red" if over > 0.5 else "yellow" if over > 0.2 else "green")
    now, middle, least, most = (f"{value:.2f}{unit}" for value in (values[-1], usual, min(values), max(values)))
    words = f"{what} {now}, median {middle}, {least} to {most}"
    return [Text(f"{words}, iterations {shown[0][0]} to {shown[-1][0]}"), line]


def _events(events: Sequence[Mapping[str, Any]], width: int, room: int) -> list[Text]:
    """The last events in at most `room` lines, two for each at most."""
    from rich.text import Text

    lines: list[Text] = []
    for event in reversed(events):
        clock = f"{event['at'].astimezone(UTC):%H:%M:%S}  "
        words = textwrap.wrap(one_line(event["text"]), max(width - len(clock), 20), break_on_hyphens=False) or [""]
        if len(words) > 2:
            words = [words[0], words[1][: width - len(clock) - 4] + " ..."]
        if len(lines) + len(words) > room:
            break
        told = [Text.assemble((clock, "dim"), words[0]), *(Text(" " * len(clock) + more) for more in words[1:])]
        lines = [*told, *lines]
    return lines


def _layout(status: Mapping[str, Any], width: int, room: int | None, unicode: bool) -> list[Text]:
    """The layout in at most `room` lines: every rank by its number while that fits, else a sign for each."""
    from rich.text import Text

    if status["layout"] is None:
        return [Text("no plan yet", style="dim")]
    layout = from_json(json.dumps(status["layout"]))
    health: dict[int, Health] = {int(rank): value for rank, value in status["health"].items()}
    lines = [Text(f"epoch {status['epoch']}: {status['description']}", style="bold")]
    if len(layout.replicas) <= WHOLE_GRID:
        grid = list(layout_grid(layout, health, width).split("\n", allow_blank=True))
        heads = sum("stage 0" in line.plain for line in grid[:1]) + sum("stage" in line.plain for line in grid[1:])
        if heads <= 1 and (room is None or len(grid) + 2 <= room):
            lines += grid
            if meaning := legend(health.values()):
                lines.append(Text(meaning, style="dim"))
            return lines
    return [*lines, *signs(layout, health, width, None if room is None else room - 1, unicode=unicode)]


def signs(
    layout: Layout, health: Mapping[int, Health], width: int, room: int | None, *, unicode: bool = True
) -> list[Text]:
    """A row of signs for each replica that is not all active, runs of the others in one line; at most `room` lines.

    Below are the ranks that are not active by number, those in no place of the layout included, and what signs mean.
    """
    from rich.text import Text

    well = "■" if unicode else "o"
    sign = {state: letter or well for state, letter in HEALTH_LETTERS.items()}
    troubled = [
        d
        for d, replica in enumerate(layout.replicas)
        if replica.vacant or any(health.get(rank, "active") != "active" for rank in replica.ranks)
    ]
    below = _by_number(layout, health)
    meaning = legend(health.values())
    foot = [*below, Text(f"{well} active{', ' if meaning else ''}{meaning}", style="dim")]
    rows: dict[int, list[Text]] = {}
    used = 0
    for d in troubled:
        row = _row(layout, d, health, sign, width)
        # A line for the well ones before and after it, and one for those that have no room.
        if room is not None and used + len(row) + 3 > room - len(foot) and rows:
            break
        rows[d] = row
        used += len(row) + 1
    lines: list[Text] = []
    first = 0
    left_out = [d for d in troubled if d not in rows]
    end = left_out[0] if left_out else len(layout.replicas)
    for d in [*rows, end]:
        if d > first:
            lines.append(_calm(layout, first, d - 1))
        if d in rows:
            lines += rows[d]
        first = d + 1
    if left_out:
        rest = len(layout.replicas) - end
        lines.append(Text(f"and {rest} more replicas, {len(left_out)} of them not all active", style="yellow"))
    return [*lines, *foot]


def _calm(layout: Layout, first: int, last: int) -> Text:
    """Replicas that are all active, in a line."""
    from rich.text import Text

    ranks = sum(len(layout.replicas[d].ranks) for d in range(first, last + 1))
    name = f"replica {first}" if first == last else f"replicas {first} to {last}"
    return Text.assemble(f"{name}: ", (f"all {ranks:,} ranks active", HEALTH_STYLES["active"]))


def _row(layout: Layout, d: int, health: Mapping[int, Health], sign: Mapping[Health, str], width: int) -> list[Text]:
    """One replica: the stages' ranks as signs, on as many lines as they need."""
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
    """`dead: ranks 5, 17-24`: what is not active, by number, a line for each state."""
    from rich.text import Text

    found: dict[Health, list[int]] = {}
    for rank, state in health.items():
        found.setdefault(state, []).append(rank)
    found.setdefault("standby", []).extend(rank for rank in layout.standby if rank not in health)
    lines = []
    for state in ("dead", "suspected", "slow", "standby", "starting"):
        if ranks := sorted(found.get(state, [])):
            lines.append(Text(f"{len(ranks):,} {state}: {rank_list(ranks)}", style=HEALTH_STYLES[state]))
    return lines


def headline(status: Mapping[str, Any]) -> list[str]:
    """The job, how it is, and where training is."""
    found = [f"job {status['job']}", status["state"], f"iteration {of_target(status)}"]
    if status["loss"] is not None:
        found.append(f"loss {status['loss']:.4f}")
    if status["iteration_seconds"] is not None:
        found.append(f"{duration(status['iteration_seconds'])} an iteration")
    return found
