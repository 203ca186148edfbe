"""The search for the checkpoints of a script that does not declare a model (`scripts.script_checkpoints`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from resihp.record.scripts.checkpoints import StoredCheckpoint, Version
from resihp.record.state import JobRecord


@dataclass
class CheckpointSearch:
    asked_at: float | None = None
    """Time of the request that is not answered yet; None if there is none."""
    is_due: bool = False
    """Whether another search is needed after the present one."""
    known_at: float | None = None
    """Time of the last request that was answered without an error; None if there is none."""
    answered_at: float | None = None
    """Time of the last answer; None before the first one."""
    took_s: float = 0.0
    """Seconds that the last search took."""
    stored: tuple[StoredCheckpoint, ...] = ()
    """The complete checkpoints in the last answer, newest first; before the first one, those in the record."""
    earlier: set[Version] = field(default_factory=set)
    """Checkpoints that were there before the script was started."""
    reported: dict[str, int | None] = field(default_factory=dict)
    """Paths that the script has reported, with the iteration if it named one."""
    fresh: set[str] = field(default_factory=set)
    """Those that were reported since the last request."""
    error: str = ""
    """Why the last search failed; empty if it did not."""
    is_overdue: bool = False
    """Whether a start of the script has not waited for the end of the present search."""

    @staticmethod
    def of(record: JobRecord) -> CheckpointSearch:
        return CheckpointSearch(stored=record.checkpoints.stored)
