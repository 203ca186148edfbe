"""Cuts in the last backward pass of a chunk, so that sums of gradients begin while the pass is still running. Pure.

A gradient is complete once the last backward pass that adds to it has passed its layer: the head's gradient is complete
first, the embedding's last. The pass is therefore cut at borders between layers, and each part is a separate
instruction (`resihp.pipeline.program`). The program begins sums between two parts; no autograd hook begins a sum
outside the program's order. A chunk is cut only where a sum can begin earlier because of the cut. Gradients that fit
into one bucket are summed at once, after the whole pass.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from resihp.parallelism.layout import LayerSpan, Layout

MAX_PARTS = 8
"""Maximum number of parts of a chunk. Each part costs a call of autograd; only the sums of the last part cannot overlap
with computation."""

ChunkPlace = tuple[int, int, int]
"""(replica, stage, chunk)."""


def depths(layout: Layout, replica: int, stage: int, units: Sequence[str]) -> dict[int, int]:
    """Return, for each chunk of a stage, the layer that its last backward pass must reach before the gradients of
    `units` are complete.

    Chunks without a layer of `units` are left out; the result is in ascending order of chunks. The final norm and the
    head belong to the last layer's part, the embedding to the first layer's part.
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
    """Return the layers of each part of each chunk that is cut, from the chunk's last layers to its first.

    `sums` lists (owners, units) of each sum. The cuts are at the layers where a sum can begin, at least an eighth of
    the chunk apart (`MAX_PARTS`). The embedding's sum begins after the first layer, even if another stage uses the same
    parameter.
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
