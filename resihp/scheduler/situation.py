"""What the planner is told, and what it answers."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from resihp.errors import PlanError
from resihp.parallelism.layout import Layout, Replica
from resihp.parallelism.model import ModelSpec
from resihp.parallelism.plan import Plan
from resihp.scheduler.cost import memory, profile
from resihp.scheduler.cost.device_memory import NOTHING, Overhead
from resihp.scheduler.cost.memory import Post
from resihp.scheduler.cost.profile import Profile, layer_units


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """Who is there, who held what, and what the job was started with."""

    epoch: int
    """Of the plan to be made."""
    base: Layout
    """The layout in effect, the dead included; ranks of mirrors are on standby in it."""
    mirrors: tuple[Replica, ...] = ()
    """Replicas in effect that hold copies of state and compute nothing (`Plan.mirrors`), the dead included."""
    available: tuple[int, ...]
    """Live ranks that can work, with those that have none now and those that just came."""
    nodes: dict[int, str]
    """Node of each rank: of the available ones, and of the dead where known."""
    model: ModelSpec
    micro_batches: int
    """Of the global batch."""
    tokens: int = 0
    """Of the longest micro-batch; 0 where it is not known."""
    tp: int
    pp: int
    chunks: int = 1
    schedule: str = "1f1b"
    sequence_parallel: bool = False
    speeds: dict[int, float] = {}
    """Normalised throughput where it was measured; 1, a healthy device's, where not."""
    memory_bytes: int | None = None
    """Of each device; None where it is not known, and then not checked."""
    overhead: Overhead = NOTHING
    """What of it is not for state and activations."""
    zero_1: bool = False
    """Whether replicas share the optimizer's state: those that a plan keeps (`state_bytes_of`)."""
    profile: Profile | None = None
    """Times of the model; None where nothing was measured, and then those of `layer_units`."""
    links: dict[tuple[str, str], float] = {}
    """Slow links: speed, 1 a healthy one's, between two nodes, in ascending order."""
    stale: tuple[int, ...] = ()
    """Available ranks that have lost the state that `base` says they hold."""
    fresh: bool = False
    """Whether all state is drawn or comes from a checkpoint: then nothing is held beside it on the way."""

    @property
    def most_stages(self) -> int:
        """Of a replica: one more than the job was started with, where a leftover group may take some layers.

        Where memory is not known, no more: then layouts change as little as they can.
        """
        return self.pp + (self.memory_bytes is not None and self.chunks == 1)

    @property
    def room_bytes(self) -> int | None:
        """What each device has for state and activations; None where that is not known."""
        return None if self.memory_bytes is None else self.overhead.room(self.memory_bytes)

    def speed(self, ranks: tuple[int, ...]) -> float:
        """Of a tensor-parallel group, in healthy devices: k * min p."""
        return len(ranks) * min((self.speeds.get(rank, 1.0) for rank in ranks), default=0.0)

    def state_bytes_of(self, replicas: int) -> int | None:
        """Of each parameter, gradient and optimizer included, where so many replicas hold it; None: what the model's
        precision takes, whoever holds it."""
        return memory.zero_1(replicas) if self.zero_1 else None

    def post(self, stage: int, stages: int, tp: int, replicas: int) -> Post:
        """What decides how much memory a stage needs in a job of so many replicas."""
        return Post(
            stage=stage,
            stages=stages,
            tp=tp,
            chunks=self.chunks,
            schedule=self.schedule,
            micro_batches=self.micro_batches,
            sequence_parallel=self.sequence_parallel,
            state_bytes=self.state_bytes_of(replicas),
        )

    @property
    def times(self) -> Profile:
        return layer_units(self.model) if self.profile is None else self.profile

    @property
    def unit(self) -> Literal["layer times", "s"]:
        """Of predicted times, in words."""
        return "layer times" if self.profile is None else "s"

    def link(self, sender: tuple[int, ...], receiver: tuple[int, ...]) -> float:
        """Speed of the slowest link between two groups."""
        if not self.links:
            return 1.0
        there = {self.nodes[rank] for rank in receiver}
        pairs = [(a, b) if a < b else (b, a) for a in {self.nodes[rank] for rank in sender} for b in there]
        return min((self.links.get(pair, 1.0) for pair in pairs), default=1.0)

    def transfer_s(self, sender: tuple[int, ...], receiver: tuple[int, ...]) -> float:
        """Seconds of one micro-batch's activations, or of their gradients, from a group to another."""
        times = self.times
        if not (times.transfer_s or times.inside_s):
            return 0.0
        if {self.nodes[rank] for rank in sender} == {self.nodes[rank] for rank in receiver}:
            return times.inside_s
        return times.transfer_s / self.link(sender, receiver)

    @property
    def holding(self) -> Layout:
        """The layout in effect with its mirrors: all that hold state."""
        if not self.mirrors:
            return self.base
        mirroring = {rank for replica in self.mirrors for rank in replica.ranks}
        standby = tuple(rank for rank in self.base.standby if rank not in mirroring)
        return Layout((*self.base.replicas, *self.mirrors), standby)

    @property
    def lost(self) -> frozenset[int]:
        """Ranks of `base` that are gone."""
        return frozenset(self.base.ranks).difference(self.available)


def check(situation: Situation) -> None:
    """Raises PlanError naming what of a situation cannot be: speeds that are none, unknown ranks, a profile of another
    model, nothing to do.
    """
    for rank, speed in situation.speeds.items():
        if not (math.isfinite(speed) and speed >= 0):
            raise PlanError(f"rank {rank}: speed {speed}; speeds are numbers from 0, stopped, to 1, healthy")
    for (a, b), speed in situation.links.items():
        if not (math.isfinite(speed) and speed > 0):
            raise PlanError(f"link {a}-{b}: speed {speed}; speeds of links are numbers above 0, 1 for a healthy one")
        if a > b:
            raise PlanError(f"link {a}-{b}: its nodes are not in ascending order")
    known = situation.nodes.keys()
    for name, ranks in (("available", situation.available), ("measured", situation.speeds)):
        unknown = [rank for rank in ranks if rank not in known]
        if unknown:
            raise PlanError(f"{name} rank {unknown[0]}: no such rank, its node is not known")
    if situation.micro_batches < 1:
        raise PlanError(f"{situation.micro_batches} micro-batches an iteration: there is nothing to plan")
    if situation.model.layers < situation.chunks:
        raise PlanError(f"{situation.model.layers} layers cannot be cut into {situation.chunks} chunks of a stage")
    if situation.profile is not None:
        profile.check(situation.profile, situation.model)


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The plan, and why this one."""

    plan: Plan
    seconds: float
    """Predicted for an iteration, in the unit of `Situation.times`."""
    reason: str
    alternatives: tuple[tuple[str, float], ...] = ()
    """What else was possible, with its prediction."""
