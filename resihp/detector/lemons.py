"""Which nodes fail more often than the fleet does: lemons. Ranks nodes by past verdicts; never drains one.

Failures of a node are taken as a Poisson process in its device-hours of service, with a rate of its own that nodes
draw from the fleet's Gamma distribution. The conjugate posterior then tells how probable it is that this node's rate
is above the fleet's (of all other nodes). Both failures and service fade with a half-life: a repaired node is a new
node. On the InfiniteHBD trace (400 nodes, 175 days) lemons fail 5.5 times as often as others in the next two weeks,
2.6 times if the returns within two days of a repair are left out; after 85 days nothing is left of it
(`tests/resihp/detector/test_lemons.py` measures this).

Suspicions, programs' failures, broken connections and secondary errors say nothing of a node and do not count. Called
by `db.reading.health` with a ledger's verdicts. Times in seconds since 1970; pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
from scipy import special

Floats = npt.NDArray[np.float64]

DAY_S = 86_400.0
HALF_LIFE_S = 30 * DAY_S
"""Of 7, 14, 30, 90 days and none, the one that predicts best on the InfiniteHBD trace."""
USUAL_RATE = 2e-5
"""Failures per device-hour of a fleet of which nothing is known yet: 419 interruptions in 54 days of 16,384 GPUs (The
Llama 3 Herd of Models, table 5); InfiniteHBD's 4.2 faults per 1000 node-days of 8 GPUs are the same."""
SAME_OUTAGE_S = 600.0
"""Verdicts of one node that follow each other within this time are of one outage."""
LEMON = 0.95
"""A node is called a lemon from this probability on, and from its second failure on."""
COUNTING = frozenset({"fail-stop", "fail-slow"})
COMPONENTS = frozenset({"process", "device", "node", "link"})
_SHAPES = np.geomspace(0.1, 10.0, 41)


class NodeFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A failure that was put down to `node`. `kind`, `component` as in `journal.FailureFound`; `certainty` that it was
    the node's fault, 0 to 1."""

    node: str
    at: float
    kind: str
    component: str
    certainty: float = 1.0
    secondary: bool = False
    job: str = ""
    cause: str = ""

    @property
    def counts(self) -> bool:
        return self.kind in COUNTING and self.component in COMPONENTS and not self.secondary and self.certainty > 0.0


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """A time in which `devices` of a node were at work."""

    node: str
    since: float
    until: float
    devices: int = 1


class NodeHealth(msgspec.Struct, frozen=True, kw_only=True):
    """A node's record. `failures`: outages counted; `weight`: the same, faded and weighed by certainty; `rate`:
    failures per device-hour to be expected (posterior mean); `probability`: that its rate is above the fleet's."""

    node: str
    failures: int
    weight: float
    last: float | None
    device_hours: float
    """Of service, faded."""
    rate: float
    probability: float
    verdicts: tuple[NodeFailure, ...]
    """That count, oldest first."""

    @property
    def lemon(self) -> bool:
        return self.failures >= 2 and self.probability >= LEMON


