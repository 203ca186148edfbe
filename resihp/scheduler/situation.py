"""Input (`Situation`) and output (`Decision`) of the planner."""

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
    """The available ranks, the holders of state, and the settings with which the job was started."""

    epoch: int
    """Epoch of the plan to be made."""
    base: Layout
    """The layout in effect, including dead ranks. Ranks of mirrors are on standby in it."""
    mirrors: tuple[Replica, ...] = ()
    """Replicas in effect that hold copies of state and compute nothing (`Plan.mirrors`), including dead ranks."""
    available: tuple[int, ...]
    """Live ranks that can work, including standby ranks and ranks that just joined."""
    nodes: dict[int, str]
    """Node of each available rank, and of dead ranks where it is known."""
    model: ModelSpec
    micro_batches: int
    """Number of micro-batches of the global batch."""
    tokens: int = 0
    """Number of tokens of the longest micro-batch; 0 if unknown."""
    tp: int
    pp: int
    chunks: int = 1
    schedule: str = "1f1b"
    sequence_parallel: bool = False
    speeds: dict[int, float] = {}
    """Normalised throughput of each measured rank, from 0 (stopped) to 1 (healthy). Ranks that are not listed count as
    1."""
    memory_bytes: int | None = None
    """Memory of each device in bytes; None if unknown, in which case memory is not checked."""
    overhead: Overhead = NO_OVERHEAD
    """Part of `memory_bytes` that is not available for state and activations."""
    zero_1: bool = False
    """Whether replicas share the optimizer's state (ZeRO, stage 1), so that bytes per parameter depend on their number
    (`state_bytes_of`)."""
    profile: Profile | None = None
    """Times of the model; None if nothing was measured, in which case `layer_units` is used."""
    links: dict[tuple[str, str], float] = {}
    """Speed of each slow link between two nodes, relative to a healthy link (1). The nodes are in ascending order."""
    stale: tuple[int, ...] = ()
    """Available ranks that no longer have the state that `base` assigns to them."""
    fresh: bool = False
    """Whether all state is initialised or loaded from a checkpoint, so that ranks hold no old state during the
    transition."""

    @property
    def most_stages(self) -> int:
        """Maximum number of stages of a replica: one more than at the start of the job, so that a leftover group may
        take layers.

        If memory is unknown, or stages have several chunks, the number at the start: then layouts change as little as
        possible.
        """
        return self.pp + (self.memory_bytes is not None and self.chunks == 1)

    @property
    def room_bytes(self) -> int | None:
        """Memory of each device for state and activations, in bytes; None if unknown."""
        return None if self.memory_bytes is None else self.overhead.room(self.memory_bytes)

    def speed(self, ranks: tuple[int, ...]) -> float:
        """Return the speed of a tensor-parallel group of k ranks, in healthy devices: k times the lowest speed of a
        rank."""
        return len(ranks) * min((self.speeds.get(rank, 1.0) for rank in ranks), default=0.0)

    def state_bytes_of(self, replicas: int) -> int | None:
        """Return the bytes of state per parameter, including gradient and optimizer, if `replicas` replicas hold the
        state.

        None if replicas do not share state: then the model's precision determines the bytes.
        """
        return tensor_bytes.zero_1(replicas) if self.zero_1 else None

    def stage_setup(self, stage: int, stages: int, tp: int, replicas: int) -> StageSetup:
        """Return the facts that determine the memory of a stage, in a job of `replicas` replicas."""
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
        """Unit of predicted times, for messages."""
        return "layer times" if self.profile is None else "s"

    def link(self, sender: tuple[int, ...], receiver: tuple[int, ...]) -> float:
        """Return the speed of the slowest link between two groups."""
        if not self.links:
            return 1.0
        receiver_nodes = {self.nodes[rank] for rank in receiver}
        pairs = [(a, b) if a < b else (b, a) for a in {self.nodes[rank] for rank in sender} for b in receiver_nodes]
        return min((self.links.get(pair, 1.0) for pair in pairs), default=1.0)

    def transfer_s(self, sender: tuple[int, ...], receiver: tuple[int, ...]) -> float:
        """Return the seconds to send one micro-batch's activations, or their gradients, from one group to another."""
        times = self.times
        if not (times.transfer_s or times.inside_s):
            return 0.0
        if {self.nodes[rank] for rank in sender} == {self.nodes[rank] for rank in receiver}:
            return times.inside_s
        return times.transfer_s / self.link(sender, receiver)

    @property
    def holding(self) -> Layout:
        """The layout in effect including its mirrors: all replicas that hold state."""
        if not self.mirrors:
            return self.base
        mirroring = {rank for replica in self.mirrors for rank in replica.ranks}
        standby = tuple(rank for rank in self.base.standby if rank not in mirroring)
        return Layout((*self.base.replicas, *self.mirrors), standby)

    @property
    def lost(self) -> frozenset[int]:
        """Ranks of `base` that are no longer available."""
        return frozenset(self.base.ranks).difference(self.available)


def check(situation: Situation) -> None:
    """Raise PlanError, naming the fault, if a situation is inconsistent.

    Faults are: invalid speeds, unknown ranks, a profile of another model, a batch without micro-batches.
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
    """The chosen plan, its predicted time, and the reason for the choice."""

    plan: Plan
    seconds: float
    """Predicted time of an iteration, in the unit of `Situation.times` (seconds, or layer times if nothing was
    measured)."""
    reason: str
    alternatives: tuple[tuple[str, float], ...] = ()
    """(name, predicted time) of the other plans."""
