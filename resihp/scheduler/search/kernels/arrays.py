"""Arrays of the search: a situation, tables of known facts, and layouts, with names for their columns.

The module describes the meaning of each number in an array; ranks, nodes, speeds, groups and pipelines are numbers. It
never computes. Called by the other modules of this folder, and by `resihp.scheduler.search`, which fills and reads the
arrays.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
TIME_TOLERANCE = 1e-9
"""Relative difference below which two times count as equal."""
STAGES, ROW, SHARE = range(3)
"""Columns of a pipeline: number of stages, row in the tables, number of micro-batches."""
SIZE, SLOWEST, HOME, MAX_BESIDE = range(4)
"""Columns of a group: number of ranks; number of the lowest speed; number of the node, -1 if there are several. From
`MAX_BESIDE` on, the most layers that fit beside the present state of its ranks: as a middle stage, as the last, as the
first, and as the only stage."""
MAX_COUNT, RULE = 1, 2
"""Columns of a row, besides `STAGES`. `MAX_COUNT`: number of micro-batches that memory allows. `RULE`: number of the
best of `ORDER_RULES`, counted from 1; 0 if unknown, -1 if none is worth it."""
EXPOSED, RAMP, PACE = range(3)
"""Columns of a row, in seconds. `EXPOSED`: gradient sums after the last backward pass, over healthy links. `RAMP` plus
`PACE` for each micro-batch: a lower bound of the time under any orders."""
F, B, W, LATE, LAYER_SUM_S = range(5)
"""Columns of a stage, in seconds: F, B (including W if it is not separate) and W of one micro-batch; the transfer to
the next stage, or back; the gradient sums of one layer."""
MAX_ALIVE, LAYERS, BUCKET = range(3)
"""Columns of a stage: number of micro-batches alive at once that memory allows, number of layers, minimum number of
layers in a part of the gradient sums."""
CURRENT, CANDIDATE, BEST, QUERIED, FORMER = range(5)
"""Indices of layouts: the search's present layout, the one being tried, the best one, one that the caller asked about,
and the first of the former best ones. The starting layouts of later cycles follow the former best ones."""
TRIAL, CYCLE, CYCLES, SHAKES_LEFT, FORMER_COUNT, FORMER_KEPT, NEXT_START, STARTS_LEFT = range(8)
"""Counters of a search: trials of the present cycle so far, and in total; number of cycles; remaining trials of random
changes; number of former best layouts, and how many of them are kept; index of the next starting layout, and how many
are left."""


class Costs(NamedTuple):
    """Costs of the model's layers under the schedule."""

    sums: Floats
    """(3, layers + 1): seconds of F, B and W, summed over all layers before each layer."""
    ends: Floats
    """(2, 3): seconds of F, B and W of the embedding, and of the head."""
    split: bool
    """Whether W is separate from B."""
    parts: int
    """Maximum number of parts in which a stage's gradients are summed."""


class PipeKind(NamedTuple):
    """Facts that determine a pipeline's time, by stage."""

    speeds: Floats
    late: Floats
    """Seconds of the transfer to the next stage, or back; 0 for the last stage."""
    layer_sum_s: Floats
    """Seconds to sum the gradients of one layer."""
    bucket: Ints
    """Minimum number of layers in a part of the gradient sums."""


class Job(NamedTuple):
    """A situation as arrays. Ranks, nodes and speeds are numbers; higher numbers of speeds are lower speeds."""

    costs: Costs
    speed: Ints
    """Number of the speed of each rank."""
    speeds: Floats
    node: Ints
    """Number of the node of each rank."""
    links: Floats
    """Speed of the link between each two nodes."""
    transfers: Ints
    """Number of the transfer time between each two nodes."""
    late: Floats
    """Seconds of a transfer, by number of the transfer time."""
    degrees: Ints
    """Allowed numbers of ranks of a group, ascending."""
    layer_sum_s: Floats
    """Seconds to sum the gradients of one layer, by degree."""
    bucket: Ints
    """Minimum number of layers in a part of the gradient sums, by degree."""
    state: Ints
    """Index into `needs` for the size of state per parameter, by number of replicas."""
    needs: Ints
    """Bytes by index of `state`, degree and kind of stage (0 middle, 1 last, 2 first, 3 both): everything outside the
    layers, a layer's state, and a layer's activations of one micro-batch."""
    left_bytes: Ints
    """Bytes that each rank has left beside its present state."""
    seat: Ints
    """Present place of each rank: index in its group; size of that group, 0 if the rank holds no state; first and last
    layer; whether it holds the embedding, and the head."""
    carried: Ints
    """Bytes of new state by degree and kind of stage, as in `needs`: outside the layers, and for each layer."""
    kept_factor: float
    """Factor on the bytes of new state that a rank already holds."""
    room: int
    """Bytes of a device for state and activations."""
    micro_batches: int
    step_s: float
    linked: bool
    """Whether gradient sums use slow links."""
    beside: bool
    """Whether ranks must have room beside their present state."""
    own: bool
    """Whether pipelines may have orders of their own."""


class Tables(NamedTuple):
    """Known facts about groups, about pipelines before the choice of their layers (cuts), and about pipelines with
    layers (rows)."""

    used: Ints
    """Number of entries of the groups, the cuts and the rows."""
    group_index: Ints
    ranks: Ints
    """(groups, ranks): ranks of each group, ascending; -1 after the last."""
    group: Ints
    cut_index: Ints
    cut_keys: Ints
    cut_row: Ints
    """Row of the pipeline with its layers; -1 if it does not fit into memory."""
    row_index: Ints
    row_keys: Ints
    row: Ints
    row_s: Floats
    stage: Ints
    """(rows, columns, stages), as `stage_s`."""
    stage_s: Floats
    times: Floats
    """(rows, micro-batches): seconds of a pipeline as played; 0 if not yet played."""


class Layouts(NamedTuple):
    """Several layouts; the first index of each array is that of the layout."""

    pipes: Ints
    """Number of pipelines of each layout."""
    pipe: Ints
    """(layouts, pipes, columns)."""
    groups: Ints
    """(layouts, pipes, stages): numbers of the groups."""
    score: Floats
    """(layouts, 2): seconds of an iteration, and the seconds that it would take if micro-batches were divisible."""
