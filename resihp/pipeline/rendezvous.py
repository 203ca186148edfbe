"""NCCL's rules alone: whether operations that ranks begin in some order can all complete. Pure.

There are no tags: the k-th operation on a communicator must be the same on all members. An operation completes only
when all members carry it out. As the strictest case, a rank carries out one operation at a time, over all of its
communicators, in the order in which it began them. Called by `resihp.pipeline.communication_rules`, which determines
the operations.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

Channel = tuple[str, tuple[int, ...]]
"""A communicator, given by its use and its ranks."""

Operation = tuple[str | int, ...]
"""Identity of an operation, including its size. A sum: ("bucket", index). A collective inside a computation: kind,
micro-batch, virtual stage, first and last layer. A piece of a parcel: direction, micro-batch, boundary and
`TensorRange`'s start, stop and of."""


class Rendezvous:
    """Collects the operations that each rank begins and waits for, then checks that they all complete."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self._lists: dict[Channel, dict[int, list[Operation]]] = {}
        self._numbers: dict[tuple[Channel, int], int] = {}
        self._turns: list[tuple[Channel, int]] = []
        """For each operation number: the communicator, and the operation's position among the operations of the
        communicator."""
        self._steps: dict[int, list[tuple[int, list[int], list[int]]]] = {rank: [] for rank in ranks}
        """For each rank: its steps as (instruction, operations to begin, operations to wait for after that)."""

    def operation(self, channel: Channel, rank: int, operation: Operation) -> int:
        """Record a rank's next operation on a communicator, and return the operation's number.

        The operations of all members at the same position share one number.
        """
        operations = self._lists.setdefault(channel, {member: [] for member in channel[1]})[rank]
        turn = (channel, len(operations))
        operations.append(operation)
        if turn not in self._numbers:
            self._numbers[turn] = len(self._turns)
            self._turns.append(turn)
        return self._numbers[turn]

    def step(self, rank: int, instruction: int, begins: list[int], waits: list[int]) -> None:
        """Record that, at `instruction`, a rank begins the operations `begins` and continues once the operations
        `waits` are done.
        """
        self._steps[rank].append((instruction, begins, waits))

    def mismatch(self) -> str | None:
        """Return a message about the first operation that differs between members of a communicator, or None."""
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
        """Return a message about ranks that wait for each other forever, or None. Call it only if `mismatch` returns
        None.
        """
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
        """Describe the ranks that wait for each other, given each rank's current operation and the step that it
        reached.
        """

        def absent(rank: int) -> list[int]:
            members = self._turns[at_hand[rank]][0][1]
            return [member for member in members if at_hand.get(member) != at_hand[rank]]

        visited = [next(iter(at_hand))]
        while (after := absent(visited[-1])[0]) not in visited:
            visited.append(after)
        waits = []
        for rank in visited[visited.index(after) :]:
            channel, k = self._turns[at_hand[rank]]
            steps, step = self._steps[rank], reached[rank]
            where = f"at instruction {steps[step][0]}" if step < len(steps) else "at its end"
            operation, peers = _spoken(self._lists[channel][rank][k]), ", ".join(map(str, absent(rank)))
            waits.append(f"rank {rank} ({where}) waits in {operation} on {_name(channel)} for rank {peers}")
        return f"deadlock when each rank carries out one operation at a time: {'; '.join(waits)}"


def spoken_parcel(direction: object, micro_batch: object, boundary: object) -> str:
    """Describe a parcel in messages."""
    content = "activations" if direction == "forward" else "gradients"
    return f"{content} of micro-batch {micro_batch} over boundary {boundary}"


def _name(channel: Channel) -> str:
    return f"{channel[0]}/{'-'.join(map(str, channel[1]))}"


def _spoken(operation: Operation | None) -> str:
    if operation is None:
        return "nothing"
    if operation[0] == "bucket":
        return f"the sum of bucket {operation[1]}"
    if len(operation) == 5:
        return f"{operation[0]} of micro-batch {operation[1]} in layers {operation[3]} to {operation[4]}"
    direction, m, b, start, stop, elements = operation
    return f"elements {start} to {stop} of {elements} of {spoken_parcel(direction, m, b)}"
