"""One iteration on one rank, as data: the inputs of its computation (`interpreter`) and its end (`step_agreement`).

Created by `resihp.executor.engine`. Decides nothing and holds no tensor.
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
    """Receives the progress of an iteration, in the rank's own thread."""

    def enter(self, phase: Phase) -> None: ...

    def progressed(self) -> None:
        """Called when one more primitive, synchronisation or chunk of state is done."""

    def communicating(self, waits: bool) -> None:
        """Called with True before and False after each wait for peers."""


@contextmanager
def waiting(observer: Observer, activity: str) -> Iterator[None]:
    """Report a wait for peers. Errors of the back end are raised as CommunicatorError."""
    observer.communicating(True)
    try:
        with guarded(activity):
            yield
    finally:
        observer.communicating(False)


class Prepared(msgspec.Struct, frozen=True):
    """Data derived from a plan; equal on all ranks, except `counted`."""

    plan: Plan
    paths: dict[int, tuple[Stop, ...]]
    buckets: tuple[Bucket, ...]
    programs: dict[int, Program]
    memberships: tuple[GroupSpec, ...]
    counted: tuple[Slice, ...]
    """Slices that this rank counts in sums over the whole model."""
    multiple: int
    """Micro-batches are padded to a multiple of this many tokens, so that sequence parallelism splits them evenly."""

    def tensor_group(self, replica: int, stage: int) -> str:
        """Return the name of the communicator of a stage's ranks; a single rank has none."""
        layout = self.plan.layout
        return tensor_of(layout.replicas[replica].stages[stage].ranks, layout.active)


@dataclass(frozen=True)
class Iteration:
    """Iteration `number` under `prepared.plan` on `rank`, whose place is (replica, stage).

    `batch` is the global batch; `vocab` bounds its tokens. `observer` is notified of the use of `communicators`.
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
    """Whether gradients are computed. They are not in an evaluation, whose global batches are numbered from 1."""

    @property
    def program(self) -> Program:
        """This rank's program."""
        return self.prepared.programs[self.rank]

    @property
    def active(self) -> tuple[int, ...]:
        """Ranks with work."""
        return self.prepared.plan.layout.active
