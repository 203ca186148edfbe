"""How the time of a job was spent, moment by moment. `cost_accounts` adds it up over the whole job or a part.

A timeline runs from the job's start to its end, and every second of it is divided among `SHARES`, so that adjacent
parts add up to the whole. Between two commits, the time of an interruption comes first, in its order (discarded work,
until it was noticed, reconfiguring), then the iteration, mixed with the pauses. Pure; reads nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np

from resihp.db.reading.costs.goodput import Course, Floats, Interruption

Row = dict[str, Any]

CAUSES = ("start", "detect", "reconfigure", "redo", "rollback", "slow", "idle", "capacity", "checkpoint", "other")
SHARES = ("useful", *CAUSES)
ITERATION_SHARES = ("useful", "slow", "idle", "capacity", "rollback")
"""Shares into which the time of each committed iteration is divided; `cost_accounts` defines them."""
GOODPUT_SHARES = ("useful", "slow", "rollback")
"""Shares of iterations that count for goodput."""
NEWER_CAUSES = frozenset({"idle"})
"""Causes that accounts stored by older versions lack; there, their time counts as `useful` and `capacity`."""
Again = Sequence[tuple[int, int]]
"""Ranges (first, last) of iterations that later attempts of a run committed again; in order and disjoint."""
_AT = {name: place for place, name in enumerate(SHARES)}
_OF_WORK = [_AT[name] for name in ITERATION_SHARES]
_MIN_SECONDS = 1e-9


@dataclass(frozen=True)
class HeldDevices:
    """Devices held over time: times `at_s` in seconds since the job's start, ascending, and `device_s`, the
    device-seconds up to each time."""

    at_s: Floats
    device_s: Floats

    def until(self, at_s: Floats) -> Floats:
        """Return the device-seconds up to these times."""
        return np.asarray(np.interp(at_s, self.at_s, self.device_s), dtype=np.float64)


@dataclass(frozen=True, kw_only=True)
class HeldTime:
    """Intervals of time, in seconds since the job's start. `seconds`: how the seconds of each interval are divided,
    with shape (intervals, `SHARES`)."""

    begin_s: Floats
    end_s: Floats
    seconds: Floats
    of_devices: Floats
    """As `seconds`, but for GPU-hours, in which devices that are not held are not lost."""
    held: HeldDevices
    held_s: float
    """Seconds from the job's start to its end."""
    wall: tuple[float, float]
    """Start and end of the wall time of goodput."""
    failures: tuple[tuple[float, bool], ...] = ()
    """(when noticed, whether it indicates hardware) of each failure."""
    repairs: tuple[tuple[float, float], ...] = ()
    """(when noticed, seconds to recover) of each recovered failure."""
    trained: bool = True
    """Whether any iteration was committed."""
    in_proportion: bool = False
    """Whether causes are spread evenly over the wall time, because detailed rows were removed."""
    hours_scale: Floats | None = None
    """Factors by which GPU-hours are multiplied, by `SHARES`; None for no factors."""

    def between(self, since_s: float, until_s: float) -> tuple[Floats, Floats]:
        """Return seconds and GPU-hours by `SHARES`, for the part from `since_s` to `until_s`."""
        lengths = self.end_s - self.begin_s
        long = lengths > 0.0
        lengths = np.where(long, lengths, 1.0)
        begin = np.clip(self.begin_s, since_s, max(until_s, since_s))
        end = np.clip(self.end_s, since_s, max(until_s, since_s))
        share = np.where(long, (end - begin) / lengths, 0.0)
        devices = np.where(long, (self.held.until(end) - self.held.until(begin)) / lengths, 0.0)
        hours = devices @ self.of_devices / 3600.0
        return share @ self.seconds, hours if self.hours_scale is None else hours * self.hours_scale


