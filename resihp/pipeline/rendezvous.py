"""NCCL's rules by themselves: whether operations that ranks begin in some order can all be done. Pure.

No tags: the k-th operation on a communicator must be the same on all members. Rendezvous: an operation is done only
when all members carry it out. And, as the strictest case, a rank carries out one operation at a time, over all of its
communicators, in the order in which it began them. Used by `resihp.pipeline.checker`, which knows what is asked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

Channel = tuple[str, tuple[int, ...]]
"""A communicator: what it is for, and its ranks."""

Operation = tuple[str | int, ...]
"""What it is about, its size included: ("bucket", index); kind, micro-batch, virtual stage and layers; a piece of a
parcel."""


class Rendezvous:
    """Collects what each rank begins and waits for, then judges it."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self._lists: dict[Channel, dict[int, list[Operation]]] = {}
        self._numbers: dict[tuple[Channel, int], int] = {}
        self._turns: list[tuple[Channel, int]] = []
        """Of each operation by number: communicator, and which of its operations."""
        self._steps: dict[int, list[tuple[int, list[int], list[int]]]] = {rank: [] for rank in ranks}
        """For each rank: at which instruction, operations to begin, operations to wait for then."""

    def operation(self, channel: Channel, rank: int, what: Operation) -> int:
        """The number of a rank's next operation on a communicator: that of its peers' at the same turn."""
        done = self._lists.setdefault(channel, {member: [] for member in channel[1]})[rank]
        turn = (channel, len(done))
        done.append(what)
        if turn not in self._numbers:
            self._numbers[turn] = len(self._turns)
            self._turns.append(turn)
        return self._numbers[turn]

    def step(self, rank: int, instruction: int, begins: list[int], waits: list[int]) -> None:
        """At an instruction, a rank begins some operations and goes on once others are done."""
        self._steps[rank].append((instruction, begins, waits))

    def mismatch(self) -> str | None:
        """The first operation that is not the same on all members, or None."""
        for channel, lists in self._lists.items():
            first = channel[1][0]
            for rank, operations in lists.items():
                if operations != lists[first]:
                    pairs = itertools.zip_longest(lists[first], operations)
                    k, (a, b) = next((k, pair) for k, pair in enumerate(pairs) if pair[0] != pair[1])
                    return (
                        f"operation {k} on communicator {_name(channel)} is {_spoken(a)} on rank {first}, "
                        f"but {_spoken(b)} on rank {rank}"
                    )
        return None

    def deadlock(self) -> str | None:
        """Which ranks wait for each other for ever, or None if all can be done. Call it where nothing mismatches."""
        ranks = list(self._steps)
        reached = dict.fromkeys(ranks, 0)
        begun = dict.fromkeys(ranks, False)
        queues: dict[int, list[int]] = {rank: [] for rank in ranks}
        head = dict.fromkeys(ranks, 0)
        offered = dict.fromkeys(ranks, -1)
        offers = [0] * len(self._turns)
        done = [False] * len(self._turns)
        todo = ranks[:]
        while todo:
            rank = todo.pop()
            steps, queue = self._steps[rank], queues[rank]
            while reached[rank] < len(steps):
                _, begins, waits = steps[reached[rank]]
                if not begun[rank]:
                    queue += begins
                    begun[rank] = True
                if not all(done[number] for number in waits):
                    break
                reached[rank] += 1
                begun[rank] = False
            if head[rank] == len(queue) or offered[rank] == queue[head[rank]]:
                continue
            number = offered[rank] = queue[head[rank]]
            offers[number] += 1
            members = self._turns[number][0][1]
            if offers[number] == len(members):
                done[number] = True
                for member in members:
                    head[member] += 1
                todo += members
        if all(done):
            return None
        at_hand = {rank: queues[rank][head[rank]] for rank in ranks if head[rank] < len(queues[rank])}
        return self._circle(at_hand, reached)

    def _circle(self, at_hand: dict[int, int], reached: dict[int, int]) -> str:
        """Ranks that wait for each other, given what each carries out and the step that it has reached."""

        def absent(rank: int) -> list[int]:
            members = self._turns[at_hand[rank]][0][1]
            return [member for member in members if at_hand.get(member) != at_hand[rank]]

        seen = [next(iter(at_hand))]
        while (after := absent(seen[-1])[0]) not in seen:
            seen.append(after)
        told = []
        for rank in seen[seen.index(after) :]:
            channel, k = self._turns[at_hand[rank]]
            steps, step = self._steps[rank], reached[rank]
            where = f"at instruction {steps[step][0]}" if step < len(steps) else "at its end"
            what, peers = _spoken(self._lists[channel][rank][k]), ", ".join(map(str, absent(rank)))
            told.append(f"rank {rank} ({where}) waits in {what} on {_name(channel)} for rank {peers}")
        return f"deadlock when each rank carries out one operation at a time: {'; '.join(told)}"


def spoken_parcel(direction: object, micro_batch: object, boundary: object) -> str:
    """A parcel in messages."""
    what = "activations" if direction == "forward" else "gradients"
    return f"{what} of micro-batch {micro_batch} over boundary {boundary}"


def _name(channel: Channel) -> str:
    return f"{channel[0]}/{'-'.join(map(str, channel[1]))}"


def _spoken(operation: Operation | None) -> str:
    if operation is None:
        return "nothing"
    if operation[0] == "bucket":
        return f"the sum of bucket {operation[1]}"
    if len(operation) == 5:
        return f"{operation[0]} of micro-batch {operation[1]} in layers {operation[3]} to {operation[4]}"
    direction, m, b, start, stop, of = operation
    return f"elements {start} to {stop} of {of} of {spoken_parcel(direction, m, b)}"
