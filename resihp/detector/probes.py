"""Judges probes of devices and links against their peers and against the past. Pure.

A device's speed is the lower of its matrix-product rate and its memory bandwidth, relative to the median of its peers;
a link's speed is relative to the median link of its kind. A node all of whose devices are slower than in former jobs is
slow as well, unless most nodes are: then the nodes are not the cause. This module also decides which pairs measure
when, so that each link has the machine to itself. Called by the controller (`resihp.controller.probing`).
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence

import msgspec

from resihp.protocol.messages import Speed, Transfer
from resihp.settings import Thresholds

DEFAULT_THRESHOLDS = Thresholds()
"""Thresholds for devices and links, unless the job has its own."""
MAX_REFERENCE_LINKS = 4
"""Highest number of reference links that are measured together with a suspected link."""
MIN_PEERS = 2
"""Number of peers that a comparison needs: with fewer, it is undecidable which device is the odd one out."""

MIN_FORMER_JOBS = 3
"""Number of former jobs after which a node's usual speed counts as known."""
MAX_FORMER_JOBS = 9
"""Number of former jobs that count, the latest ones: a few jobs after a driver update, its speed is the usual one."""

DOUBT_SHARE = 0.9
"""A device below this share of its peers' speed is in doubt and is measured again: one probe is short, and may have run
together with other work on the same machine."""
ALIKE_SHARE = 0.9
"""If the slowest reference device reaches less than this share of their median, the references are disturbed
themselves, and nothing is judged against them."""
RECHECK_LOOKS = (3, 5)
"""Measurements of a device in doubt: before it may be found unfit, and after which it is cleared in any case."""
SHARED_LOOKS = (5, 10)
"""The same while training goes on beside the probe, on processors that others share: there a measurement is less
reliable, and nothing waits for the verdict."""
SUSPECT_LOOKS = 3
"""Measurements of a suspect on shared processors before a probe may count against it."""

FIRST_RECHECK_S = 5.0
"""Seconds until a device that a probe set aside is measured again; doubled after each further failed probe."""
MAX_RECHECK_FACTOR = 10
"""Longest pause between two of these probes, as a multiple of `recheck_s`."""
MAX_DOUBLINGS = 30

LINK_LOOKS = 3
"""Measurements of a link whose ranks share processors with others: all of them have to find the link slow."""

Place = tuple[str, str, str]
"""Node name, host name, and kind of devices: node names recur in other clusters, and nodes are refitted."""
Pair = tuple[int, int]
"""Two ranks, the lower one first."""


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """Verdict of one device's probe. `speed`: 1 is as fast as its peers; None without anything to compare it with.
    `odds`: for a suspect, the log odds that it is slow, by this probe alone."""

    rank: int
    speed: float | None
    fit: bool
    evidence: str
    odds: float = 0.0


class JudgedLink(msgspec.Struct, frozen=True, kw_only=True):
    """Verdict on a suspected link. `speed`: 1 is as fast as others; None without anything to compare it with."""

    speed: float | None
    slow: bool
    evidence: str


class Former(msgspec.Struct, frozen=True, kw_only=True):
    """Speed of a healthy device in a former job, measured before it was given work."""

    place: Place
    job: int
    flops: float
    memory_bytes: float


def usual_speeds(former: Iterable[Former]) -> dict[Place, Speed]:
    """Return the usual speed of each node's devices: the median over its latest jobs of the median over its devices.

    `former`: the latest first. A node that was in fewer than `MIN_FORMER_JOBS` jobs is left out.
    """
    jobs: dict[Place, dict[int, list[Speed]]] = {}
    for former_speed in former:
        of_place = jobs.setdefault(former_speed.place, {})
        if former_speed.job in of_place or len(of_place) < MAX_FORMER_JOBS:
            speed = Speed(flops=former_speed.flops, memory_bytes=former_speed.memory_bytes)
            of_place.setdefault(former_speed.job, []).append(speed)
    return {
        place: _median([_median(speeds) for speeds in of_place.values()])
        for place, of_place in jobs.items()
        if len(of_place) >= MIN_FORMER_JOBS
    }


