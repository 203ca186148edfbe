"""Choose the nodes on which a script is started again.

A round needs whole nodes, because scripts expect the same number of processes on each. The nodes of the round before it
stay in their order, so that most ranks return to their place; standby nodes fill gaps. A node with a dead device is
never used. A node on which processes have failed again and again is left out if the others are enough. Pure; called by
`restarts`.
"""

from __future__ import annotations

from resihp.controller.state.job import Job
from resihp.words import count_of, natural


def nodes_of(job: Job) -> tuple[str, ...]:
    """Return the nodes of the next round; empty if there are fewer than `Settings.nodes_least`."""
    settings, candidates = job.settings, usable(job)
    reliable = [name for name in candidates if not _is_unreliable(job, name)]
    least = settings.nodes_least
    chosen = reliable if len(reliable) >= least else candidates
    count = min(len(chosen), settings.nodes - settings.spares if settings.spares_wait else settings.nodes)
    while count >= max(1, least) and not _fits(job, count):
        count -= 1
    return tuple(chosen[:count]) if count >= max(1, least) else ()


def shortage(job: Job) -> str:
    """Return, in words, that too few nodes are left."""
    count, least = len(usable(job)), job.settings.nodes_least
    return f"the script needs {count_of(least, 'node')} ([job] min_nodes), {count} can be used"


def usable(job: Job) -> list[str]:
    """Return the live nodes without a dead device, those of the present round first."""
    placed = list(dict.fromkeys(place.node for place in job.record.placements))
    unplaced = sorted(job.nodes.keys() - set(placed), key=natural)
    dead = {name for name, _ in job.dead_devices}
    return [
        name
        for name in (*placed, *unplaced)
        if job.nodes[name].alive and name not in dead and job.nodes[name].devices >= job.settings.gpus_per_node
    ]


def _is_unreliable(job: Job, name: str) -> bool:
    """Return whether more processes have failed on one device of the node than a device may lose."""
    failures = (count for (node, _), count in job.record.failed_on.items() if node == name)
    return max(failures, default=0) > job.settings.come_backs


def _fits(job: Job, count: int) -> bool:
    """Return whether the devices of so many nodes make whole replicas."""
    settings = job.settings
    return count * settings.gpus_per_node % (settings.tp * settings.pp) == 0
