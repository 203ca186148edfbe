"""One iteration on one rank, as data: the inputs of its computation (`interpreter`) and of its end (`step_agreement`).

Created by `resihp.executor.engine`. Decides nothing and contains no tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import msgspec
import torch

from resihp.executor.communicators import Communicators
from resihp.executor.tensor_group import guarded
from resihp.faults import Phase
from resihp.parallelism.ownership import Slice
from resihp.parallelism.plan import Plan, Stop
from resihp.parallelism.workload import MicroBatch
from resihp.pipeline.program import Bucket, GroupSpec, Program, tensor_of


class Observer(Protocol):
    """Receives the progress of an iteration. Its methods are called in the rank's own thread."""

    def enter(self, phase: Phase) -> None: ...

    def progressed(self) -> None:
        """Called after each primitive, synchronisation or chunk of transferred state."""

    def communicating(self, waits: bool) -> None:
        """Called with True before and False after each wait for peers."""


@contextmanager
def waiting(observer: Observer, activity: str) -> Iterator[None]:
    """Report a wait for peers to the observer. Errors of the back end are raised as CommunicatorError."""
    observer.communicating(True)
    try:
        with guarded(activity):
            yield
    finally:
        observer.communicating(False)


class Prepared(msgspec.Struct, frozen=True):
    """Everything that one rank needs of a plan, derived from it. All fields except `counted` are equal on all ranks."""

    plan: Plan
    paths: dict[int, tuple[Stop, ...]]
    buckets: tuple[Bucket, ...]
    programs: dict[int, Program]
    memberships: tuple[GroupSpec, ...]
    counted: tuple[Slice, ...]
    """Slices that this rank contributes to sums over the whole model, so that each slice is counted once."""
    multiple: int
    """The number of tokens of a micro-batch is padded to a multiple of this number, so that sequence parallelism
    divides it evenly."""

    def tensor_group(self, replica: int, stage: int) -> str:
        """Return the name of the communicator of a stage's ranks. A stage with one rank has no such communicator."""
        layout = self.plan.layout
        return tensor_of(layout.replicas[replica].stages[stage].ranks, layout.active)


@dataclass(frozen=True)
class Iteration:
    """Iteration `number` under `prepared.plan` on `rank`, which has the place (replica, stage).

    `batch` is the global batch; its tokens are below `vocab`. `observer` receives the progress and the waits on
    `communicators`.
    """

    number: int
    rank: int
    place: tuple[int, int]
    prepared: Prepared
    batch: Sequence[MicroBatch]
    vocab: int
    communicators: Communicators
    observer: Observer
    device: torch.device
    learns: bool = True
    """Whether gradients are computed. False in an evaluation, where `number` counts global batches from 1."""

    @property
    def program(self) -> Program:
        """This rank's program."""
        return self.prepared.programs[self.rank]

    @property
    def active(self) -> tuple[int, ...]:
        """Ranks with work under the plan."""
        return self.prepared.plan.layout.active
