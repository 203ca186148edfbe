"""Input and output of the planner."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from resihp.errors import PlanError
from resihp.parallelism.layout import Layout, Replica
from resihp.parallelism.model import ModelSpec
from resihp.parallelism.plan import Plan
from resihp.scheduler.cost import profile, tensor_bytes
from resihp.scheduler.cost.device_memory import NO_OVERHEAD, Overhead
from resihp.scheduler.cost.memory import StageSetup
from resihp.scheduler.cost.profile import Profile, layer_units


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """The available ranks, the holders of state, and the settings that the job was started with."""

    epoch: int
    """Epoch of the plan to be made."""
    base: Layout
    """The layout in effect, dead ranks included; ranks of mirrors are on standby in it."""
    mirrors: tuple[Replica, ...] = ()
    """Replicas in effect that hold copies of state and compute nothing (`Plan.mirrors`), dead ranks included."""
    available: tuple[int, ...]
    """Live ranks that can work, including ranks without work and ranks that just joined."""
    nodes: dict[int, str]
    """Node of each available rank, and of dead ranks if known."""
    model: ModelSpec
    micro_batches: int
    """Micro-batches of the global batch."""
    tokens: int = 0
    """Tokens of the longest micro-batch; 0 if unknown."""
    tp: int
    pp: int
    chunks: int = 1
    schedule: str = "1f1b"
    sequence_parallel: bool = False
    speeds: dict[int, float] = {}
    """Normalised throughput of measured ranks; all others count as healthy, 1."""
    memory_bytes: int | None = None
    """Memory of each device; None if unknown, and then memory is not checked."""
    overhead: Overhead = NO_OVERHEAD
    """Part of it that is not available for state and activations."""
    zero_1: bool = False
    """Whether the replicas that a plan keeps share the optimizer's state (`state_bytes_of`)."""
    profile: Profile | None = None
    """Times of the model; None if nothing was measured, and then those of `layer_units`."""
    links: dict[tuple[str, str], float] = {}
    """Speed of each slow link between two nodes, named in ascending order; 1 is a healthy link's."""
    stale: tuple[int, ...] = ()
    """Available ranks that have lost the state that `base` assigns to them."""
    fresh: bool = False
    """Whether all state is initialised or loaded from a checkpoint; then no old state is held during the transition."""

    @property
    def most_stages(self) -> int:
        """Most stages of a replica: one more than the job was started with, so that a leftover group may take some
        layers.

        Where memory is unknown, no more than at the start: then layouts change as little as possible.
        """
        return self.pp + (self.memory_bytes is not None and self.chunks == 1)

    @property
    def room_bytes(self) -> int | None:
        """Memory of each device for state and activations; None if unknown."""
        return None if self.memory_bytes is None else self.overhead.room(self.memory_bytes)

    def speed(self, ranks: tuple[int, ...]) -> float:
        """Return the speed of a tensor-parallel group, in healthy devices: k * min p."""
        return len(ranks) * min((self.speeds.get(rank, 1.0) for rank in ranks), default=0.0)

    def state_bytes_of(self, replicas: int) -> int | None:
        """Return the bytes of state per parameter, gradient and optimizer included, if so many replicas hold it.

        None: the bytes that the model's precision takes, whatever the number of replicas.
        """
        return tensor_bytes.zero_1(replicas) if self.zero_1 else None

    def stage_setup(self, stage: int, stages: int, tp: int, replicas: int) -> StageSetup:
        """Return the facts that decide how much memory a stage needs in a job of so many replicas."""
        return StageSetup(
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
        """Unit of predicted times, in words."""
        return "layer times" if self.profile is None else "s"

    def link(self, sender: tuple[int, ...], receiver: tuple[int, ...]) -> float:
        """Return the speed of the slowest link between two groups."""
        if not self.links:
            return 1.0
        receiver_nodes = {self.nodes[rank] for rank in receiver}
        pairs = [(a, b) if a < b else (b, a) for a in {self.nodes[rank] for rank in sender} for b in receiver_nodes]
        return min((self.links.get(pair, 1.0) for pair in pairs), default=1.0)

    def transfer_s(self, sender: tuple[int, ...], receiver: tuple[int, ...]) -> float:
        """Return the seconds of one micro-batch's activations, or of their gradients, from one group to another."""
        times = self.times
        if not (times.transfer_s or times.inside_s):
            return 0.0
        if {self.nodes[rank] for rank in sender} == {self.nodes[rank] for rank in receiver}:
            return times.inside_s
        return times.transfer_s / self.link(sender, receiver)

    @property
    def holding(self) -> Layout:
        """The layout in effect with its mirrors: all holders of state."""
        if not self.mirrors:
            return self.base
        mirroring = {rank for replica in self.mirrors for rank in replica.ranks}
        standby = tuple(rank for rank in self.base.standby if rank not in mirroring)
        return Layout((*self.base.replicas, *self.mirrors), standby)

    @property
    def lost(self) -> frozenset[int]:
        """Ranks of `base` that are lost."""
        return frozenset(self.base.ranks).difference(self.available)


def check(situation: Situation) -> None:
    """Raise PlanError, naming the fault, if a situation is not consistent.

    Faults are invalid speeds, unknown ranks, a profile of another model, or a batch without micro-batches.
    """
    for rank, speed in situation.speeds.items():
        if not (math.isfinite(speed) and speed >= 0):
            raise PlanError(f"rank {rank}: speed {speed}; a speed is a number from 0 (stopped) to 1 (healthy)")
    for (a, b), speed in situation.links.items():
        if not (math.isfinite(speed) and speed > 0):
            raise PlanError(f"link {a}-{b}: speed {speed}; the speed of a link is a number above 0, 1 if healthy")
        if a > b:
            raise PlanError(f"link {a}-{b}: its nodes are not in ascending order")
    known_ranks = situation.nodes.keys()
    for name, ranks in (("available", situation.available), ("measured", situation.speeds)):
        unknown = [rank for rank in ranks if rank not in known_ranks]
        if unknown:
            raise PlanError(f"{name} rank {unknown[0]}: no such rank, no node is given for it")
    if situation.micro_batches < 1:
        raise PlanError(f"{situation.micro_batches} micro-batches an iteration: there is nothing to plan")
    if situation.model.layers < situation.chunks:
        raise PlanError(f"{situation.model.layers} layers cannot be cut into {situation.chunks} chunks of a stage")
    if situation.profile is not None:
        profile.check(situation.profile, situation.model)


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The plan, and the reason for it."""

    plan: Plan
    seconds: float
    """Predicted time of an iteration, in the unit of `Situation.times`."""
    reason: str
    alternatives: tuple[tuple[str, float], ...] = ()
    """Other plans by name, each with its prediction."""
