"""Finds lemons: nodes and devices that fail more often than the rest of the fleet. Judges past verdicts; never drains.

It counts whole outages of the last 30, 90 and 180 days, of a node and of each of its devices. Each count is compared
with the rate of all others by an exact Poisson tail, or a gamma-Poisson tail where rates differ over the fleet, and
only a small share of all lemons may be called so by chance (`excess`). Counts do not fade: a faded count is no longer a
count. Of nodes that fail 10 times as often as others, half a year finds three in four, which is all that can be found
while one of 2,000 others is called a lemon; of nodes that fail 20 times as often, all (`benchmarks/lemons.py`). Only
the order of display uses fading.

Definition of an outage. A Poisson tail needs independent failures. Verdicts on one node within ten minutes of the
previous one belong to one outage, whatever they name. The same device that fails again within two days, or the node as
such within twelve hours, has the same unrepaired fault, for up to a week: one bad week of a device is one outage, and a
fault that goes on after it counts once a week. An outage is attributed to a device if no other device was named.

Verdicts that count. Only verdicts on a device or on the node as such, with a certainty of at least `MIN_CERTAINTY`,
make an outage that counts. A process may have ended for any reason, and a slow link may be caused by its other end:
outages without better evidence (`NodeHealth.unsure`) are shown and affect the order, but never make a lemon.
Suspicions, failures of the program, broken connections and secondary errors say nothing about a node.

A repaired node or device starts anew if the repair was reported (`mended`), and devices that moved take their records
along (`moved`). On the InfiniteHBD trace (400 nodes, 175 days, in which nodes were repaired but repairs were not
reported) few nodes stand out, because so many fail in bursts: those that do fail 4.9 times as often as others in the
next two weeks, 7 failures of 18 lemons (`tests/resihp/detector/test_lemons.py` measures this; the twelve hours and
`excess.MIN_SHAPE` were chosen with a look at this trace, so it is not a prediction).

Called by `db.reading.health` and `db.reading.fleet` with a ledger's verdicts. Times in seconds since 1970; pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from resihp.detector.service_hours import (
    DAY_S,
    WINDOW_ERROR_SHARES,
    Served,
    Service,
    hours_of_device,
    part,
    served_by_node,
)

if TYPE_CHECKING:
    from resihp.detector.excess import Excess, Floats

HORIZON_S = max(WINDOW_ERROR_SHARES) * DAY_S
"""Age, in seconds, beyond which verdicts and service are ignored."""
HALF_LIFE_S = 30 * DAY_S
"""Half-life, in seconds, for the order of display. Of 7, 14, 30, 90 days and no fading, the value by which past
failures best predicted later ones on the InfiniteHBD trace."""
USUAL_RATE = 2e-5
"""Failures per device-hour of a fleet without a record: 419 interruptions in 54 days of 16,384 GPUs (The Llama 3 Herd
of Models, table 5); InfiniteHBD's 4.2 faults per 1000 node-days of 8 GPUs are the same rate."""
FALSE_NODES, FALSE_DEVICES = 0.1, 0.02
"""Accepted share of false ones among the nodes, and among the devices, that are called lemons."""
MIN_OUTAGES = 3
"""Lowest number of outages of a lemon. Two may be one fault with a failed repair, or chance in a young fleet."""
SAME_OUTAGE_S = 600.0
"""Verdicts on one node that follow each other within this time belong to one outage."""
SAME_DEVICE_S, SAME_NODE_S, MAX_FAULT_S = 2 * DAY_S, 0.5 * DAY_S, 7 * DAY_S
"""A device that fails again within the first time, or a node as such within the second, still has the same fault, until
the third has passed since that fault began. (For a node as such it is unknown whether the cause is the same.)"""
MIN_CERTAINTY = 0.5
"""Lowest certainty at which a verdict counts."""
COUNTED_KINDS = frozenset({"fail-stop", "fail-slow"})
COUNTED_COMPONENTS = frozenset({"process", "device", "node", "link"})
DECIDING_COMPONENTS = frozenset({"device", "node"})


class NodeFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A failure that was attributed to `node`. `kind`, `component`: as in `journal.FailureFound`; `device`: device of
    the node, if one is named; `certainty`: that the node caused it, 0 to 1."""

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
        """Whether it says anything about the node."""
        return (
            self.kind in COUNTED_KINDS
            and self.component in COUNTED_COMPONENTS
            and not self.secondary
            and self.certainty > 0.0
        )

    @property
    def decides(self) -> bool:
        """Whether it shows, with enough certainty, that hardware of the node failed."""
        return self.counts and self.component in DECIDING_COMPONENTS and self.certainty >= MIN_CERTAINTY


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """How often something failed, against the usual rate.

    `observed` outages where `expected` were expected, in the last `window_days` (the most significant window). `p`:
    probability of so many by chance, over all windows; `q`: expected share of false picks among all of the fleet that
    stand out at least as much.
    """

    observed: int
    expected: float
    window_days: int
    p: float
    q: float
    lemon: bool

    @property
    def told(self) -> str:
        """The count in words: `9 outages in 90 days, 0.37 expected`."""
        outages = "1 outage" if self.observed == 1 else f"{self.observed} outages"
        return f"{outages} in {self.window_days} days, {self.expected:.2g} expected"


class NodeHealth(msgspec.Struct, frozen=True, kw_only=True):
    """A node's record of the last 180 days.

    `failures`: outages that count; `unsure`: outages without sufficient evidence against hardware; `tally`: of the node
    as a whole; `devices`: tallies of the devices that failed, by number; `device_hours` of service; `weight`: all
    outages, faded and weighted by certainty; `rate`: expected failures per device-hour, from `weight` and faded
    service, for the order of display.
    """

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
    """Verdicts of all outages, oldest first."""

    @property
    def lemon(self) -> bool:
        """Whether the node as a whole, or one of its devices, is a lemon."""
        return self.tally.lemon or bool(self.lemon_devices)

    @property
    def lemon_devices(self) -> tuple[int, ...]:
        return tuple(device for device, tally in self.devices.items() if tally.lemon)


class _Outage(msgspec.Struct):
    """One outage of a node that began `at`. `devices`: devices named by verdicts that count; `certainty`: of the most
    certain verdict, which is from `surest_at`."""

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


def node_health(
    verdicts: Iterable[NodeFailure],
    services: Iterable[Service],
    now: float,
    *,
    half_life_s: float = HALF_LIFE_S,
    mended: Mapping[str, float] | None = None,
) -> list[NodeHealth]:
    """Return all nodes that served or failed: lemons first, then by descending expected failure rate.

    `mended`: since when a node, or a device (`part`), is as good as new. Its earlier record is ignored; that of a
    device is ignored for its node as well. Verdicts and service after `now` or before the longest window are left out.
    Raises ValueError for a half-life that is not positive.
    """
    if not half_life_s > 0.0:
        raise ValueError(f"half-life of {half_life_s} s: must be positive")
    fresh = mended or {}
    counted: dict[str, list[NodeFailure]] = {}
    for verdict in sorted(verdicts, key=_order):
        if verdict.counts and max(now - HORIZON_S, _fresh_since(verdict, fresh)) <= verdict.at <= now:
            counted.setdefault(verdict.node, []).append(verdict)
    all_services = list(services)
    names = sorted(counted.keys() | {service.node for service in all_services})
    served = served_by_node(all_services, names, now, fresh)
    outages = [_outages(counted.get(name, ())) for name in names]
    tallies, devices = _tallies(names, outages, served, now, fresh)
    weights, rates = _expected_rates(outages, served, now, half_life_s)
    nodes = [
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
    return sorted(nodes, key=lambda node: (not node.lemon, -node.rate, node.node))


# --- outages --------------------------------------------------------------------------------------------------------


def _order(verdict: NodeFailure) -> tuple[object, ...]:
    """Return a sort key by time that does not depend on the order of arrival."""
    device = -1 if verdict.device is None else verdict.device
    return verdict.at, verdict.node, verdict.component, device, -verdict.certainty, verdict.job, verdict.cause


def _fresh_since(verdict: NodeFailure, fresh: Mapping[str, float]) -> float:
    if not fresh:
        return -np.inf
    since = fresh.get(verdict.node, -np.inf)
    return since if verdict.device is None else max(since, fresh.get(part(verdict.node, verdict.device), -np.inf))


def _outages(verdicts: Sequence[NodeFailure]) -> list[_Outage]:
    """Group the verdicts of one node, in order of time, into outages."""
    outages: list[_Outage] = []
    faults: dict[tuple[str, int | None], tuple[_Outage, float]] = {}
    now, latest = None, -np.inf
    for verdict in verdicts:
        fault = (verdict.component, verdict.device)
        if now is None or verdict.at - latest > SAME_OUTAGE_S:
            now, last = faults.get(fault, (None, -np.inf))
            within_s = SAME_DEVICE_S if verdict.component == "device" else SAME_NODE_S
            if now is None or verdict.at - last > within_s or verdict.at - now.at > MAX_FAULT_S:
                now = _Outage(verdict.at)
                outages.append(now)
        now.add(verdict)
        latest = verdict.at
        if verdict.device is not None or verdict.component != "device":  # else it may be another device each time
            faults[fault] = (now, verdict.at)
    return outages


# --- judgement ------------------------------------------------------------------------------------------------------


def _tallies(
    names: Sequence[str], outages: Sequence[Sequence[_Outage]], served: Served, now: float, fresh: Mapping[str, float]
) -> tuple[list[Tally], list[dict[int, Tally]]]:
    """Return the tally of every node, and for each node those of its devices that failed."""
    from resihp.detector.excess import dispersion, excess  # imports scipy, which cost queries do not need

    counting = [(i, outage) for i, node_outages in enumerate(outages) for outage in node_outages if outage.counts]
    counts = _counts([i for i, _ in counting], [outage.at for _, outage in counting], len(names), now)
    shape = dispersion(counts[:, -1], served.hours[:, -1])
    shares = list(WINDOW_ERROR_SHARES.values())
    judged = excess(
        counts, served.hours, shares, shape=shape, usual_rate=USUAL_RATE, false=FALSE_NODES, least=MIN_OUTAGES
    )

    alone = [(i, next(iter(outage.devices)), outage.at) for i, outage in counting if len(outage.devices) == 1]
    failed = sorted({(i, device) for i, device, _ in alone})
    number = {member: n for n, member in enumerate(failed)}
    of_devices = _counts([number[i, device] for i, device, _ in alone], [at for _, _, at in alone], len(failed), now)
    hours = np.zeros((len(failed), len(WINDOW_ERROR_SHARES)))
    for (i, device), n in number.items():
        renewed = fresh.get(part(names[i], device), -np.inf) if fresh else -np.inf
        always = device < served.fewest[i] and renewed == -np.inf
        hours[n] = served.wall[i] if always else hours_of_device(served, i, device, now, since=renewed)
    most = np.zeros(len(names))
    np.maximum.at(most, served.rows, served.lowest + served.devices)
    devices = excess(
        of_devices,
        hours,
        shares,
        shape=shape,
        usual_rate=USUAL_RATE,
        false=FALSE_DEVICES,
        least=MIN_OUTAGES,
        others_exposure=np.maximum(served.hours.sum(axis=0) - hours.sum(axis=0), 0.0),
        others_number=max(int(most.sum()) - len(failed), 0),
    )
    device_tallies: list[dict[int, Tally]] = [{} for _ in names]
    for (i, device), tally in zip(failed, _as_tallies(of_devices, devices), strict=True):
        device_tallies[i][device] = tally
    return _as_tallies(counts, judged), device_tallies


def _counts(rows: Sequence[int], at: Sequence[float], n: int, now: float) -> Floats:
    """Count the times `at`, each of a row, in each window; shape (n, windows)."""
    where, times = np.array(rows, dtype=np.intp), np.array(at, dtype=np.float64)
    counts = np.zeros((n, len(WINDOW_ERROR_SHARES)))
    for window, days in enumerate(WINDOW_ERROR_SHARES):
        counts[:, window] = np.bincount(where[times >= now - DAY_S * days], minlength=n)
    return counts


def _as_tallies(counts: Floats, judged: Excess) -> list[Tally]:
    days = list(WINDOW_ERROR_SHARES)
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
    outages: Sequence[Sequence[_Outage]], served: Served, now: float, half_life_s: float
) -> tuple[Floats, Floats]:
    """Return faded outages, weighted by certainty, and expected rates; shapes (n,).

    The rate is that of a node which had failed once more, in the time in which one of the others fails once.
    """
    weights = np.zeros(len(outages))
    for i, node_outages in enumerate(outages):
        for outage in node_outages:
            weights[i] += outage.certainty * 0.5 ** ((now - outage.surest_at) / half_life_s)
    seconds = (
        half_life_s / np.log(2) * (_fade(now - served.until, half_life_s) - _fade(now - served.since, half_life_s))
    )
    hours = np.bincount(served.rows, served.devices * seconds / 3600.0, minlength=len(outages))
    usual = (weights.sum() - weights + 1.0) / (hours.sum() - hours + 1.0 / USUAL_RATE)
    return weights, (1.0 + weights) / (1.0 / usual + hours)


def _fade(age_s: Floats, half_life_s: float) -> Floats:
    return np.asarray(0.5 ** (np.maximum(age_s, 0.0) / half_life_s), dtype=np.float64)
