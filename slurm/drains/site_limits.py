"""A site's limits on drains with scontrol: on nodes drained at a time, and on drains of one user in an hour.

Both are counted from what Slurm itself says of drained nodes, so that all jobs of all users count, and nothing is
stored. Jobs that drain in the same second may exceed a limit. A node that was undrained since has lost its
reason and does not count. Decides whether one more drain is allowed; `resihp.slurm.drains.drain` asks before it drains.
"""

from __future__ import annotations

import pwd
from collections.abc import Mapping

import msgspec

from resihp.slurm.client import PREFIX, NodeView, Slurm
from resihp.slurm.drains.spool import asked_by

HOUR_S = 3600.0


class DrainLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a site; None: no limit.

    `drained`: most nodes of the cluster that are drained with our reason at a time. `drained_share`: the same as a
    share of the nodes of `partition`, in which both are counted; at least one node.
    `user_drains_per_hour`: most drains of one user in an hour, whichever job.
    """

    drained: int | None = None
    drained_share: float | None = None
    partition: str = ""
    user_drains_per_hour: int | None = None


NO_LIMITS = DrainLimits()


def refusal(slurm: Slurm, limits: DrainLimits, uid: int, now: float) -> str:
    """Return why the limits allow no further drain by the jobs of user `uid`; empty if they allow one. Raises
    SlurmError."""
    if limits == DrainLimits(partition=limits.partition):
        return ""
    ours = {name: view for name, view in slurm.drained().items() if view.reason.startswith(PREFIX)}
    text = _too_many_drained(slurm, limits, ours) or _too_many_of_user(limits, ours, uid, now)
    return f"{text}; try: sinfo -R | grep {PREFIX.strip()}" if text else ""


def _too_many_drained(slurm: Slurm, limits: DrainLimits, ours: Mapping[str, NodeView]) -> str:
    if limits.drained is not None and len(ours) >= limits.drained:
        drained = _are_drained(len(ours))
        return f"{drained} with our reason, and the site allows {limits.drained} at a time"
    if limits.drained_share is not None:
        if not limits.partition:
            return "the site allows a share of the partition, and the job's partition is not known"
        names = slurm.partition_nodes(limits.partition)
        count = len(names.keys() & ours.keys())
        most = most_of(limits.drained_share, len(names))
        if count >= most:
            allowed = f"the site allows {100 * limits.drained_share:g} % of its {_nodes(len(names))}"
            where = f"of partition {limits.partition}"
            return f"{_are_drained(count, where)} with our reason, and {allowed} at a time, which is {most}"
    return ""


def _are_drained(count: int, where: str = "") -> str:
    return " ".join(filter(None, (_nodes(count), where, "is" if count == 1 else "are", "drained")))


def _nodes(count: int) -> str:
    return f"{count} node" if count == 1 else f"{count} nodes"


def most_of(share: float, nodes: int) -> int:
    """Return the number of nodes that a share allows: rounded down, but at least one."""
    return max(1, int(share * nodes + 1e-9))


def _too_many_of_user(limits: DrainLimits, ours: Mapping[str, NodeView], uid: int, now: float) -> str:
    most = limits.user_drains_per_hour
    if most is None:
        return ""
    user = _user_of(uid)
    count = sum(
        (view.reason_by == user or asked_by(view.reason) == uid)
        and (view.reason_at is None or view.reason_at > now - HOUR_S)
        for view in ours.values()
    )
    if count < most:
        return ""
    return f"jobs of {user} had {_nodes(count)} drained in the last hour, and the site allows {most}"


def _user_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
