"""Differences between releases of Slurm, by version: here and nowhere else.

Each fact names the releases on which it was measured; between them it follows Slurm's change log, and where that is
silent the older behaviour. Decides nothing about a job. Used by `slurm.commands`, `resihp submit` and `resihp run`.
"""

from __future__ import annotations

import msgspec

Version = tuple[int, int, int]

OLDEST, NEWEST = (22, 5), (26, 5)
"""Tested range: all Slurm tests pass on 22.05.8, 24.11.5 and 26.05.5."""


class SlurmRelease(msgspec.Struct, frozen=True, kw_only=True):
    """Behaviour of a release that differs from that of others."""

    keeps_preemption: bool
    """Slurm requeues a job that leaves in its grace time. A job that has *requested* a requeue, or was still there when
    the grace time was over, keeps its preemption mark: it is queued once more after it has completed.

    22.05.8: neither; the job must request it. 24.11.5: both, every time. 26.05.5: the first, and requesting clears the
    mark.
    """
    forgets_gpus: bool
    """A job that is requeued before Slurm has noticed that one of its nodes is dead waits until it has, and is then
    started without its GPUs: its steps are refused ("Invalid generic resource"). 22.05.8, every time; not 24.11.5,
    26.05.5."""
    expedites: bool
    """`sbatch --requeue=expedite`: 26.05.5 accepts it where the site allows it, 22.05.8 and 24.11.5 do not know the
    option; it was added in 25.11."""


def of(version: Version) -> SlurmRelease:
    return SlurmRelease(
        keeps_preemption=(24, 5, 0) <= version < (26, 5, 5),
        forgets_gpus=version < (24, 11, 0),
        expedites=version >= (25, 11, 0),
    )


def named(version: Version) -> str:
    """Format a version as Slurm does: 24.05.3."""
    return f"{version[0]}.{version[1]:02}.{version[2]}"


def untried(version: Version) -> str | None:
    """Return the notice, shown once, for a release outside the tested range; None for one inside it."""
    if OLDEST <= version[:2] <= NEWEST:
        return None
    comparison = "older" if version[:2] < OLDEST else "newer"
    tested = f"{OLDEST[0]}.{OLDEST[1]:02} to {NEWEST[0]}.{NEWEST[1]:02}"
    return (
        f"Slurm {named(version)} is {comparison} than the releases that resihp was tested with ({tested}); continuing"
    )
