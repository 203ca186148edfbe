"""Measures the slowness of each rank of a per-operation trace in each step, without the effect of the workload. Pure.

A micro-batch passes all stages of its replica, so that a long micro-batch takes long on all of them. Each duration is
therefore compared with those of the same micro-batch on the other stages, as far as these correlate, and the result
with the same result of the other replicas. The rest is the rank's own slowness. If all stages of a replica are slow, or
if the job has no pipeline, the quickest micro-batch of each step is compared instead, because even among long sequences
some are short.

Never decides whether a rank is slow; its caller `resihp.detector.offline.operations` does.
"""

from __future__ import annotations

import msgspec
import numpy as np
import pandas as pd

from resihp.detector.offline.traces import Floats, Ints, Trace

MIN_VARIATION = 0.02
"""Smallest standard deviation of a step's micro-batches, log units, at which the relation between the durations on
different stages can be estimated."""


class Series(msgspec.Struct, frozen=True, eq=False):
    """The slowness of each rank, or of each replica, in each step."""

    values: Floats
    """(steps, ranks): log of the slowness; 0 is healthy, NaN is unknown."""
    dp: Ints
    """(ranks,): index into the trace's `dps`."""
    stage: Ints
    """(ranks,): index into the trace's `stages`; -1 for all stages of a replica."""
    rank: Ints
    """(ranks,): number of the rank; -1 for several ranks."""
    peers: Ints
    """(ranks,): number of the group of peers, whose series should be alike."""


def by_micro_batch(trace: Trace) -> Series:
    """Return the slowness of each rank, compared with the same micro-batches on other stages, and with other
    replicas."""
    rows = computation(trace)
    rows["level"] = np.log(rows["seconds"])
    rows["level"] -= rows.groupby(["kind", "chunk"])["level"].transform("median")
    rows["work"] = rows.groupby(["step", "dp", "micro_batch", "kind"], sort=False).ngroup()
    table = _table(rows, "work", "stage", "level", len(trace.stages))
    others = _of_others(table)
    rows["others"] = others[rows["work"], rows["stage"]]
    rows["own"] = rows["level"] - rows["others"]
    rows["own"] -= _common_slope(rows) * rows["others"]
    series = _per_unit(rows, "own", len(trace.steps))
    return _against_replicas(series)


def by_quickest(trace: Trace) -> Series:
    """Return the slowness of each rank by its quickest micro-batch of each step.

    It is relative to the ranks of the same stage on other replicas. With a single replica, it is relative to the rank's
    own past.
    """
    rows = computation(trace)
    rows["level"] = np.log(rows["seconds"])
    rows["level"] -= rows.groupby(["kind", "chunk"])["level"].transform("median")
    keys = ["step", "dp", "stage", "rank", "kind", "chunk"]
    quickest = rows.groupby(keys, sort=False)["level"].min().reset_index()
    series = _per_unit(quickest, "level", len(trace.steps))
    return _against_replicas(series) if len(trace.dps) > 1 else series


def by_replica(trace: Trace) -> Series:
    """Return the slowness that all stages of a replica share: the minimum of `by_quickest` over its stages."""
    series = by_quickest(trace)
    count = len(trace.dps)
    least = np.full((len(trace.steps), count), np.inf)
    for dp in range(count):
        own = series.values[:, series.dp == dp]
        if own.shape[1]:
            least[:, dp] = np.where(np.isfinite(own), own, np.inf).min(axis=1)
    none = np.full(count, -1, dtype=np.int64)
    least[~np.isfinite(least)] = np.nan
    return Series(values=least, dp=np.arange(count), stage=none, rank=none, peers=np.zeros(count, dtype=np.int64))


