"""The lists that keep nodes out of a user's jobs, whichever folder these are submitted from.

Each of his homes has one, where its jobs write down what they found; his own has what `resihp node exclude` was told,
beside his registry of jobs, since nobody thinks of a folder then. What is submitted heeds all of them. Used by
`resihp node`, `resihp submit`, a job's requests for replacements, and `resihp run`, which tells of nodes that it has
been given all the same.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from resihp.errors import OwnershipError
from slurm.client import Slurm
from slurm.drains.exclusions import Exclusion, Exclusions, avoided, clusters
from wrapper import registry
from wrapper.job_folder import check_our_home, home, is_our_home

_log = logging.getLogger("slurm")


def own(cluster: str) -> Exclusions | None:
    """The user's own list; None for one without a home folder."""
    place = registry.place()
    return None if place is None else Exclusions(place.parent, cluster)


def lists(cluster: str, here: Path | None = None) -> list[Exclusions]:
    """This home's, or that of the home named, the user's own, and those of his other homes, as far as these are
    there."""
    return [found for root in _roots(here) if (found := Exclusions(root, cluster)).path.exists()]


def to_avoid(slurm: Slurm, cluster: str, now: float, here: Path | None = None) -> tuple[str, ...]:
    """Names of nodes to leave out of a submission from this home, or from the one named. Where others do not answer
    soon, their lists are not heeded, with a warning. Raises SlurmError."""
    found: list[Exclusion] = []

    def look() -> None:
        found.extend(item for each in lists(cluster, here) for item in each.current(now))

    items: Iterable[Exclusion] = found
    if trouble := registry.promptly(look, "lists of excluded nodes"):
        _log.warning("%s; only those of %s are heeded", trouble, here or home())
        items = Exclusions(here or home(), cluster).current(now)
    return avoided(list(items), slurm)


def known_clusters() -> list[str]:
    """Those that any of the lists is of, for when Slurm does not tell which one this is."""
    return sorted({name for root in _roots() for name in clusters(root)})


def known(of: Iterable[Exclusions]) -> list[Exclusion]:
    """What these lists have, by name; of a node that several have, what keeps it out for longest."""
    found: dict[str, Exclusion] = {}
    for each in of:
        for item in each.known():
            if item.node not in found or item.expires_at > found[item.node].expires_at:
                found[item.node] = item
    return [found[node] for node in sorted(found)]


def exclude(cluster: str, node: str, reason: str, until: float, now: float) -> Exclusion:
    """Keep a node out of all of the user's jobs; this home's list has it as well, for jobs of an older version that run
    already. Raises ExclusionError."""
    here, mine = home(), own(cluster)
    if mine is None or is_our_home(here):
        places = [*([] if mine is None else [mine]), Exclusions(check_our_home(here), cluster)]
    else:
        places = [mine]
    return max((each.add(node, reason, until, now=now) for each in places), key=lambda added: added.expires_at)


def remove(cluster: str, node: str) -> bool:
    """Use it again, whichever lists have it; False where none has. Raises ExclusionError."""
    return any([each.remove(node) for each in lists(cluster)])


def given_all_the_same(cluster: str, nodes: Collection[str], now: float) -> list[Exclusion]:
    """Nodes of an allocation that are kept out: a batch script that was given to sbatch itself heeds no list. Nothing
    where the lists cannot be read soon: a job waits for no file system but its own."""
    found: list[Exclusion] = []

    def look() -> None:
        found.extend(item for item in known(lists(cluster)) if item.node in nodes and item.expires_at > now)

    registry.promptly(look, "lists")
    return list(found)


def _roots(here: Path | None = None) -> list[Path]:
    """The folders that may have lists, the home first. A `.resihp` of another user in the current folder is none."""
    if here is None:
        with suppress(OwnershipError):
            here = home()
    place = registry.place()
    homes = [Path(entry.home) for entry in registry.entries()[0] if entry.slurm_job]
    every = dict.fromkeys([*([here] if here else []), *([place.parent] if place else []), *homes])
    return [each for each in every if is_our_home(each)]