def node_health(
    verdicts: Iterable[NodeFailure],
    services: Iterable[Service],
    now: float,
    *,
    half_life_s: float = HALF_LIFE_S,
    mended: Mapping[str, float] | None = None,
) -> list[NodeHealth]:
    """All nodes that served or failed, the most probable lemon first.

    `mended`: since when a node is as good as new; what was before does not count for it. Verdicts and service after
    `now` are left out. Raises ValueError for a half-life that is not positive.
    """
    if not half_life_s > 0.0:
        raise ValueError(f"half-life of {half_life_s} s: must be positive")
    fresh = mended or {}
    counted: dict[str, list[NodeFailure]] = {}
    for verdict in sorted(verdicts, key=lambda verdict: (verdict.at, verdict.node)):
        if verdict.counts and fresh.get(verdict.node, verdict.at) <= verdict.at <= now:
            counted.setdefault(verdict.node, []).append(verdict)
    served = list(services)
    names = sorted(counted.keys() | {service.node for service in served})
    row = {name: i for i, name in enumerate(names)}
    outages = {name: _outages(counted.get(name, ())) for name in names}
    hours = _served_hours(served, row, fresh, now, half_life_s)
    every = [(i, o.certainty, o.at) for i, name in enumerate(names) for o in outages[name]]
    where, certainty, at = np.array(every, dtype=np.float64).reshape(-1, 3).T
    faded = certainty * _fade(now - at, half_life_s)
    weights = np.asarray(np.bincount(where.astype(np.intp), faded, minlength=len(names)), dtype=np.float64)
    rates, probabilities = posterior(weights, hours)
    found = [
        NodeHealth(
            node=name,
            failures=len(outages[name]),
            weight=float(weights[i]),
            last=counted[name][-1].at if name in counted else None,
            device_hours=float(hours[i]),
            rate=float(rates[i]),
            probability=float(probabilities[i]),
            verdicts=tuple(counted.get(name, ())),
        )
        for i, name in enumerate(names)
    ]
    return sorted(found, key=lambda node: (-node.probability, -node.weight, node.node))


def posterior(failures: Floats, device_hours: Floats) -> tuple[Floats, Floats]:
    """Expected failures per device-hour, and probability that a node's rate is above that of all others, shapes (n,).

    Gamma-Poisson: a node's rate ~ Gamma(shape a, mean m), so given w failures in e device-hours it is
    Gamma(a + w, rate a / m + e). `m` is the other nodes' rate, with `USUAL_RATE` worth one failure; `a` maximises the
    fleet's marginal likelihood (negative binomial), held near 1 by a log-normal prior while the fleet is small.
    """
    if not len(failures):
        return np.zeros(0), np.zeros(0)
    mean = (failures.sum() - failures + 1.0) / (device_hours.sum() - device_hours + 1.0 / USUAL_RATE)
    a = _SHAPES[:, None]
    expected = mean * device_hours
    likelihood = (
        special.gammaln(a + failures)
        - special.gammaln(a)
        + a * np.log(a / (a + expected))
        + special.xlogy(failures, expected / (a + expected))
    ).sum(axis=1)
    shape = _SHAPES[int(np.argmax(likelihood - 0.5 * np.log(_SHAPES) ** 2))]
    scale = shape / mean + device_hours
    return (shape + failures) / scale, special.gammaincc(shape + failures, mean * scale)


def _served_hours(
    services: Sequence[Service], row: Mapping[str, int], fresh: Mapping[str, float], now: float, half_life_s: float
) -> Floats:
    """(nodes,): device-hours of service, each worth half as much one half-life ago; in whatever order they come."""
    table = np.array(
        [
            (row[one.node], max(one.since, fresh.get(one.node, one.since)), min(one.until, now), one.devices)
            for one in services
        ],
        dtype=np.float64,
    ).reshape(-1, 4)
    where, since, until, devices = table[np.lexsort(table.T)].T
    until = np.maximum(since, until)
    faded_s = half_life_s / np.log(2) * (_fade(now - until, half_life_s) - _fade(now - since, half_life_s))
    hours = np.bincount(where.astype(np.intp), devices * faded_s / 3600.0, minlength=len(row))
    return np.asarray(hours, dtype=np.float64)


def _fade(age_s: Floats, half_life_s: float) -> Floats:
    return np.asarray(0.5 ** (np.maximum(age_s, 0.0) / half_life_s), dtype=np.float64)


def _outages(verdicts: Sequence[NodeFailure]) -> list[NodeFailure]:
    """One verdict for each outage, the most certain; in order of time."""
    outages: list[NodeFailure] = []
    latest = -np.inf
    for verdict in verdicts:
        if verdict.at - latest > SAME_OUTAGE_S:
            outages.append(verdict)
        elif verdict.certainty > outages[-1].certainty:
            outages[-1] = verdict
        latest = verdict.at
    return outages
