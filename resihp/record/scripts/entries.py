"""Entries about restarts, and about scripts that do not declare a model; the base class of all entries.

Part of `journal`, which has all names of this module.
"""

from __future__ import annotations

import msgspec


class Entry(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base class of all entries."""


class RestartDecided(Entry, frozen=True, kw_only=True):
    """All processes of the script are to be ended, and started again in `round`. `progressed`: whether the round that
    ends had made progress, as far as known. `is_planned`: no failure is the reason, but nodes that have joined.

    Only for a script that does not declare a model. Written before any process is ended.
    """

    round: int
    reason: str
    progressed: bool
    is_planned: bool = False


class CounterSeen(Entry, frozen=True, kw_only=True):
    """The iterations of a script that does not report to resihp are read from the output of `rank`.

    Written when its iteration counter is first seen, when its goal changes, and when the counter goes back: after a
    restart, iterations up to `furthest` are done again, and are not committed again. Until the counter has passed
    `furthest`, it is written again every half minute. `goal`: the last iteration of the script; None if not printed.
    """

    rank: int
    iteration: int
    furthest: int = 0
    goal: int | None = None


class LossNotFinite(Entry, frozen=True, kw_only=True):
    """A script that does not report to resihp has printed a loss that is NaN or infinite; the loss before was finite,
    or unknown."""

    rank: int
    iteration: int
    loss: str


class CheckpointDistrusted(Entry, frozen=True, kw_only=True):
    """A script does not resume from this checkpoint any more. Path and time of change identify it. `failure`: the
    failure to which it led; empty if there is another reason."""

    folder: str
    modified: float
    reason: str
    failure: str = ""


class RollbackDecided(Entry, frozen=True, kw_only=True):
    """Training with `resihp.Trainer` goes back to `iteration`, because no surviving rank holds some of the later state.

    The next plan loads the checkpoint in `folder`; if it is empty, ranks draw initial parameters. Steps that ranks took
    in an epoch before `epoch` no longer count. `reason`: the loss.
    """

    epoch: int
    iteration: int
    folder: str
    reason: str
