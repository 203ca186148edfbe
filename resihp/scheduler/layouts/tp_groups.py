"""Ranks that remain in a tensor-parallel group after devices stopped or slowed down (the paper's Eq. 3 and 4). Pure.

A group is as fast as its slowest rank, so a slow rank may cost more than it contributes. The module decides about one
group at a time, from given candidates; the planner decides which ranks are candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction


def degrees(
    candidates: int, k_min: int, *, started_with: int | None = None, obstacle: Callable[[int], str | None] | None = None
) -> tuple[int, ...]:
    """Return K of Eq. 3: { 2^q : k_min <= 2^q <= |G'| }, ascending. `candidates` is |G'|.

    `started_with`: the degree with which the job was started. It is in K even if it is not a power of two, and higher
    degrees are not. `obstacle` returns why the model cannot be split for a degree, or None if it can.
    """
    powers = {1 << q for q in range(candidates.bit_length())}
    if started_with is not None:
        powers = {k for k in powers | {started_with} if k <= started_with}
    return tuple(
        k for k in sorted(powers) if max(1, k_min) <= k <= candidates and (obstacle is None or obstacle(k) is None)
    )


def speed(group: Sequence[tuple[int, float]]) -> float:
    """Return the throughput of a group, in healthy devices: k * min p."""
    return len(group) * min((p for _, p in group), default=0.0)


def exclude(
    candidates: Sequence[tuple[int, float]],
    k_min: int = 1,
    *,
    started_with: int | None = None,
    obstacle: Callable[[int], str | None] | None = None,
    before: Sequence[int] = (),
) -> tuple[int, ...]:
    """Return S* of Eq. 4: among the groups S_k of the k fastest candidates, k in K, the group with the highest k * min
    p.

    `candidates` are live ranks with their normalised throughput p (1 if healthy); a rank with p <= 0 is excluded. Of
    equally fast groups the larger one is chosen. `before` is the former group, including dead ranks. Among ranks of
    equal p, ranks that already hold a part of their share in the new group come first, then other members of `before`,
    then the rest in the order of `candidates`. Former members keep their relative order; new ranks take the remaining
    places. Empty if K is empty.
    """
    able = [(rank, p) for rank, p in candidates if p > 0.0]
    fastest = sorted((p for _, p in able), reverse=True)
    best_degree, best_speed = 0, 0.0
    for k in degrees(len(able), k_min, started_with=started_with, obstacle=obstacle):
        if k * fastest[k - 1] >= best_speed:
            best_degree, best_speed = k, k * fastest[k - 1]
    if not best_degree:
        return ()
    return _seated(able, best_degree, fastest[best_degree - 1], before)


def overlap(t: int, k: int, other_t: int, other_k: int) -> Fraction:
    """Return the share of a cut parameter that rank `t` of `k` ranks and rank `other_t` of `other_k` ranks both
    hold."""
    low, high = max(Fraction(t, k), Fraction(other_t, other_k)), min(Fraction(t + 1, k), Fraction(other_t + 1, other_k))
    return max(high - low, Fraction(0))


def _seated(able: list[tuple[int, float]], k: int, slowest: float, before: Sequence[int]) -> tuple[int, ...]:
    """Return the k ranks with the highest p, each at the place where it has to receive the least state."""
    old_t = {rank: t for t, rank in enumerate(before)}
    order = {rank: i for i, (rank, _) in enumerate(able)}
    required = {rank for rank, p in able if p > slowest}
    optional = [rank for rank, p in able if p == slowest]
    if len(before) == k and required <= set(before) and set(before) <= {*required, *optional}:
        return tuple(before)
    seats = _seats_near_state(required, optional, order, old_t, k, len(before))
    chosen = required.union(seats.values())
    for rank in sorted(optional, key=lambda rank: (rank not in old_t, order[rank])):
        if len(chosen) < k:
            chosen.add(rank)
    free = [t for t in range(k) if t not in seats]
    unseated = [rank for rank in chosen if rank not in seats.values()]
    unseated.sort(key=lambda rank: (rank not in old_t, old_t.get(rank, 0), order[rank]))
    seats |= dict(zip(free, unseated, strict=True))
    return _in_old_order(seats, old_t)


def _seats_near_state(
    required: set[int], optional: Sequence[int], order: Mapping[int, int], old_t: Mapping[int, int], k: int, old_k: int
) -> dict[int, int]:
    """Return ranks by place in a group of `k`, for ranks that hold some of the place's state, those that hold most
    first.

    `old_t`: place of each rank in the former group of `old_k`. `order`: preference among ranks of equal speed. Ranks of
    `required` always keep a place.
    """
    seat_choices = sorted(
        (rank not in required, -overlap(t, k, old_t[rank], old_k), t, order[rank], rank)
        for rank in (*required, *optional)
        if rank in old_t
        for t in range(k)
        if overlap(t, k, old_t[rank], old_k)
    )
    seats: dict[int, int] = {}
    chosen = set(required)
    for _, _, t, _, rank in seat_choices:
        if t in seats or rank in seats.values() or (rank not in chosen and len(chosen) == k):
            continue
        seats[t] = rank
        chosen.add(rank)
    return seats


def _in_old_order(seats: Mapping[int, int], old_t: Mapping[int, int]) -> tuple[int, ...]:
    """Return the ranks by place, with former members of the group in their former order."""
    members = sorted((rank for rank in seats.values() if rank in old_t), key=old_t.__getitem__)
    places = sorted(t for t, rank in seats.items() if rank in old_t)
    return tuple(rank for _, rank in sorted(({**seats, **dict(zip(places, members, strict=True))}).items()))
