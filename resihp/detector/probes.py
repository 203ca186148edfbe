"""Judges probes of devices and links by comparison with their peers and with the past. Pure.

A device has two relative speeds, its rate of matrix products and its memory bandwidth, each divided by the median of
its peers; the lower one counts. A link's speed is relative to the median link of its kind (within a node, or between
nodes). If all devices of a node are slower than in former jobs, the node is slow, unless most nodes are: then the nodes
are not the cause. This module also decides which pairs of ranks measure at the same time, so that no two measured links
share a machine. Never starts a probe. Called by the controller (`resihp.controller.probing`).
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence

import msgspec

from resihp.protocol.messages import Speed, Transfer
from resihp.settings import ProbeLimits

DEFAULT_PROBE_LIMITS = ProbeLimits()
"""Limits for devices and links, unless the job has its own."""
MAX_REFERENCE_LINKS = 4
"""Highest number of reference links that are measured together with a suspected link."""
MIN_PEERS = 2
"""Number of peers that a comparison needs: with fewer, it cannot be decided which device is the slow one."""

MIN_FORMER_JOBS = 3
"""Number of former jobs after which a node's usual speed counts as known."""
MAX_FORMER_JOBS = 9
"""Number of latest former jobs that count: few, so that the speed after a driver update soon is the usual one."""

DOUBT_SHARE = 0.9
"""A device below this share of its peers' speed is in doubt and is measured again: a probe is short, and other work on
the same machine may have disturbed it."""
ALIKE_SHARE = 0.9
"""If the slowest reference device is below this share of the references' median, the references were disturbed, and no
device is judged against them."""
RECHECK_LOOKS = (3, 5)
"""Numbers of measurements of a device in doubt: before it may be found unfit, and after which it is cleared."""
SHARED_LOOKS = (5, 10)
"""As `RECHECK_LOOKS`, while training goes on and other ranks use the same processors: a measurement is then less
reliable, and nothing waits for the verdict."""
SUSPECT_LOOKS = 3
"""Number of measurements of a suspected device on shared processors before a probe may count against it."""

FIRST_RECHECK_S = 5.0
"""Seconds until a device that failed a probe is measured again; doubled after each further failed probe."""
MAX_RECHECK_FACTOR = 10
"""Longest interval between two probes of a device that keeps failing, as a multiple of `recheck_s`."""
MAX_DOUBLINGS = 30

LINK_LOOKS = 3
"""Number of measurements of a link between ranks on shared processors: each of them has to find the link slow."""

Place = tuple[str, str, str]
"""Node name, host name and kind of devices of a node. The node name alone is not enough: other clusters use it, too,
and nodes get other devices."""
Pair = tuple[int, int]
"""Two ranks, the lower one first."""


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """Verdict on a device after a probe."""

    rank: int
    speed: float | None
    """Speed relative to the device's peers or past, 1 is equally fast; None if there was nothing to compare it with."""
    fit: bool
    """Whether the device may get work."""
    evidence: str
    """The measurements behind the verdict, in words."""
    odds: float = 0.0
    """For a suspected device: log odds that it is slow, by this probe alone."""


class JudgedLink(msgspec.Struct, frozen=True, kw_only=True):
    """Verdict on a suspected link after a probe."""

    speed: float | None
    """Speed relative to reference links or to the past, 1 is equally fast; None without a comparison."""
    slow: bool
    evidence: str
    """The measurements behind the verdict, in words."""


class Former(msgspec.Struct, frozen=True, kw_only=True):
    """Speed of a healthy device in a former job, measured before the device got work."""

    place: Place
    job: int
    flops: float
    memory_bytes: float


def usual_speeds(former: Iterable[Former]) -> dict[Place, Speed]:
    """Return the usual speed of a device on each node: the median over the node's latest jobs of the devices' median.

    `former`: measurements of former jobs, the latest job first. A node with fewer than `MIN_FORMER_JOBS` former jobs is
    left out.
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
    """Return, for each node with a known usual speed, the speed of its best device relative to the usual speed, as a
    number and in words.

    The best device counts, because a problem of the node slows all devices of the node. A single slow device is found
    by comparison with its peers.
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
    limits: ProbeLimits = DEFAULT_PROBE_LIMITS,
) -> dict[int, Judged]:
    """Judge the device of each rank by its measured speed, relative to the other ranks and to its own `past` if known.

    `failed`: ranks with a device that could not be measured at all, with the reason; these devices are unfit.
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
        judged[rank] = Judged(rank=rank, speed=speed, fit=speed >= limits.fit, evidence=text)
    return judged


def in_doubt(judged: Mapping[int, Judged]) -> tuple[int, ...]:
    """Return the ranks with a device below `DOUBT_SHARE` of the healthy speed: it has to be measured again."""
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
    limits: ProbeLimits = DEFAULT_PROBE_LIMITS,
    within: tuple[int, int] = RECHECK_LOOKS,
) -> Judged | None:
    """Judge a device in doubt against reference devices; return None if another measurement is needed.

    `own`, `witnesses`: the best of `looks` measurements of the device, and of each reference. The best counts, because
    other work on a machine only makes a device look slower. While the references differ from each other, they were
    disturbed and no verdict is possible; after the last measurement the device is then cleared, unless it is far below
    the slowest reference. `shared`: other ranks use the same processors, so that many measurements are needed.
    `within`: numbers of measurements before a device may be found unfit, and after which it is judged anyway.
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
        sure += [comparison for comparison in slowest if comparison[0] < limits.fit]
    if sure and min(sure)[0] < limits.fit:
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
    """Return the median of the references' speeds; 0 for a measure in which the references differ too much."""
    return Speed(
        flops=median.flops if min(witness.flops for witness in witnesses) >= ALIKE_SHARE * median.flops else 0.0,
        memory_bytes=median.memory_bytes
        if min(witness.memory_bytes for witness in witnesses) >= ALIKE_SHARE * median.memory_bytes
        else 0.0,
    )


