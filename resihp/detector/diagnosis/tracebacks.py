"""Finds the exceptions that end a traceback, in any of the forms in which it may be printed.

Reads Python's own tracebacks, also behind a prefix (`[rank3]: `, a time) and interleaved with lines of other ranks,
those of exception groups, loguru's (`> File`), rich's boxes, and those that a logger wrote into one line of JSON.
Does not interpret an exception. Called by `clues`. Takes time linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

TRACEBACK_TITLE = "Traceback (most recent call last)"
STRUCTURED_MARK = '"exc_type"'
"""Key with which structlog begins an exception that it writes as a JSON object."""
MAX_LINES = 400
MAX_BOX_LINES = 4000
"""With the values of all variables, rich prints many lines per frame."""
MAX_JSON_CHARACTERS = 16_000
_LINE_CHARACTERS = 600
_PREFIX_CHARACTERS = 120
_CHAINED = ("The above exception was the direct cause", "During handling of the above exception")
_CHAIN_CHARACTERS = 400

_FRAME_BEGINS = ('  File "', '> File "')
_FRAME = re.compile(r'[ >] File "([^"\n]{1,400})", line')
_EXCEPTION = re.compile(r"[^\W\d][\w.<>]{0,199}(?:\([\w.]{1,64}\))?(?:: |:?$)")
_STAMP = re.compile(r"[\[(]?20\d\d-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?\s?(?:Z|[+-]\d\d:?\d\d)?[\])]?")
_OF_A_RAY_TASK = re.compile(r"[\w.]{0,80}RayTaskError\b")
_GROUP = "Exception Group "
_SUB_EXCEPTION = re.compile(r"\+(?:-\+)?-{8,40} (?:\d{1,4}|\.\.\.) -{8,40}$")
_GROUPS_ERROR = re.compile(r"\(\d{1,4} sub-exceptions?\)\s{0,200}$")
_BOX_FRAME = re.compile(r"[│|] (\S[^\n]{0,300}?):\d{1,7} in ")
_ESCAPED_FRAME = re.compile(r'  File \\?"([^"\\\n]{1,400})')
_STRUCTURED = re.compile(r'"exc_type": ?"([\w.<>]{1,200})", ?"exc_value": ?"((?:[^"\\]|\\.){0,300})')


class TracebackEnd(NamedTuple):
    """An exception that ends a traceback. `error`: start of its text, behind a prefix such as `[rank5]: `; `words`: its
    text if that is not one line of the log; `file`: file of its innermost frame."""

    error: int
    chained: bool
    file: str
    words: str = ""


def exceptions(
    text: str, titles: Iterable[tuple[int, int]], structured: Iterable[tuple[int, int]]
) -> dict[int, TracebackEnd]:
    """Return the exceptions by the start of their lines.

    `titles`, `structured`: places of `TRACEBACK_TITLE` and `STRUCTURED_MARK` in the text, each with the start of its
    line.
    """
    ends: dict[int, TracebackEnd] = {}
    for start, at in titles:
        before = text[start:at]
        if _is_escaped(text, at):
            ends.update(_in_json(text, start, at))
        elif "╭" in before or "+--" in before:
            ends.update(_after_box(text, start, at))
        elif len(before) <= _PREFIX_CHARACTERS:
            ends.update(_plain(text, start, at))
    for start, _ in structured:
        match = _STRUCTURED.search(text, start, start + 8 * MAX_JSON_CHARACTERS)
        if match is not None and start not in ends:
            ends[start] = TracebackEnd(start, False, "", f"{match[1]}: {_unescaped(match[2])}")
    return _without_groups(text, ends)


def _without_groups(text: str, ends: dict[int, TracebackEnd]) -> dict[int, TracebackEnd]:
    """Drop exception groups: a group says less than the exceptions in it, which follow."""
    starts = sorted(ends)
    for start in starts[:-1]:
        end = ends[start]
        if _GROUPS_ERROR.search(end.words or text[end.error : _line_end(text, end.error)]):
            del ends[start]
    return ends


# --- Python's own -----------------------------------------------------------------------------------------------------


def _plain(text: str, start: int, at: int) -> dict[int, TracebackEnd]:
    prefix = text[start:at]
    chained = _is_chained(text, start)
    is_group = prefix.endswith(_GROUP)
    if is_group:
        prefix = prefix.removesuffix(_GROUP)
        prefix = f"{prefix[:-2]}| " if prefix.endswith("+ ") else prefix
    second = text.find("\n", at) + 1
    if prefix.strip() and text.startswith(_FRAME_BEGINS, second):
        prefix = ""  # a logger wrote one prefix for the whole traceback
    innermost = ""
    for line, bare in _lines_with(text, second, prefix):
        head = text[bare : bare + 8]
        if head[:1] not in (" ", "\t", "\n", "") and not head.startswith("> File"):
            if not _EXCEPTION.match(text, bare, _line_end(text, bare)):
                return {}
            ends = {line: TracebackEnd(bare, chained, innermost)}
            if _OF_A_RAY_TASK.match(text, bare, _line_end(text, bare)):
                ends |= _in_ray_task(text, line, prefix)
            inner = _sub_exceptions(text, line, prefix, innermost) if is_group else None
            return ends if inner is None else inner
        if head.startswith(_FRAME_BEGINS):
            frame = _FRAME.match(text, bare, _line_end(text, bare))
            innermost = frame[1] if frame is not None else innermost
    return {}


def _in_ray_task(text: str, outer: int, prefix: str) -> dict[int, TracebackEnd]:
    """Return the exception that ended a Ray task; it stands below the frames of the task without a title of its own."""
    innermost = ""
    for line, bare in _lines_with(text, text.find("\n", outer) + 1, prefix):
        if text[bare : bare + 1] not in (" ", "\t", "\n", ""):
            is_one = innermost and _EXCEPTION.match(text, bare, _line_end(text, bare))
            return {line: TracebackEnd(bare, True, innermost)} if is_one else {}
        frame = _FRAME.match(text, bare, _line_end(text, bare))
        innermost = frame[1] if frame is not None else innermost
    return {}


def _lines_with(text: str, line: int, prefix: str) -> Iterator[tuple[int, int]]:
    """Yield the starts of the lines that have this prefix, and where the rest of each begins.

    A line without the prefix is another process's if the prefix names a process; else the traceback was cut off.
    """
    stamp = _STAMP.match(prefix)
    rest = prefix[stamp.end() :] if stamp is not None else prefix
    is_shared = bool(prefix.strip(" |+-"))
    for _ in range(MAX_LINES):
        if not line or line >= len(text):
            return
        bare = _bare(text, line, prefix, rest if stamp is not None else None)
        if bare is not None:
            yield line, bare
        elif not is_shared:
            return
        line = text.find("\n", line) + 1


def _bare(text: str, line: int, prefix: str, behind_stamp: str | None) -> int | None:
    if behind_stamp is None:
        return line + len(prefix) if text.startswith(prefix, line) else None
    stamp = _STAMP.match(text, line)
    if stamp is None or not text.startswith(behind_stamp, stamp.end()):
        return None
    return stamp.end() + len(behind_stamp)


def _sub_exceptions(text: str, group: int, prefix: str, file: str) -> dict[int, TracebackEnd] | None:
    """Return the exceptions of a group that have no traceback of their own; the others are found by theirs. None if the
    group shows no exceptions: then its own line is the only one."""
    margin = prefix.removesuffix("| ")
    ends: dict[int, TracebackEnd] = {}
    has_members = False
    line = text.find("\n", group) + 1
    for _ in range(MAX_LINES):
        if not line or line >= len(text) or not text.startswith(margin, line):
            break
        rest = text[line + len(margin) : _line_end(text, line)]
        if not rest.startswith(("+", " ", "|")):
            break
        line = text.find("\n", line) + 1
        if _SUB_EXCEPTION.search(rest) and line:
            has_members = True
            bare = line + len(margin)
            below = text[bare : _line_end(text, bare)]
            bare += len(below) - len(below.lstrip(" |"))
            if TRACEBACK_TITLE not in text[bare : _line_end(text, bare)] and _EXCEPTION.match(
                text, bare, _line_end(text, bare)
            ):
                ends[line] = TracebackEnd(bare, False, file)
    return ends if has_members else None


# --- rich's boxes -----------------------------------------------------------------------------------------------------


def _after_box(text: str, start: int, at: int) -> dict[int, TracebackEnd]:
    """Return the exception below a box; rich may have wrapped its text at the box's width."""
    corner = text.find("╭", start, at)
    corner = corner if corner >= 0 else text.find("+--", start, at)
    prefix = text[start:corner]
    width = _line_end(text, start) - corner
    innermost, inside = "", True
    line = text.find("\n", at) + 1
    for _ in range(MAX_BOX_LINES):
        if not line or line >= len(text) or not text.startswith(prefix.rstrip(), line):
            return {}
        bare = min(line + len(prefix), _line_end(text, line))
        head = text[bare : bare + 3]
        if head.startswith(("│", "|")):
            frame = _BOX_FRAME.match(text, bare, _line_end(text, bare))
            innermost = frame[1] if frame is not None else innermost
        elif head.startswith(("╭", "╰")) or head == "+--":
            if TRACEBACK_TITLE in text[bare : _line_end(text, bare)]:
                return {}  # this traceback was cut off, and another one begins
            inside = head.startswith("╭") or (head == "+--" and not inside)
        elif head.strip() and not inside:
            if not _EXCEPTION.match(text, bare, _line_end(text, bare)):
                return {}
            words = _wrapped(text, bare, prefix, width)
            return {line: TracebackEnd(bare, _is_chained(text, start), innermost, words)}
        line = text.find("\n", line) + 1
    return {}


