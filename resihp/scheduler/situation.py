"""What the planner is told, and what it answers."""

from __future__ import annotations

import msgspec

from resihp.layout import Layout
from resihp.model import ModelSpec
from resihp.plan import Plan


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """Who is there, who held what, and what the job was started with."""

    epoch: int
    """Of the plan to be made."""
    base: Layout
    """The layout in effect, the dead included."""
    available: tuple[int, ...]
    """Live ranks that can work, with those that have none now and those that just came."""
    nodes: dict[int, str]
    """Node of each rank: of the available ones, and of the dead where known."""
    model: ModelSpec
    micro_batches: int
    """Of the global batch."""
    tokens: int = 0
    """Of the longest micro-batch; 0 where it is not known."""
    tp: int
    pp: int
    chunks: int = 1
    schedule: str = "1f1b"
    sequence_parallel: bool = False
    speeds: dict[int, float] = {}
    """Normalised throughput where it was measured; 1, a healthy device's, where not."""
    memory_bytes: int | None = None
    """Of each device; None where it is not known, and then not checked."""
    stale: tuple[int, ...] = ()
    """Available ranks that have lost the state that `base` says they hold."""

    def speed(self, ranks: tuple[int, ...]) -> float:
        """Of a tensor-parallel group, in healthy devices: k * min p."""
        return len(ranks) * min((self.speeds.get(rank, 1.0) for rank in ranks), default=0.0)

    @property
    def lost(self) -> frozenset[int]:
        """Ranks of `base` that are gone."""
        return frozenset(self.base.ranks).difference(self.available)


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The plan, and why this one."""

    plan: Plan
    seconds: float
    """Predicted for an iteration: 1 is the forward of one layer and one micro-batch on one healthy device."""
    reason: str
    alternatives: tuple[tuple[str, float], ...] = ()
    """What else was possible, with its prediction."""
