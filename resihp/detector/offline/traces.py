"""Parses per-operation traces in the form that ByteDance's StragglerAnalysis publishes, and leaves out invalid rows.

A trace has one row for each operation that a rank carried out in a step: the computation of a micro-batch in a chunk,
each of the two ends of a transfer between stages, collectives, the optimizer. `read` parses a frame; its result is used
by `resihp.detector.offline.what_if` and `resihp.detector.offline.operations`. Judges no rank.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pandas as pd

from resihp.errors import UsageError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

COLUMNS = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "mb_id")
"""Required columns of a trace. `seq_id`, `mc` and `gmc` are used if present."""

FORWARD, BACKWARD = "forward-compute", "backward-compute"
OPTYPES = (
    FORWARD,
    BACKWARD,
    "forward-send",
    "forward-recv",
    "backward-send",
    "backward-recv",
    "params-all-gather",
    "gc",
    "layernorm-grads-all-reduce",
    "embedding-grads-all-reduce",
    "grads-reduce-scatter",
    "separate-grads-all-reduce",
    "optimizer-clip-main-grad",
    "optimizer",
)
"""Known optypes; rows with any other optype are left out."""

OPTYPE_CODES = {optype: code for code, optype in enumerate(OPTYPES)}


class Trace(msgspec.Struct, frozen=True, eq=False):
    """The valid rows of a trace as columns (n,), ordered by step, replica, stage, rank and start. Times in seconds."""

    steps: tuple[int, ...]
    """Labels of the steps, increasing; usually with gaps, because such traces are sampled."""
    dps: tuple[int, ...]
    stages: tuple[int, ...]
    step: Ints
    """Index into `steps`; likewise, `dp` is an index into `dps` and `stage` one into `stages`."""
    dp: Ints
    stage: Ints
    rank: Ints
    kind: Ints
    """Index into OPTYPES."""
    sequence: Ints
    """Number of the operation among those of the same optype, rank and step, from 0."""
    chunk: Ints
    """Model chunk (virtual stage) within the whole model; -1 if the operation belongs to no chunk."""
    micro_batch: Ints
    """Micro-batch of a computation; -1 for all other operations."""
    start: Floats
    seconds: Floats
    known: Flags
    """Whether the duration is valid. If it was not a number or negative, or zero in a computation, `seconds` is the
    median of similar operations."""
    left_out: int = 0
    """Number of rows left out: without a place, a start or a known optype, or repeated."""

    @property
    def size(self) -> int:
        return self.step.size

    @property
    def end(self) -> Floats:
        return self.start + self.seconds

    @property
    def is_compute(self) -> Flags:
        return self.kind <= OPTYPE_CODES[BACKWARD]

    def take(self, rows: npt.NDArray[Any]) -> Trace:
        """Return a trace with only the given rows, and the same labels."""
        columns = {name: getattr(self, name)[rows] for name in _ROWS}
        return msgspec.structs.replace(self, **columns)


_ROWS = ("step", "dp", "stage", "rank", "kind", "sequence", "chunk", "micro_batch", "start", "seconds", "known")


def read(frame: pd.DataFrame) -> Trace:
    """Parse a frame of per-operation rows in any order. Invalid and repeated rows are left out.

    Raises UsageError if a column is missing or contains text instead of numbers, or if no computation has a duration.
    """
    missing = [name for name in COLUMNS if name not in frame.columns]
    if missing:
        raise UsageError(
            f"trace: no column {', '.join(map(repr, missing))}; it has {', '.join(map(str, frame.columns)) or 'none'}, "
            f"and needs {', '.join(COLUMNS)}"
        )
    names = [name for name in (*COLUMNS, "seq_id", "mc", "gmc") if name in frame.columns]
    table = frame[names].drop_duplicates()
    kind = table["optype"].astype(str).map(OPTYPE_CODES)
    columns = {name: _numbers(table, name) for name in names if name != "optype"}
    placed = kind.notna().to_numpy() & np.isfinite(columns["start_ts"])
    for name in ("dp_rank", "stage", "rank", "step"):
        placed &= np.isfinite(columns[name])
    columns["kind"] = np.asarray(kind.to_numpy(np.float64, na_value=-1.0), dtype=np.float64)
    whole = {
        name: np.where(np.isfinite(values), values, -1.0)[placed].astype(np.int64)
        for name, values in columns.items()
        if name not in ("start_ts", "duration")
    }
    if not (whole["kind"] <= OPTYPE_CODES[BACKWARD]).any():
        raise UsageError(f"trace: no row of computation with a place and a start in {len(frame)} rows")
    start, seconds = columns["start_ts"][placed], columns["duration"][placed]
    _fine_enough(frame["start_ts"].dtype, start, seconds[whole["kind"] <= OPTYPE_CODES[BACKWARD]])

    none = np.full(start.size, -1, dtype=np.int64)
    order = np.lexsort(
        (whole.get("seq_id", none), start, whole["rank"], whole["stage"], whole["dp_rank"], whole["step"])
    )
    whole = {name: values[order] for name, values in whole.items()}
    start, seconds = start[order], seconds[order]
    none = none[order]
    steps, step = np.unique(whole["step"], return_inverse=True)
    dps, dp = np.unique(whole["dp_rank"], return_inverse=True)
    stages, stage = np.unique(whole["stage"], return_inverse=True)
    kind_code, rank = whole["kind"], whole["rank"]
    is_compute = kind_code <= OPTYPE_CODES[BACKWARD]

    place = pd.DataFrame({"step": step, "dp": dp, "stage": stage, "rank": rank, "kind": kind_code})
    sequence = _sequence(place, whole.get("seq_id"))
    chunk = _chunks(whole.get("mc", none), whole.get("gmc", none), stage, len(stages), is_compute)
    micro_batch = _micro_batches(place.assign(chunk=chunk), whole["mb_id"], is_compute)
    known_duration = np.isfinite(seconds) & (seconds >= 0.0) & ~(is_compute & (seconds <= 0.0))
    if not (known_duration & is_compute).any():
        raise UsageError("trace: no computation has a duration above zero")
    return Trace(
        steps=tuple(map(int, steps)),
        dps=tuple(map(int, dps)),
        stages=tuple(map(int, stages)),
        step=step.astype(np.int64),
        dp=dp.astype(np.int64),
        stage=stage.astype(np.int64),
        rank=rank,
        kind=kind_code,
        sequence=sequence,
        chunk=chunk,
        micro_batch=micro_batch,
        start=start,
        seconds=_filled(pd.Series(np.where(known_duration, seconds, np.nan)), place.assign(chunk=chunk)),
        known=known_duration,
        left_out=len(frame) - start.size,
    )


def folded(trace: Trace) -> Trace:
    """Return a trace with one rank per stage of a replica: for each operation, the slowest tensor-parallel peer.

    The other peers wait for the slowest one.
    """
    keys = pd.DataFrame({name: getattr(trace, name) for name in _ROWS})
    if keys.groupby(["dp", "stage"])["rank"].nunique().max() == 1:
        return trace
    keys["end"] = trace.end
    same = keys.groupby(["step", "dp", "stage", "kind", "sequence"], sort=False)
    row = same["seconds"].idxmax()
    keys["start"], keys["end"] = same["start"].transform("max"), same["end"].transform("max")
    keys["seconds"] = np.where(trace.is_compute, keys["seconds"], np.maximum(keys["end"] - keys["start"], 0.0))
    keys["rank"] = keys.groupby(["dp", "stage"])["rank"].transform("min")
    keys = keys.loc[row].sort_values(["step", "dp", "stage", "start", "sequence"])
    return msgspec.structs.replace(trace, **{name: keys[name].to_numpy() for name in _ROWS})


def _numbers(table: pd.DataFrame, name: str) -> Floats:
    """Return a column as float64, with NaN for missing values. Raises UsageError for text."""
    try:
        return np.asarray(pd.to_numeric(table[name]).to_numpy(np.float64, na_value=np.nan))
    except (TypeError, ValueError) as error:
        raise UsageError(f"trace: column {name!r} does not hold numbers: {error}") from None


def _fine_enough(dtype: Any, start: Floats, computation: Floats) -> None:
    """Raise UsageError if starts are too coarse, such as seconds since 1970 in float32: operations would seem to begin
    together."""
    longest = computation[np.isfinite(computation)]
    resolution = float(np.spacing(np.float32(np.abs(start).max()))) if dtype == np.float32 else 0.0
    if longest.size and resolution > max(float(np.median(longest)), 0.0) > 0.0:
        raise UsageError(
            f"trace: column 'start_ts' is float32 and resolves only steps of {resolution:.3g} s at these values; "
            "write it as float64, or from the start of each step"
        )


def _sequence(place: pd.DataFrame, given: Ints | None) -> Ints:
    """Return each operation's number among those of the same optype, rank and step.

    The numbers `given` are used if they are unique; otherwise the order of the operations is.
    """
    keys = list(place.columns)
    counted = np.asarray(place.groupby(keys, sort=False).cumcount(), dtype=np.int64)
    if given is None:
        return counted
    unsure = place.assign(given=given).duplicated(keep=False).to_numpy() | (given < 0)
    if not unsure.any():
        return given
    spoilt = place.assign(unsure=unsure).groupby(keys, sort=False)["unsure"].transform("any").to_numpy()
    return np.where(spoilt, counted, given)


def _chunks(mc: Ints, gmc: Ints, stage: Ints, stages: int, is_compute: Flags) -> Ints:
    """Return the chunk of each operation within the model: `gmc` if given, else by Megatron's interleaving of `mc`."""
    interleaved = np.where(is_compute, np.maximum(mc, 0), mc) * stages + stage
    of_model = np.where(gmc >= 0, gmc, interleaved) if (gmc[is_compute] >= 0).all() else interleaved
    return np.where(is_compute | (mc >= 0), of_model, -1)


def _micro_batches(place: pd.DataFrame, given: Ints, is_compute: Flags) -> Ints:
    """Return the micro-batch of each computation, as given or by its order within the chunk; -1 for other
    operations."""
    if (given[is_compute] < 0).any():
        given = np.asarray(place.groupby(list(place.columns), sort=False).cumcount(), dtype=np.int64)
    return np.where(is_compute, given, -1)


def _filled(seconds: pd.Series[float], place: pd.DataFrame) -> Floats:
    """Replace unknown durations by the median of similar operations: of the rank in the step, else of the stage, else
    of all ranks."""
    for keys in (["step", "dp", "stage", "kind", "chunk"], ["stage", "kind", "chunk"], ["kind"]):
        if not seconds.isna().any():
            break
        seconds = seconds.fillna(seconds.groupby([place[key] for key in keys]).transform("median"))
    return np.asarray(seconds.fillna(0.0), dtype=np.float64)
