"""What probes of devices and links say: each compared with its peers, and with what it did before. Pure.

A device's speed is the smaller of what its matrix products and its memory reach, against the median of its peers; a
link's, how fast it is against the median link of its kind. A node all of whose devices are slower than they were in
former jobs is slow as well, unless most nodes are: then it is not the nodes. Which pairs measure when, so that each
link has the machine to itself, is decided here too. Called by the controller (`resihp.controller.fail_slow.probing`).
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence

import msgspec

from resihp.protocol.messages import Speed, Transfer
from resihp.settings import Thresholds

USUAL = Thresholds()
"""What devices and links are judged by, unless the job has thresholds of its own."""
MOST_WITNESSES = 4
"""Links that are measured beside one under suspicion."""
FEWEST_PEERS = 2
"""Fewer peers cannot tell which of them is odd."""

FEWEST_JOBS = 3
"""Former jobs that it takes to know what a node usually gives."""
LATEST_JOBS = 9
"""Former jobs that count, the latest: a new driver is what is usual after a few."""

NEAR = 0.9
"""A device that reaches less than this of its peers is in doubt and measured again: one probe is short, and may have
met others at work on the same machine."""
ALIKE = 0.9
"""Witnesses of which one reaches less than this of their median are disturbed themselves: nobody is judged by them."""
LOOKS = (3, 5)
"""At a device in doubt: before it is found unfit, and after which the doubt is in its favour."""
SHARED_LOOKS = (5, 10)
"""The same while training goes on beside it, on processors that others share: there a look tells less, and nobody waits
for the verdict."""
SUSPECT_LOOKS = 3
"""At a suspect on shared processors, before a probe says anything against it."""

AGAIN_S = 5.0
"""How soon a device that a probe set aside is measured again; after each further one in twice the time."""
RARELY = 10
"""So many times `recheck_s` at most lie between two of these probes."""
MOST_DOUBLINGS = 30

LINK_LOOKS = 3
"""At a link between ranks that share their machine's processors with others: each of them has to find it slow."""

Place = tuple[str, str, str]
"""A node, its host's name, and what its devices are: names of nodes recur in other clusters, and nodes are refitted."""
Pair = tuple[int, int]
"""Two ranks, the lower one first."""


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """One device's probe. `speed`: 1 as fast as its peers; None where there is nothing to compare with. `odds`: of one
    under suspicion, the logarithm of those that it is slow, by this probe alone."""

    rank: int
    speed: float | None
    fit: bool
    evidence: str
    odds: float = 0.0


class JudgedLink(msgspec.Struct, frozen=True, kw_only=True):
    """A link under suspicion, measured. `speed`: 1 as fast as others; None where there is nothing to compare with."""

    speed: float | None
    slow: bool
    evidence: str


class Former(msgspec.Struct, frozen=True, kw_only=True):
    """What a healthy device of a node gave in a former job, before it was given work."""

    place: Place
    job: int
    flops: float
    memory_bytes: float


def usual_speeds(former: Iterable[Former]) -> dict[Place, Speed]:
    """What the devices of nodes usually give: the median of the latest jobs, of each its devices' median.

    `former`: the latest first. A node that was in fewer than `FEWEST_JOBS` is not known.
    """
    jobs: dict[Place, dict[int, list[Speed]]] = {}
    for one in former:
        of_place = jobs.setdefault(one.place, {})
        if one.job in of_place or len(of_place) < LATEST_JOBS:
            speed = Speed(flops=one.flops, memory_bytes=one.memory_bytes)
            of_place.setdefault(one.job, []).append(speed)
    return {
        place: _median([_median(speeds) for speeds in of_place.values()])
        for place, of_place in jobs.items()
        if len(of_place) >= FEWEST_JOBS
    }


