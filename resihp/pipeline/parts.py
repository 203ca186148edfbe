"""Cuts in the last backward of a chunk, so that sums of gradients begin while it is still running. Pure.

A gradient is complete once the last backward that adds to it has passed its layer: the head's first, the embedding's
last. So that sums begin while that backward goes on, it is cut into parts at borders of layers, each an instruction of
its own (`resihp.pipeline.program`): the program begins a sum between two parts, and no hook does so outside its order.
A chunk is cut only where a sum begins earlier because of it; gradients that fit into one bucket are summed at once,
after the whole backward.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from resihp.parallelism.layout import LayerSpan, Layout

MAX_PARTS = 8
"""Most parts of a chunk. Only the sums of the last part cannot overlap; each part costs a call of autograd."""

ChunkPlace = tuple[int, int, int]
"""(replica, stage, chunk)."""


def depths(layout: Layout, replica: int, stage: int, units: Sequence[str]) -> dict[int, int]:
    """Return the layer that the last backward of each chunk of a stage must reach for the gradients of `units`.

    The result is by chunk, in ascending order. The final norm and the head come with the last layer's part, the
    embedding with the first layer's.
    """
    order = layout.replicas[replica].virtual_stages
    ends = {"embedding": order[0], "final": order[-1], "head": order[-1]}
    chunks = layout.replicas[replica].stages[stage].chunks
    depth_of_chunk: dict[int, int] = {}
    for unit in units:
        if unit in ends:
            s, c = ends[unit]
            layer_of_chunk = {c: chunks[c][unit != "embedding"]} if s == stage else {}
        else:
            layer = int(unit.removeprefix("layer."))
            layer_of_chunk = {c: layer for c, (first, last) in enumerate(chunks) if first <= layer <= last}
        for c, depth in layer_of_chunk.items():
            depth_of_chunk[c] = min(depth, depth_of_chunk.get(c, depth))
    return dict(sorted(depth_of_chunk.items()))


def cuts(
    layout: Layout, sums: Iterable[tuple[Sequence[int], tuple[str, ...]]]
) -> dict[ChunkPlace, tuple[LayerSpan, ...]]:
    """Return the layers of the parts of each chunk that is cut, from its last layers to its first.

    `sums`: owners and units of each sum. A border stands where a sum can begin, with at least an eighth of the chunk
    (`MAX_PARTS`) between two. The embedding's sum begins after the first layer, wherever else its parameter is used.
    """
    places = {rank: (place.replica, place.stage) for rank, place in layout.places()}
    units_of_place = {
        (places[owner], units)
        for owners, units in sums
        if len(owners) > 1 and "embedding" not in units
        for owner in owners
    }
    borders: dict[ChunkPlace, set[int]] = defaultdict(set)
    for (d, s), units in units_of_place:
        for c, depth in depths(layout, d, s, units).items():
            borders[d, s, c].add(depth)
    parts_of_chunk: dict[ChunkPlace, tuple[LayerSpan, ...]] = {}
    for (d, s, c), depths_of_chunk in borders.items():
        first, last = layout.replicas[d].stages[s].chunks[c]
        min_layers = math.ceil((last - first + 1) / MAX_PARTS)
        spans: list[LayerSpan] = []
        stop = last
        for border in sorted(depths_of_chunk, reverse=True):
            if border > first and stop - border + 1 >= min_layers:
                spans.append((border, stop))
                stop = border - 1
        if spans:
            parts_of_chunk[d, s, c] = (*spans, (first, stop))
    return parts_of_chunk
