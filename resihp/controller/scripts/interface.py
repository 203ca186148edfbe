"""Events and actions about scripts that do not declare a model, and the base classes of all events and actions.

Part of `resihp.controller.interface`, which has all names of this module.
"""

from __future__ import annotations

import msgspec

from resihp.protocol.messages import Printed, WorkerLook
from resihp.record.scripts.checkpoints import StoredCheckpoint, Version


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class Action(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class WorkerPrinted(Event, frozen=True, kw_only=True):
    """A rank of a script that does not report to resihp has printed iterations (`messages.Printed`)."""

    printed: Printed


class WorkersSeen(Event, frozen=True, kw_only=True):
    """The state and stack of each worker of a node, as the controller has asked for. `nccl`: the answer of NCCL's
    service; empty without one."""

    node: str
    looks: tuple[WorkerLook, ...]
    nccl: str = ""


class CheckpointsFound(Event, frozen=True, kw_only=True):
    """Answer to `FindCheckpoints`: the newest complete checkpoints of the script, newest first. `error`: why the search
    failed; empty if it did not."""

    checkpoints: tuple[StoredCheckpoint, ...]
    error: str = ""


class ProcessesEnded(Event, frozen=True, kw_only=True):
    """All processes of a round have ended on this node, with all processes that they had started."""

    node: str
    round: int


class FindCheckpoints(Action, frozen=True, kw_only=True):
    """Find the complete checkpoints of a script: those that match `[checkpoint] latest`, and those that it has reported
    and that are still there. Answered with `CheckpointsFound`. `fresh`: those reported since the last request, which
    are complete as they are now. `complete`: versions that are known to be complete."""

    reported: tuple[str, ...] = ()
    fresh: frozenset[str] = frozenset()
    complete: frozenset[Version] = frozenset()


class EndProcesses(Action, frozen=True, kw_only=True):
    """End all processes of a round of the script on this node, and all processes that they have started. Answered with
    a `ProcessesEnded` event, after a `WorkerExited` event for each process."""

    node: str
    round: int


class LookAtWorkers(Action, frozen=True, kw_only=True):
    """Inspect the workers of this node. Answered with a `WorkersSeen` event, or not at all.

    `asks_nccl`: also ask NCCL's service there, which knows of all ranks.
    """

    node: str
    asks_nccl: bool = False
