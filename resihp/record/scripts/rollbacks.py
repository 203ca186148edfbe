"""Rollbacks of a job that trains with resihp.Trainer: to which checkpoint it can go back, and how often it has."""

from __future__ import annotations

from dataclasses import dataclass

from resihp.protocol.messages import Declare
from resihp.record.scripts.entries import RollbackDecided


@dataclass
class Rollbacks:
    """The newest complete checkpoint of this run, and the rollbacks so far. Only `fold` changes it."""

    newest: tuple[int, str] | None = None
    """Iteration and folder of the newest complete checkpoint; None if this run has written none."""
    last: RollbackDecided | None = None
    count: int = 0
    in_a_row: int = 0
    """Number of rollbacks since the newest checkpoint was complete, or since the start."""

    @property
    def epoch(self) -> int:
        """First epoch that still counts; 0 without a rollback."""
        return 0 if self.last is None else self.last.epoch

    def loaded(self, trains: Declare | None) -> tuple[int, str]:
        """Return iteration and folder of the checkpoint that ranks load while no rank has state: that of the last
        rollback, else the one from which the job, which declared `trains`, resumes. (0, "") if there is none."""
        if self.last is not None:
            return self.last.iteration, self.last.folder
        return (0, "") if trains is None else (trains.resume_from, trains.resume_folder)

    def saved(self, iteration: int, folder: str) -> None:
        """Apply a complete checkpoint."""
        self.newest, self.in_a_row = (iteration, folder), 0

    def decide(self, entry: RollbackDecided) -> None:
        """Apply a rollback."""
        self.last, self.count, self.in_a_row = entry, self.count + 1, self.in_a_row + 1
