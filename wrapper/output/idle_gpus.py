"""Names the GPUs of a job that have no work, with their nodes and the reasons, in one line. Pure.

Called by the live view, `resihp status`, `history cost` and `report`, with the job's history; no other module names
idle GPUs. Their cost is computed by `resihp.db.reading.costs.cost_accounts`, as `idle` and `capacity`. Counted are the
GPUs that the job was given, including spares, and those of lost nodes that were not replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from resihp.record.describe import rank_list
from resihp.words import natural
from resihp.wrapper.output.job_history import Device, JobHistory, PastFailure

MAX_GROUPS = 6
"""Most groups of GPUs that are described; further groups are only counted."""
NO_STAGE, SPARE, MIRROR = "no stage for it", "spare", "holds a copy of the state"
FROM_START = 0
"""Value of `IdleGpu.since` for a GPU that has been idle since the start."""


class IdleGpu(NamedTuple):
    """A GPU without work. `why`: the reason. `since`: first iteration without work; `FROM_START`; or None if that is
    too long ago to know. `rank`: last rank on the GPU; None if it never had one."""

    node: str
    why: str
    since: int | None
    rank: int | None


class IdleGpus:
    """The idle GPUs of a job under its plan in effect. Built from the history as it is now."""

    def __init__(self, history: JobHistory) -> None:
        self._history = history
        self._nodes = list(_counted(history))
        self._failed: set[int] = set()
        self._slow: dict[Device, float] = {}
        """Remaining speed (1 is full speed) of each device that is slow now."""
        for failure in history.failures.values():
            if failure.kind == "fail-stop":
                self._failed.update(failure.ranks)
            elif failure.kind == "fail-slow" and not failure.ended:
                self._add_slow(failure)

    def idle(self) -> list[IdleGpu]:
        """Return every GPU without work, ordered by node and device; an empty list before the first plan."""
        history = self._history
        if not history.plans:
            return []
        active = history.plans[-1].ranks.active
        newest: dict[str, dict[int, int]] = {}
        for rank, worker in sorted(history.workers.items()):
            of_node = newest.setdefault(worker.node, {})
            if of_node.get(worker.device, -1) not in active:
                of_node[worker.device] = rank
        gpus = []
        for node in self._nodes:
            by_device = newest.get(node, {})
            for device in range(max(history.gpus_per_node, *(device + 1 for device in by_device), 0)):
                rank_there = by_device.get(device)
                if rank_there is None or rank_there not in active:
                    why = self._why(node, device, rank_there, len(active))
                    gpus.append(IdleGpu(node, why, self._since(rank_there), rank_there))
        return gpus

    def line(self) -> str:
        """Return a line such as `2 of 8 GPUs idle since the start: rank 3 on n1 (79 % of its peers in the start probe),
        ...`; empty if all GPUs have work."""
        gpus = self.idle()
        if not gpus:
            return ""
        total = len(self._nodes) * self._history.gpus_per_node
        shared = {gpu.since for gpu in gpus}
        head = f"{len(gpus)} of {max(total, len(gpus))} GPUs idle"
        if len(shared) == 1:
            head += _since(*shared)
        order = {node: place for place, node in enumerate(self._nodes)}

        def key(gpu: IdleGpu) -> tuple[bool, int, str, int, bool]:
            """Order the groups: spare GPUs, and GPUs for which the layout has no stage, come last."""
            since = -1 if gpu.since is None else gpu.since
            return gpu.why in (NO_STAGE, SPARE), order[gpu.node], gpu.why, since, gpu.rank is None

        groups = []
        for (_, _, why, since, unknown), group in groupby(sorted(gpus, key=key), key):
            alike = list(group)
            node, ranks = alike[0].node, [gpu.rank for gpu in alike]
            when = "" if len(shared) == 1 else _since(None if since == -1 else since).replace(" since", ", since", 1)
            subject = _gpus(len(ranks)) if unknown else rank_list(rank for rank in ranks if rank is not None)
            groups.append(f"{subject} {'of' if unknown else 'on'} {node} ({why}{when})")
        more = f", and {len(groups) - MAX_GROUPS} more groups" if len(groups) > MAX_GROUPS else ""
        return f"{head}: {', '.join(groups[:MAX_GROUPS])}{more}"

    def _add_slow(self, failure: PastFailure) -> None:
        if failure.node is not None and failure.device is not None and failure.speed is not None:
            self._slow.setdefault((failure.node, failure.device), failure.speed)

    def _why(self, node: str, device: int, rank: int | None, active: int) -> str:
        history = self._history
        if history.nodes[node].lost_at is not None:
            return "its node was lost" if rank is not None else "never came"
        if rank is None:
            return "no process was started on it"
        if rank in self._failed:
            return "it died"
        roles = history.plans[-1].ranks
        slowness = self._slowness((node, device))
        if rank in roles.mirroring:
            return f"{MIRROR}; {slowness}" if slowness else MIRROR
        if slowness:
            return slowness
        if rank not in roles.standby:
            return "its process ended" if history.workers[rank].ended else "not in the plan yet"
        return SPARE if history.gpus_requested and active >= history.gpus_requested else NO_STAGE

    def _slowness(self, place: Device) -> str:
        """Describe how a device failed its probe, or else how slow it is; empty if neither."""
        if place in self._history.unfit:
            occasion, speed = self._history.unfit[place]
            probe = "the start probe" if occasion == "start" else "the probe as it joined"
            return f"failed {probe}" if speed is None else f"{100 * speed:.0f} % of its peers in {probe}"
        if place in self._slow:
            return f"slow, {100 * self._slow[place]:.0f} % of its speed"
        return ""

    def _since(self, rank: int | None) -> int | None:
        """Return the first iteration of the earliest plan since which the rank has had no work; None if that plan is
        forgotten."""
        plans = self._history.plans
        idle_since = len(plans)
        while idle_since and (rank is None or rank not in plans[idle_since - 1].ranks.active):
            idle_since -= 1
        if idle_since:
            return plans[idle_since].begins
        return FROM_START if self._history.has_first_plan else None


def _counted(history: JobHistory) -> Iterator[str]:
    """Yield the nodes of the job by name, then the most recently lost nodes that were not replaced."""
    present = [name for name, node in history.nodes.items() if node.lost_at is None]
    yield from sorted(present, key=natural)
    missing = max(history.nodes_requested - len(present), 0)
    losses = [(node.lost_at, natural(name), name) for name, node in history.nodes.items() if node.lost_at is not None]
    yield from (name for _, _, name in sorted(losses)[max(len(losses) - missing, 0) :])


def _gpus(number: int) -> str:
    return "1 GPU" if number == 1 else f"{number} GPUs"


def _since(iteration: int | None) -> str:
    if iteration is None:
        return ""
    return " since the start" if iteration == FROM_START else f" since iteration {iteration}"
