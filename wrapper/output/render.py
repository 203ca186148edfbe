"""Parts of terminal output: the layout grid with each rank's health, durations, counts, escaped text.

Used by `resihp.wrapper.sinks.terminal` and `resihp.wrapper.commands`. Decides nothing. Rich markup is never
interpreted: names and reasons come from outside and are printed literally.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

from resihp.parallelism.layout import Layout, Stage

if TYPE_CHECKING:
    from rich.text import Text

Health = Literal["active", "standby", "starting", "slow", "suspected", "dead"]
HEALTH_LETTERS: Mapping[Health, str] = {
    "active": "",
    "standby": "s",
    "starting": "+",
    "slow": "~",
    "suspected": "?",
    "dead": "x",
}
"""Letter that follows a rank's number, so that its health is visible without colour."""
HEALTH_STYLES: Mapping[Health, str] = {
    "active": "green",
    "standby": "yellow",
    "starting": "cyan",
    "slow": "bold yellow",
    "suspected": "magenta",
    "dead": "bold red",
}
MAX_SUSPECT_RANKS = 4
"""Most ranks that the description of a suspicion names."""
ZERO_S = 5e-8
"""Times up to this, in seconds, are shown as zero, as they may be rounding errors of added and subtracted times."""
SHORT_DURATION_S = 0.00995
"""Times below this, in seconds, are not shown in hundredths of a second."""
MAX_GRID_ROWS = 16
"""Most rows of a grid. If there are more replicas, healthy ones are left out."""


def literal(text: str) -> str:
    """Return `text` with control characters escaped, because a reason that quotes a log must not control the
    terminal."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def one_line(text: str) -> str:
    """Return a name escaped as in `literal` and on one line, so that no part of it can look like another message of
    resihp."""
    return " ".join(literal(text).split())


def say(text: str) -> None:
    """Print a message of resihp on stderr, escaped as in `literal`, because it may quote a worker's log or Slurm."""
    print(f"resihp: {literal(text)}", file=sys.stderr, flush=True)


def duration(seconds: float | None) -> str:
    """Format a duration: `0.62 s`, `12.3 s`, `4 min 05 s`, `2 h 03 min`, `3 d 04 h`; short ones as `3.1 ms`, `250 µs`;
    `-` for None, NaN and infinities."""
    if seconds is None or seconds != seconds or seconds in (float("inf"), float("-inf")):
        return "-"
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if ZERO_S < seconds < SHORT_DURATION_S:
        return f"{seconds * 1e3:.2g} ms" if seconds >= 0.000995 else f"{seconds * 1e6:.3g} µs"
    if seconds < 9.995:
        return f"{seconds:.2f} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24:02d} h"


def as_change(ratio: float | None) -> str:
    """Format a ratio of times as a change, such as `+50.0 %` for 1.5."""
    return "-" if ratio is None else f"{100 * (ratio - 1):+.1f} %"


