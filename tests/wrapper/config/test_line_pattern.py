"""The user's regular expression for the lines of iterations: what is refused before a job begins."""

from __future__ import annotations

import time

import pytest

from resihp.wrapper.config.line_pattern import line_pattern


@pytest.mark.parametrize(
    "pattern",
    [
        "",
        r"batch (?P<iteration>[\d,]+) of (?P<goal>\d+): ce=(?P<loss>\S+)",
        r"iter (?P<iteration>\d+).*loss[:=]\s*(?P<loss>[-+.\deE]+).*time (?P<seconds>[\d.]+)",
        r"^\[(?:train|valid)\]\s+(?P<iteration>\d+)/(?P<goal>\d+)\s",
        r"(?i)STEP\s*(?P<iteration>\d{1,9})\b",
    ],
)
def test_a_usual_pattern_is_taken_at_once(pattern: str) -> None:
    began = time.thread_time()
    assert line_pattern(pattern) == pattern
    assert time.thread_time() - began < 2.0


@pytest.mark.parametrize(
    ("pattern", "error"),
    [
        (r"batch (?P<iteration>\d+", "not a regular expression of Python: missing \\)"),
        (r"batch (\d+)", "needs the group `iteration`"),
        (r"(?P<iteration>\d+) (?P<los>\S+)", "needs the group `iteration`, and knows goal, loss"),
        (r"(?P<iteration>(\d+)+)!", "takes too long on a line of [0-9]{2} characters"),
        (r"iteration: (?P<iteration>(?:\d|\d\d)+) of", "takes too long"),
        (r"step (?P<iteration>\d+) ((\w+ )*\w+)*;", "takes too long"),
        (r"(?P<iteration>\d+).*a.*a.*a.*a.*a;", "takes too long"),
    ],
)
def test_what_would_stop_an_agent_is_refused_within_seconds(pattern: str, error: str) -> None:
    began = time.thread_time()
    with pytest.raises(ValueError, match=error):
        line_pattern(pattern)
    assert time.thread_time() - began < 5.0
