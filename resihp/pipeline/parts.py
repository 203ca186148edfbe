"""How far the last backward of a chunk must be for gradients to be there, and where it is cut for that. Pure.

A gradient is there once the last backward that adds to it has passed its layer: the head's first, the embedding's last.
So that sums begin while that backward goes on, it is cut into parts at borders of layers, each an instruction of its
own (`resihp.pipeline.program`): it is the program that begins a sum between two of them, and no hook behind its back.
Only where a sum begins earlier by it; what fits into one bucket is summed at once, after the whole.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from resihp.parallelism.layout import LayerSpan, Layout

PARTS = 8
"""Most parts of a chunk. What cannot overlap is the sums of the last one; each costs a call of autograd."""

ChunkPlace = tuple[int, int, int]
"""(replica, stage, chunk)."""


def depths(layout: Layout, replica: int, stage: int, units: Sequence[str]) -> dict[int, int]:
    """Down to which layer the last backward of each chunk of a stage must be for gradients of `units`; chunks ascend.

    The final norm and the head come with the last layer's part, the embedding with the first layer's.
    """
    order = layout.replicas[replica].virtual_stages
    ends = {"embedding": order[0], "final": order[-1], "head": order[-1]}
    chunks = layout.replicas[replica].stages[stage].chunks
    found: dict[int, int] = {}
    for unit in units:
        if unit in ends:
            s, c = ends[unit]
            held = {c: chunks[c][unit != "embedding"]} if s == stage else {}
        else:
            layer = int(unit.removeprefix("layer."))
            held = {c: layer for c, (first, last) in enumerate(chunks) if first <= layer <= last}
        for c, depth in held.items():
            found[c] = min(depth, found.get(c, depth))
    return dict(sorted(found.items()))


def cuts(
    layout: Layout, sums: Iterable[tuple[Sequence[int], tuple[str, ...]]]
) -> dict[ChunkPlace, tuple[LayerSpan, ...]]:
    """Layers of the parts of each chunk that is cut, from its last to its first; `sums`: owners and units of each.

    A border stands where a sum can begin, with at least an eighth of the chunk (`PARTS`) between two. The embedding's
    sum begins after the first layer, wherever else its parameter is used.
    """
    places = {rank: (place.replica, place.stage) for rank, place in layout.places()}
    held = {
        (places[owner], units)
        for owners, units in sums
        if len(owners) > 1 and "embedding" not in units
        for owner in owners
    }
    borders: dict[ChunkPlace, set[int]] = defaultdict(set)
    for (d, s), units in held:
        for c, depth in depths(layout, d, s, units).items():
            borders[d, s, c].add(depth)
    found: dict[ChunkPlace, tuple[LayerSpan, ...]] = {}
    for (d, s, c), wanted in borders.items():
        first, last = layout.replicas[d].stages[s].chunks[c]
        least = math.ceil((last - first + 1) / PARTS)
        spans: list[LayerSpan] = []
        stop = last
        for border in sorted(wanted, reverse=True):
            if border > first and stop - border + 1 >= least:
                spans.append((border, stop))
                stop = border - 1
        if spans:
            found[d, s, c] = (*spans, (first, stop))
    return found
