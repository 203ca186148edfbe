"""Checkpoints of a script that does not declare a model: those that were found, the one from which the present round
resumed, and what came of it. Part of `state.JobRecord`; changed only by the fold.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from resihp.record.journal import CheckpointCommitted, CheckpointDistrusted, RestartDecided, WorkersOrdered

MAX_KNOWN = 64
"""Number of checkpoints that are remembered, the last ones. Scripts keep far fewer on disk."""

Version = tuple[str, float]
"""Path of a checkpoint, and time of its last change: a script may use a path again."""


class StoredCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A complete checkpoint of a script. `iteration`: as its name says; None if it does not. `modified`: time of its
    last change in seconds since 1970."""

    path: str
    iteration: int | None
    modified: float
    bytes: int

    @property
    def version(self) -> Version:
        return self.path, self.modified


class RoundEnd(NamedTuple):
    """The end of a round: its reason, and the last iteration that it printed; 0 if none is known."""

    reason: str
    reached: int


@dataclass
class ScriptCheckpoints:
    by_path: dict[str, CheckpointCommitted] = field(default_factory=dict)
    """The last version of each checkpoint, in the order in which they were found."""
    distrusted: dict[Version, str] = field(default_factory=dict)
    """Checkpoints from which the script does not resume any more, with the failure to which each led, if any."""
    resumed: CheckpointCommitted | None = None
    """The checkpoint from which the present round was to resume; None if none was known."""
    saved_in_round: set[Version] = field(default_factory=set)
    """Checkpoints found since the present round began, without those that are distrusted."""
    furthest: int = 0
    """The largest iteration of a checkpoint found so far."""
    furthest_before: int = 0
    """The same when the present round began."""
    bad_ends: dict[Version, list[RoundEnd]] = field(default_factory=dict)
    """Ends of the rounds that resumed from a checkpoint and completed no further one, by checkpoint."""

    @property
    def stored(self) -> tuple[StoredCheckpoint, ...]:
        """The known checkpoints, newest first. Some may not be on disk any more."""
        checkpoints = (
            StoredCheckpoint(path=path, iteration=entry.iteration, modified=entry.modified or 0.0, bytes=entry.bytes)
            for path, entry in self.by_path.items()
        )
        return tuple(sorted(checkpoints, key=lambda stored: (stored.modified, stored.iteration or 0), reverse=True))

    def found(self, entry: CheckpointCommitted, decision: RestartDecided | None = None) -> bool:
        """Add a checkpoint. `decision`: the one that has ended the present round, if any. Return whether the checkpoint
        shows that the round had made progress before that; one with bad losses does not."""
        self.by_path.pop(entry.folder, None)
        self.by_path[entry.folder] = entry
        self.saved_in_round.add(version_of(entry))
        self.furthest = max(self.furthest, entry.iteration)
        while len(self.by_path) > MAX_KNOWN:
            self._forget(next(iter(self.by_path)))
        is_late = decision is not None and not decision.reason.startswith("the loss ")
        return is_late and entry.iteration > self.furthest_before

    def distrust(self, entry: CheckpointDistrusted) -> None:
        self.distrusted[entry.folder, entry.modified] = entry.failure
        self.saved_in_round.discard((entry.folder, entry.modified))

    def ends(self, decision: RestartDecided, reached: int) -> list[RoundEnd]:
        """Return the ends of the rounds that resumed from the same checkpoint as the present round and completed no
        further one, in order. The present one ends by `decision`; `reached`: its last iteration."""
        if self.resumed is None or self.saved_in_round or decision.is_planned:
            return []
        return [*self.bad_ends.get(version_of(self.resumed), ()), RoundEnd(decision.reason, reached)]

    def begin_round(self, order: WorkersOrdered, decision: RestartDecided | None) -> None:
        """Note the checkpoint from which a round is to resume. `decision`: the one that ended the round before it; None
        for the first round."""
        if decision is not None and self.resumed is not None and (ends := self.ends(decision, order.reached)):
            self.bad_ends[version_of(self.resumed)] = ends
        self.furthest_before = self.furthest
        self.resumed, self.saved_in_round = self.by_path.get(order.checkpoint), set()

    def _forget(self, path: str) -> None:
        version = version_of(self.by_path.pop(path))
        self.distrusted.pop(version, None)
        self.bad_ends.pop(version, None)


def version_of(checkpoint: CheckpointCommitted) -> Version:
    return checkpoint.folder, checkpoint.modified or 0.0
