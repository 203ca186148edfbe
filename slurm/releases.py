"""What differs between releases of Slurm, by version: here and nowhere else.

Each fact names the releases on which it was measured; between those it is what Slurm's own changes say, and where they
say nothing the older way. Decides nothing about a job. Asked by `slurm.commands`, `resihp submit` and `resihp run`.
"""

from __future__ import annotations

import msgspec

Version = tuple[int, int, int]

OLDEST, NEWEST = (22, 5), (26, 5)
"""All tests of Slurm pass on 22.05.8, 24.11.5 and 26.05.5."""


class SlurmRelease(msgspec.Struct, frozen=True, kw_only=True):
    """What a release does that others do not."""

    keeps_preemption: bool
    """A job that leaves in its time of grace is run again by Slurm, and one that has *asked* for that, or was still
    there when the time was over, keeps the mark of its preemption: it is queued once more when it has completed.

    22.05.8: neither; it must ask. 24.11.5: both, every time. 26.05.5: the first, and asking clears the mark.
    """
    forgets_gpus: bool
    """A job that is requeued before Slurm has noticed that a node of it is dead waits for that, and is started without
    its GPUs then: its steps are refused ("Invalid generic resource"). 22.05.8, every time; not 24.11.5, 26.05.5.
    """
    expedites: bool
    """`sbatch --requeue=expedite`: 26.05.5 takes it where the site allows it, 22.05.8 and 24.11.5 know no such option;
    it came with 25.11."""


def of(version: Version) -> SlurmRelease:
    return SlurmRelease(
        keeps_preemption=(24, 5, 0) <= version < (26, 5, 5),
        forgets_gpus=version < (24, 11, 0),
        expedites=version >= (25, 11, 0),
    )


def named(version: Version) -> str:
    """As Slurm writes it: 24.05.3."""
    return f"{version[0]}.{version[1]:02}.{version[2]}"


def untried(version: Version) -> str | None:
    """What a user is told once about a release that nobody has tried; None for those between the tried ones."""
    if OLDEST <= version[:2] <= NEWEST:
        return None
    which = "older" if version[:2] < OLDEST else "newer"
    tried = f"{OLDEST[0]}.{OLDEST[1]:02} to {NEWEST[0]}.{NEWEST[1]:02}"
    return f"Slurm {named(version)} is {which} than those that resihp was tried with ({tried}); going on"