def again_in_s(times_unfit: int, recheck_s: float) -> float:
    """Return the seconds until the next probe of a device that failed its last `times_unfit` probes.

    The interval begins at `FIRST_RECHECK_S`, doubles with each failure, and ends at `MAX_RECHECK_FACTOR` * `recheck_s`.
    """
    doublings = min(max(times_unfit - 1, 0), MAX_DOUBLINGS)
    return min(min(FIRST_RECHECK_S, recheck_s) * 2.0**doublings, MAX_RECHECK_FACTOR * recheck_s)


def best(first: Speed, second: Speed) -> Speed:
    """Combine two measurements of one device: the higher value of each measure."""
    return Speed(
        flops=max(first.flops, second.flops),
        memory_bytes=max(first.memory_bytes, second.memory_bytes),
        hardware=first.hardware or second.hardware,
    )


def in_turns(ranks: Iterable[int], machines: Mapping[int, str], shared: Container[int]) -> list[tuple[int, ...]]:
    """Return groups of ranks; the ranks of a group are measured at the same time, one group after the other.

    Ranks in `shared` use the same processors as other ranks of their machine: of these, each group has at most one per
    machine. All other ranks are in the first group.
    """
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
    """Return the median of sorted values without `value`. No sort is needed, because there are thousands of devices."""
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
    """Return the seconds of a transfer over each measured link: the mean of the times that both ranks measured."""
    seconds: dict[Pair, list[float]] = {}
    for rank, transfers in answers.items():
        for transfer in transfers:
            if transfer.seconds > 0.0:
                seconds.setdefault(_pair(rank, transfer.peer), []).append(transfer.seconds)
    return {pair: statistics.mean(ends) for pair, ends in seconds.items()}


def judge_links(times: Mapping[Pair, float], nodes: Mapping[int, str]) -> dict[Pair, float]:
    """Return the speed of each measured link relative to the median link of its kind.

    There are two kinds: links within a node, and links between nodes. `times`: seconds of a transfer. Links of a kind
    with too few measurements are left out.
    """
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
    limits: ProbeLimits = DEFAULT_PROBE_LIMITS,
) -> JudgedLink:
    """Judge a suspected link against reference links (`beside`), or, without references, against the past.

    `times`: seconds of a transfer over the link and over each reference. `past`: seconds at the job's start, of the
    link itself if known, else of its kind. The lower limit `link_fit` applies to a single reference, and to the
    past, which was measured with all ranks parked while other ranks train now.
    """
    within = _within(link, nodes)
    others = [seconds for pair, seconds in times.items() if pair != link and _within(pair, nodes) == within]
    if others:
        share = statistics.median(others) / times[link]
        those = "another link's" if len(others) == 1 else f"{len(others)} other links'"
        evidence = f"transfers at {share:.0%} of {those}"
        least = limits.link_confirmed if len(others) > 1 else limits.link_fit
        return JudgedLink(speed=share, slow=share < least, evidence=evidence)
    alike = [seconds for pair, seconds in past.items() if _within(pair, nodes) == within]
    if alike:
        share = past.get(link, statistics.median(alike)) / times[link]
        evidence = f"transfers at {share:.0%} of those at the start"
        return JudgedLink(speed=share, slow=share < limits.link_fit, evidence=evidence)
    return JudgedLink(speed=None, slow=False, evidence="nothing to compare it with")


def judge_link_again(looks: Sequence[JudgedLink], *, shared: bool) -> JudgedLink | None:
    """Return the median of the verdicts `looks`, each of which found the link slow; None if another measurement is
    needed.

    One verdict suffices unless other ranks use the same processors (`shared`). A measurement is short, so that the
    operating system may favour the reference link during all of it: on two busy cores, a healthy link had half the
    reference's speed or less in one measurement of eight.
    """
    if not shared:
        return looks[-1]
    if len(looks) < LINK_LOOKS:
        return None
    middle = sorted(looks, key=lambda look: look.speed or 0.0)[len(looks) // 2]
    return msgspec.structs.replace(middle, evidence=f"{middle.evidence}, slow in each of {len(looks)} looks")


def beside(link: Pair, ranks: Iterable[int], nodes: Mapping[int, str]) -> tuple[Pair, ...]:
    """Return the links that are measured at the same time: a suspected link, and reference links of its kind.

    No two references share a node, and no reference uses a node of the suspected link, because the cause may slow
    everything that this node sends.
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
    """Return rounds of measurements over a ring of `ranks`: each rank measures the links to both of its neighbours.

    The pairs of a round are disjoint; there are two rounds, or three for an odd number of ranks. If a rank's end is
    slow, both of its links are slow; if a link itself is slow, only that link is.
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
