"""Are nodes that fail too often found, and nobody else? `python -m benchmarks.lemons`, half a minute on one core.

Fleets are drawn that know nothing of how they are judged: N nodes of 8 GPUs of which each fails with its node's rate,
at any time, alone; some nodes, the lemons, at `x` times the rate of all others (`even`: all their devices; `one
board`: as many failures in all, what is too many of one device). `rates differ`: each ordinary node has a rate of its
own, from a Gamma distribution of shape 2. `mixed`: of all failures, 22 % are deaths of processes, of which nobody knows
why (of Llama 3's 419 interruptions 78 % were put down to hardware). The rate is Llama 3's for every ordinary node, the
time half a year.

The first table has ten draws of what the detector must show, each of 4 fleets of 500 nodes with 10 lemons. The second
has the mean of many, per 40 lemons and per 2,000 nodes, with its standard error, and what no rule can exceed that sees
how often each node failed and is wrong about one of 2,000 nodes. Then what fleet managers bring along, by hand; and the
time that it takes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy import stats

from resihp.detector.lemons import USUAL_RATE, NodeFailure, NodeHealth, node_health
from resihp.detector.service_hours import DAY_S, Service

GPUS = 8
NODES, LEMONS, DAYS = 500, 10, 182
NOW = DAYS * DAY_S
PROCESSES = 0.22
"""Share of failures of which there is no evidence against hardware, in a mixed fleet."""


@dataclass(frozen=True)
class Kind:
    """A kind of fleet to draw; lemons are its first nodes."""

    times: float
    how: str = "even"
    lemons: int = LEMONS
    nodes: int = NODES
    days: float = DAYS
    differ: bool = False
    mixed: bool = False


def drawn(kind: Kind, rng: np.random.Generator) -> list[NodeFailure]:
    """The failures of one fleet."""
    rates = np.full((kind.nodes, GPUS), USUAL_RATE)
    if kind.differ:
        rates *= rng.gamma(2.0, 0.5, kind.nodes)[:, None]
    if kind.how == "even":
        rates[: kind.lemons] = kind.times * USUAL_RATE
    else:
        bad = rng.integers(0, GPUS, kind.lemons)
        rates[np.arange(kind.lemons), bad] += (kind.times - 1.0) * GPUS * USUAL_RATE
    numbers = rng.poisson(rates * 24.0 * kind.days)
    return [
        NodeFailure(
            node=name(int(node)),
            device=int(device),
            at=float(at),
            kind="fail-stop",
            component="process" if kind.mixed and rng.random() < PROCESSES else "device",
        )
        for node, device in np.argwhere(numbers)
        for at in rng.uniform(0.0, kind.days * DAY_S, numbers[node, device])
    ]


def name(node: int) -> str:
    return f"n{node:04}"


def services(nodes: int = NODES, days: float = DAYS, each_days: float | None = None) -> list[Service]:
    """All nodes at work all the time, in jobs of so many days."""
    each = days if each_days is None else each_days
    return [
        Service(node=name(node), since=begin * DAY_S, until=min(begin + each, days) * DAY_S, devices=GPUS)
        for begin in np.arange(0.0, days, each)
        for node in range(nodes)
    ]


def judged(kind: Kind, seed: Sequence[int]) -> tuple[int, int]:
    """Lemons found, and other nodes that were called lemons."""
    failures = drawn(kind, np.random.default_rng(seed))
    called = [
        one.node for one in node_health(failures, services(kind.nodes, kind.days), kind.days * DAY_S) if one.lemon
    ]
    found = sum(int(node[1:]) < kind.lemons for node in called)
    return found, len(called) - found


def bound(times: float) -> float:
    """Of 40 lemons, how many are found at most, on average, if 1 of 2,000 nodes may be called one wrongly.

    By counts of the whole time, against known rates, as Neyman and Pearson have it: with a coin where one count more or
    less is too much.
    """
    usual = USUAL_RATE * 24.0 * GPUS * DAYS
    ordinary = 2000 - 4 * LEMONS
    least = next(count for count in range(1000) if ordinary * stats.poisson.sf(count, usual) <= 1.0) + 1
    sure = ordinary * stats.poisson.sf(least - 1, usual)
    often = (1.0 - sure) / (ordinary * stats.poisson.pmf(least - 1, usual))
    return float(
        40.0 * (stats.poisson.sf(least - 1, times * usual) + often * stats.poisson.pmf(least - 1, times * usual))
    )


KINDS = {
    "10 times, even": Kind(10.0),
    "20 times, even": Kind(20.0),
    "5 times, even": Kind(5.0),
    "10 times, one board": Kind(10.0, how="one board"),
    "20 times, one board": Kind(20.0, how="one board"),
    "10 times, mixed": Kind(10.0, mixed=True),
    "20 times, mixed": Kind(20.0, mixed=True),
    "20 times, rates differ": Kind(20.0, differ=True),
    "no lemons": Kind(1.0, lemons=0),
    "no lemons, rates differ": Kind(1.0, lemons=0, differ=True),
    "no lemons, after 20 days": Kind(1.0, lemons=0, days=20.0),
    "10 times, 2,048 nodes, 40 lemons": Kind(10.0, nodes=2048, lemons=40),
    "20 times, 64 nodes, 2 lemons": Kind(20.0, nodes=64, lemons=2),
}


# --- by hand --------------------------------------------------------------------------------------------------------


def failures(
    node: str, days: Sequence[float], device: int | None = None, component: str = "device"
) -> list[NodeFailure]:
    """Of a node, at these days of the half-year."""
    return [
        NodeFailure(node=node, device=device, at=day * DAY_S, kind="fail-stop", component=component) for day in days
    ]


def by_hand() -> list[tuple[str, str]]:
    """(what happened, what is said of it)."""
    fleet, usual = services(), drawn(Kind(1.0, lemons=0), np.random.default_rng(7))
    usual = [one for one in usual if one.node not in ("n0001", "n0002")]
    weekly = list(np.arange(10.0, 80.0, 9.0))

    def said(ones: list[NodeFailure], mended: dict[str, float] | None = None) -> str:
        return told(node_health(usual + ones, fleet, NOW, mended=mended), "n0001")

    two, young = failures("n0001", [0.5, 1.9]), services(days=2.0)
    busy = [one for node in range(NODES) for one in failures(name(node), [node % 7 + 3.0 + 9.0 * k for k in range(19)])]
    return [
        ("8 failures of different devices, 9 days apart", said(failures("n0001", weekly))),
        ("the same, of device 3 alone", said(failures("n0001", weekly, 3))),
        ("the same, and device 3 replaced on day 90", said(failures("n0001", weekly, 3), {"n0001:3": 90 * DAY_S})),
        ("the same, and the node repaired on day 90", said(failures("n0001", weekly), {"n0001": 90 * DAY_S})),
        (
            "the same, and 6 more failures after the repair",
            said(failures("n0001", [*weekly, 95.0, 110.0, 121.0, 140.0, 160.0, 170.0]), {"n0001": 90 * DAY_S}),
        ),
        ("12 failures of device 3 in one week", said(failures("n0001", np.arange(12) / 2.0 + 100.0, 3))),
        ("12 failures of device 3 within five hours", said(failures("n0001", np.arange(12) / 60.0 + 100.0, 3))),
        ("6 failures of device 3 a week, for 5 weeks", said(failures("n0001", np.arange(30) * 1.2 + 100.0, 3))),
        ("9 deaths of processes, of which nobody knows why", said(failures("n0001", weekly, 3, "process"))),
        ("2 failures in a fleet of 2 days", told(node_health(two, young, 2 * DAY_S), "n0001")),
        ("everybody fails every 9 days", told(node_health(busy, fleet, NOW), "n0001")),
    ]  # fmt: skip


def told(found: Sequence[NodeHealth], node: str) -> str:
    one = next(each for each in found if each.node == node)
    lemon = "lemon" if one.tally.lemon else "no lemon"
    devices = [f"device {device} {one.devices[device].told}: lemon" for device in one.lemon_devices]
    return "; ".join([f"{one.tally.told}: {lemon}", *devices])


# --- output ---------------------------------------------------------------------------------------------------------


def timed() -> list[tuple[str, float]]:
    """Seconds to judge fleets."""
    found = []
    for nodes, days, each_days in ((500, 182.0, None), (2048, 3 * 365.0, None), (2048, 3 * 365.0, 14.0)):
        told = drawn(Kind(10.0, nodes=nodes, days=days), np.random.default_rng(3))
        served = services(nodes, days, each_days)
        began = time.perf_counter()
        node_health(told, served, days * DAY_S)
        words = f"{nodes:,} nodes, {days:.0f} days: {len(told):,} verdicts, {len(served):,} services"
        found.append((words, time.perf_counter() - began))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--fleets", type=int, default=100, help="of each kind in the second table")
    fleets = parser.parse_args().fleets
    console = Console(highlight=False)

    must = Table("lemons fail", "found of 40", "false of 2,000 nodes", title="ten draws of 4 fleets")
    for words in ("10 times, even", "20 times, even"):
        draws = np.array([judged(KINDS[words], (2025, seed)) for seed in range(40)]).reshape(10, 4, 2).sum(axis=1)
        must.add_row(words, *(" ".join(map(str, column)) for column in draws.T))
    console.print(must)

    many = Table("fleet", "found of 40", "at most", "false of 2,000 nodes", title=f"mean of {fleets} fleets")
    for words, kind in KINDS.items():
        each = np.array([judged(kind, (1, seed)) for seed in range(fleets)], dtype=np.float64)
        scale = np.array([40.0 / max(kind.lemons, 1), 2000.0 / kind.nodes])
        mean, error = scale * each.mean(axis=0), scale * each.std(axis=0) / np.sqrt(fleets)
        found = f"{mean[0]:.1f} ± {error[0]:.1f}" if kind.lemons else "-"
        comparable = kind == Kind(kind.times) and kind.lemons
        most = f"{bound(kind.times):.1f}" if comparable else ""
        many.add_row(words, found, most, f"{mean[1]:.2f} ± {error[1]:.2f}")
    console.print(many)

    hand = Table("what happened to a node", "what is said of it", title="by hand")
    for row in by_hand():
        hand.add_row(*row)
    console.print(hand)

    for words, seconds in timed():
        console.print(f"{words}: {seconds:.2f} s")


if __name__ == "__main__":
    main()
