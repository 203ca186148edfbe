"""Finds lemons: nodes and devices that fail significantly more often than the rest of the fleet.

Judges verdicts of past jobs; never drains a node. Called by `resihp.db.reading.health` and `resihp.db.reading.fleet`
with a ledger's verdicts. Times are seconds since 1970; pure.

Method. It counts the outages of each node, and of each device, in the last 30, 90 and 180 days. Each count is compared
with the rate of all other nodes or devices by an exact Poisson tail probability, or a gamma-Poisson one if rates differ
over the fleet; only a small share of the lemons may be false (`excess`). Counts do not fade, because the tail
probability needs whole numbers; only the order of display uses fading. Within half a year this finds three in four of
the nodes that fail 10 times as often as others, and all nodes that fail 20 times as often (`benchmarks/lemons.py`). No
method can find more while only one of 2,000 healthy nodes is called a lemon.

Outages. A Poisson tail needs independent failures. Verdicts on one node within ten minutes of the previous one belong
to one outage, whatever part they name. If the same device fails again within two days, or the node as such within
twelve hours, it still has the same unrepaired fault, for up to a week: one bad week of a device is one outage, and a
fault that goes on longer counts once a week. An outage is attributed to a device if no other device was named.

Verdicts that count. An outage counts if it has a verdict on a device or on the node as such with a certainty of at
least `MIN_CERTAINTY`. Other outages (`NodeHealth.unsure`) are shown and affect the order, but never make a lemon: a
process may have ended for any reason, and the other end may be the cause of a slow link. Suspicions, failures of the
program, broken connections and secondary errors are ignored.

Repairs. The record of a repaired node or device starts anew if the repair was reported (`mended`), and devices that
moved take their records along (`moved`).

Validation. On the InfiniteHBD trace (400 nodes, 175 days; nodes were repaired, but repairs were not reported) few nodes
stand out, because many nodes fail in bursts. These few fail 4.9 times as often as other nodes in the next two weeks: 7
failures of 18 lemons (measured by `tests/resihp/detector/test_lemons.py`). This is not a prediction, because the twelve
hours and `excess.MIN_SHAPE` were chosen with knowledge of this trace.
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
"""Half-life of outages, in seconds, for the order of display. On the InfiniteHBD trace, past failures predicted later
ones best with this value, out of 7, 14, 30, 90 days and no fading."""
USUAL_RATE = 2e-5
"""Prior rate of failures per device-hour, for a fleet without a record: 419 interruptions in 54 days of 16,384 GPUs
(The Llama 3 Herd of Models, table 5). InfiniteHBD's 4.2 faults per 1000 node-days of 8 GPUs are the same rate."""
FALSE_NODES, FALSE_DEVICES = 0.1, 0.02
"""Accepted share of false lemons among all nodes, and among all devices, that are called lemons."""
MIN_OUTAGES = 3
"""Lowest number of outages of a lemon. Two may be one fault after a failed repair, or chance in a new fleet."""
SAME_OUTAGE_S = 600.0
"""A verdict within this many seconds of the previous verdict on the same node belongs to the same outage."""
SAME_DEVICE_S, SAME_NODE_S, MAX_FAULT_S = 2 * DAY_S, 0.5 * DAY_S, 7 * DAY_S
"""A device that fails again within SAME_DEVICE_S, or a node as such that fails again within SAME_NODE_S, still has the
same fault, until MAX_FAULT_S after that fault began. SAME_NODE_S is shorter, because it is unknown whether failures of
a node as such have the same cause."""
MIN_CERTAINTY = 0.5
"""Lowest certainty of a verdict that makes an outage count."""
COUNTED_KINDS = frozenset({"fail-stop", "fail-slow"})
COUNTED_COMPONENTS = frozenset({"process", "device", "node", "link"})
DECIDING_COMPONENTS = frozenset({"device", "node"})


class NodeFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A verdict of a past job on a node: a failure or slow-down that was attributed to the node or a part of it."""

    node: str
    at: float
    """Time of the failure, in seconds since 1970."""
    kind: str
    """Kind of failure, as in `journal.FailureFound`."""
    component: str
    """Failed component, as in `journal.FailureFound`."""
    device: int | None = None
    """Number of the device on the node; None if the verdict names no device."""
    certainty: float = 1.0
    """Probability that the node caused the failure, 0 to 1."""
    secondary: bool = False
    """Whether the failure only followed from another failure."""
    job: str = ""
    cause: str = ""

    @property
    def counts(self) -> bool:
        """Whether the verdict indicates a problem of the node, surely or not."""
        return (
            self.kind in COUNTED_KINDS
            and self.component in COUNTED_COMPONENTS
            and not self.secondary
            and self.certainty > 0.0
        )

    @property
    def decides(self) -> bool:
        """Whether the verdict shows, with a certainty of at least `MIN_CERTAINTY`, that hardware of the node failed."""
        return self.counts and self.component in DECIDING_COMPONENTS and self.certainty >= MIN_CERTAINTY


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """The number of outages of a node or device, compared with the rate of the rest of the fleet.

    `observed`, `expected`: observed and expected outages in the last `window_days`, the most significant window. `p`:
    probability of so many outages by chance, over all windows. `q`: expected share of false lemons if all nodes (or
    devices) that stand out at least as much are called lemons.
    """

    observed: int
    expected: float
    window_days: int
    p: float
    q: float
    lemon: bool

    @property
    def told(self) -> str:
        """Observed and expected outages in words: `9 outages in 90 days, 0.37 expected`."""
        outages = "1 outage" if self.observed == 1 else f"{self.observed} outages"
        return f"{outages} in {self.window_days} days, {self.expected:.2g} expected"


class NodeHealth(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a node over the last 180 days.

    `failures`: number of outages that count; `unsure`: number of outages without sufficient evidence against hardware;
    `last`: time of the latest verdict, None without one; `device_hours`: hours of service, times devices; `tally`:
    outages of the whole node, including its devices; `devices`: tallies of the devices that failed, by device number;
    `weight`: sum of all outages, faded and weighted by certainty; `rate`: expected failures per device-hour, from
    `weight` and faded service, for the order of display.
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
    """Verdicts of all outages, including those that do not count, oldest first."""

    @property
    def lemon(self) -> bool:
        """Whether the node as a whole, or one of its devices, is a lemon."""
        return self.tally.lemon or bool(self.lemon_devices)

    @property
    def lemon_devices(self) -> tuple[int, ...]:
        return tuple(device for device, tally in self.devices.items() if tally.lemon)


class _Outage(msgspec.Struct):
    """An outage of a node that began at time `at`. `counts`: whether a verdict decides that hardware failed; `devices`:
    devices named by such verdicts; `certainty`, `surest_at`: certainty and time of the most certain verdict."""

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
    """Return the records of all nodes that were in service or failed: lemons first, then by descending failure rate.

    `mended`: time of the repair of a node, or of a device (named by `part`). Earlier failures and service of the
    repaired node or device are ignored; those of a device are ignored for its node as well. Verdicts and service after
    `now`, or before the longest window, are ignored. Raises ValueError for a half-life that is not positive.
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
    """Return a sort key of verdicts: by time, then by the other fields, so that the order of arrival does not
    matter."""
    device = -1 if verdict.device is None else verdict.device
    return verdict.at, verdict.node, verdict.component, device, -verdict.certainty, verdict.job, verdict.cause


def _fresh_since(verdict: NodeFailure, fresh: Mapping[str, float]) -> float:
    if not fresh:
        return -np.inf
    since = fresh.get(verdict.node, -np.inf)
    return since if verdict.device is None else max(since, fresh.get(part(verdict.node, verdict.device), -np.inf))


def _outages(verdicts: Sequence[NodeFailure]) -> list[_Outage]:
    """Group the verdicts on one node, sorted by time, into outages."""
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
    """Return the tally of every node, and, for every node, the tallies of its failed devices by device number."""
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
    """Count events in each window, (n, windows): event i belongs to row `rows[i]` and happened at time `at[i]`."""
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
    """Return, for each node, its faded outages weighted by certainty, and its expected rate of failures; shapes (n,).

    As a prior, one more failure is assumed, in the time in which the other nodes would fail once.
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
