"""Parses the options of a planning question: `--layout tp=4,dp=2,pp=4`, `--slow 12:0.5`. Pure.

It refuses a text that it cannot parse, and gives an example. It never compares one option with another
(`question.check`). Called by `resihp plan`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from resihp.errors import LayoutError, UsageError
from resihp.faults import ends
from resihp.scheduler.what_if import catalogue
from resihp.scheduler.what_if.question import Link


def degrees(text: str) -> tuple[int, int, int]:
    """Return (tp, dp, pp) from a text such as `tp=4,dp=2,pp=4`, in any order. Raises LayoutError."""
    example = "for example tp=4,dp=2,pp=4"
    degree_of: dict[str, int] = {}
    for part in text.split(","):
        key, separator, value = (word.strip() for word in part.partition("="))
        if not separator or not re.fullmatch(r"\d{1,9}", value):
            raise LayoutError(f"layout {text}: {part.strip() or 'nothing'} is not a degree; {example}")
        if key not in ("tp", "dp", "pp"):
            raise LayoutError(f"layout {text}: unknown degree {key}; {catalogue.nearest(key, ('tp', 'dp', 'pp'))}")
        if key in degree_of:
            raise LayoutError(f"layout {text}: {key} is given twice; {example}")
        degree_of[key] = int(value)
    for key in ("tp", "dp", "pp"):
        if key not in degree_of:
            raise LayoutError(f"layout {text}: {key} is missing; {example}")
        if degree_of[key] < 1:
            raise LayoutError(f"layout {text}: {key} must be at least 1; {example}")
    return degree_of["tp"], degree_of["dp"], degree_of["pp"]


def ranks(texts: Iterable[str]) -> tuple[int, ...]:
    """Return the ranks of texts such as `5,17` or `8-11`, in ascending order. Raises UsageError."""
    rank_set: set[int] = set()
    for part in _parts(texts):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise UsageError(f"--fail {part}: not a rank; for example --fail 5,17 or --fail 8-11")
        if int(match[2] or match[1]) - int(match[1]) > 1_000_000:
            raise UsageError(f"--fail {part}: more ranks than any job has")
        rank_set |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(rank_set))


def names(texts: Iterable[str]) -> tuple[str, ...]:
    """Return the nodes of texts such as `n3` or `n3,n4`."""
    return tuple(dict.fromkeys(_parts(texts)))


def speeds(texts: Iterable[str]) -> dict[int, float]:
    """Return the speed of each rank from texts such as `12:0.5` or `12:0.5,13:0.7`. Raises UsageError."""
    speed_of_rank: dict[int, float] = {}
    for part in _parts(texts):
        rank, _, speed = part.partition(":")
        if not re.fullmatch(r"\d{1,9}", rank):
            raise UsageError(f"--slow {part}: not a rank with its speed; for example --slow 12:0.5")
        if int(rank) in speed_of_rank:
            raise UsageError(f"--slow {part}: rank {rank} is given twice")
        speed_of_rank[int(rank)] = _speed(
            f"--slow {part}", speed, f"a device that does nothing has failed: --fail {rank}"
        )
    return speed_of_rank


def links(texts: Iterable[str]) -> dict[Link, float]:
    """Return the speed of each link from texts such as `n1-n2:0.3`; node names are ascending. Raises UsageError."""
    speed_of_link: dict[Link, float] = {}
    for part in _parts(texts):
        pair, _, speed = part.rpartition(":")
        link = ends(pair)
        if link is None:
            raise UsageError(f"--slow-link {part}: not two nodes with a speed; for example --slow-link n1-n2:0.3")
        if link in speed_of_link:
            raise UsageError(f"--slow-link {part}: this link is given twice")
        speed_of_link[link] = _speed(f"--slow-link {part}", speed, "planning does not support links that are down")
    return speed_of_link


def _parts(texts: Iterable[str]) -> list[str]:
    return [part.strip() for text in texts for part in text.split(",")]


def _speed(subject: str, text: str, at_zero: str) -> float:
    try:
        speed = float(text)
    except ValueError:
        raise UsageError(f"{subject}: {text or 'nothing'} is not a speed; 1 is healthy, 0.5 half as fast") from None
    if not 0 < speed <= 1:
        hint = at_zero if speed == 0 else "it is more than 0 and at most 1: 1 is healthy, 0.5 half as fast"
        raise UsageError(f"{subject}: speed {text}; {hint}")
    return speed
