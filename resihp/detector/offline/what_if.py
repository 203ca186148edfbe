"""Estimates a job's steps without its stragglers, after ByteDance's StragglerAnalysis (OSDI '25). Pure.

A step is simulated from the dependencies of its operations: computation in the order of each rank; a transfer between
stages once both of its ends are there; collectives once the last of their group is. The own duration of a transfer or
collective is the part after the last participant came: waiting is simulated. Replacing durations then shows the cost of
a rank's or a stage's slowness to the job.

Why this is not `resihp.pipeline.compiled`: that plays what a plan *will* do, F, B and W with a delay between stages,
before one synchronisation. A trace holds what *was* done: transfers as operations of their own with two ends and an
order, collectives across replicas (per stage), between stages (embedding) and over all ranks (clipping), per step, and
rows may be missing. For a trace with computation alone both give the same times, which a test asserts.

Judges no rank (`resihp.detector.offline.operations` does); `resihp analyze` prints the result.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from resihp.detector.offline.dependencies import dependencies
from resihp.detector.offline.traces import OPTYPES, Flags, Floats, Ints, Trace, folded

WORST_PERCENT = 3
"""Percentage of ranks whose slowness `mw` takes away (the paper's choice), rounded up."""

MEAN_OPTYPES = ("forward-compute", "backward-compute", "gc", "optimizer")
"""Optypes whose ideal duration is the mean; for all others, which communicate, it is the median."""


class WhatIf(msgspec.Struct, frozen=True, eq=False):
    """The cost of a trace's stragglers. Seconds are means over the steps that could be simulated."""

    original_s: float
    """The step as simulated from the observed durations."""
    ideal_s: float
    """The same with the mean of its kind for each computation, the median for each communication."""
    dps: tuple[int, ...]
    stages: tuple[int, ...]
    by_dp: Floats
    """(dps,): step with only this replica's durations as observed, relative to the ideal one."""
    by_stage: Floats
    """(stages,): the same for a stage."""
    present: Flags
    """(dps, stages): whether the trace has such a rank."""
    without_worst_s: float
    """The original step with the worst ranks made ideal."""
    without_last_stage_s: float
    steps: Ints
    """Indices of the trace's steps that could be simulated."""
    explained_s: Floats
    """(steps,): each step as simulated with its computation as observed, but ideal communication."""

    @property
    def slowdown(self) -> float:
        return self.original_s / self.ideal_s

    @property
    def scores(self) -> Floats:
        """(dps, stages): a rank is as slow as both its replica and its stage are. NaN if there is none."""
        return np.where(self.present, np.minimum(self.by_dp[:, None], self.by_stage[None, :]), np.nan)

    @property
    def mw(self) -> float | None:
        """Share of the slow-down that the worst ranks account for; None if nothing is slow."""
        return self._share(self.without_worst_s)

    @property
    def ms(self) -> float | None:
        """Share of the slow-down that the last stage accounts for; None if nothing is slow."""
        return self._share(self.without_last_stage_s)

    def _share(self, without_s: float) -> float | None:
        excess_s = self.original_s - self.ideal_s
        return (self.original_s - without_s) / excess_s if abs(excess_s) > 1e-9 * self.original_s else None


def what_if(trace: Trace) -> WhatIf | None:
    """Simulate the steps of a trace as they were and as they could have been.

    Steps that lack whole ranks are left out if others do not, and so are steps whose operations wait for each other in
    a circle. None if no step is left. One simulation for each replica and stage, each linear in the rows.
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
    """Nodes that wait for earlier levels only."""

    nodes: slice
    edges: slice
    firsts: npt.NDArray[np.intp]
    """For each node its first edge, within `edges`."""


class Graph(msgspec.Struct, frozen=True, eq=False):
    """Dependencies of n operations. A node begins as a unit: one operation, or the participants of one transfer."""

    node: Ints
    """(n,): node of each operation, numbered level after level."""
    seconds: Floats
    """(n,): duration of each operation, without its waiting."""
    sources: Ints
    """Operation at whose end an edge begins, ordered by the node to which it leads."""
    levels: tuple[_Wave, ...]
    roots: int
    """Number of nodes that wait for nothing; they come first."""
    step: Ints
    steps: Ints
    """First operation of each step that is present."""
    circular: Flags
    """(steps of the trace,): whether operations of a step wait for each other in a circle, which makes it invalid."""

    @classmethod
    def from_trace(cls, trace: Trace) -> Graph:
        """Return the graph of a folded trace."""
        node, seconds, edges = dependencies(trace)
        return _levelled(trace, node, seconds, edges)

    def ends(self, seconds: Floats) -> Floats:
        """Return the end of each operation, from the beginning of its step, for durations (n,) without waiting."""
        begin = np.zeros(int(self.node.max(initial=-1)) + 1)
        taken, waited = seconds[self.sources], self.node[self.sources]
        for level in self.levels:
            done = begin[waited[level.edges]]
            done += taken[level.edges]
            np.maximum.reduceat(done, level.firsts, out=begin[level.nodes])
        return np.asarray(begin[self.node] + seconds)

    def step_seconds(self, seconds: Floats) -> Floats:
        """Return the duration of each step."""
        return np.maximum.reduceat(self.ends(seconds), self.steps)

    def mean_step(self, seconds: Floats) -> float:
        return float(self.step_seconds(seconds).mean())


def _worst(scores: Floats, present: Flags, trace: Trace) -> list[tuple[int, int]]:
    """Return the worst ranks; among equals those with lower numbers first."""
    ranks = np.full(scores.shape, np.iinfo(np.int64).max)
    np.minimum.at(ranks, (trace.dp, trace.stage), trace.rank)
    count = -(-int(present.sum()) * WORST_PERCENT // 100)
    order = np.lexsort((ranks.ravel(), -scores.ravel()))[:count]
    return [(int(i) // scores.shape[1], int(i) % scores.shape[1]) for i in order]


def _whole_steps(trace: Trace) -> Trace:
    """Return the steps in which every rank has computation, if there are any; else all."""
    lanes = np.unique(np.stack([trace.step, trace.dp, trace.stage])[:, trace.is_compute], axis=1)
    counts = np.bincount(lanes[0], minlength=len(trace.steps))
    whole = counts == len(set(zip(lanes[1].tolist(), lanes[2].tolist(), strict=True)))
    return trace.take(whole[trace.step]) if whole.any() and not whole.all() else trace


def _ideal(trace: Trace, seconds: Floats) -> Floats:
    """Return each operation's duration if all of its kind were alike."""
    ideal = np.empty_like(seconds)
    for code in np.unique(trace.kind):
        own = trace.kind == code
        ideal[own] = seconds[own].mean() if OPTYPES[code] in MEAN_OPTYPES else np.median(seconds[own])
    return ideal


def _levelled(trace: Trace, node: Ints, seconds: Floats, edges: Ints) -> Graph:
    """Number the nodes so that each waits for smaller numbers only."""
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
