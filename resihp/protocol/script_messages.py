"""Messages about scripts that do not declare a model, and the base class of all messages.

Part of `messages`, which has all names of this module and describes the conversations.
"""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base class of all messages that are sent on their own."""


class ScriptSaved(Message, frozen=True, kw_only=True):
    """Report that a script which does not declare a model has completed a checkpoint (`resihp.checkpointed`).

    `path` is absolute. `iteration` is the last iteration in the checkpoint; None if the script did not say.
    """

    path: str
    iteration: int | None = None


class PrintedFigures(msgspec.Struct, frozen=True, kw_only=True):
    """An iteration that a script has printed as complete. `seconds`: duration of one iteration, a mean if lines were
    combined; None if unknown. `loss`: None if not printed; may be NaN or infinite."""

    iteration: int
    seconds: float | None = None
    loss: float | None = None


class Printed(Message, frozen=True, kw_only=True):
    """Report the new iterations on the output of one rank, for a script that has not sent `Declare`.

    The agent reads rank 0 and the last rank, once a second. A script that prints more than
    `resihp.detector.console.condensing.MAX_FIGURES` iterations in this time has several of them combined. `goal`: last
    iteration of the script; None if not printed.
    """

    rank: int
    figures: tuple[PrintedFigures, ...]
    goal: int | None = None


class WorkerLook(msgspec.Struct, frozen=True, kw_only=True):
    """One worker as it was inspected. `state`: the kernel's, as R, S, D or T. `frames`: (file, line, function) of the
    main thread, innermost first; empty if they are not known. `source`: text of the innermost line; empty if it could
    not be read."""

    rank: int
    state: str
    frames: tuple[tuple[str, int, str], ...] = ()
    source: str = ""


class WorkersInspected(Message, frozen=True, kw_only=True):
    """Answer to `InspectWorkers`. `nccl`: text of NCCL's RAS service; empty if it was not asked or is not there."""

    looks: tuple[WorkerLook, ...]
    nccl: str = ""


class InspectWorkers(Message, frozen=True, kw_only=True):
    """Inspect all workers of the node, because a script makes no progress. `asks_nccl`: also ask NCCL's RAS service."""

    asks_nccl: bool = False
