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


class PrintedFigures(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An iteration that a script has printed or reported as complete. `seconds`: duration of one iteration, a mean if
    several were combined; None if unknown. `loss`: None if not given; may be NaN or infinite. `tokens` and
    `sum_squared_lengths`: of the iteration's global batch, 0 if not given."""

    iteration: int
    seconds: float | None = None
    loss: float | None = None
    tokens: int = 0
    sum_squared_lengths: int = 0


class Printed(Message, frozen=True, kw_only=True):
    """Report the new iterations on the output of one rank, for a script that has not sent `Declare`.

    The agent reads rank 0 and the last rank, once a second. A script that prints more than
    `resihp.detector.console.condensing.MAX_FIGURES` iterations in this time has several of them combined. `goal`: last
    iteration of the script; None if not printed. `called`: the rank has reported them with `resihp.iteration`.
    """

    rank: int
    figures: tuple[PrintedFigures, ...]
    goal: int | None = None
    called: bool = False


class ScriptTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of a process since its start, so that nothing is lost with a message (`resihp.iteration`,
    `resihp.section`).

    `iterations`: number of calls. `iteration`: number of the last one. `own_s`: seconds in sections, nested ones not
    counted twice. `sections`: name, seconds and number of uses of each.
    """

    iterations: int
    iteration: int
    own_s: float
    sections: tuple[tuple[str, float, int], ...] = ()


class ScriptProgress(Message, frozen=True, kw_only=True):
    """Report the totals of a process, to its agent only, at most about twice a second. `figures`: the iterations since
    the last message; the agent passes them on for rank 0 and for the last rank."""

    totals: ScriptTotals
    figures: tuple[PrintedFigures, ...] = ()


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
