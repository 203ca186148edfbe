"""Which nodes and devices fail more often than the fleet does: lemons. Judges by past verdicts; never drains one.

Counted are whole outages of the last 30, 90 and 180 days, of a node and of each of its devices. Each count is held
against the rate of all others by an exact Poisson tail, or a gamma-Poisson one where rates differ over the fleet, and
of all that are called lemons only a small share may be so by chance (`excess`). Nothing fades in this: a count that
fades is no count any more. Of nodes that fail 10 times as often as others half a year finds three in four, which is
what can be found at all while one of 2,000 others is called a lemon; of 20 times, all (`benchmarks/lemons.py`). Fading
only ranks.

What is one outage. A Poisson tail wants failures that do not follow from each other. Verdicts of one node within ten
minutes of the last are of one outage, whatever they name. The same device that fails again within two days, or the
node as such within twelve hours, is the same fault, not mended, for up to a week: one bad week of a device is one
outage, and one that goes on after it collects one a week. An outage is a device's if no other was named.

What decides. Only verdicts on a device or on the node as such, of which we are sure enough (`SURE`), make an outage
that counts. A process may have died of anything, and of a slow link the other end may be to blame: outages of which
there is nothing else (`NodeHealth.unsure`) are told and rank, and never make a lemon. Suspicions, programs' failures,
broken connections and secondary errors say nothing of a node at all.

What is mended starts anew, if somebody says so (`mended`), and devices that moved take their records along (`moved`).
On the InfiniteHBD trace (400 nodes, 175 days, in which nodes were repaired and nobody told when) few stand out, because
so many fail in bursts: they fail 4.9 times as often as others in the next two weeks, 7 failures of 18 lemons
(`tests/resihp/detector/test_lemons.py` measures this; the twelve hours and `excess.MOST_SPREAD` were chosen with a look
at it, so it is no prediction).

Called by `db.reading.health` and `db.reading.fleet` with a ledger's verdicts. Times in seconds since 1970; pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from resihp.detector.excess import Excess, Floats, Whole

DAY_S = 86_400.0
WINDOWS: Mapping[int, float] = {30: 0.04, 90: 0.06, 180: 0.9}
"""Days, and the window's share of the error. The longest sees most of who always was a lemon; who has become one lately
stands out in a short one even with a small share."""
HORIZON_S = max(WINDOWS) * DAY_S
"""What is older says nothing any more."""
HALF_LIFE_S = 30 * DAY_S
"""For the order of display: of 7, 14, 30, 90 days and none, the one by which former failures predicted best on the
InfiniteHBD trace."""
USUAL_RATE = 2e-5
"""Failures per device-hour of a fleet of which nothing is known yet: 419 interruptions in 54 days of 16,384 GPUs (The
Llama 3 Herd of Models, table 5); InfiniteHBD's 4.2 faults per 1000 node-days of 8 GPUs are the same."""
FALSE_NODES, FALSE_DEVICES = 0.1, 0.02
"""Accepted share of false ones among the nodes, and among the devices, that are called lemons."""
LEAST = 3
"""Outages of a lemon. Two are one fault whose repair did not last, and in a young fleet two are nothing."""
SAME_OUTAGE_S = 600.0
"""Verdicts of one node that follow each other within this time are of one outage."""
SAME_DEVICE_S, SAME_PART_S, SAME_MOST_S = 2 * DAY_S, 0.5 * DAY_S, 7 * DAY_S
"""The same device that fails again within the first, or the node as such within the second, has the same fault still,
until the third is over since it began. (Of a node as such nobody knows whether the cause is the same.)"""
SURE = 0.5
"""Certainty from which on a verdict decides."""
COUNTING = frozenset({"fail-stop", "fail-slow"})
COMPONENTS = frozenset({"process", "device", "node", "link"})
DECIDING = frozenset({"device", "node"})


class NodeFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A failure that was put down to `node`. `kind`, `component` as in `journal.FailureFound`; `device`: which of the
    node's, if one is named; `certainty` that it was the node's fault, 0 to 1."""

    node: str
    at: float
    kind: str
    component: str
    device: int | None = None
    certainty: float = 1.0
    secondary: bool = False
    job: str = ""
    cause: str = ""

    @property
    def counts(self) -> bool:
        """Whether it says anything of the node."""
        return self.kind in COUNTING and self.component in COMPONENTS and not self.secondary and self.certainty > 0.0

    @property
    def decides(self) -> bool:
        """Whether it says for sure that hardware of the node failed."""
        return self.counts and self.component in DECIDING and self.certainty >= SURE


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """A time in which `devices` of a node were at work: those from number `first` on; None: the first ones, which is
    all that the node had at work then."""

    node: str
    since: float
    until: float
    devices: int = 1
    first: int | None = None


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """How often something failed, against what is usual: `observed` outages where `expected` were, in the last
    `window_days`: of the windows, the one that tells most. `p`: how probable so many are, by chance, over all windows;
    `q`: the share of false ones among all of the fleet that stand out at least as much."""

    observed: int
    expected: float
    window_days: int
    p: float
    q: float
    lemon: bool

    @property
    def told(self) -> str:
        """`9 outages in 90 days, 0.37 expected`."""
        outages = "1 outage" if self.observed == 1 else f"{self.observed} outages"
        return f"{outages} in {self.window_days} days, {self.expected:.2g} expected"


class NodeHealth(msgspec.Struct, frozen=True, kw_only=True):
    """A node's record of the last 180 days. `failures`: outages that count; `unsure`: those that do not, for want of
    evidence against hardware; `tally`: how the node stands as a whole; `devices`: how those of its devices stand
    that failed, by number; `device_hours` of service; `weight`: all outages, faded and weighed by certainty; `rate`:
    failures per device-hour to be expected, by `weight` and faded service, for the order of display."""

    node: str
    failures: int
    unsure: int
    last: float | None
    device_hours: float
    tally: Tally
    devices: Mapping[int, Tally]
    weight: float
    rate: float
    verdicts: tuple[NodeFailure, ...]
    """Of all outages, oldest first."""

    @property
    def lemon(self) -> bool:
        """The node as a whole, or a device of it."""
        return self.tally.lemon or bool(self.lemon_devices)

    @property
    def lemon_devices(self) -> tuple[int, ...]:
        return tuple(device for device, tally in self.devices.items() if tally.lemon)


class _Outage(msgspec.Struct):
    """One outage of a node since `at`. `devices`: those that were named by what `counts`; `certainty`: of the surest
    verdict, which is from `surest_at`."""

    at: float
    counts: bool = False
    devices: frozenset[int] = frozenset()
    certainty: float = 0.0
    surest_at: float = 0.0

    def add(self, verdict: NodeFailure) -> None:
        if verdict.decides:
            self.counts = True
            if verdict.device is not None and verdict.device not in self.devices:
                self.devices |= {verdict.device}
        if verdict.certainty > self.certainty:
            self.certainty, self.surest_at = verdict.certainty, verdict.at


class _Served(msgspec.Struct):
    """Services in order of their node's row (`rows`), those of row i from `first[i]` to `first[i + 1]`; times cut to
    what counts. `lowest`: number of the first device. `hours`: device-hours by node and window, and `wall`: those that
    each of its first `fewest` devices served, by now as good as new or not."""

    rows: Whole
    first: Whole
    since: Floats
    until: Floats
    devices: Floats
    lowest: Floats
    hours: Floats
    wall: Floats
    fewest: Floats


def part(node: str, device: int) -> str:
    """The name of a device in `mended`."""
    return f"{node}:{device}"


def node_health(
    verdicts: Iterable[NodeFailure],
    services: Iterable[Service],
    now: float,
    *,
    half_life_s: float = HALF_LIFE_S,
    mended: Mapping[str, float] | None = None,
) -> list[NodeHealth]:
    """All nodes that served or failed: lemons first, then whoever is expected to fail most.

    `mended`: since when a node, or a device (`part`), is as good as new; what was before does not count for it, and of
    a device not for its node either. Verdicts and service after `now` or before the longest window are left out.
    Raises ValueError for a half-life that is not positive.
    """
    if not half_life_s > 0.0:
        raise ValueError(f"half-life of {half_life_s} s: must be positive")
    fresh = mended or {}
    counted: dict[str, list[NodeFailure]] = {}
    for verdict in sorted(verdicts, key=_order):
        if verdict.counts and max(now - HORIZON_S, _fresh_since(verdict, fresh)) <= verdict.at <= now:
            counted.setdefault(verdict.node, []).append(verdict)
    given = list(services)
    names = sorted(counted.keys() | {service.node for service in given})
    served = _served(given, names, now, fresh)
    outages = [_outages(counted.get(name, ())) for name in names]
    tallies, devices = _tallies(names, outages, served, now, fresh)
    weights, rates = _expected_rates(outages, served, now, half_life_s)
    found = [
        NodeHealth(
            node=name,
            failures=(failures := sum(outage.counts for outage in outages[i])),
            unsure=len(outages[i]) - failures,
            last=counted[name][-1].at if name in counted else None,
            device_hours=float(served.hours[i, -1]),
            tally=tallies[i],
            devices=devices[i],
            weight=float(weights[i]),
            rate=float(rates[i]),
            verdicts=tuple(counted.get(name, ())),
        )
        for i, name in enumerate(names)
    ]
    return sorted(found, key=lambda node: (not node.lemon, -node.rate, node.node))


# --- outages --------------------------------------------------------------------------------------------------------


def _order(verdict: NodeFailure) -> tuple[object, ...]:
    """Of time, and the same in whatever order they come."""
    device = -1 if verdict.device is None else verdict.device
    return verdict.at, verdict.node, verdict.component, device, -verdict.certainty, verdict.job, verdict.cause


def _fresh_since(verdict: NodeFailure, fresh: Mapping[str, float]) -> float:
    if not fresh:
        return -np.inf
    since = fresh.get(verdict.node, -np.inf)
    return since if verdict.device is None else max(since, fresh.get(part(verdict.node, verdict.device), -np.inf))


def _outages(verdicts: Sequence[NodeFailure]) -> list[_Outage]:
    """Of one node, in order of time."""
    outages: list[_Outage] = []
    faults: dict[tuple[str, int | None], tuple[_Outage, float]] = {}
    now, latest = None, -np.inf
    for verdict in verdicts:
        fault = (verdict.component, verdict.device)
        if now is None or verdict.at - latest > SAME_OUTAGE_S:
            now, last = faults.get(fault, (None, -np.inf))
            within_s = SAME_DEVICE_S if verdict.component == "device" else SAME_PART_S
            if now is None or verdict.at - last > within_s or verdict.at - now.at > SAME_MOST_S:
                now = _Outage(verdict.at)
                outages.append(now)
        now.add(verdict)
        latest = verdict.at
        if verdict.device is not None or verdict.component != "device":  # else nobody knows whether it is the same
            faults[fault] = (now, verdict.at)
    return outages


# --- service --------------------------------------------------------------------------------------------------------


def _served(services: Sequence[Service], names: Sequence[str], now: float, fresh: Mapping[str, float]) -> _Served:
    row = {name: i for i, name in enumerate(names)}
    where = np.array([row[one.node] for one in services], dtype=np.intp)
    numbers = [(one.since, one.until, one.devices, -1 if one.first is None else one.first) for one in services]
    given = np.array(numbers, dtype=np.float64).reshape(-1, 4)
    order = np.lexsort((*given.T, where))
    where, (since, until, devices, lowest) = where[order], given[order].T
    renewed = np.array([fresh.get(name, -np.inf) for name in names], dtype=np.float64)
    since, until = np.maximum(since, renewed[where]), np.minimum(until, now)
    over = _overlap_h(since, until, now)
    wall, hours = np.zeros((2, len(names), len(WINDOWS)))
    fewest = np.full(len(names), np.inf)
    np.add.at(wall, where, over)
    np.add.at(hours, where, devices[:, None] * over)
    np.minimum.at(fewest, where, np.where(lowest < 0.0, devices, 0.0))
    served = _Served(
        rows=where,
        first=np.searchsorted(where, np.arange(len(names) + 1)),
        since=since,
        until=np.maximum(since, until),
        devices=devices,
        lowest=np.maximum(lowest, 0.0),
        hours=hours,
        wall=wall,
        fewest=fewest,
    )
    for name, at in fresh.items():
        node, _, device = name.rpartition(":")
        if node in row and device.isdecimal():  # what it did before it was changed
            hours[row[node]] -= _device_hours(served, row[node], int(device), now, until=at)
    np.maximum(hours, 0.0, out=hours)
    return served


def _device_hours(
    served: _Served, row: int, device: int, now: float, since: float = -np.inf, until: float = np.inf
) -> Floats:
    """(windows,): hours that a device of a node served in a time."""
    own = slice(served.first[row], served.first[row + 1])
    number = device - served.lowest[own]
    there = (number >= 0.0) & (number < served.devices[own])
    begun, over = served.since[own][there], served.until[own][there]
    hours = _overlap_h(np.maximum(begun, since), np.minimum(over, until), now).sum(axis=0)
    return np.asarray(hours, dtype=np.float64)


def _overlap_h(since: Floats, until: Floats, now: float) -> Floats:
    """(n, windows): hours of these times in each window."""
    starts = now - DAY_S * np.array(list(WINDOWS), dtype=np.float64)
    return np.asarray(np.maximum(until[:, None] - np.maximum(since[:, None], starts), 0.0) / 3600.0, dtype=np.float64)


# --- judgement ------------------------------------------------------------------------------------------------------


def _tallies(
    names: Sequence[str], outages: Sequence[Sequence[_Outage]], served: _Served, now: float, fresh: Mapping[str, float]
) -> tuple[list[Tally], list[dict[int, Tally]]]:
    """Of every node, and of its devices that failed."""
    from resihp.detector.excess import dispersion, excess  # scipy: who asks for costs has no need of it

    counting = [(i, outage) for i, each in enumerate(outages) for outage in each if outage.counts]
    counts = _counts([i for i, _ in counting], [outage.at for _, outage in counting], len(names), now)
    shape = dispersion(counts[:, -1], served.hours[:, -1])
    shares = list(WINDOWS.values())
    judged = excess(counts, served.hours, shares, shape=shape, usual_rate=USUAL_RATE, false=FALSE_NODES, least=LEAST)

    alone = [(i, next(iter(outage.devices)), outage.at) for i, outage in counting if len(outage.devices) == 1]
    failed = sorted({(i, device) for i, device, _ in alone})
    number = {which: n for n, which in enumerate(failed)}
    of_devices = _counts([number[i, device] for i, device, _ in alone], [at for _, _, at in alone], len(failed), now)
    hours = np.zeros((len(failed), len(WINDOWS)))
    for (i, device), n in number.items():
        renewed = fresh.get(part(names[i], device), -np.inf) if fresh else -np.inf
        always = device < served.fewest[i] and renewed == -np.inf
        hours[n] = served.wall[i] if always else _device_hours(served, i, device, now, since=renewed)
    most = np.zeros(len(names))
    np.maximum.at(most, served.rows, served.lowest + served.devices)
    devices = excess(
        of_devices,
        hours,
        shares,
        shape=shape,
        usual_rate=USUAL_RATE,
        false=FALSE_DEVICES,
        least=LEAST,
        others_exposure=np.maximum(served.hours.sum(axis=0) - hours.sum(axis=0), 0.0),
        others_number=max(int(most.sum()) - len(failed), 0),
    )
    found: list[dict[int, Tally]] = [{} for _ in names]
    for (i, device), tally in zip(failed, _told(of_devices, devices), strict=True):
        found[i][device] = tally
    return _told(counts, judged), found


def _counts(rows: Sequence[int], at: Sequence[float], n: int, now: float) -> Floats:
    """(n, windows): how many of the times `at`, each of a row, are in each window."""
    where, times = np.array(rows, dtype=np.intp), np.array(at, dtype=np.float64)
    counts = np.zeros((n, len(WINDOWS)))
    for window, days in enumerate(WINDOWS):
        counts[:, window] = np.bincount(where[times >= now - DAY_S * days], minlength=n)
    return counts


def _told(counts: Floats, judged: Excess) -> list[Tally]:
    days = list(WINDOWS)
    return [
        Tally(
            observed=int(counts[i, window]),
            expected=float(judged.expected[i]),
            window_days=days[window],
            p=float(judged.p[i]),
            q=float(judged.q[i]),
            lemon=bool(judged.picked[i]),
        )
        for i, window in enumerate(judged.window)
    ]


# --- order of display -----------------------------------------------------------------------------------------------


def _expected_rates(
    outages: Sequence[Sequence[_Outage]], served: _Served, now: float, half_life_s: float
) -> tuple[Floats, Floats]:
    """Faded outages, weighed by certainty, and the rate that they let expect: as if each node had failed once more, in
    the time in which one of the others does. Shapes (n,)."""
    weights = np.zeros(len(outages))
    for i, each in enumerate(outages):
        for outage in each:
            weights[i] += outage.certainty * 0.5 ** ((now - outage.surest_at) / half_life_s)
    seconds = (
        half_life_s / np.log(2) * (_fade(now - served.until, half_life_s) - _fade(now - served.since, half_life_s))
    )
    hours = np.bincount(served.rows, served.devices * seconds / 3600.0, minlength=len(outages))
    usual = (weights.sum() - weights + 1.0) / (hours.sum() - hours + 1.0 / USUAL_RATE)
    return weights, (1.0 + weights) / (1.0 / usual + hours)


def _fade(age_s: Floats, half_life_s: float) -> Floats:
    return np.asarray(0.5 ** (np.maximum(age_s, 0.0) / half_life_s), dtype=np.float64)
