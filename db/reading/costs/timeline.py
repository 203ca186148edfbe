"""Where the time of a job went, moment by moment: what `cost_accounts` adds up, over all of it or a part.

A timeline runs from the job's start to its end, and every second of it is shared out among `SHARES`; so parts that join
without a gap add up to the whole. Between two commits, what an interruption took comes first, in its order (work thrown
away, until it was noticed, reconfiguring), then the iteration, mixed with the pauses. Pure; reads nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np

from db.reading.costs.goodput import Course, Floats, Interruption

Row = dict[str, Any]

CAUSES = ("start", "detect", "reconfigure", "redo", "rollback", "slow", "idle", "capacity", "checkpoint", "other")
SHARES = ("useful", *CAUSES)
WORK = ("useful", "slow", "idle", "capacity", "rollback")
"""What committed iterations are shared out among."""
DONE = ("useful", "slow", "rollback")
"""What goodput counts of them."""
UNTOLD = frozenset({"idle"})
"""Causes that accounts kept by older versions do not have: there `useful` and `capacity` have their time."""
Again = Sequence[tuple[int, int]]
"""First and last iterations of what later attempts of a run committed again; in order, and apart from each other."""
_AT = {name: place for place, name in enumerate(SHARES)}
_OF_WORK = [_AT[name] for name in WORK]
_LEAST_S = 1e-9


@dataclass(frozen=True)
class HeldDevices:
    """Devices held: `at_s` since the job's start, ascending, and the device-seconds up to each."""

    at_s: Floats
    device_s: Floats

    def until(self, at_s: Floats) -> Floats:
        """Device-seconds up to these times."""
        return np.asarray(np.interp(at_s, self.at_s, self.device_s), dtype=np.float64)


@dataclass(frozen=True, kw_only=True)
class HeldTime:
    """Stretches of time, seconds since the job's start, and what the seconds of each went to: (stretches, `SHARES`)."""

    begin_s: Floats
    end_s: Floats
    seconds: Floats
    of_devices: Floats
    """The same for GPU-hours, in which devices that are not held are not lost."""
    held: HeldDevices
    held_s: float
    """From the job's start to its end."""
    wall: tuple[float, float]
    """Where goodput's wall time begins and ends."""
    failures: tuple[tuple[float, bool], ...] = ()
    """When each was noticed, and whether it says something of hardware."""
    repairs: tuple[tuple[float, float], ...] = ()
    """When what was mended had been noticed, and how long that took."""
    trained: bool = True
    """Whether any iteration was committed."""
    in_proportion: bool = False
    """Whether causes are spread evenly over the wall time, as the rows that told more are gone."""
    hours_scale: Floats | None = None
    """By `SHARES`, what GPU-hours are multiplied by; None for 1."""

    def between(self, since_s: float, until_s: float) -> tuple[Floats, Floats]:
        """Seconds and GPU-hours by `SHARES`, of the part from `since_s` to `until_s`."""
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
    """Devices that the job held. Its allocation's from its start, whether their agents came or not; a replacement's
    from when it joined; a node, lost or not, until it was given back."""
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
    at_work = np.cumsum([float(steps[each]) for each in at_s.tolist()])
    return HeldDevices(at_s, np.cumsum(np.diff(at_s, prepend=0.0) * np.append(0.0, at_work[:-1])))


def laid_out(
    clock: Course,
    spans: Sequence[Interruption],
    pauses: Mapping[int, float],
    work: Floats,
    of_devices: Floats,
    held: HeldDevices,
    **told: Any,
) -> HeldTime:
    """The timeline of a job. `pauses`: for checkpoints, by the index of the commit that they came before; `work`: of
    each commit, by `WORK`, and `of_devices` the same time for GPU-hours; `told`: fields of `HeldTime` that are kept as
    they are."""
    start_s, held_s = clock.before_s, clock.before_s + clock.wall_s + clock.after_s
    told |= {"held": held, "held_s": held_s, "wall": (start_s, start_s + clock.wall_s)}
    if not clock.ends_s:
        start = _only("start", held_s)
        return HeldTime(
            begin_s=np.zeros(1), end_s=np.array([held_s]), seconds=start, of_devices=start, trained=False, **told
        )
    ends = np.array((0.0, *clock.ends_s, max(clock.wall_s + clock.after_s, clock.ends_s[-1])))
    lengths = np.diff(ends)
    shares = np.zeros((len(lengths), len(SHARES)))
    shares[:-1, _OF_WORK] = _placed(work, lengths[:-1])
    free = np.maximum(lengths - shares.sum(axis=1), 0.0)
    pieces = _interrupted(spans, free)
    for index, pause in pauses.items():
        shares[index, _AT["checkpoint"]] = paused = min(pause, float(free[index]))
        free[index] -= paused
    shares[:, _AT["other"]] += free
    begins = ends[:-1].copy()
    parts = [(0.0, start_s, _only("start", start_s))]
    for index, of in pieces.items():
        for cause, seconds in of:
            begin = start_s + float(begins[index])
            parts.append((begin, begin + seconds, _only(cause, seconds)))
            begins[index] += seconds
    hours = shares.copy()
    hours[:-1, _OF_WORK] = _placed(of_devices, lengths[:-1])
    before = [each for _, _, each in parts]
    return HeldTime(
        begin_s=np.concatenate(([begin for begin, _, _ in parts], start_s + begins)),
        end_s=np.concatenate(([end for _, end, _ in parts], start_s + ends[1:])),
        seconds=np.concatenate((*before, shares)),
        of_devices=np.concatenate((*before, hours)),
        **told,
    )


