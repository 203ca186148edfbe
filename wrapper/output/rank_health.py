"""The health of each rank of a job: active, standby, starting, slow, suspected or dead. The only place that decides it.
Pure.

`follow` takes entries of the journal (the live view, metrics); `wrapper.commands.status` fills it from a ledger's rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from resihp.record import journal

if TYPE_CHECKING:
    from resihp.parallelism.layout import Layout
    from wrapper.output.render import Health


@dataclass
class RankHealth:
    """Ranks by the state of their workers; workers in `left` ended by themselves."""

    running: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)
    dead: set[int] = field(default_factory=set)
    suspected: set[int] = field(default_factory=set)
    slow: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Slow ranks, by their failure."""

    def follow(self, entry: journal.AnyEntry) -> None:
        """Update the state with one entry of the journal. A verdict ends the suspicion that led to it."""
        match entry:
            case journal.WorkerStarted(rank=rank):
                self._discard(rank)
                self.running.add(rank)
            case journal.WorkerEnded(rank=rank):
                self._discard(rank)
                (self.left if entry.exit == 0 else self.dead).add(rank)
            case journal.Suspected(rank=int() as rank):
                if entry.cleared:
                    self.suspected.discard(rank)
                else:
                    self.suspected.add(rank)
            case journal.FailureFound():
                self.suspected -= set(entry.ranks)
                if entry.kind == "fail-slow" and entry.component in ("device", "link"):
                    self.slow[entry.failure] = entry.ranks
            case journal.FailureEnded():
                self.slow.pop(entry.failure, None)

    def by_rank(self, layout: Layout | None) -> dict[int, Health]:
        """Return the health of each rank, that of a healthy one by its place in the layout; a rank that left before it
        had a place is omitted."""
        standby = set(layout.standby) if layout else set()
        active = set(layout.active) if layout else set()
        slow = {rank for ranks in self.slow.values() for rank in ranks}

        def health(rank: int) -> Health:
            if rank in self.dead:
                return "dead"
            if rank in self.suspected:
                return "suspected"
            if rank in slow:
                return "slow"
            return "standby" if rank in standby else "active" if rank in active else "starting"

        states = {rank: health(rank) for rank in sorted(self.running | self.left | self.dead)}
        return {rank: state for rank, state in states.items() if state != "starting" or rank in self.running}

    def _discard(self, rank: int) -> None:
        for ranks in (self.running, self.left, self.dead, self.suspected):
            ranks.discard(rank)

    def __copy__(self) -> RankHealth:
        return RankHealth({*self.running}, {*self.left}, {*self.dead}, {*self.suspected}, {**self.slow})