def judge_nodes(
    speeds: Mapping[int, Speed], places: Mapping[int, Place], usual: Mapping[Place, Speed]
) -> dict[str, tuple[float, str]]:
    """Return, for each node with a known usual speed, the share of it that its best device reaches, and that in words.

    The best device counts, because all devices of a node share a problem of the node; a device that is slow alone
    shows against its peers.
    """
    shares: dict[str, tuple[float, str]] = {}
    for rank, own in speeds.items():
        place = places[rank]
        parts = _against(own, usual[place], "of this node's speed in former jobs") if place in usual else []
        if parts and min(parts) > shares.get(place[0], (0.0, "")):
            shares[place[0]] = min(parts)
    return shares


def judge_devices(
    speeds: Mapping[int, Speed],
    failed: Mapping[int, str],
    past: Mapping[int, Speed] | None = None,
    wanted: Thresholds = DEFAULT_THRESHOLDS,
) -> dict[int, Judged]:
    """Judge each rank's probe against the other ranks, and against the `past` of its own device where that is known.

    `failed`: ranks whose device could not be measured at all, with the reason.
    """
    past = past or {}
    judged = {rank: Judged(rank=rank, speed=None, fit=False, evidence=why) for rank, why in failed.items()}
    flops = sorted(speed.flops for speed in speeds.values())
    memory_bytes = sorted(speed.memory_bytes for speed in speeds.values())
    for rank, own in speeds.items():
        parts = []
        if len(speeds) > MIN_PEERS:
            peers = Speed(
                flops=_median_without(flops, own.flops), memory_bytes=_median_without(memory_bytes, own.memory_bytes)
            )
            parts += _against(own, peers, "of its peers")
        if rank in past:
            parts += _against(own, past[rank], "of its own past")
        if not parts:
            judged[rank] = Judged(rank=rank, speed=None, fit=True, evidence="nothing to compare it with")
            continue
        speed, text = min(parts)
        judged[rank] = Judged(rank=rank, speed=speed, fit=speed >= wanted.fit, evidence=text)
    return judged


def in_doubt(judged: Mapping[int, Judged]) -> tuple[int, ...]:
    """Return the devices that were slower than their peers, or nearly so: they have to be measured again first."""
    return tuple(
        sorted(rank for rank, verdict in judged.items() if verdict.speed is not None and verdict.speed < DOUBT_SHARE)
    )


def judge_again(
    rank: int,
    own: Speed,
    witnesses: Sequence[Speed],
    looks: int,
    *,
    shared: bool = True,
    wanted: Thresholds = DEFAULT_THRESHOLDS,
    within: tuple[int, int] = RECHECK_LOOKS,
) -> Judged | None:
    """Judge a device in doubt against reference devices (`witnesses`), by the best of equally many measurements of
    each.

    Returns None if another measurement is needed. Other work only makes a device look slower than it is: the best of
    all measurements comes closest, and once the references agree, their speed is what they can do. Until then nothing
    is known, and in the end the device is cleared, unless it is far below the slowest reference. `shared`: others use
    the same processors, which takes many measurements. `within`: measurements before a device may be found unfit, and
    after which it is judged in any case.
    """
    peers = _median(witnesses)
    against_all = _against(own, peers, "of its peers")
    sure = _against(own, _where_alike(witnesses, peers), "of its peers")
    least, most = within
    if not shared or looks >= SHARED_LOOKS[1]:
        flops, memory_bytes = (
            min(witness.flops for witness in witnesses),
            min(witness.memory_bytes for witness in witnesses),
        )
        slowest = _against(own, Speed(flops=flops, memory_bytes=memory_bytes), "of its slowest peer")
        sure += [comparison for comparison in slowest if comparison[0] < wanted.fit]
    if sure and min(sure)[0] < wanted.fit:
        speed, text = min(sure)
        if looks < least:
            return None
        return Judged(rank=rank, speed=speed, fit=False, evidence=f"{text}, the best of {looks} more looks")
    comparable = len(sure) >= len(against_all)
    clears = comparable and all(share >= DOUBT_SHARE for share, _ in sure)
    if not clears and looks < (least if comparable else most):
        return None
    if not against_all:
        return Judged(rank=rank, speed=None, fit=True, evidence="nothing to compare it with")
    speed, text = min(against_all)
    return Judged(rank=rank, speed=speed, fit=True, evidence=text)


