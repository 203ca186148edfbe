"""Recognises names of fields and columns, as programs log them: iteration numbers, and times with their units. Pure.

    train/Step Time (ms)   sec/batch   it_per_sec   iteration_time_us   train_step_timing in s   global_step

`usual_name` converts each to one form (`step_time_ms`, `sec_per_batch`); everything else here takes names in that form.
A duration is parsed in parts, so that each unit combines with each word for an iteration. Called by `fields` and by the
modules that recognise a file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

ITERATION_NAMES = (
    *("iteration", "global_step", "global_steps", "trainer/global_step", "train/global_step", "iteration_number"),
    *("step", "train_step", "global_step/max_steps", "iter", "current_steps", "num_updates", "training_step"),
    *("step_num", "_step", "iterations", "iters", "it", "steps", "batch", "batch_idx", "batch_number"),
)
"""Names for iteration numbers; those that count on through epochs come first."""
EPOCH_NAMES = ("epoch",)
MOMENT_NAMES = (
    *("timestamp", "_timestamp", "finished_at", "created_at", "@timestamp", "datetime", "date", "ts", "at"),
    *("wall_time", "walltime", "_runtime", "wall", "elapsed_time"),
    *("relative_time_(process)", "relative_time_(wall)"),
)
TOKENS_NAMES = ("tokens", "num_tokens", "n_tokens", "tokens_per_step", "tokens_per_iteration")
SQUARED_LENGTH_NAMES = ("sum_squared_lengths",)
RANK_NAMES = ("rank", "global_rank")
JOB_NAMES = ("job_uuid", "job")
COMPUTE_SECONDS = "compute_seconds"
"""Field with a rank's own time, since the other times are the same on all ranks: all wait for the slowest."""
WINDOW_SECONDS = ("train_wall",)
"""Fields with the time of all iterations since the previous row."""

_LISTED = frozenset(
    (
        *ITERATION_NAMES,
        *EPOCH_NAMES,
        *MOMENT_NAMES,
        *TOKENS_NAMES,
        *SQUARED_LENGTH_NAMES,
        *RANK_NAMES,
        *JOB_NAMES,
        COMPUTE_SECONDS,
        *WINDOW_SECONDS,
    )
)
_TRAINING_PREFIXES = frozenset(
    (
        *("train", "training", "trainer", "perf", "performance", "timing", "timings", "time", "timers", "throughput"),
        *("speed", "stats", "metrics", "time_metrics", "iteration-time", "progress", "log"),
    )
)
"""Words that may stand before a name and a slash: `perf/step_time` is a step's time, `eval/step_time` is not."""

UNITS_S = {
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1.0),
    **dict.fromkeys(("ms", "msec", "msecs", "millis", "millisecond", "milliseconds"), 1e-3),
    **dict.fromkeys(("us", "µs", "usec", "usecs", "microsecond", "microseconds"), 1e-6),
}
_UNIT = "|".join(sorted(UNITS_S, key=len, reverse=True))
_ITERATION_WORD = "iteration|iter|it|step|batch"
_DURATION_WORD = "time|timing|duration|elapsed|elapsed_time|wall_?time"
_ITERATION_DURATION = re.compile(
    rf"(?P<prefix>(?:(?:avg|average|mean|train|training)_)*)"
    rf"(?:(?:{_ITERATION_WORD})_(?:{_DURATION_WORD})(?:_(?P<unit>{_UNIT}))?"
    rf"|(?:{_ITERATION_WORD})_(?P<unit_alone>{_UNIT})"
    rf"|(?:{_DURATION_WORD})(?:_(?P<unit_before>{_UNIT}))?_per_(?:{_ITERATION_WORD})(?:_(?P<unit_behind>{_UNIT}))?"
    rf"|(?P<unit_first>{_UNIT})_per_(?:{_ITERATION_WORD}))"
)
_BARE = re.compile(
    rf"(?P<word>time|elapsed|elapsed_time(?=_)|duration|dt|end_to_end)(?:_(?P<unit>{_UNIT}))?"
    r"|(?P<unit_alone>seconds|milliseconds|ms|microseconds)"
)
_RATE = re.compile(
    r"(?:(?:avg|average|mean)_)?(?:global_)?(?:iterations?|iters?|its?|steps?|batch(?:es)?)_per_(?:s|sec|seconds?)|ups"
)


class NamedDuration(NamedTuple):
    """Meaning of a field's name for the time that it holds."""

    order: int
    """Preference: of equally frequent fields, the one of the lowest order is used."""
    unit_s: float
    has_unit: bool
    may_be_clock: bool
    """Whether the field may be a clock: `time` and `elapsed` are durations, or a clock if they never go back."""


@lru_cache(maxsize=4096)
def usual_name(name: str) -> str:
    """Return `step_time_ms` for `Perf/Step Time (ms)`; a name without meaning unless with its prefix keeps that."""
    lower = name.strip().lower()
    if lower in _LISTED:
        return lower
    joined = re.sub(r"[ -]+", "_", lower)
    joined = re.sub(rf"_*[(\[]({_UNIT})[)\]]$|_in_({_UNIT})$", lambda unit: f"_{unit[1] or unit[2]}", joined)
    whole = re.sub(r"(?<=[a-z])/(?=[a-z])", "_per_", joined)
    for form in (joined, whole):
        if is_known(form):
            return form
    head, slash, tail = lower.partition("/")
    if slash and head in _TRAINING_PREFIXES and is_known(usual := usual_name(tail)):
        return usual
    return lower


@lru_cache(maxsize=4096)
def duration_of(name: str) -> NamedDuration | None:
    """Return the duration that a usual name describes; None for a name of something else."""
    if (match := _ITERATION_DURATION.fullmatch(name)) is not None:
        groups = match.groupdict()
        unit = next((groups[group] for group in groups if group.startswith("unit") and groups[group]), None)
        is_mean = re.search("avg|average|mean", groups["prefix"]) is not None
        return NamedDuration(2 if is_mean else 1, UNITS_S[unit or "s"], unit is not None, False)
    if (match := _BARE.fullmatch(name)) is None:
        return None
    if (alone := match["unit_alone"]) is not None:
        return NamedDuration(0, UNITS_S[alone], True, False)
    may_be_clock = match["word"] in ("time", "elapsed", "elapsed_time")
    return NamedDuration(
        4 if may_be_clock else 3, UNITS_S[match["unit"] or "s"], match["unit"] is not None, may_be_clock
    )


@lru_cache(maxsize=4096)
def is_rate(name: str) -> bool:
    """Decide whether a usual name is that of iterations per second."""
    return _RATE.fullmatch(name) is not None


def is_known(name: str) -> bool:
    """Decide whether rows are read by a field of this usual name."""
    return name in _LISTED or duration_of(name) is not None or is_rate(name)


def has_iteration(names: Iterable[str]) -> bool:
    """Decide whether one of these usual names numbers iterations."""
    return any(name in ITERATION_NAMES for name in names)


def has_time(names: Iterable[str]) -> bool:
    """Decide whether one of these usual names holds a time of any kind."""
    time_names = {*MOMENT_NAMES, *WINDOW_SECONDS}
    return any(name in time_names or duration_of(name) is not None or is_rate(name) for name in names)
