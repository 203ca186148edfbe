"""What probes of devices and links say: each compared with its peers, and with what it did before. Pure.

A device's speed is the smaller of what its matrix products and its memory reach, against the median of its peers; a
link's, how fast it is against the median link of its kind. Which pairs measure when, so that each link has the machine
to itself, is decided here too. Called by the controller (`resihp.controller.examination`).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import msgspec

from resihp.protocol.messages import Speed, Transfer

FIT = 0.8
"""A device that reaches less than this of its peers, or of its own past, is not fit to be learnt as healthy."""
LINK_FIT = 0.6
"""The same for links, whose times scatter more."""
FEWEST_PEERS = 2
"""Fewer peers cannot tell which of them is odd."""

Pair = tuple[int, int]
"""Two ranks, the lower one first."""


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """One device's probe. `speed`: 1 as fast as its peers; None where there is nothing to compare with."""

    rank: int
    speed: float | None
    fit: bool
    evidence: str


def judge_devices(
    found: Mapping[int, Speed], failed: Mapping[int, str], past: Mapping[int, Speed] | None = None
) -> dict[int, Judged]:
    """Each rank's probe against the others', and against the `past` of its own device where that is known.

    `failed`: ranks whose device could not even be measured, and why.
    """
    past = past or {}
    judged = {rank: Judged(rank=rank, speed=None, fit=False, evidence=why) for rank, why in failed.items()}
    for rank, own in found.items():
        others = [speed for other, speed in found.items() if other != rank]
        parts = []
        if len(others) >= FEWEST_PEERS:
            parts += _against(own, _median(others), "of its peers")
        if rank in past:
            parts += _against(own, past[rank], "of its own past")
        if not parts:
            judged[rank] = Judged(rank=rank, speed=None, fit=True, evidence="nothing to compare it with")
            continue
        speed, text = min(parts)
        judged[rank] = Judged(rank=rank, speed=speed, fit=speed >= FIT, evidence=text)
    return judged


def _median(speeds: Sequence[Speed]) -> Speed:
    return Speed(
        flops=statistics.median(speed.flops for speed in speeds),
        memory_bytes=statistics.median(speed.memory_bytes for speed in speeds),
    )


def _against(own: Speed, other: Speed, of: str) -> list[tuple[float, str]]:
    found = []
    if other.flops > 0.0:
        share = own.flops / other.flops
        found.append((share, f"matrix products at {share:.0%} {of}, {own.flops / 1e9:.4g} GFLOP/s"))
    if other.memory_bytes > 0.0:
        share = own.memory_bytes / other.memory_bytes
        found.append((share, f"memory at {share:.0%} {of}, {own.memory_bytes / 1e9:.4g} GB/s"))
    return found


def judge_links(found: Mapping[int, Sequence[Transfer]], nodes: Mapping[int, str]) -> dict[Pair, float]:
    """Speed of each measured link against the median of its kind: inside a node, or between two."""
    seconds: dict[Pair, list[float]] = {}
    for rank, transfers in found.items():
        for transfer in transfers:
            if transfer.seconds > 0.0:
                pair = (min(rank, transfer.peer), max(rank, transfer.peer))
                seconds.setdefault(pair, []).append(transfer.seconds)
    times = {pair: statistics.median(ends) for pair, ends in seconds.items()}
    kinds: dict[bool, list[float]] = {}
    for (a, b), time in times.items():
        kinds.setdefault(nodes.get(a) == nodes.get(b), []).append(time)
    medians = {kind: statistics.median(of) for kind, of in kinds.items() if len(of) > FEWEST_PEERS}
    return {
        (a, b): medians[kind] / time
        for (a, b), time in times.items()
        if (kind := nodes.get(a) == nodes.get(b)) in medians
    }


def ring(ranks: Sequence[int]) -> tuple[tuple[Pair, ...], ...]:
    """Rounds of disjoint pairs in which everybody meets both neighbours: two, or three for an odd number of ranks.

    A rank whose own end is bad shows on both of its links, a link that is bad by itself on one.
    """
    order = sorted(ranks)
    if len(order) < 2:
        return ()
    if len(order) == 2:
        return ((_pair(*order),),)
    edges = [_pair(order[i], order[(i + 1) % len(order)]) for i in range(len(order))]
    even, odd = tuple(edges[: len(order) - len(order) % 2 : 2]), tuple(edges[1::2])
    closing = (edges[-1],) if len(order) % 2 else ()
    return tuple(pairs for pairs in (even, odd, closing) if pairs)


def _pair(a: int, b: int) -> Pair:
    return (a, b) if a < b else (b, a)