def _where_alike(witnesses: Sequence[Speed], median: Speed) -> Speed:
    """Return the median of the references; 0 for a measure in which disturbed references differ."""
    return Speed(
        flops=median.flops if min(witness.flops for witness in witnesses) >= ALIKE_SHARE * median.flops else 0.0,
        memory_bytes=median.memory_bytes
        if min(witness.memory_bytes for witness in witnesses) >= ALIKE_SHARE * median.memory_bytes
        else 0.0,
    )


def again_in_s(times_unfit: int, recheck_s: float) -> float:
    """Return the seconds until a device is measured again that was unfit in this many probes in a row: short at first,
    then doubled each time."""
    doublings = min(max(times_unfit - 1, 0), MAX_DOUBLINGS)
    return min(min(FIRST_RECHECK_S, recheck_s) * 2.0**doublings, MAX_RECHECK_FACTOR * recheck_s)


def best(first: Speed, second: Speed) -> Speed:
    """Return the better value of both measurements of one device."""
    return Speed(
        flops=max(first.flops, second.flops),
        memory_bytes=max(first.memory_bytes, second.memory_bytes),
        hardware=first.hardware or second.hardware,
    )


def in_turns(ranks: Iterable[int], machines: Mapping[int, str], shared: Container[int]) -> list[tuple[int, ...]]:
    """Return groups of ranks to be measured together: all at once, except that ranks which share their machine's
    processors take turns."""
    turns: list[list[int]] = []
    used: Counter[str] = Counter()
    for rank in ranks:
        turn = used[machines[rank]] if rank in shared else 0
        if rank in shared:
            used[machines[rank]] += 1
        if turn == len(turns):
            turns.append([])
        turns[turn].append(rank)
    return [tuple(turn) for turn in turns]


def _median(speeds: Sequence[Speed]) -> Speed:
    return Speed(
        flops=statistics.median(speed.flops for speed in speeds),
        memory_bytes=statistics.median(speed.memory_bytes for speed in speeds),
    )


