"""Choose the nodes on which a script is started again.

A round needs whole nodes, because scripts expect the same number of processes on each. The nodes of the round before it
stay in their order, so that most ranks return to their place; standby nodes fill gaps. A node with a dead device is
never used. A node on which processes have failed again and again is left out if the others are enough. A node with a
slow device is left out if the others are enough, and train at least as fast without it. Pure; called by `restarts`.
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
    return tuple(_without_slow(job, chosen))


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


def _without_slow(job: Job, names: list[str]) -> list[str]:
    """Return the nodes of a round; without those that have a slow device, if the others are enough and the loss of
    nodes costs no more than the slow devices, for which all others wait."""
    slow = job.record.slow
    slow_nodes = {name for name, _ in slow}
    present, healthy = (
        _whole_replicas(job, names),
        _whole_replicas(job, [name for name in names if name not in slow_nodes]),
    )
    speed = min((verdict.speed for (name, _), verdict in slow.items() if name in present), default=1.0)
    return healthy if healthy and len(healthy) >= speed * len(present) else present


def _whole_replicas(job: Job, names: list[str]) -> list[str]:
    """Return the first nodes that make whole replicas, as many as a round may have; none if these are too few."""
    settings = job.settings
    least = max(1, settings.nodes_least)
    count = min(len(names), settings.nodes - settings.spares if settings.spares_wait else settings.nodes)
    while count >= least and count * settings.gpus_per_node % (settings.tp * settings.pp):
        count -= 1
    return names[:count] if count >= least else []
