"""Tables on a terminal: what happens where there is no room for one. The only place that decides it.

First what consists of words goes on in further lines, at blanks, and in long names after `-`, `_`, `/` and the like.
Then columns are left out, which is said, but never those that tell rows apart. Then every row is shown as lines of its
own, a heading and a cell in each. Nothing is ever cut. A pipe has room for everything (`answers.console`).

Cells are shown literally, never read as markup. Called by `wrapper.commands`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wrapper.output.answers import message
from wrapper.output.render import literal

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

LEAST = 12
"""A column of words is not made narrower, and no word that is as short is broken."""
EDGES = 2
"""Blanks left and right of a table."""
GAPS = (3, 2)
"""Between columns, where there is room, and where there is none."""
NOTHING = ("", "-")
_ENDS = re.compile(r"(?<=[-_/=+@|])(?=\S)|(?<=[.,:;])(?=[^\W\d])")
"""Where a name may go on in the next line; a number stays whole."""


@dataclass(frozen=True)
class Column:
    """Of a table: its heading, and what may become of it where there is no room."""

    heading: str
    right: bool = False
    wraps: bool = False
    """Words, which may go on in a further line; numbers and times may not."""
    kept: bool = False
    """It tells rows apart: never left out. The first column is kept anyway."""


def show(screen: Console, columns: Sequence[Column], rows: Sequence[Sequence[str | Text]]) -> None:
    """Print a table; what is left out of it is said on stderr."""
    cells = [[_text(cell) for cell in row] for row in rows]
    chosen = list(range(len(columns)))
    while (fit := _fit(screen.width, columns, cells, chosen)) is None:
        goes = _to_go(columns, cells, chosen)
        if goes is None or 2 * (len(columns) - len(chosen) + 1) > len(columns):
            _show_records(screen, columns, cells)
            return
        chosen.remove(goes)
    _print(screen, columns, cells, chosen, *fit)
    if left := [columns[n].heading for n in range(len(columns)) if n not in chosen]:
        message(f"left out for want of room: {', '.join(left)}; a wider terminal, a pipe and --json have all")


def lines(text: Text, width: int) -> list[Text]:
    """`text` in lines of so many columns, broken at blanks, longer words where `_ENDS` has it, or else anywhere."""
    found: list[Text] = []
    for line in text.split("\n", allow_blank=True):
        ends, at, used = [], 0, 0
        for piece in _pieces(line.plain, width):
            if used and used + _size(piece.rstrip()) > width:
                ends.append(at)
                used = 0
            at, used = at + len(piece), used + _size(piece)
        found += line.divide(ends)
    for each in found:
        each.rstrip()
    return found


# --- room -----------------------------------------------------------------------------------------------------------


def _fit(
    width: int, columns: Sequence[Column], cells: Sequence[Sequence[Text]], chosen: Sequence[int]
) -> tuple[int, list[int]] | None:
    """The gap, and the widths of the columns that are chosen; None where there is no room for them."""
    natural = [max(_longest(text) for text in (_text(columns[n].heading), *(row[n] for row in cells))) for n in chosen]
    for gap in GAPS:
        if sum(natural) + gap * (len(chosen) - 1) + EDGES <= width:
            return gap, natural
    room = width - GAPS[-1] * (len(chosen) - 1) - EDGES
    least = [min(_least(columns[n], [row[n] for row in cells]), most) for n, most in zip(chosen, natural, strict=True)]
    if sum(least) > room:
        return None
    level = 0  # the longest are made shorter first
    while sum(_levelled(natural, least, level + 1)) <= room:
        level += 1
    widths = _levelled(natural, least, level)
    for n, most in enumerate(natural):
        if widths[n] < most and sum(widths) < room:
            widths[n] += 1
    return GAPS[-1], widths


def _levelled(natural: Sequence[int], least: Sequence[int], level: int) -> list[int]:
    return [max(low, min(most, level)) for low, most in zip(least, natural, strict=True)]


def _least(column: Column, cells: Sequence[Text]) -> int:
    """Columns that it takes at least."""
    heading = _longest_piece(column.heading)
    if not column.wraps:
        return max([heading, *(_longest(text) for text in cells)])
    longest = max((_longest(text) for text in cells), default=0)
    return max([heading, min(longest, LEAST), *(_longest_piece(text.plain) for text in cells)])


def _to_go(columns: Sequence[Column], cells: Sequence[Sequence[Text]], chosen: Sequence[int]) -> int | None:
    """The column to do without: one with nothing in it, or else one without words; the last of these."""
    may = [n for n in chosen if n and not columns[n].kept]
    empty = [n for n in may if all(row[n].plain in NOTHING for row in cells)]
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

    shown = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        header_style="bold",
        padding=(0, 1, 0, gap - 2),
        show_header=any(columns[n].heading for n in chosen),
    )
    for n, width in zip(chosen, widths, strict=True):
        heading = _wrapped(_text(columns[n].heading), width)
        shown.add_column(heading, justify="right" if columns[n].right else "left", width=width, no_wrap=True)
    for row in cells:
        shown.add_row(*(_wrapped(row[n], width) for n, width in zip(chosen, widths, strict=True)))
    if screen.is_terminal:
        screen.print(shown, crop=False)
        return
    with screen.capture() as printed:
        screen.print(shown, crop=False)
    for line in printed.get().splitlines():  # the blanks that fill a column are nobody's in a file
        screen.print(line.rstrip(), soft_wrap=True)


def _show_records(screen: Console, columns: Sequence[Column], cells: Sequence[Sequence[Text]]) -> None:
    """Each row as lines, of what there is something to say of; an empty line between rows."""
    from rich.text import Text

    label = min(max(_size(column.heading) for column in columns), screen.width // 2) + 2
    for number, row in enumerate(cells):
        if number:
            screen.print()
        for column, cell in zip(columns, row, strict=True):
            if cell.plain in NOTHING:
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
    return max((_size(part) for word in words.split() for part in _parts(word, LEAST)), default=0)


def _parts(word: str, width: int) -> list[str]:
    return [word] if _size(word.rstrip()) <= width else _ENDS.split(word)


def _pieces(words: str, width: int) -> Iterator[str]:
    """What stays together, with the blanks behind it."""
    for word in re.findall(r"^\s+|\S+\s*", words):
        for part in _parts(word, width):
            rest = part
            while _size(rest.rstrip()) > width:  # a word that is longer than the terminal is wide
                most = next(n for n in range(len(rest), 0, -1) if n == 1 or _size(rest[:n]) <= width)
                yield rest[:most]
                rest = rest[most:]
            yield rest