def _median_without(ascending: Sequence[float], value: float) -> float:
    """Return the median of all values but this one, without a new sort for each of thousands of devices."""
    skipped, others_count = bisect_left(ascending, value), len(ascending) - 1
    low, high = (ascending[i + (i >= skipped)] for i in ((others_count - 1) // 2, others_count // 2))
    return (low + high) / 2


def _against(own: Speed, reference: Speed, phrase: str) -> list[tuple[float, str]]:
    comparisons = []
    if reference.flops > 0.0:
        share = own.flops / reference.flops
        comparisons.append((share, f"matrix products at {share:.0%} {phrase}, {own.flops / 1e9:.4g} GFLOP/s"))
    if reference.memory_bytes > 0.0:
        share = own.memory_bytes / reference.memory_bytes
        comparisons.append((share, f"memory at {share:.0%} {phrase}, {own.memory_bytes / 1e9:.4g} GB/s"))
    return comparisons


def link_seconds(answers: Mapping[int, Sequence[Transfer]]) -> dict[Pair, float]:
    """Return the seconds of each measured link: the mean of its two ends."""
    seconds: dict[Pair, list[float]] = {}
    for rank, transfers in answers.items():
        for transfer in transfers:
            if transfer.seconds > 0.0:
                seconds.setdefault(_pair(rank, transfer.peer), []).append(transfer.seconds)
    return {pair: statistics.mean(ends) for pair, ends in seconds.items()}


def judge_links(times: Mapping[Pair, float], nodes: Mapping[int, str]) -> dict[Pair, float]:
    """Return the speed of each measured link relative to the median of its kind: within a node, or between two."""
    kinds: dict[bool, list[float]] = {}
    for (a, b), time in times.items():
        kinds.setdefault(nodes.get(a) == nodes.get(b), []).append(time)
    medians = {kind: statistics.median(seconds) for kind, seconds in kinds.items() if len(seconds) > MIN_PEERS}
    return {
        (a, b): medians[kind] / time
        for (a, b), time in times.items()
        if (kind := nodes.get(a) == nodes.get(b)) in medians
    }


def judge_link(
    link: Pair,
    times: Mapping[Pair, float],
    nodes: Mapping[int, str],
    past: Mapping[Pair, float],
    wanted: Thresholds = DEFAULT_THRESHOLDS,
) -> JudgedLink:
    """Judge a suspected link against reference links (`beside`); without any, against its past or that of its kind.

    Against a single reference the threshold is `link_fit`, as against the past, which was measured with all ranks
    parked: now others train at the same time.
    """
    within = _within(link, nodes)
    others = [seconds for pair, seconds in times.items() if pair != link and _within(pair, nodes) == within]
    if others:
        share = statistics.median(others) / times[link]
        those = "another link's" if len(others) == 1 else f"{len(others)} other links'"
        evidence = f"transfers at {share:.0%} of {those}"
        least = wanted.link_confirmed if len(others) > 1 else wanted.link_fit
        return JudgedLink(speed=share, slow=share < least, evidence=evidence)
    alike = [seconds for pair, seconds in past.items() if _within(pair, nodes) == within]
    if alike:
        share = past.get(link, statistics.median(alike)) / times[link]
        evidence = f"transfers at {share:.0%} of those at the start"
        return JudgedLink(speed=share, slow=share < wanted.link_fit, evidence=evidence)
    return JudgedLink(speed=None, slow=False, evidence="nothing to compare it with")


def judge_link_again(looks: Sequence[JudgedLink], *, shared: bool) -> JudgedLink | None:
    """Return the median of these verdicts, each of which found the link slow; None if another measurement is needed.

    A measurement is short. Where others share the processors (`shared`), the operating system may favour the reference
    for all of it, and a healthy link shows half of that speed or less: in one measurement of eight on two busy cores.
    """
    if not shared:
        return looks[-1]
    if len(looks) < LINK_LOOKS:
        return None
    middle = sorted(looks, key=lambda look: look.speed or 0.0)[len(looks) // 2]
    return msgspec.structs.replace(middle, evidence=f"{middle.evidence}, slow in each of {len(looks)} looks")


def beside(link: Pair, ranks: Iterable[int], nodes: Mapping[int, str]) -> tuple[Pair, ...]:
    """Return one round of measurements: a suspected link, and reference links of its kind.

    Each reference has its nodes to itself and none on a node of the suspected link, because whatever slows that link
    may slow all that its nodes send.
    """
    own = {nodes[rank] for rank in link}
    of_node: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        if nodes[rank] not in own:
            of_node.setdefault(nodes[rank], []).append(rank)
    if _within(link, nodes):
        pairs = [(node_ranks[0], node_ranks[1]) for node_ranks in of_node.values() if len(node_ranks) > 1]
    else:
        first = [node_ranks[0] for node_ranks in of_node.values()]
        pairs = list(zip(first[::2], first[1::2], strict=False))
    return (link, *(_pair(*pair) for pair in pairs[:MAX_REFERENCE_LINKS]))


def _within(pair: Pair, nodes: Mapping[int, str]) -> bool:
    return nodes[pair[0]] == nodes[pair[1]]


def ring(ranks: Sequence[int]) -> tuple[tuple[Pair, ...], ...]:
    """Return rounds of disjoint pairs in which each rank meets both neighbours: two rounds, or three for an odd number.

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