def count(number: float) -> str:
    """Format a number briefly: `812`, `18.2k`, `3.4M`, `1.2G`."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * size:
            return f"{number / size:.1f}{letter}"
    return f"{number:.0f}"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def suspects(row: dict[str, Any]) -> str:
    """Return the subject of a suspicion's row: `rank 5`, `link 3-4`, `data 0, 1`, `node n1`; `everybody` if the row
    names no rank."""
    if row["component"] == "node":
        return f"node {row['node']}"
    numbers = ", ".join(map(str, row["ranks"][:MAX_SUSPECT_RANKS])) + (
        "..." if len(row["ranks"]) > MAX_SUSPECT_RANKS else ""
    )
    if not numbers:
        return "everybody"
    if row["component"] == "link":
        return "link " + "-".join(map(str, row["ranks"]))
    return f"{'rank' if row['component'] in ('device', 'process') else row['component']} {numbers}"


def _runs(ranks: Iterable[int], health: Mapping[int, Health], default: Health) -> list[tuple[str, Health]]:
    """Return the ranks in order as words, with neighbours of equal health as a range: `0-3`, `4x`."""
    words: list[tuple[str, Health]] = []
    key = lambda pair: (pair[1] - pair[0], health.get(pair[1], default))  # noqa: E731 - consecutive, equal health
    for (_, state), group in groupby(enumerate(ranks), key):
        run = [rank for _, rank in group]
        span = str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}"
        words.append((span + HEALTH_LETTERS[state], state))
    return words


def _layers(stage: Stage) -> str:
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in stage.chunks)


def legend(health: Iterable[Health]) -> str:
    """Return the meaning of the letters in use, as `s standby, x dead`."""
    present = set(health)
    return ", ".join(f"{letter} {name}" for name, letter in HEALTH_LETTERS.items() if letter and name in present)


def _usual(layout: Layout, depth: int) -> list[str | None]:
    """Return the layers of each stage in most replicas. Without a majority, return those layers that all replicas agree
    on."""
    shapes = [tuple(_layers(stage) for stage in replica.stages) for replica in layout.replicas]
    if not shapes:
        return []
    common, times = Counter(shapes).most_common(1)[0]
    if 2 * times > len(shapes):
        return [*common, *[None] * (depth - len(common))]
    agreed = [{shape[s] if s < len(shape) else None for shape in shapes} for s in range(depth)]
    return [spans.pop() if len(spans) == 1 else None for spans in agreed]


def _odd(layout: Layout, health: Mapping[int, Health], usual: Sequence[str | None]) -> list[int]:
    """Return the replicas that differ from most: in shape, in layers, or because one of their ranks is not active."""
    shapes = [tuple(stage.tp for stage in replica.stages) for replica in layout.replicas]
    common = Counter(shapes).most_common(1)[0][0] if shapes else ()
    return [
        d
        for d, replica in enumerate(layout.replicas)
        if shapes[d] != common
        or any(_layers(stage) != usual[s] for s, stage in enumerate(replica.stages))
        or any(health.get(rank, "active") != "active" for rank in replica.ranks)
    ]


def _rows(count: int, odd: Sequence[int]) -> list[int | str]:
    """Return the rows of the grid: a replica's number, or a text that stands for replicas left out. If there are too
    many replicas, only the first and the unusual ones get rows."""
    if count <= MAX_GRID_ROWS:
        return list(range(count))
    odd_shown = odd[: MAX_GRID_ROWS - 2]
    picked = sorted({*range(MAX_GRID_ROWS - len(odd_shown)), *odd_shown})
    rows: list[int | str] = []
    for d, following in zip([-1, *picked], [*picked, count], strict=True):
        rows += [d] if d >= 0 else []
        left_out = range(d + 1, following)
        if left_out:
            calm = "all active" if not set(left_out).intersection(odd) else "not all active"
            rows.append(f"... {len(left_out)} more, {calm}")
    return rows


def layout_grid(layout: Layout, health: Mapping[int, Health] | None = None, width: int = 80) -> Text:
    """Return the layout as a grid: a row for each replica, a column for each stage, and in each cell the ranks of its
    tensor-parallel group.

    Layers are above the columns; a cell whose stage has other layers names them (`L0-3`). Below the grid are standby
    ranks, and ranks in `health` that are not in the layout: dead, or started and not yet part of a plan. Stages that do
    not fit into `width` columns continue below. Letters show the health as well as colours.
    """
    from rich.text import Text

    health = health or {}
    grid = _Grid(layout, health)
    lines = [line for columns in _blocks(grid.widths, width - grid.label_width) for line in grid.lines(columns)]
    if not layout.replicas:
        lines.append(Text("no replica"))
    for name, ranks, state in _below(layout, health):
        if ranks:
            lines += _wrapped(name.ljust(grid.label_width), _runs(ranks, health, state), width)
    for line in lines:
        line.rstrip()
    return Text("\n").join(lines)


Cell = list[tuple[str, "Health"]]
"""Words of a cell, each with the health that determines its colour."""


class _Grid:
    """The cells of a layout, by replica and stage, and the width of each column."""

    def __init__(self, layout: Layout, health: Mapping[int, Health]) -> None:
        depth = max((len(replica.stages) for replica in layout.replicas), default=0)
        usual = _usual(layout, depth)
        self._rows = _rows(len(layout.replicas), _odd(layout, health, usual))
        self._cells: dict[int, list[Cell]] = {}
        for d in self._rows:
            if isinstance(d, int):
                self._cells[d] = [_cell(stage, health, usual[s]) for s, stage in enumerate(layout.replicas[d].stages)]
        self._heads = [f"stage {s}" for s in range(depth)]
        self._layers = ["" if span is None else f"layers {span}" for span in usual]
        self.label_width = max([len("replica 0"), *(len(f"replica {d}") for d in self._cells)]) + 2
        self.widths = [self._column_width(s) + 2 for s in range(depth)]

    def lines(self, columns: Sequence[int]) -> Iterator[Text]:
        """Yield the lines for these stages: headings, layers, and a line for each replica."""
        from rich.text import Text

        indent = " " * self.label_width
        yield Text(indent + "".join(self._heads[s].ljust(self.widths[s]) for s in columns), style="bold")
        if any(self._layers[s] for s in columns):
            yield Text(indent + "".join(self._layers[s].ljust(self.widths[s]) for s in columns), style="dim")
        for d in self._rows:
            yield Text(d) if isinstance(d, str) else self._line(d, columns)

    def _line(self, replica: int, columns: Sequence[int]) -> Text:
        from rich.text import Text

        line = Text(f"replica {replica}".ljust(self.label_width))
        cells = self._cells[replica]
        for s in columns:
            if s >= len(cells):
                continue
            for n, (word, state) in enumerate(cells[s]):
                line.append(" " if n else "").append(word, HEALTH_STYLES[state])
            line.append(" " * (self.widths[s] - _width(cells[s])))
        return line

    def _column_width(self, stage: int) -> int:
        widths = [_width(cells[stage]) for cells in self._cells.values() if stage < len(cells)]
        return max(len(self._heads[stage]), len(self._layers[stage]), *widths)


def _cell(stage: Stage, health: Mapping[int, Health], usual_layers: str | None) -> Cell:
    """Return the ranks of a stage, and its layers if they differ from the layers of the column."""
    cell: Cell = _runs(stage.ranks, health, "active") or [("none", "dead")]
    return cell if _layers(stage) == usual_layers else [*cell, (f"L{_layers(stage)}", "active")]


def _below(layout: Layout, health: Mapping[int, Health]) -> Sequence[tuple[str, Sequence[int], Health]]:
    """Return the ranks that are in no replica, by group: standby, starting, dead."""
    working = set(layout.active)
    dead = sorted(rank for rank in health if health[rank] == "dead" and rank not in working)
    standby = [rank for rank in layout.standby if health.get(rank) != "dead"]
    starting = sorted(set(health) - set(layout.ranks) - set(dead))
    return ("standby", standby, "standby"), ("starting", starting, "starting"), ("dead", dead, "dead")


def _width(cell: Sequence[tuple[str, Health]]) -> int:
    return sum(len(word) for word, _ in cell) + len(cell) - 1


def _blocks(widths: Sequence[int], room: int) -> list[list[int]]:
    """Split the columns into blocks; the columns of a block fit side by side into `room`."""
    blocks: list[list[int]] = []
    used = 0
    for s, width in enumerate(widths):
        if not blocks or used + width > room + 2:  # the two blanks after the last column may be cut off
            blocks.append([])
            used = 0
        blocks[-1].append(s)
        used += width
    return blocks


def _wrapped(label: str, words: Sequence[tuple[str, Health]], width: int) -> list[Text]:
    from rich.text import Text

    lines = [Text(label)]
    for word, state in words:
        if lines[-1].cell_len + len(word) > width and lines[-1].plain.strip():
            lines.append(Text(" " * len(label)))
        lines[-1].append(word, HEALTH_STYLES[state]).append(" ")
    return lines


def hours(gpu_hours: float) -> str:
    """Format GPU-hours: `1,234 GPU-h`, `8.21 GPU-h`; small amounts as `12.3 GPU-min` or `4.56 GPU-s`."""
    if gpu_hours >= 99.95:
        return f"{gpu_hours:,.0f} GPU-h"
    for unit, size in (("h", 1.0), ("min", 1 / 60)):
        if gpu_hours >= 0.9995 * size:
            return f"{gpu_hours / size:.3g} GPU-{unit}"
    return f"{gpu_hours * 3600:.3g} GPU-s"
