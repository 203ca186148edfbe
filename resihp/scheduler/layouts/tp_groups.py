"""Who stays in a tensor-parallel group when devices have stopped or slowed down (the paper's Eq. 3 and 4). Pure.

A group is as fast as its slowest rank, so a slow one may cost more than it gives. This module decides about one group
at a time, from candidates that it is given; which ranks are candidates is the planner's decision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction


def degrees(
    candidates: int, k_min: int, *, started_with: int | None = None, obstacle: Callable[[int], str | None] | None = None
) -> tuple[int, ...]:
    """K of Eq. 3: { 2^q : k_min <= 2^q <= |G'| }, ascending.

    `started_with` is the degree that the job was started with: it belongs to K even if it is no power of two, and
    nothing above it does. `obstacle` tells why the model cannot be split so many ways, None where it can.
    """
    powers = {1 << q for q in range(candidates.bit_length())}
    if started_with is not None:
        powers = {k for k in powers | {started_with} if k <= started_with}
    return tuple(
        k for k in sorted(powers) if max(1, k_min) <= k <= candidates and (obstacle is None or obstacle(k) is None)
    )


def speed(group: Sequence[tuple[int, float]]) -> float:
    """Throughput of a group in healthy devices: k * min p."""
    return len(group) * min((p for _, p in group), default=0.0)


def exclude(
    candidates: Sequence[tuple[int, float]],
    k_min: int = 1,
    *,
    started_with: int | None = None,
    obstacle: Callable[[int], str | None] | None = None,
    before: Sequence[int] = (),
) -> tuple[int, ...]:
    """S* of Eq. 4: of the groups S_k of the k candidates with the highest p, k in K, that with the highest k * min p.

    `candidates` are live ranks with their normalised throughput p (1 healthy). Ties keep the larger group. `before`
    is the group as it was, the dead included: among ranks of equal p, those come first that already hold part of what
    they would hold in the new group, then the other members, then by their order in `candidates`. Members keep their
    relative order, newcomers take the places that are left. Empty when K is empty. p <= 0 excludes a rank.
    """
    able = [(rank, p) for rank, p in candidates if p > 0.0]
    fastest = sorted((p for _, p in able), reverse=True)
    best, found = 0, 0.0
    for k in degrees(len(able), k_min, started_with=started_with, obstacle=obstacle):
        if k * fastest[k - 1] >= found:
            best, found = k, k * fastest[k - 1]
    if not best:
        return ()
    return _seated(able, best, fastest[best - 1], before)


def overlap(t: int, k: int, other: int, of: int) -> Fraction:
    """How much of a cut parameter index `t` of `k` ranks and index `other` of `of` ranks both hold."""
    low, high = max(Fraction(t, k), Fraction(other, of)), min(Fraction(t + 1, k), Fraction(other + 1, of))
    return max(high - low, Fraction(0))


def _seated(able: list[tuple[int, float]], k: int, slowest: float, before: Sequence[int]) -> tuple[int, ...]:
    """The k ranks with the highest p, each where it has to receive least."""
    at = {rank: t for t, rank in enumerate(before)}
    order = {rank: i for i, (rank, _) in enumerate(able)}
    must = {rank for rank, p in able if p > slowest}
    may = [rank for rank, p in able if p == slowest]
    if len(before) == k and must <= set(before) and set(before) <= {*must, *may}:
        return tuple(before)
    seats: dict[int, int] = {}
    near = sorted(
        (rank not in must, -overlap(t, k, at[rank], len(before)), t, order[rank], rank)
        for rank in (*must, *may)
        if rank in at
        for t in range(k)
        if overlap(t, k, at[rank], len(before))
    )
    chosen = set(must)
    for _, _, t, _, rank in near:
        if t in seats or rank in seats.values() or (rank not in chosen and len(chosen) == k):
            continue
        seats[t] = rank
        chosen.add(rank)
    for rank in sorted(may, key=lambda rank: (rank not in at, order[rank])):
        if len(chosen) < k:
            chosen.add(rank)
    free = [t for t in range(k) if t not in seats]
    rest = [rank for rank in chosen if rank not in seats.values()]
    rest.sort(key=lambda rank: (rank not in at, at.get(rank, 0), order[rank]))
    seats |= dict(zip(free, rest, strict=True))
    members = sorted((rank for rank in chosen if rank in at), key=at.__getitem__)
    places = sorted(t for t, rank in seats.items() if rank in at)
    return tuple(rank for _, rank in sorted(({**seats, **dict(zip(places, members, strict=True))}).items()))