def judge_nodes(
    found: Mapping[int, Speed], places: Mapping[int, Place], usual: Mapping[Place, Speed]
) -> dict[str, tuple[float, str]]:
    """Of each node whose usual speeds are known: the share of them that the best of its devices reaches, in words too.

    The best, because what all devices of a node have in common is the node's; one that is slow alone its peers show.
    """
    shares: dict[str, tuple[float, str]] = {}
    for rank, own in found.items():
        place = places[rank]
        parts = _against(own, usual[place], "of what this node gave in former jobs") if place in usual else []
        if parts and min(parts) > shares.get(place[0], (0.0, "")):
            shares[place[0]] = min(parts)
    return shares


def judge_devices(
    found: Mapping[int, Speed],
    failed: Mapping[int, str],
    past: Mapping[int, Speed] | None = None,
    wanted: Thresholds = USUAL,
) -> dict[int, Judged]:
    """Each rank's probe against the others', and against the `past` of its own device where that is known.

    `failed`: ranks whose device could not even be measured, and why.
    """
    past = past or {}
    judged = {rank: Judged(rank=rank, speed=None, fit=False, evidence=why) for rank, why in failed.items()}
    flops = sorted(speed.flops for speed in found.values())
    memory_bytes = sorted(speed.memory_bytes for speed in found.values())
    for rank, own in found.items():
        parts = []
        if len(found) > FEWEST_PEERS:
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
    """Those that were slower than their peers, or nearly, and have to be measured again before that counts."""
    return tuple(sorted(rank for rank, one in judged.items() if one.speed is not None and one.speed < NEAR))


def judge_again(
    rank: int,
    own: Speed,
    witnesses: Sequence[Speed],
    looks: int,
    *,
    shared: bool = True,
    wanted: Thresholds = USUAL,
    within: tuple[int, int] = LOOKS,
) -> Judged | None:
    """A device in doubt against its witnesses, by the best that each gave in as many looks; None: look once more.

    Others' work only ever makes a device look slower than it is: the best of all looks comes closest, and once the
    witnesses come to the same it is what they can do. Until then nothing is known, and in the end nothing held against
    the device, unless it is far below the slowest of them. Where processors are `shared` that takes many looks.
    `within`: how many looks it takes to find a device unfit, and after how many it is judged in any case.
    """
    peers = _median(witnesses)
    every = _against(own, peers, "of its peers")
    sure = _against(own, _where_alike(witnesses, peers), "of its peers")
    least, most = within
    if not shared or looks >= SHARED_LOOKS[1]:
        flops, memory_bytes = min(one.flops for one in witnesses), min(one.memory_bytes for one in witnesses)
        slowest = _against(own, Speed(flops=flops, memory_bytes=memory_bytes), "of its slowest peer")
        sure += [each for each in slowest if each[0] < wanted.fit]
    if sure and min(sure)[0] < wanted.fit:
        speed, text = min(sure)
        if looks < least:
            return None
        return Judged(rank=rank, speed=speed, fit=False, evidence=f"{text}, the best of {looks} more looks")
    known = len(sure) >= len(every)
    well = known and all(share >= NEAR for share, _ in sure)
    if not well and looks < (least if known else most):
        return None
    if not every:
        return Judged(rank=rank, speed=None, fit=True, evidence="nothing to compare it with")
    speed, text = min(every)
    return Judged(rank=rank, speed=speed, fit=True, evidence=text)


def _where_alike(witnesses: Sequence[Speed], median: Speed) -> Speed:
    """Their median; 0 for what disturbed witnesses differ in."""
    return Speed(
        flops=median.flops if min(one.flops for one in witnesses) >= ALIKE * median.flops else 0.0,
        memory_bytes=median.memory_bytes
        if min(one.memory_bytes for one in witnesses) >= ALIKE * median.memory_bytes
        else 0.0,
    )


def again_in_s(times_unfit: int, recheck_s: float) -> float:
    """Return the seconds until a device is measured again that so many probes in a row have found unfit: soon at first,
    then ever more rarely."""
    doublings = min(max(times_unfit - 1, 0), MOST_DOUBLINGS)
    return min(min(AGAIN_S, recheck_s) * 2.0**doublings, RARELY * recheck_s)


