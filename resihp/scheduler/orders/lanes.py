"""Work and memory limits of a stage while schedules advance under the rule of `resihp.scheduler.orders.migration`.
Pure.

Micro-batches of the stage's own replica are limited as in 1F1B. *Guests*, which migrated to the stage, are added if
memory allows. The module never decides which micro-batch migrates, or when a primitive begins.
"""

from __future__ import annotations

import heapq
import math

import msgspec

from resihp.parallelism.plan import Kind, Plan, Primitive
from resihp.pipeline.timeline import Node
from resihp.scheduler.cost import memory
from resihp.scheduler.situation import Situation

SPARE_MICRO_BATCHES = 2
"""Micro-batches that a stage may hold beyond the limit of 1F1B if memory allows; all of them are guests."""


class Lane:
    """One stage of one replica while the schedules advance: its queues of ready work, its order so far, and its
    limits."""

    def __init__(self, replica: int, held_back: tuple[int, int], room: tuple[int, int], *, stopped: bool) -> None:
        self.replica, self.stopped = replica, stopped
        self.held_back = held_back
        """Maximum number of the replica's own micro-batches between F and B, and between F and W."""
        self.room = room
        """Maximum number of micro-batches, own and guests, between F and B, and between F and W."""
        self.order: list[Primitive] = []
        self.running: Node | None = None
        self.own: list[tuple[tuple[int, ...], Node]] = []
        """Ready forwards of the replica's own micro-batches, most urgent first."""
        self.guests: list[tuple[tuple[int, ...], Node]] = []
        self.others: dict[Kind, list[tuple[tuple[int, ...], Node]]] = {"B": [], "W": []}
        self.own_held, self.held = [0, 0], [0, 0]
        """Current number of micro-batches between F and B, and between F and W: own ones, and all."""
        self.expected = 0
        """Number of guests before their forward, whether or not they have arrived."""

    @property
    def welcoming(self) -> bool:
        """Whether the stage works and its memory suffices for one more guest."""
        return not self.stopped and all(
            count + self.expected < room for count, room in zip(self.held, self.room, strict=True)
        )

    def next(self) -> Node | None:
        """Remove and return the node that the stage begins now; None if it begins none."""
        if self.others["B"]:
            return heapq.heappop(self.others["B"])[1]
        if all(count < room for count, room in zip(self.held, self.room, strict=True)):
            may_begin_own = all(count < limit for count, limit in zip(self.own_held, self.held_back, strict=True))
            queues = [
                queue for queue, may_begin in ((self.own, may_begin_own), (self.guests, True)) if may_begin and queue
            ]
            if queues:
                return min(queues, key=lambda queue: queue[0]).pop(0)[1]
        return heapq.heappop(self.others["W"])[1] if self.others["W"] else None

    def hold(self, node: Node, *, own: bool, split: bool) -> None:
        """Update the numbers of micro-batches for a primitive that begins. `own`: whether the micro-batch is not a
        guest."""
        change = {"F": (1, 1), "B": (-1, 0 if split else -1), "W": (0, -1)}[node[0]]
        for counts in (self.held, self.own_held) if own else (self.held,):
            counts[0] += change[0]
            counts[1] += change[1]


def lanes(plan: Plan, situation: Situation) -> dict[tuple[int, int], Lane]:
    """Return a lane for every (replica, stage), with the number of micro-batches that the stage may hold.

    A stage's own micro-batches are limited as in 1F1B, generalised to virtual stages as in `schedules.greedy`. In a
    pipeline of V virtual stages, with at most C chunks a stage, the limit is one micro-batch for every C virtual stages
    that follow, and one more for each chunk of the stage if C is above 1.
    """
    memories = _memories(plan, situation)
    lane_of_stage: dict[tuple[int, int], Lane] = {}
    for d, replica in enumerate(plan.layout.replicas):
        virtual = replica.virtual_stages
        chunks = max(len(stage.chunks) for stage in replica.stages)
        limits = [0] * len(replica.stages)
        for v, (s, _) in enumerate(virtual):
            limits[s] += -(-(len(virtual) - v) // chunks) + (chunks > 1)
        for s, stage in enumerate(replica.stages):
            fits = memories.get((d, s), math.inf)
            held_back = (int(min(limits[s], fits)), int(min(max(limits), fits)))
            room = (int(min(limits[s] + SPARE_MICRO_BATCHES, fits)), int(min(max(limits) + SPARE_MICRO_BATCHES, fits)))
            lane_of_stage[d, s] = Lane(d, held_back, room, stopped=not situation.speed(stage.ranks))
    return lane_of_stage


def overfull(plan: Plan, situation: Situation) -> str | None:
    """Return a message about the rank that most exceeds the memory of its device; None if all ranks fit."""
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
    """Return the number of micro-batches, at least one, that each (replica, stage) has memory for; empty if memory is
    unknown.

    The number follows from `memory.needed_bytes` of a stage with one and with two micro-batches in its largest chunk.
    """
    if situation.room_bytes is None or not situation.tokens:
        return {}
    replicas = plan.layout.replicas
    largest = [
        [max(range(len(stage.chunks)), key=lambda c: stage.chunks[c][1] - stage.chunks[c][0]) for stage in r.stages]
        for r in replicas
    ]
    plan_with_one, plan_with_two = (
        msgspec.structs.replace(
            plan, orders=tuple(tuple(tuple(Primitive("F", m, c) for m in range(n)) for c in row) for row in largest)
        )
        for n in (1, 2)
    )
    state_bytes = situation.state_bytes_of(memory.sharing(plan.layout))
    count_of_stage: dict[tuple[int, int], int] = {}
    for d, replica in enumerate(replicas):
        for s, stage in enumerate(replica.stages):
            if stage.ranks:
                with_one, with_two = (
                    memory.needed_bytes(p, stage.ranks[0], situation.model, situation.tokens, state_bytes=state_bytes)
                    for p in (plan_with_one, plan_with_two)
                )
                free = situation.room_bytes - with_one
                count_of_stage[d, s] = max(1, 1 + free // max(1, with_two - with_one))
    return count_of_stage
