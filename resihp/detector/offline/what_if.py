"""Estimates the time of a job's steps without its stragglers, after ByteDance's StragglerAnalysis (OSDI '25). Pure.

A step is simulated from the dependencies of its operations. Computation follows the order of each rank; a transfer
between stages begins when both of its ends are ready; a collective begins when the last rank of its group is ready. The
duration of a transfer or collective is only the part after its last participant arrived, because the simulation adds
the waiting. Simulations with other durations then show the cost of the slowness of a rank or a stage.

Why not `resihp.pipeline.compiled`: it simulates the orders of a plan, with F, B and W, a delay between stages, and one
synchronisation at the end. A trace records more: transfers with two ends and an order of their own, and collectives
across replicas (per stage), between stages (embedding) and over all ranks (clipping); and rows may be missing. For a
trace with computation only, both give the same times, as a test asserts.

Judges no rank (`resihp.detector.offline.operations` does); `resihp analyze` prints the result.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from resihp.detector.offline.dependencies import dependencies
from resihp.detector.offline.traces import OPTYPES, Flags, Floats, Ints, Trace, folded

WORST_PERCENT = 3
"""Percentage of ranks, rounded up, that count as the worst ranks of `mw` (the paper's choice)."""

MEAN_OPTYPES = ("forward-compute", "backward-compute", "gc", "optimizer")
"""Optypes with the mean as ideal duration; for all other optypes, which communicate, it is the median."""


class WhatIf(msgspec.Struct, frozen=True, eq=False):
    """The cost of a trace's stragglers. Seconds of a step are means over all steps that could be simulated."""

    original_s: float
    """Seconds of a step with the observed durations."""
    ideal_s: float
    """Seconds of a step with ideal durations: for each optype, the mean of computation and the median of
    communication."""
    dps: tuple[int, ...]
    stages: tuple[int, ...]
    by_dp: Floats
    """(dps,): time of a step with the observed durations of this replica and ideal ones elsewhere, over `ideal_s`."""
    by_stage: Floats
    """(stages,): time of a step with the observed durations of this stage and ideal ones elsewhere, over `ideal_s`."""
    present: Flags
    """(dps, stages): whether the trace has a rank at this replica and stage."""
    without_worst_s: float
    """Seconds of a step with ideal durations of the worst ranks."""
    without_last_stage_s: float
    """Seconds of a step with ideal durations of the last stage."""
    steps: Ints
    """Indices of the trace's steps that could be simulated."""
    explained_s: Floats
    """(steps,): seconds of each step with observed computation and ideal communication."""

    @property
    def slowdown(self) -> float:
        return self.original_s / self.ideal_s

    @property
    def scores(self) -> Floats:
        """(dps, stages): slow-down of each rank, the lower of its replica's and its stage's; NaN without a rank."""
        return np.where(self.present, np.minimum(self.by_dp[:, None], self.by_stage[None, :]), np.nan)

    @property
    def mw(self) -> float | None:
        """Share of the excess over the ideal step that the worst ranks cause; None without an excess."""
        return self._share(self.without_worst_s)

    @property
    def ms(self) -> float | None:
        """Share of the excess over the ideal step that the last stage causes; None without an excess."""
        return self._share(self.without_last_stage_s)

    def _share(self, without_s: float) -> float | None:
        excess_s = self.original_s - self.ideal_s
        return (self.original_s - without_s) / excess_s if abs(excess_s) > 1e-9 * self.original_s else None


def what_if(trace: Trace) -> WhatIf | None:
    """Simulate the steps of a trace with observed and with ideal durations, and return the cost of stragglers.

    Steps without all ranks are left out if other steps have all ranks; steps with a cycle of dependencies are left out,
    too. None if no step is left. There is one simulation for each replica and each stage, linear in the rows.
    """
    trace = _whole_steps(folded(trace))
    graph = Graph.from_trace(trace)
    if graph.circular.any():
        trace = trace.take(~np.isin(trace.step, np.flatnonzero(graph.circular)))
        if not trace.size:
            return None
        graph = Graph.from_trace(trace)
    observed, ideal = graph.seconds, _ideal(trace, graph.seconds)
    original_s, ideal_s = graph.mean_step(observed), graph.mean_step(ideal)
    if not ideal_s > 0.0:
        return None

    def only(rows: Flags) -> float:
        return graph.mean_step(np.where(rows, observed, ideal)) / ideal_s

    by_dp = np.array([only(trace.dp == i) for i in range(len(trace.dps))])
    by_stage = np.array([only(trace.stage == i) for i in range(len(trace.stages))])
    present = np.zeros((by_dp.size, by_stage.size), dtype=np.bool_)
    present[trace.dp, trace.stage] = True
    worst = np.zeros_like(present)
    for dp, stage in _worst(np.where(present, np.minimum(by_dp[:, None], by_stage[None, :]), -np.inf), present, trace):
        worst[dp, stage] = True
    return WhatIf(
        original_s=original_s,
        ideal_s=ideal_s,
        dps=trace.dps,
        stages=trace.stages,
        by_dp=by_dp,
        by_stage=by_stage,
        present=present,
        without_worst_s=graph.mean_step(np.where(worst[trace.dp, trace.stage], ideal, observed)),
        without_last_stage_s=graph.mean_step(np.where(trace.stage == len(trace.stages) - 1, ideal, observed)),
        steps=trace.step[graph.steps],
        explained_s=graph.step_seconds(np.where(trace.is_compute, observed, ideal)),
    )


class _Wave(msgspec.Struct, frozen=True, eq=False):
    """A level of the graph: nodes that depend on nodes of earlier levels only."""

    nodes: slice
    edges: slice
    firsts: npt.NDArray[np.intp]
    """Index of each node's first edge, within `edges`."""


class Graph(msgspec.Struct, frozen=True, eq=False):
    """The dependencies of n operations.

    A node is a set of operations that begin together: a single operation, or the participants of a transfer or
    collective.
    """

    node: Ints
    """(n,): node of each operation, numbered level by level."""
    seconds: Floats
    """(n,): duration of each operation, without waiting."""
    sources: Ints
    """Operation that each edge depends on; edges are ordered by the node that waits."""
    levels: tuple[_Wave, ...]
    roots: int
    """Number of nodes without dependencies; they are the first nodes."""
    step: Ints
    """(n,): index of each operation's step."""
    steps: Ints
    """Index of the first operation of each step with operations."""
    circular: Flags
    """(steps of the trace,): whether the dependencies of a step have a cycle, so that the step is invalid."""

    @classmethod
    def from_trace(cls, trace: Trace) -> Graph:
        """Return the graph of a folded trace."""
        node, seconds, edges = dependencies(trace)
        return _levelled(trace, node, seconds, edges)

    def ends(self, seconds: Floats) -> Floats:
        """Return (n,): the end of each operation, in seconds since its step began.

        `seconds` (n,): duration of each operation, without waiting.
        """
        begin = np.zeros(int(self.node.max(initial=-1)) + 1)
        taken, waited = seconds[self.sources], self.node[self.sources]
        for level in self.levels:
            done = begin[waited[level.edges]]
            done += taken[level.edges]
            np.maximum.reduceat(done, level.firsts, out=begin[level.nodes])
        return np.asarray(begin[self.node] + seconds)

    def step_seconds(self, seconds: Floats) -> Floats:
        """Return the seconds of each step, for durations (n,) of the operations."""
        return np.maximum.reduceat(self.ends(seconds), self.steps)

    def mean_step(self, seconds: Floats) -> float:
        return float(self.step_seconds(seconds).mean())


def _worst(scores: Floats, present: Flags, trace: Trace) -> list[tuple[int, int]]:
    """Return the (replica, stage) of the worst ranks; of ranks with equal scores, those with lower numbers."""
    ranks = np.full(scores.shape, np.iinfo(np.int64).max)
    np.minimum.at(ranks, (trace.dp, trace.stage), trace.rank)
    count = -(-int(present.sum()) * WORST_PERCENT // 100)
    order = np.lexsort((ranks.ravel(), -scores.ravel()))[:count]
    return [(int(i) // scores.shape[1], int(i) % scores.shape[1]) for i in order]


def _whole_steps(trace: Trace) -> Trace:
    """Return a trace of the steps in which every rank has computation; of all steps if there are no such steps."""
    lanes = np.unique(np.stack([trace.step, trace.dp, trace.stage])[:, trace.is_compute], axis=1)
    counts = np.bincount(lanes[0], minlength=len(trace.steps))
    whole = counts == len(set(zip(lanes[1].tolist(), lanes[2].tolist(), strict=True)))
    return trace.take(whole[trace.step]) if whole.any() and not whole.all() else trace


def _ideal(trace: Trace, seconds: Floats) -> Floats:
    """Return (n,): the ideal duration of each operation, the mean or median of its optype."""
    ideal = np.empty_like(seconds)
    for code in np.unique(trace.kind):
        own = trace.kind == code
        ideal[own] = seconds[own].mean() if OPTYPES[code] in MEAN_OPTYPES else np.median(seconds[own])
    return ideal


def _levelled(trace: Trace, node: Ints, seconds: Floats, edges: Ints) -> Graph:
    """Return the graph, with nodes numbered so that each node depends on nodes with smaller numbers only."""
    names, node = np.unique(node, return_inverse=True)
    count = names.size
    source, target = edges[0], node[edges[1]]
    order = np.argsort(node[source], kind="stable")
    leads = target[order]
    firsts = np.searchsorted(node[source][order], np.arange(count + 1))
    waiting = np.bincount(target, minlength=count)
    level = np.full(count, -1, dtype=np.int64)
    ready = np.flatnonzero(waiting == 0)
    depth = 0
    while ready.size:
        level[ready] = depth
        sizes = firsts[ready + 1] - firsts[ready]
        spots = np.repeat(firsts[ready] - np.cumsum(sizes) + sizes, sizes) + np.arange(int(sizes.sum()))
        reached, times = np.unique(leads[spots], return_counts=True)
        waiting[reached] -= times
        ready = reached[waiting[reached] == 0]
        depth += 1
    circular = np.zeros(len(trace.steps), dtype=np.bool_)
    circular[trace.step[level[node] < 0]] = True

    numbered = np.argsort(level, kind="stable")
    number = np.empty(count, dtype=np.int64)
    number[numbered] = np.arange(count)
    node, target = number[node], number[target]
    by_target = np.argsort(target, kind="stable")
    source, target = source[by_target], target[by_target]
    bounds = np.searchsorted(level[numbered], np.arange(depth + 1))
    begins = np.searchsorted(target, np.arange(count + 1))
    levels = tuple(
        _Wave(slice(a, b), slice(int(begins[a]), int(begins[b])), begins[a:b] - begins[a])
        for a, b in zip(bounds[1:-1].tolist(), bounds[2:].tolist(), strict=True)
    )
    return Graph(
        node=node,
        seconds=seconds,
        sources=source,
        levels=levels,
        roots=int(bounds[1]) if depth else 0,
        step=trace.step,
        steps=np.flatnonzero(np.diff(trace.step, prepend=-1)),
        circular=circular,
    )
