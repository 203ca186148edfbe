"""The part of the model's state that each rank holds under a layout. Pure.

Called by all code that counts bytes: of a transition (`prices`, `labels`), and of memory during it
(`transition_memory`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from resihp.parallelism.layout import LayerSpan, Replica


class HeldState(msgspec.Struct, frozen=True):
    """Share of the model's state held by index `t` of a group of `tp`: chunks of layers, and units outside the
    layers."""

    chunks: tuple[LayerSpan, ...]
    units: frozenset[str]
    t: int
    tp: int

    @property
    def layers(self) -> frozenset[int]:
        return frozenset(layer for first, last in self.chunks for layer in range(first, last + 1))


def holdings(replicas: Iterable[Replica]) -> Iterator[tuple[int, HeldState]]:
    """Yield each rank of these replicas with the state that it holds."""
    for replica in replicas:
        for s, stage in enumerate(replica.stages):
            units = units_outside(replica, s)
            for t, rank in enumerate(stage.ranks):
                yield rank, HeldState(stage.chunks, units, t, stage.tp)


def units_outside(replica: Replica, stage: int) -> frozenset[str]:
    """Return the units that a stage holds besides its layers."""
    virtual = replica.virtual_stages
    first = {"embedding"} if stage == virtual[0][0] else set()
    return frozenset(first | ({"final", "head"} if stage == virtual[-1][0] else set()))
