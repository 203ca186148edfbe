"""What earlier runs of the same Slurm job did about nodes: how many they had drained, and which died under them.

A job that Slurm starts again has no new allowance. Read off their journals when a run begins
(`wrapper.commands.in_slurm`).
A run whose journal cannot be read here may have used all that it was allowed. Decides nothing, writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from resihp.errors import OwnershipError, ResihpError, UsageError
from resihp.record.journal import DrainDecided
from resihp.words import count_of
from wrapper.config.run_spec import load
from wrapper.job_folder import Job, runs_of


class EarlierRuns(NamedTuple):
    drained: int = 0
    died: tuple[str, ...] = ()


def of(job_id: str, notice: Callable[[str], None]) -> EarlierRuns:
    """Of this Slurm job, before the run that is about to begin makes its folder."""
    drained, died = 0, set()
    for run in runs_of(job_id):
        decisions = _decisions(run)
        if decisions is None:
            allowed = _allowed(run)
            drained += allowed
            if allowed:
                notice(
                    f"{run.name}: its journal cannot be read; counted as having had {count_of(allowed, 'node')} drained"
                )
            continue
        drained += sum(entry.measure == "drain" for entry in decisions)
        died |= {entry.node for entry in decisions if entry.grounds in ("died", "died again")}
    return EarlierRuns(drained, tuple(sorted(died)))


def _decisions(run: Job) -> list[DrainDecided] | None:
    """None where they are not known."""
    try:
        records = run.records()
    except (ResihpError, OSError):
        return None
    return [record.entry for record in records if isinstance(record.entry, DrainDecided)] if records else None


def _allowed(run: Job) -> int:
    """How many it may have had drained; none where it ended before it began."""
    try:
        return load(run.run_file).settings.drains
    except OwnershipError:
        raise
    except UsageError:
        return 0
