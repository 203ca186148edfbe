"""Differences between releases of Slurm. All code that depends on a version is here.

Each fact names the releases on which it was measured. For releases in between, Slurm's change log is followed, and
where it says nothing, the older behaviour is assumed. Decides nothing about a job. Used by `resihp.slurm.commands`,
`resihp submit` and `resihp run`.
"""

from __future__ import annotations

import msgspec

Version = tuple[int, int, int]

OLDEST, NEWEST = (22, 5), (26, 5)
"""Oldest and newest tested releases: all Slurm tests pass on 22.05.8, 24.11.5 and 26.05.5."""


class SlurmRelease(msgspec.Struct, frozen=True, kw_only=True):
    """Behaviour of a release where releases differ."""

    keeps_preemption: bool
    """Whether Slurm itself requeues a job that ends in its grace time. In addition, a job that *requested* a requeue,
    or was still running at the end of the grace time, keeps its preemption mark, and is queued once more after it has
    completed.

    22.05.8: neither; the job must request the requeue. 24.11.5: both, always. 26.05.5: only the first; a request clears
    the mark.
    """
    forgets_gpus: bool
    """Whether a job that is requeued before Slurm has noticed a dead node of it is started without its GPUs, once Slurm
    has noticed the dead node: the job's steps are then refused ("Invalid generic resource"). 22.05.8: always. 24.11.5
    and 26.05.5: never."""
    expedites: bool
    """Whether `sbatch --requeue=expedite` exists. It was added in 25.11: 26.05.5 accepts it where the site allows it,
    22.05.8 and 24.11.5 do not know the option."""


def of(version: Version) -> SlurmRelease:
    return SlurmRelease(
        keeps_preemption=(24, 5, 0) <= version < (26, 5, 5),
        forgets_gpus=version < (24, 11, 0),
        expedites=version >= (25, 11, 0),
    )


def named(version: Version) -> str:
    """Format a version as Slurm does, such as 24.05.3."""
    return f"{version[0]}.{version[1]:02}.{version[2]}"


def untried(version: Version) -> str | None:
    """Return a notice for a release outside of the tested range, to be shown once; None for a tested one."""
    if OLDEST <= version[:2] <= NEWEST:
        return None
    comparison = "older" if version[:2] < OLDEST else "newer"
    tested = f"{OLDEST[0]}.{OLDEST[1]:02} to {NEWEST[0]}.{NEWEST[1]:02}"
    return (
        f"Slurm {named(version)} is {comparison} than the releases that resihp was tested with ({tested}); continuing"
    )
