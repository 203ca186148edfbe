"""Checks `[progress] pattern`, the user's regular expression for the lines of a script's iterations.

Python cannot interrupt the search of a regular expression, and an agent that searches for minutes looks dead. So a
pattern is tried at the start on lines that are made from it, of growing length: one whose time grows faster than the
agents can afford is refused. They limit the length of lines, and give up a pattern that is slow nevertheless
(`resihp.wrapper.agent.logs.script_output`).
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

MAX_SEARCH_S = 0.05
"""Longest processor time for one line."""
LENGTH_RATIO = 1.3
"""Each line is so many times as long as the one before: even if the time doubles with each character, the first search
that takes too long ends within a second."""
GROUP_NAMES = frozenset(("iteration", "goal", "loss", "seconds", "tokens_per_second"))
_REPEATED = re.compile(r"(\\.|\[[^\]]*\]|\)|[^*+{}\\])(?:[*+]|\{\d*,\d*\})")
"""A part of a pattern that may be repeated without a close limit."""
_SYNTAX = re.compile(r"\(\?P<\w+>|\(\?[:=!]|[()^$|?*+]|\{\d*,?\d*\}")


def line_pattern(text: str) -> str:
    """Return the pattern unchanged. Raises ValueError if it is invalid, lacks the group `iteration`, has an unknown
    group, or is too slow."""
    if not text:
        return text
    from resihp.detector.console.printed_progress import MAX_LINE_FOR_PATTERN  # slow to import, and seldom needed

    try:
        pattern = re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"not a regular expression of Python: {error}") from error
    names = pattern.groupindex.keys()
    if "iteration" not in names or not names <= GROUP_NAMES:
        raise ValueError(
            r"needs the group `iteration`, and knows goal, loss, seconds and tokens_per_second: "
            r"'batch (?P<iteration>\d+) of (?P<goal>\d+) ce=(?P<loss>\S+)'"
        )
    for beginning, repeated in _trials(text):
        length = 8.0
        while length <= MAX_LINE_FOR_PATTERN:
            began = time.thread_time()
            pattern.search(f"{beginning}{repeated * (int(length) // len(repeated))}\0")
            if time.thread_time() - began > MAX_SEARCH_S:
                raise ValueError(
                    f"takes too long on a line of {int(length)} characters: avoid a repeat inside a repeat, as in (a+)+"
                )
            length *= LENGTH_RATIO
    return text


def _trials(text: str) -> Iterator[tuple[str, str]]:
    """Yield beginnings of lines, and texts to repeat behind them, on which a search may take long: for each repeated
    part of the pattern, a text that matches the pattern up to there."""
    yield "", _example(text) or "x"
    for part in _REPEATED.finditer(text):
        yield _example(text[: part.start()]), _example(part[1]) or "1"


def _example(text: str) -> str:
    """Return a text that the part of a pattern may match, without its repeats and alternatives."""

    def example_of(match: re.Match[str]) -> str:
        symbol = match[0]
        if symbol.startswith("["):
            return "1" if re.search(r"\\d|0-9", symbol) else symbol[-2]
        return {r"\d": "1", r"\w": "a", r"\s": " ", r"\S": "x", ".": "x"}.get(symbol, symbol[-1])

    plain = _SYNTAX.sub("", re.sub(r"\\[()^$|?*+{}]", "x", text))
    return re.sub(r"\[[^\]]*\]|\\.|\.", example_of, plain)