def computation(trace: Trace) -> pd.DataFrame:
    """Return the rows of computation with a known duration. If a stage has only one rank per step, its rank numbers are
    unified."""
    rows = np.flatnonzero(trace.is_compute & trace.known)
    names = ("step", "dp", "stage", "rank", "kind", "chunk", "micro_batch", "seconds")
    frame = pd.DataFrame({name: getattr(trace, name)[rows] for name in names})
    if frame.groupby(["step", "dp", "stage"])["rank"].nunique().max() == 1:
        frame["rank"] = frame.groupby(["dp", "stage"])["rank"].transform("min")
    return frame


def _table(rows: pd.DataFrame, row: str, column: str, values: str, width: int) -> Floats:
    """Return (rows, width): medians of the column `values`, by the whole numbers in the columns `row` and `column`."""
    table = np.full((int(rows[row].max()) + 1, width), np.nan)
    medians = rows.groupby([row, column], sort=False)[values].median().reset_index()
    table[medians[row], medians[column]] = medians[values]
    return table


def _of_others(table: Floats) -> Floats:
    """Return, for each entry, the median of the other entries in its row, NaN without any; in wide rows, of all
    entries."""
    width = table.shape[1]
    if width > 32:
        return np.broadcast_to(row_medians(table)[:, None], table.shape)
    return np.stack([row_medians(np.delete(table, i, axis=1)) for i in range(width)], axis=1)


def row_medians(table: Floats) -> Floats:
    """Return the median of each row, without NaN; NaN for a row without values."""
    if not table.shape[1]:
        return np.full(len(table), np.nan)
    ordered = np.sort(table, axis=1)
    counts = np.isfinite(ordered).sum(axis=1)
    rows = np.arange(len(table))
    return np.asarray((ordered[rows, np.maximum(counts - 1, 0) // 2] + ordered[rows, counts // 2]) / 2)


def _common_slope(rows: pd.DataFrame) -> Floats:
    """Return (n,): the factor by which durations of a chunk and kind grow with the micro-batch more than on other
    stages.

    Attention grows with the squares of lengths and the head does not, so that a stage without the head varies more. The
    slopes are fitted to differences within one rank and step, because a slow-down of the rank does not affect these.
    """
    within = ["step", "dp", "stage", "rank", "kind", "chunk"]
    means = rows.groupby(within, sort=False)[["own", "others"]].transform("mean")
    own, others = rows["own"] - means["own"], rows["others"] - means["others"]
    sums = pd.DataFrame({"product": own * others, "square": others**2, "kind": rows["kind"], "chunk": rows["chunk"]})
    of_kind = sums.groupby(["kind", "chunk"])[["product", "square"]].transform("mean")
    varied = of_kind["square"] > MIN_VARIATION**2
    return np.where(varied, of_kind["product"] / of_kind["square"].where(varied, 1.0), 0.0)


def _per_unit(rows: pd.DataFrame, values: str, steps: int) -> Series:
    """Return the medians of the column `values` by step and rank, as a Series without peers."""
    units = rows[["dp", "stage", "rank"]].drop_duplicates().sort_values(["stage", "dp", "rank"]).reset_index(drop=True)
    units["unit"] = np.arange(len(units))
    placed = rows[["step", "dp", "stage", "rank", values]].merge(units, on=["dp", "stage", "rank"])
    dp, stage, rank = (units[name].to_numpy(np.int64) for name in ("dp", "stage", "rank"))
    table = np.full((steps, len(units)), np.nan)
    medians = _table(placed, "step", "unit", values, len(units))
    table[: len(medians)] = medians
    return Series(values=table, dp=dp, stage=stage, rank=rank, peers=np.arange(len(units)))


def _against_replicas(series: Series) -> Series:
    """Return the series minus the median of the other replicas on the same stage, which is not the rank's own part."""
    values = series.values.copy()
    for stage in np.unique(series.stage):
        own = np.flatnonzero(series.stage == stage)
        dps, column = np.unique(series.dp[own], return_inverse=True)
        of_dp = np.stack([row_medians(series.values[:, own[column == i]]) for i in range(dps.size)], axis=1)
        values[:, own] -= _of_others(of_dp)[:, column]
    return msgspec.structs.replace(series, values=values, peers=series.stage)