def _wrapped(text: str, bare: int, prefix: str, width: int) -> str:
    """Return an error's text over several lines: each but the last is about as wide as the box."""
    if "│" in prefix or "|" in prefix:  # inside another box, whose border ends each line
        return text[bare : _line_end(text, bare)].rstrip(" │|")
    words = text[bare : _line_end(text, bare)].rstrip()
    last = words
    line = text.find("\n", bare) + 1
    for _ in range(6):
        following = text[line : _line_end(text, line)] if line else ""
        following = following[len(prefix) :].rstrip() if following.startswith(prefix) else ""
        next_word = following.partition(" ")[0]
        if not next_word or len(last) > width or len(last) + 1 + len(next_word) <= width:
            break
        words += f" {following}"
        last = following
        line = text.find("\n", line) + 1
    return words


# --- one line of JSON -------------------------------------------------------------------------------------------------


def _is_escaped(text: str, at: int) -> bool:
    return text.startswith(("\\n", ":\\n"), at + len(TRACEBACK_TITLE))


def _in_json(text: str, start: int, at: int) -> dict[int, TracebackEnd]:
    """Return the last of the exceptions that are written with `\\n` as line end."""
    end = text.find("\n", at, at + MAX_JSON_CHARACTERS)
    escaped = text[at : end if end >= 0 else at + MAX_JSON_CHARACTERS]
    words, file, frames, chained = "", "", False, False
    for piece in escaped.split("\\n"):
        if piece.startswith(TRACEBACK_TITLE):
            frames, chained = True, bool(words)
        elif frames and piece.startswith(_FRAME_BEGINS[0]):
            frame = _ESCAPED_FRAME.match(piece)
            file = frame[1] if frame is not None else file
        elif frames and piece[:1] not in (" ", "\t", ""):
            error = re.split(r'(?<!\\)"', piece, maxsplit=1)[0]
            if _EXCEPTION.match(error):
                words = _unescaped(error)
            frames = False
    return {start: TracebackEnd(start, chained, file, words)} if words else {}


def _unescaped(text: str) -> str:
    return text.replace('\\"', '"').replace("\\\\", "\\")


# --- lines ------------------------------------------------------------------------------------------------------------


def _is_chained(text: str, start: int) -> bool:
    before = text[max(0, start - _CHAIN_CHARACTERS) : start]
    return any(words in before for words in _CHAINED)


def _line_end(text: str, start: int) -> int:
    """Return the end of the line that contains `start`, or of the part of it that is examined."""
    end = text.find("\n", start, start + _LINE_CHARACTERS)
    return end if end >= 0 else min(start + _LINE_CHARACTERS, len(text))