def held_devices(job: Row, nodes: Sequence[Row], held_s: float) -> HeldDevices:
    """Return the devices that the job held over time. A device of the job's allocation counts from the job's start,
    whether or not its agent joined; a device of a replacement counts from its joining. Each counts until its node, lost
    or not, was given back."""
    joined = [row for row in nodes if row["joined_at"] is not None and row["devices"] > 0]
    joined.sort(key=lambda row: (row.get("replacement") is not None, row["joined_at"]))
    absent = [row for row in nodes if (row["joined_at"] is None or row["devices"] <= 0) and not row.get("replacement")]
    places = job["nodes"]

    def at(moment: datetime | None, default: float) -> float:
        return default if moment is None else min(max((moment - job["started_at"]).total_seconds(), 0.0), held_s)

    spans: list[tuple[float, float, int]] = []
    for row in joined:
        own = places > 0 and row.get("replacement") is None
        places -= own
        spans.append((0.0 if own else at(row["joined_at"], 0.0), at(row["released_at"], held_s), row["devices"]))
    for row in absent[: max(places, 0)]:
        places -= 1
        spans.append((0.0, at(row["released_at"], held_s), job["gpus_per_node"]))
    spans += [(0.0, held_s, job["gpus_per_node"])] * max(places, 0)
    steps: dict[float, int] = {0.0: 0, held_s: 0}
    for begin, end, devices in spans:
        if end > begin:
            steps[begin] = steps.get(begin, 0) + devices
            steps[end] = steps.get(end, 0) - devices
    at_s = np.array(sorted(steps))
    at_work = np.cumsum([float(steps[at]) for at in at_s.tolist()])
    return HeldDevices(at_s, np.cumsum(np.diff(at_s, prepend=0.0) * np.append(0.0, at_work[:-1])))


def laid_out(
    clock: Course,
    spans: Sequence[Interruption],
    pauses: Mapping[int, float],
    work: Floats,
    of_devices: Floats,
    held: HeldDevices,
    **fields: Any,
) -> HeldTime:
    """Return the timeline of a job. `pauses`: of checkpoints, by the index of the following commit. `work`: seconds of
    each commit, by `ITERATION_SHARES`; `of_devices`: the same for GPU-hours. `fields`: fields of `HeldTime` that are
    passed on unchanged."""
    start_s, held_s = clock.before_s, clock.before_s + clock.wall_s + clock.after_s
    fields |= {"held": held, "held_s": held_s, "wall": (start_s, start_s + clock.wall_s)}
    if not clock.ends_s:
        start = _single_share("start", held_s)
        return HeldTime(
            begin_s=np.zeros(1), end_s=np.array([held_s]), seconds=start, of_devices=start, trained=False, **fields
        )
    ends = np.array((0.0, *clock.ends_s, max(clock.wall_s + clock.after_s, clock.ends_s[-1])))
    lengths = np.diff(ends)
    shares = np.zeros((len(lengths), len(SHARES)))
    shares[:-1, _OF_WORK] = _fitted_to_intervals(work, lengths[:-1])
    free = np.maximum(lengths - shares.sum(axis=1), 0.0)
    pieces = _interrupted(spans, free)
    for index, pause in pauses.items():
        shares[index, _AT["checkpoint"]] = paused = min(pause, float(free[index]))
        free[index] -= paused
    shares[:, _AT["other"]] += free
    begins = ends[:-1].copy()
    parts = [(0.0, start_s, _single_share("start", start_s))]
    for index, causes in pieces.items():
        for cause, seconds in causes:
            begin = start_s + float(begins[index])
            parts.append((begin, begin + seconds, _single_share(cause, seconds)))
            begins[index] += seconds
    hours = shares.copy()
    hours[:-1, _OF_WORK] = _fitted_to_intervals(of_devices, lengths[:-1])
    before = [seconds_of_part for _, _, seconds_of_part in parts]
    return HeldTime(
        begin_s=np.concatenate(([begin for begin, _, _ in parts], start_s + begins)),
        end_s=np.concatenate(([end for _, end, _ in parts], start_s + ends[1:])),
        seconds=np.concatenate((*before, shares)),
        of_devices=np.concatenate((*before, hours)),
        **fields,
    )


