"""The part of the model's state that each rank holds under a layout. Pure.

Called by all code that counts bytes: for a transition (`prices`, `labels`), and for memory during it
(`transition_memory`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from resihp.parallelism.layout import LayerSpan, Replica


class HeldState(msgspec.Struct, frozen=True):
    """State held by rank `t` of a group of `tp`: its share of the layers of `chunks`, and of the `units` outside the
    layers."""

    chunks: tuple[LayerSpan, ...]
    units: frozenset[str]
    t: int
    tp: int

    @property
    def layers(self) -> frozenset[int]:
        return frozenset(layer for first, last in self.chunks for layer in range(first, last + 1))


def holdings(replicas: Iterable[Replica]) -> Iterator[tuple[int, HeldState]]:
    """Yield (rank, state that it holds) for each rank of these replicas."""
    for replica in replicas:
        for s, stage in enumerate(replica.stages):
            units = units_outside(replica, s)
            for t, rank in enumerate(stage.ranks):
                yield rank, HeldState(stage.chunks, units, t, stage.tp)


def units_outside(replica: Replica, stage: int) -> frozenset[str]:
    """Return the units outside the layers that a stage holds: "embedding", "final", "head"."""
    virtual = replica.virtual_stages
    first = {"embedding"} if stage == virtual[0][0] else set()
    return frozenset(first | ({"final", "head"} if stage == virtual[-1][0] else set()))
