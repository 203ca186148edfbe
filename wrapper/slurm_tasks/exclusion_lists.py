"""The lists that exclude nodes from a user's jobs, whichever folder the jobs are submitted from.

Each home (RESIHP_HOME) of the user has a list, to which its jobs add nodes. The user's own list is stored beside the
registry of jobs, independent of any home, and contains the nodes of `resihp node exclude`. Every submission respects
all lists. Used by `resihp node`, `resihp submit`, a job's requests for replacements, and `resihp run`, which reports
excluded nodes in its allocation.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from resihp.errors import OwnershipError
from resihp.slurm.client import Slurm
from resihp.slurm.drains.exclusions import Exclusion, Exclusions, avoided, clusters
from resihp.wrapper import registry
from resihp.wrapper.job_folder import check_our_home, home, is_our_home

_log = logging.getLogger("slurm")


def own(cluster: str) -> Exclusions | None:
    """Return the user's own list; None for a user without a home folder."""
    place = registry.place()
    return None if place is None else Exclusions(place.parent, cluster)


def lists(cluster: str, here: Path | None = None) -> list[Exclusions]:
    """Return the existing exclusion lists: of this home (or of `here`), the user's own list, and of the user's other
    homes."""
    return [exclusion_list for root in _roots(here) if (exclusion_list := Exclusions(root, cluster)).path.exists()]


def to_avoid(slurm: Slurm, cluster: str, now: float, here: Path | None = None) -> tuple[str, ...]:
    """Return the names of nodes to exclude from a submission from this home, or from `here`. If the folders of other
    homes do not respond soon, their lists are ignored, with a warning. Raises SlurmError."""
    exclusions: list[Exclusion] = []

    def look() -> None:
        exclusions.extend(item for exclusion_list in lists(cluster, here) for item in exclusion_list.current(now))

    items: Iterable[Exclusion] = exclusions
    if trouble := registry.promptly(look, "lists of excluded nodes"):
        _log.warning("%s; only the list of %s is used", trouble, here or home())
        items = Exclusions(here or home(), cluster).current(now)
    return avoided(list(items), slurm)


def known_clusters() -> list[str]:
    """Return the clusters of all lists; used if Slurm does not report its own name."""
    return sorted({name for root in _roots() for name in clusters(root)})


def known(exclusion_lists: Iterable[Exclusions]) -> list[Exclusion]:
    """Return the exclusions of these lists, sorted by node name. If a node has several, the one that expires last is
    returned."""
    by_node: dict[str, Exclusion] = {}
    for exclusion_list in exclusion_lists:
        for item in exclusion_list.known():
            if item.node not in by_node or item.expires_at > by_node[item.node].expires_at:
                by_node[item.node] = item
    return [by_node[node] for node in sorted(by_node)]


def exclude(cluster: str, node: str, reason: str, until: float, now: float) -> Exclusion:
    """Exclude a node from all of the user's jobs. The node is also added to this home's list, for running jobs of an
    older version. Raises ExclusionError."""
    here, mine = home(), own(cluster)
    if mine is None or is_our_home(here):
        places = [*([] if mine is None else [mine]), Exclusions(check_our_home(here), cluster)]
    else:
        places = [mine]
    return max(
        (exclusion_list.add(node, reason, until, now=now) for exclusion_list in places),
        key=lambda added: added.expires_at,
    )


def remove(cluster: str, node: str) -> bool:
    """Remove a node from all lists; return False if it was in none. Raises ExclusionError."""
    return any([exclusion_list.remove(node) for exclusion_list in lists(cluster)])


def note_check(cluster: str, node: str, result: str, at: float) -> None:
    """Note the result of a check of a node in all lists that have the node. Raises ExclusionError."""
    for exclusion_list in lists(cluster):
        exclusion_list.note_check(node, result, at)


def given_all_the_same(cluster: str, nodes: Collection[str], now: float) -> list[Exclusion]:
    """Return the exclusions of nodes in an allocation: a batch script that was passed to sbatch directly ignores the
    lists. Empty if the lists cannot be read soon, because a job waits for no file system except its own."""
    exclusions: list[Exclusion] = []

    def look() -> None:
        exclusions.extend(item for item in known(lists(cluster)) if item.node in nodes and item.expires_at > now)

    registry.promptly(look, "lists")
    return list(exclusions)


def _roots(here: Path | None = None) -> list[Path]:
    """Return the folders that may have lists, this home first. A `.resihp` folder of another user in the current folder
    is ignored."""
    if here is None:
        with suppress(OwnershipError):
            here = home()
    place = registry.place()
    homes = [Path(entry.home) for entry in registry.entries()[0] if entry.slurm_job]
    roots = dict.fromkeys([*([here] if here else []), *([place.parent] if place else []), *homes])
    return [root for root in roots if is_our_home(root)]
