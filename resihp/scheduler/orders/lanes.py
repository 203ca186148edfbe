"""What a stage has to do, and may hold, while schedules advance under the rule of `resihp.scheduler.orders.migration`.
Pure.

Micro-batches of the stage's own replica are held back as in 1F1B; *guests*, which migrated here, come on top where
memory allows. Which micro-batch migrates, and when anything begins, is not decided here.
"""

from __future__ import annotations

import heapq
import math

import msgspec

from resihp.parallelism.plan import Kind, Plan, Primitive
from resihp.pipeline.timeline import Node
from resihp.scheduler.cost import memory
from resihp.scheduler.situation import Situation

SPARE = 2
"""Micro-batches that a stage may hold beyond those that 1F1B holds there, where memory allows: all of them guests."""


class Lane:
    """One stage of one replica while the schedules advance."""

    def __init__(self, replica: int, held_back: tuple[int, int], room: tuple[int, int], *, stopped: bool) -> None:
        self.replica, self.stopped = replica, stopped
        self.held_back = held_back
        """Most of the replica's own micro-batches between F and B, and between F and W."""
        self.room = room
        """The same of all micro-batches."""
        self.order: list[Primitive] = []
        self.running: Node | None = None
        self.own: list[tuple[tuple[int, ...], Node]] = []
        """Forwards that are ready, of the replica's own micro-batches, the most urgent first."""
        self.guests: list[tuple[tuple[int, ...], Node]] = []
        self.others: dict[Kind, list[tuple[tuple[int, ...], Node]]] = {"B": [], "W": []}
        self.own_held, self.held = [0, 0], [0, 0]
        """Micro-batches between F and B, and between F and W."""
        self.expected = 0
        """Guests that are to come, or have come, and have not begun."""

    @property
    def welcoming(self) -> bool:
        """Whether one more guest would find memory."""
        return not self.stopped and all(
            held + self.expected < room for held, room in zip(self.held, self.room, strict=True)
        )

    def next(self) -> Node | None:
        """Take what this stage begins now, if anything."""
        if self.others["B"]:
            return heapq.heappop(self.others["B"])[1]
        if all(held < room for held, room in zip(self.held, self.room, strict=True)):
            free = all(held < most for held, most in zip(self.own_held, self.held_back, strict=True))
            queues = [queue for queue, able in ((self.own, free), (self.guests, True)) if able and queue]
            if queues:
                return min(queues, key=lambda queue: queue[0]).pop(0)[1]
        return heapq.heappop(self.others["W"])[1] if self.others["W"] else None

    def hold(self, node: Node, *, own: bool, split: bool) -> None:
        """Count a primitive that begins."""
        change = {"F": (1, 1), "B": (-1, 0 if split else -1), "W": (0, -1)}[node[0]]
        for held in (self.held, self.own_held) if own else (self.held,):
            held[0] += change[0]
            held[1] += change[1]


def lanes(plan: Plan, situation: Situation) -> dict[tuple[int, int], Lane]:
    """Every stage by (replica, stage), with how many micro-batches it may hold.

    Own ones are held back as in 1F1B, generalised to virtual stages as in `schedules.greedy`: of depth V and at most C
    chunks a stage, one for every C virtual stages still to come, and one more for each chunk where there are several.
    """
    memories = _memories(plan, situation)
    found: dict[tuple[int, int], Lane] = {}
    for d, replica in enumerate(plan.layout.replicas):
        virtual = replica.virtual_stages
        chunks = max(len(stage.chunks) for stage in replica.stages)
        most = [0] * len(replica.stages)
        for v, (s, _) in enumerate(virtual):
            most[s] += -(-(len(virtual) - v) // chunks) + (chunks > 1)
        for s, stage in enumerate(replica.stages):
            fits = memories.get((d, s), math.inf)
            held_back = (int(min(most[s], fits)), int(min(max(most), fits)))
            room = (int(min(most[s] + SPARE, fits)), int(min(max(most) + SPARE, fits)))
            found[d, s] = Lane(d, held_back, room, stopped=not situation.speed(stage.ranks))
    return found


def overfull(plan: Plan, situation: Situation) -> str | None:
    """Which rank would need more memory than its device has, the worst of them; None if each has enough."""
    if situation.memory_bytes is None:
        return None
    return memory.obstacle(
        plan,
        situation.model,
        situation.memory_bytes,
        situation.tokens,
        state_bytes=situation.state_bytes_of(memory.sharing(plan.layout)),
        overhead=situation.overhead,
    )


def _memories(plan: Plan, situation: Situation) -> dict[tuple[int, int], int]:
    """How many micro-batches each stage has memory for, at least one; nothing where that is not known.

    From what `memory.needed_bytes` says of a stage that holds one, and two, in its largest chunk.
    """
    if situation.room_bytes is None or not situation.tokens:
        return {}
    replicas = plan.layout.replicas
    largest = [
        [max(range(len(stage.chunks)), key=lambda c: stage.chunks[c][1] - stage.chunks[c][0]) for stage in r.stages]
        for r in replicas
    ]
    one, two = (
        msgspec.structs.replace(
            plan, orders=tuple(tuple(tuple(Primitive("F", m, c) for m in range(n)) for c in row) for row in largest)
        )
        for n in (1, 2)
    )
    state_bytes = situation.state_bytes_of(memory.sharing(plan.layout))
    found: dict[tuple[int, int], int] = {}
    for d, replica in enumerate(replicas):
        for s, stage in enumerate(replica.stages):
            if stage.ranks:
                with_one, with_two = (
                    memory.needed_bytes(p, stage.ranks[0], situation.model, situation.tokens, state_bytes=state_bytes)
                    for p in (one, two)
                )
                free = situation.room_bytes - with_one
                found[d, s] = max(1, 1 + free // max(1, with_two - with_one))
    return found