def spread_evenly(
    detailed: HeldTime, wall_s: float, useful_s: float, lost_s: Mapping[str, float], rolled_s: float | None = None
) -> HeldTime:
    """Return the timeline of a job with thinned rows, from its stored account: causes are spread evenly over the wall
    time.

    `rolled_s`: useful time that later attempts repeated; None if it was not stored, to assume the share that it has in
    the remaining rows.
    """
    start_s, after_s = detailed.wall[0], max(detailed.held_s - detailed.wall[1], 0.0)
    seconds, _ = detailed.between(-np.inf, np.inf)
    useful, rolled = seconds[_AT["useful"]], seconds[_AT["rollback"]]
    rolled_share = rolled / (useful + rolled) if rolled > 0.0 else 0.0
    rolled_s = useful_s * rolled_share if rolled_s is None else rolled_s
    wall = np.zeros((1, len(SHARES)))
    wall[0, 1:] = [lost_s.get(cause, 0.0) for cause in CAUSES]
    wall[0, _AT["useful"]], wall[0, _AT["rollback"]] = useful_s - rolled_s, rolled_s
    edges = np.cumsum([0.0, start_s, wall_s, after_s])
    evenly = np.concatenate((_single_share("start", start_s), wall, _single_share("other", after_s)))
    return HeldTime(
        begin_s=edges[:-1],
        end_s=edges[1:],
        seconds=evenly,
        of_devices=evenly,
        held=detailed.held,
        held_s=float(edges[-1]),
        wall=(start_s, start_s + wall_s),
        failures=detailed.failures,
        repairs=detailed.repairs,
        in_proportion=True,
    )


def _single_share(cause: str, seconds: float) -> Floats:
    shares = np.zeros((1, len(SHARES)))
    shares[0, _AT[cause]] = seconds
    return shares


def _fitted_to_intervals(work: Floats, lengths: Floats) -> Floats:
    """Return the work of each commit, fitted into the time since the previous commit; any excess is moved before that
    commit."""
    placed, totals = work.copy(), work.sum(axis=1).tolist()
    carried, carry_s = np.zeros(work.shape[1]), 0.0
    room = lengths.tolist()
    for index in range(len(room) - 1, -1, -1):
        total = totals[index] + carry_s
        if not carry_s and total <= room[index]:
            continue
        both = placed[index] + carried
        placed[index] = both * min(room[index] / total, 1.0) if total > 0.0 else 0.0
        carried = both - placed[index]
        carry_s = max(total - room[index], 0.0)
        if carry_s < _MIN_SECONDS:
            carry_s = 0.0
            carried = np.zeros(work.shape[1])
    return placed


def _interrupted(spans: Sequence[Interruption], free: Floats) -> dict[int, list[tuple[str, float]]]:
    """Return the time of interruptions, by the index of the following commit and in order; reduces `free` by this
    time."""
    pieces: dict[int, list[tuple[str, float]]] = {}
    for span in spans:
        index = span.before + 1
        for cause, wanted in (("redo", span.redo_s), ("detect", span.detect_s), ("reconfigure", span.reconfigure_s)):
            left_s = wanted
            while left_s > _MIN_SECONDS and index <= span.after:
                taken = min(left_s, float(free[index]))
                if taken > 0.0:
                    pieces.setdefault(index, []).append((cause, taken))
                    free[index] -= taken
                    left_s -= taken
                if left_s > _MIN_SECONDS:
                    index += 1
    return pieces


# --- work done again by later attempts -------------------------------------------------------------------------------


def committed_again(attempts: Iterable[Row]) -> dict[str, Again]:
    """Return, by `uuid`, the iterations that later attempts of the same run committed again. Attempts have `uuid`,
    `run`, `started_at`, and their `first` and `last` iterations; an attempt that is listed twice counts once. Attempts
    of another database user (`written_by`) are ignored, because any user can name the run."""
    runs: dict[tuple[str, str | None], dict[str, Row]] = {}
    for row in attempts:
        if row["run"] and row["first"] is not None:
            runs.setdefault((row["run"], row.get("written_by")), {})[row["uuid"]] = row
    again: dict[str, Again] = {}
    for of_run in runs.values():
        later: list[tuple[int, int]] = []
        for row in sorted(of_run.values(), key=lambda row: (row["started_at"], row["uuid"]), reverse=True):
            mine = row["first"], row["last"]
            if both := [(max(a, mine[0]), min(b, mine[1])) for a, b in later if a <= mine[1] and b >= mine[0]]:
                again[row["uuid"]] = both
            later = _merged_ranges([*later, mine])
    return again


def _merged_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the same iterations as ranges in order that do not touch."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = joined[-1][0], max(joined[-1][1], last)
        else:
            joined.append((first, last))
    return joined
