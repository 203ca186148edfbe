"""Prints tables on a terminal, and decides how a table that is too wide is shortened.

First, text is wrapped: at blanks, and in long names after `-`, `_`, `/` and the like. Then columns are left out, with a
message, but never columns that identify a row. Finally each row is printed as several lines, a heading and a cell in
each line. No cell is ever cut off. A pipe has unlimited width (`answers.console`).

Cells are printed literally, never interpreted as markup. Called by `resihp.wrapper.commands`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from resihp.wrapper.output.answers import message
from resihp.wrapper.output.render import literal

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

MIN_TEXT_COLUMNS = 12
"""Smallest width of a column of text. Shorter words are not broken."""
EDGE_BLANKS = 2
"""Total number of blanks at the left and right edge of a table."""
COLUMN_GAPS = (3, 2)
"""Blanks between columns: normally, and if the table is too wide."""
EMPTY_CELLS = ("", "-")
_ENDS = re.compile(r"(?<=[-_/=+@|])(?=\S)|(?<=[.,:;])(?=[^\W\d])")
"""Places where a name may continue on the next line; a number stays whole."""


@dataclass(frozen=True)
class Column:
    """A column: its heading, and how it may be shortened."""

    heading: str
    right: bool = False
    wraps: bool = False
    """Whether the column has text, which may be wrapped; numbers and times may not."""
    kept: bool = False
    """Whether the column identifies rows, and so is never left out. The first column is always kept."""


def show(screen: Console, columns: Sequence[Column], rows: Sequence[Sequence[str | Text]]) -> None:
    """Print a table, and a message on stderr that names the columns left out."""
    cells = [[_text(cell) for cell in row] for row in rows]
    chosen = list(range(len(columns)))
    while (fit := _fit(screen.width, columns, cells, chosen)) is None:
        goes = _to_go(columns, cells, chosen)
        if goes is None or 2 * (len(columns) - len(chosen) + 1) > len(columns):
            _show_records(screen, columns, cells)
            return
        chosen.remove(goes)
    _print(screen, columns, cells, chosen, *fit)
    if missing := [columns[n].heading for n in range(len(columns)) if n not in chosen]:
        message(f"no room for columns: {', '.join(missing)}; a wider terminal, a pipe and --json show all")


def lines(text: Text, width: int) -> list[Text]:
    """Split `text` into lines of at most `width` columns: at blanks, then at `_ENDS` within longer words, else
    anywhere."""
    wrapped: list[Text] = []
    for line in text.split("\n", allow_blank=True):
        ends, at, used = [], 0, 0
        for piece in _pieces(line.plain, width):
            if used and used + _size(piece.rstrip()) > width:
                ends.append(at)
                used = 0
            at, used = at + len(piece), used + _size(piece)
        wrapped += line.divide(ends)
    for part in wrapped:
        part.rstrip()
    return wrapped


# --- room -----------------------------------------------------------------------------------------------------------


def _fit(
    width: int, columns: Sequence[Column], cells: Sequence[Sequence[Text]], chosen: Sequence[int]
) -> tuple[int, list[int]] | None:
    """Return the gap between columns, and the widths of the chosen columns; None if they do not fit into `width`."""
    natural = [max(_longest(text) for text in (_text(columns[n].heading), *(row[n] for row in cells))) for n in chosen]
    for gap in COLUMN_GAPS:
        if sum(natural) + gap * (len(chosen) - 1) + EDGE_BLANKS <= width:
            return gap, natural
    room = width - COLUMN_GAPS[-1] * (len(chosen) - 1) - EDGE_BLANKS
    least = [min(_least(columns[n], [row[n] for row in cells]), most) for n, most in zip(chosen, natural, strict=True)]
    if sum(least) > room:
        return None
    level = 0  # the widest columns are narrowed first
    while sum(_levelled(natural, least, level + 1)) <= room:
        level += 1
    widths = _levelled(natural, least, level)
    for n, most in enumerate(natural):
        if widths[n] < most and sum(widths) < room:
            widths[n] += 1
    return COLUMN_GAPS[-1], widths


def _levelled(natural: Sequence[int], least: Sequence[int], level: int) -> list[int]:
    return [max(low, min(most, level)) for low, most in zip(least, natural, strict=True)]


def _least(column: Column, cells: Sequence[Text]) -> int:
    """Return the smallest width to which a column may be narrowed."""
    heading = _longest_piece(column.heading)
    if not column.wraps:
        return max([heading, *(_longest(text) for text in cells)])
    longest = max((_longest(text) for text in cells), default=0)
    return max([heading, min(longest, MIN_TEXT_COLUMNS), *(_longest_piece(text.plain) for text in cells)])


def _to_go(columns: Sequence[Column], cells: Sequence[Sequence[Text]], chosen: Sequence[int]) -> int | None:
    """Return the column to leave out next: the last empty one, else the last one without text, else the last one; None
    if all must stay."""
    may = [n for n in chosen if n and not columns[n].kept]
    empty = [n for n in may if all(row[n].plain in EMPTY_CELLS for row in cells)]
    without_words = [n for n in may if not columns[n].wraps]
    return next(iter((empty or without_words or may)[::-1]), None)


# --- printing -------------------------------------------------------------------------------------------------------


def _print(
    screen: Console,
    columns: Sequence[Column],
    cells: Sequence[Sequence[Text]],
    chosen: Sequence[int],
    gap: int,
    widths: Sequence[int],
) -> None:
    from rich import box
    from rich.table import Table

    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        header_style="bold",
        padding=(0, 1, 0, gap - 2),
        show_header=any(columns[n].heading for n in chosen),
    )
    for n, width in zip(chosen, widths, strict=True):
        heading = _wrapped(_text(columns[n].heading), width)
        table.add_column(heading, justify="right" if columns[n].right else "left", width=width, no_wrap=True)
    for row in cells:
        table.add_row(*(_wrapped(row[n], width) for n, width in zip(chosen, widths, strict=True)))
    if screen.is_terminal:
        screen.print(table, crop=False)
        return
    with screen.capture() as printed:
        screen.print(table, crop=False)
    for line in printed.get().splitlines():  # trailing blanks are useless in a file
        screen.print(line.rstrip(), soft_wrap=True)


def _show_records(screen: Console, columns: Sequence[Column], cells: Sequence[Sequence[Text]]) -> None:
    """Print each row as several lines, one for each cell that is not empty, with an empty line between rows."""
    from rich.text import Text

    label = min(max(_size(column.heading) for column in columns), screen.width // 2) + 2
    for number, row in enumerate(cells):
        if number:
            screen.print()
        for column, cell in zip(columns, row, strict=True):
            if cell.plain in EMPTY_CELLS:
                continue
            headings = lines(_text(column.heading), label - 2)
            for n, part in enumerate(lines(cell, max(screen.width - label, 1))):
                heading = headings[n] if n < len(headings) else Text()
                heading.stylize("bold")
                heading.pad_right(label - heading.cell_len)
                screen.print(Text.assemble(heading, part), soft_wrap=True)
            for heading in headings[n + 1 :]:
                screen.print(Text.assemble((heading.plain, "bold")), soft_wrap=True)


def _wrapped(text: Text, width: int) -> Text:
    from rich.text import Text

    return Text("\n").join(lines(text, width))


# --- text -----------------------------------------------------------------------------------------------------------


def _text(cell: str | Text) -> Text:
    from rich.text import Text

    return Text(literal(cell)) if isinstance(cell, str) else cell


def _size(words: str) -> int:
    from rich.cells import cell_len

    return cell_len(words)


def _longest(text: Text) -> int:
    return max(_size(line) for line in text.plain.split("\n"))


def _longest_piece(words: str) -> int:
    return max((_size(part) for word in words.split() for part in _parts(word, MIN_TEXT_COLUMNS)), default=0)


def _parts(word: str, width: int) -> list[str]:
    return [word] if _size(word.rstrip()) <= width else _ENDS.split(word)


def _pieces(words: str, width: int) -> Iterator[str]:
    """Yield the parts of a text that cannot be broken, each with the blanks after it."""
    for word in re.findall(r"^\s+|\S+\s*", words):
        for part in _parts(word, width):
            rest = part
            while _size(rest.rstrip()) > width:  # a word longer than the line
                most = next(n for n in range(len(rest), 0, -1) if n == 1 or _size(rest[:n]) <= width)
                yield rest[:most]
                rest = rest[most:]
            yield rest
