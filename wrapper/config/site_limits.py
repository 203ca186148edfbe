"""Translates the limits of `[site]` on drains for `resihp.slurm.drains`. Reads and queries nothing."""

from __future__ import annotations

from resihp.slurm.drains.site_limits import DrainLimits
from resihp.wrapper.config.schema import Configuration
from resihp.wrapper.config.values import share_of


def drain_limits(configuration: Configuration, *partitions: str) -> DrainLimits:
    """Return the site's limits. `partitions`: those of the job and of its replacements; a limit that is a share refers
    to their nodes."""
    site = configuration.site
    return DrainLimits(
        drained=site.drained if isinstance(site.drained, int) else None,
        drained_share=share_of(site.drained),
        partition=",".join(dict.fromkeys(filter(None, partitions))),
        user_drains_per_hour=site.user_drains_per_hour,
    )
