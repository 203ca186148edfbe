"""Finds the nodes that earlier runs of the same Slurm job had drained, and the nodes that died during those runs.

A job that Slurm starts again gets no new allowance of drains. The numbers come from the journals of the earlier runs,
when a run begins (`resihp.wrapper.commands.in_slurm`). A run whose journal cannot be read here counts as if it had used
its whole allowance. Decides nothing, writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from resihp.errors import OwnershipError, ResihpError, UsageError
from resihp.record.journal import DrainDecided
from resihp.words import count_of
from resihp.wrapper.config.run_spec import load
from resihp.wrapper.job_folder import Job, runs_of


class EarlierRuns(NamedTuple):
    """Result of a search in the earlier runs' journals. `drained`: number of drained nodes; `died`: names of nodes that
    died."""

    drained: int = 0
    died: tuple[str, ...] = ()


def of(job_id: str, notice: Callable[[str], None]) -> EarlierRuns:
    """Return the drained and the dead nodes of this Slurm job's earlier runs. Call it before the new run creates its
    folder."""
    drained, died = 0, set()
    for run in runs_of(job_id):
        decisions = _decisions(run)
        if decisions is None:
            allowed = _allowed(run)
            drained += allowed
            if allowed:
                notice(
                    f"{run.name}: its journal cannot be read; assuming that it had {count_of(allowed, 'node')} drained"
                )
            continue
        drained += sum(entry.measure == "drain" for entry in decisions)
        died |= {entry.node for entry in decisions if entry.grounds in ("died", "died again")}
    return EarlierRuns(drained, tuple(sorted(died)))


def _decisions(run: Job) -> list[DrainDecided] | None:
    """Return a run's drain decisions from its journal; None if the journal cannot be read or is empty."""
    try:
        records = run.records()
    except (ResihpError, OSError):
        return None
    return [record.entry for record in records if isinstance(record.entry, DrainDecided)] if records else None


def _allowed(run: Job) -> int:
    """Return the most nodes that a run may have had drained; 0 if it ended before it had begun."""
    try:
        return load(run.run_file).settings.drains_left
    except OwnershipError:
        raise
    except UsageError:
        return 0