def best(one: Speed, other: Speed) -> Speed:
    """What a device can do that gave both."""
    return Speed(
        flops=max(one.flops, other.flops),
        memory_bytes=max(one.memory_bytes, other.memory_bytes),
        hardware=one.hardware or other.hardware,
    )


def in_turns(ranks: Iterable[int], machines: Mapping[int, str], shared: Container[int]) -> list[tuple[int, ...]]:
    """Who is measured with whom: all at once, but one after another of those who share their machine's processors."""
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


def _median_without(ascending: Sequence[float], one: float) -> float:
    """The median of all others: in a job of thousands, each is compared with the rest of them."""
    gone, left = bisect_left(ascending, one), len(ascending) - 1
    low, high = (ascending[i + (i >= gone)] for i in ((left - 1) // 2, left // 2))
    return (low + high) / 2


def _against(own: Speed, other: Speed, of: str) -> list[tuple[float, str]]:
    found = []
    if other.flops > 0.0:
        share = own.flops / other.flops
        found.append((share, f"matrix products at {share:.0%} {of}, {own.flops / 1e9:.4g} GFLOP/s"))
    if other.memory_bytes > 0.0:
        share = own.memory_bytes / other.memory_bytes
        found.append((share, f"memory at {share:.0%} {of}, {own.memory_bytes / 1e9:.4g} GB/s"))
    return found


def link_seconds(found: Mapping[int, Sequence[Transfer]]) -> dict[Pair, float]:
    """Seconds of each measured link: of its ends, the mean."""
    seconds: dict[Pair, list[float]] = {}
    for rank, transfers in found.items():
        for transfer in transfers:
            if transfer.seconds > 0.0:
                seconds.setdefault(_pair(rank, transfer.peer), []).append(transfer.seconds)
    return {pair: statistics.mean(ends) for pair, ends in seconds.items()}


def judge_links(times: Mapping[Pair, float], nodes: Mapping[int, str]) -> dict[Pair, float]:
    """Speed of each measured link against the median of its kind: inside a node, or between two."""
    kinds: dict[bool, list[float]] = {}
    for (a, b), time in times.items():
        kinds.setdefault(nodes.get(a) == nodes.get(b), []).append(time)
    medians = {kind: statistics.median(of) for kind, of in kinds.items() if len(of) > FEWEST_PEERS}
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
    wanted: Thresholds = USUAL,
) -> JudgedLink:
    """A link under suspicion, against its witnesses (`beside`); where it has none against its past, or its kind's.

    With one witness alone it is held to `link_fit`, as with its past, when all were parked: now others train beside it.
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
    """A link that each of these `looks` found slow, by the middle one; None: look once more.

    A look is short. Whom the processors' scheduler favours meanwhile, where others share them (`shared`), is fast in
    all of it, and a healthy link at half of that or less: in one look of eight on two busy cores.
    """
    if not shared:
        return looks[-1]
    if len(looks) < LINK_LOOKS:
        return None
    middle = sorted(looks, key=lambda look: look.speed or 0.0)[len(looks) // 2]
    return msgspec.structs.replace(middle, evidence=f"{middle.evidence}, slow in each of {len(looks)} looks")


def beside(link: Pair, ranks: Iterable[int], nodes: Mapping[int, str]) -> tuple[Pair, ...]:
    """One round: a link under suspicion, and witnesses of its kind.

    Each has its nodes to itself; those of the link have none, because what slows it may slow all that they send.
    """
    own = {nodes[rank] for rank in link}
    of_node: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        if nodes[rank] not in own:
            of_node.setdefault(nodes[rank], []).append(rank)
    if _within(link, nodes):
        pairs = [(there[0], there[1]) for there in of_node.values() if len(there) > 1]
    else:
        first = [there[0] for there in of_node.values()]
        pairs = list(zip(first[::2], first[1::2], strict=False))
    return (link, *(_pair(*pair) for pair in pairs[:MOST_WITNESSES]))


def _within(pair: Pair, nodes: Mapping[int, str]) -> bool:
    return nodes[pair[0]] == nodes[pair[1]]


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
