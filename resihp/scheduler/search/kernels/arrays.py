"""Arrays of the search: a situation, tables of known facts, and layouts, with names for their columns.

Describes what a number in an array means; ranks, nodes, speeds, groups and pipelines are numbers here. Never computes.
Called by the modules beside this one, and by `resihp.scheduler.search`, which fills and reads the arrays.
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
"""Columns of a pipeline: number of stages; its row in the tables; its micro-batches."""
SIZE, SLOWEST, HOME, MAX_BESIDE = range(4)
"""Columns of a group: ranks, number of the lowest speed, number of the node or -1 for several, and then the most layers
beside its ranks' state, as a stage that is neither first nor last, last, first, or both."""
MAX_COUNT, RULE = 1, 2
"""Columns of a row, besides `STAGES`: micro-batches that memory allows; the best of `ORDER_RULES`, from 1 on, 0 if not
yet known, -1 if none is worth it."""
EXPOSED, RAMP, PACE = range(3)
"""Columns of a row: seconds of the gradient sums after the last backward, over healthy links; and `RAMP` plus `PACE`
for each micro-batch, a lower bound of the time under any orders."""
F, B, W, LATE, LAYER_SUM_S = range(5)
"""Columns of a stage, in seconds: F, B (including W if not separate) and W of a micro-batch; the transfer to the next
stage, or back; the gradient sums of a layer."""
MAX_ALIVE, LAYERS, BUCKET = range(3)
"""Columns of a stage: micro-batches alive at once that memory allows, layers, least layers of a part of the sums."""
CURRENT, CANDIDATE, BEST, QUERIED, FORMER = range(5)
"""Layouts: the present one of the search, the one being tried, the best one, one that the caller asked about, and the
first of the former best ones; after them the starting layouts of cycles to come."""
TRIAL, CYCLE, CYCLES, SHAKES_LEFT, FORMER_COUNT, FORMER_KEPT, NEXT_START, STARTS_LEFT = range(8)
"""Counters of a search: trials of this cycle, and its length; cycles; remaining trials of random changes; number of
former best layouts, and of those kept; index of the next starting layout, and how many are left."""


class Costs(NamedTuple):
    """Costs of the model under the schedule."""

    sums: Floats
    """(3, layers + 1): seconds of F, B, W of all layers before each layer."""
    ends: Floats
    """(2, 3): seconds of the embedding, and of the head."""
    split: bool
    """Whether W is separate from B."""
    parts: int
    """Most parts in which a stage's gradients are summed."""


class PipeKind(NamedTuple):
    """Facts that decide a pipeline's time, by stage."""

    speeds: Floats
    late: Floats
    """Seconds to the next stage, and back; 0 for the last stage."""
    layer_sum_s: Floats
    """Seconds in which a layer's gradients are summed."""
    bucket: Ints
    """Least layers of a part of the sums."""


class Job(NamedTuple):
    """A situation. Ranks, nodes and speeds are numbers; a higher number of a speed is a lower speed."""

    costs: Costs
    speed: Ints
    """Number of the speed, by rank."""
    speeds: Floats
    node: Ints
    """Number of the node, by rank."""
    links: Floats
    """Speeds of links between nodes."""
    transfers: Ints
    """Number of the transfer time, by pair of nodes."""
    late: Floats
    """Seconds of a transfer, by the number in `transfers`."""
    degrees: Ints
    """Allowed degrees of groups, ascending."""
    layer_sum_s: Floats
    """Seconds in which a layer's gradients are summed, by degree."""
    bucket: Ints
    """Least layers of a part of the sums, by degree."""
    state: Ints
    """Number of the state's size per parameter, by number of replicas."""
    needs: Ints
    """Bytes by number in `state`, degree and kind of stage (1 last, 2 first, 3 both): besides the layers, of a layer's
    state, and of a layer's activations of a micro-batch."""
    left_bytes: Ints
    """Bytes left beside its present state, by rank."""
    seat: Ints
    """Present place, by rank: index in its group and the size of that group, 0 if it holds nothing; first and last
    layer; whether it holds the embedding and the head."""
    carried: Ints
    """Bytes of new state by degree and kind of stage, as in `needs`: without layers, and for each layer."""
    kept_factor: float
    """Factor on the bytes of new state that the rank already holds."""
    room: int
    """Bytes of a device."""
    micro_batches: int
    step_s: float
    linked: bool
    """Whether gradient sums use slow links."""
    beside: bool
    """Whether there must be room beside the present state."""
    own: bool
    """Whether pipelines may have orders of their own."""


class Tables(NamedTuple):
    """Known facts about groups, about pipelines to be cut, and about cut pipelines (rows)."""

    used: Ints
    """Number of entries of each table."""
    group_index: Ints
    ranks: Ints
    """(groups, ranks), in ascending order; -1 after the last."""
    group: Ints
    cut_index: Ints
    cut_keys: Ints
    cut_row: Ints
    """Row of a cut pipeline, -1 if it does not fit."""
    row_index: Ints
    row_keys: Ints
    row: Ints
    row_s: Floats
    stage: Ints
    """(rows, columns, stages), like `stage_s`."""
    stage_s: Floats
    times: Floats
    """(rows, micro-batches): played seconds, 0 if not played."""


class Layouts(NamedTuple):
    """Several layouts side by side; the first index is the layout's."""

    pipes: Ints
    """Number of pipelines."""
    pipe: Ints
    """(layouts, pipes, columns)."""
    groups: Ints
    """(layouts, pipes, stages): numbers of groups."""
    score: Floats
    """(layouts, 2): seconds of an iteration, and the seconds if micro-batches were divisible."""