def spread_evenly(
    of: HeldTime, wall_s: float, useful_s: float, lost_s: Mapping[str, float], rolled_s: float | None = None
) -> HeldTime:
    """The timeline of a job whose rows were thinned, from what they told while they were all there: of its wall time.

    What other attempts made useless is `rolled_s`, or, where that was not reckoned before, the same share of the useful
    time as of what is left.
    """
    start_s, after_s = of.wall[0], max(of.held_s - of.wall[1], 0.0)
    seconds, _ = of.between(-np.inf, np.inf)
    useful, rolled = seconds[_AT["useful"]], seconds[_AT["rollback"]]
    lost = rolled / (useful + rolled) if rolled > 0.0 else 0.0
    rolled_s = useful_s * lost if rolled_s is None else rolled_s
    wall = np.zeros((1, len(SHARES)))
    wall[0, 1:] = [lost_s.get(cause, 0.0) for cause in CAUSES]
    wall[0, _AT["useful"]], wall[0, _AT["rollback"]] = useful_s - rolled_s, rolled_s
    edges = np.cumsum([0.0, start_s, wall_s, after_s])
    evenly = np.concatenate((_only("start", start_s), wall, _only("other", after_s)))
    return HeldTime(
        begin_s=edges[:-1],
        end_s=edges[1:],
        seconds=evenly,
        of_devices=evenly,
        held=of.held,
        held_s=float(edges[-1]),
        wall=(start_s, start_s + wall_s),
        failures=of.failures,
        repairs=of.repairs,
        in_proportion=True,
    )


def _only(cause: str, seconds: float) -> Floats:
    shares = np.zeros((1, len(SHARES)))
    shares[0, _AT[cause]] = seconds
    return shares


def _placed(work: Floats, lengths: Floats) -> Floats:
    """Work of each commit within the time since the commit before; what is more began before that."""
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
        if carry_s < _LEAST_S:
            carry_s = 0.0
            carried = np.zeros(work.shape[1])
    return placed


def _interrupted(spans: Sequence[Interruption], free: Floats) -> dict[int, list[tuple[str, float]]]:
    """What interruptions took of the time between commits, which becomes less `free`; in order, by commit."""
    pieces: dict[int, list[tuple[str, float]]] = {}
    for one in spans:
        index = one.before + 1
        for cause, wanted in (("redo", one.redo_s), ("detect", one.detect_s), ("reconfigure", one.reconfigure_s)):
            left = wanted
            while left > _LEAST_S and index <= one.after:
                taken = min(left, float(free[index]))
                if taken > 0.0:
                    pieces.setdefault(index, []).append((cause, taken))
                    free[index] -= taken
                    left -= taken
                if left > _LEAST_S:
                    index += 1
    return pieces


# --- what later attempts did again ---------------------------------------------------------------------------------


def committed_again(attempts: Iterable[Row]) -> dict[str, Again]:
    """By `uuid`, what later attempts of the same run committed again. Attempts: `uuid`, `run`, `started_at`, and their
    `first` and `last` iterations; each once, however often it is told. What another database user wrote (`written_by`)
    makes nothing of ours useless: a run's name is no secret."""
    runs: dict[tuple[str, str | None], dict[str, Row]] = {}
    for row in attempts:
        if row["run"] and row["first"] is not None:
            runs.setdefault((row["run"], row.get("written_by")), {})[row["uuid"]] = row
    found: dict[str, Again] = {}
    for of_run in runs.values():
        later: list[tuple[int, int]] = []
        for row in sorted(of_run.values(), key=lambda row: (row["started_at"], row["uuid"]), reverse=True):
            mine = row["first"], row["last"]
            if both := [(max(a, mine[0]), min(b, mine[1])) for a, b in later if a <= mine[1] and b >= mine[0]]:
                found[row["uuid"]] = both
            later = _joined([*later, mine])
    return found


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same iterations, in order, in ranges that do not touch."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return found
