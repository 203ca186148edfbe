"""Finds the exceptions at the ends of tracebacks, in any of the forms in which programs print tracebacks.

Reads Python's own form, also with a prefix (`[rank3]: `, a time) or interleaved with lines of other ranks, exception
groups, loguru's form (`> File`), rich's boxes, and tracebacks in one line of JSON. Never interprets an exception.
Called by `clues`. The time is linear in the text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

TRACEBACK_TITLE = "Traceback (most recent call last)"
STRUCTURED_MARK = '"exc_type"'
"""First key of the JSON object that structlog writes for an exception."""
MAX_LINES = 400
"""Highest number of lines of a traceback that are read."""
MAX_BOX_LINES = 4000
"""Highest number of lines of a box that are read. With the values of variables, rich prints many lines per frame."""
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
    """An exception at the end of a traceback.

    `error`: position of the exception's text, after a prefix such as `[rank5]: `. `chained`: whether another exception
    precedes it in a chain. `file`: file of the innermost frame, empty if unknown. `words`: the exception's text if it
    is not one line of the log, else empty."""

    error: int
    chained: bool
    file: str
    words: str = ""


def exceptions(
    text: str, titles: Iterable[tuple[int, int]], structured: Iterable[tuple[int, int]]
) -> dict[int, TracebackEnd]:
    """Return all exceptions at the ends of tracebacks, by the start of their lines.

    `titles`, `structured`: (start of line, place) of each `TRACEBACK_TITLE` and each `STRUCTURED_MARK` in the text.
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
    """Drop exception groups, because the exceptions of a group follow it and are more specific."""
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
    """Return the exception that ended a Ray task. It is printed below the frames of the task, without a title."""
    innermost = ""
    for line, bare in _lines_with(text, text.find("\n", outer) + 1, prefix):
        if text[bare : bare + 1] not in (" ", "\t", "\n", ""):
            is_one = innermost and _EXCEPTION.match(text, bare, _line_end(text, bare))
            return {line: TracebackEnd(bare, True, innermost)} if is_one else {}
        frame = _FRAME.match(text, bare, _line_end(text, bare))
        innermost = frame[1] if frame is not None else innermost
    return {}


def _lines_with(text: str, line: int, prefix: str) -> Iterator[tuple[int, int]]:
    """Yield (start of line, start of the text after the prefix) for the lines with `prefix`, from `line` on.

    If the prefix names a process, lines without it are another process's and are skipped. Otherwise a line without it
    ends the traceback.
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
    """Return the exceptions of a group that have no traceback of their own; the others are found by their tracebacks.

    None if the group lists no exceptions, so that only its own line remains.
    """
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
    """Return the exception that rich prints below a box; its text may be wrapped at the width of the box."""
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
    """Return the text of an error that is wrapped over several lines, each but the last about as wide as the box."""
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
    """Return the last exception in one line of JSON, in which `\\n` stands for a line end."""
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
    """Return the end of the line that contains `start`, but at most `start` + `_LINE_CHARACTERS`."""
    end = text.find("\n", start, start + _LINE_CHARACTERS)
    return end if end >= 0 else min(start + _LINE_CHARACTERS, len(text))
