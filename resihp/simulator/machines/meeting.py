"""One collective of simulated workers: the ranks that have come to it, and whether it is over. Data only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Meeting:
    """One collective: the ranks that have come, and whether it is over."""

    come: dict[int, Callable[[], None]] = field(default_factory=dict)
    over: bool = False
    over_at: float = 0.0
    pending: set[int] = field(default_factory=set)
    broken: bool = False
