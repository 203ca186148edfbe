"""Names the GPUs of a job that have no work, with their nodes and reasons, in one line. The only place that does. Pure.

`follow` takes entries of the journal (the live view); `of_ledger` reads a ledger's rows (`resihp status`, `history
cost`, `report`). The cost of idle GPUs is computed elsewhere: by `db.reading.costs.cost_accounts`, as `idle` and
`capacity`. Counted are the GPUs that the job was given, spares included, and those of lost nodes that were not
replaced.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from db.reading.costs.goodput import devices_of
from resihp.record import journal
from resihp.record.describe import rank_list

if TYPE_CHECKING:
    from db.reading.queries import Reader
    from resihp.parallelism.plan import Plan

Row = dict[str, Any]
Device = tuple[str, int]
MAX_GROUPS = 6
"""Most groups of GPUs that are named one by one."""
MAX_PLANS = 64
"""Number of last plans in which to find since when a GPU has no work."""
NO_STAGE, SPARE, MIRROR = "no stage for it", "spare", "holds a copy of the state"
FROM_START = 0
"""First iteration without work, of a GPU that has been idle since the start."""


class IdleGpu(NamedTuple):
    """A GPU without work. `rank`: None if it never had one. `since`: the first iteration without work, `FROM_START`, or
    None if that is too long ago to know."""

    node: str
    why: str
    since: int | None
    rank: int | None


class PlanOfWork(NamedTuple):
    """Ranks by their role in a plan. `begins`: the first iteration under it. `active`: ranks that compute."""

    begins: int
    active: frozenset[int]
    standby: frozenset[int]
    mirroring: frozenset[int] = frozenset()

    @classmethod
    def of(cls, begins: int, plan: Plan) -> PlanOfWork:
        return cls(begins, frozenset(plan.computing), frozenset(plan.layout.standby), plan.mirroring)


@dataclass
class IdleGpus:
    """State from which idle GPUs are derived."""

    nodes: int = 0
    gpus_per_node: int = 0
    requested: int = 0
    """Number of GPUs of the requested layout."""
    present_nodes: dict[str, bool] = field(default_factory=dict)
    """Nodes that have joined, or were given up, in that order, and whether they are part of the job."""
    places: dict[int, Device] = field(default_factory=dict)
    """(node, device) of every rank that was started."""
    failed: set[int] = field(default_factory=set)
    """Ranks that died, or were lost with their node."""
    ended: set[int] = field(default_factory=set)
    """Ranks whose processes have ended, for any reason."""
    unfit: dict[Device, tuple[str, float | None]] = field(default_factory=dict)
    """Devices that failed their probe: the occasion, and the speed relative to their peers."""
    slow: dict[int, tuple[Device, float]] = field(default_factory=dict)
    """Slow devices, by failure, while the verdict holds: (device, remaining speed)."""
    plans: list[PlanOfWork] = field(default_factory=list)
    """The last plans that took effect, at most `MAX_PLANS`, in order."""
    whole: bool = True
    """Whether the first of these plans is the job's first."""
    decided: PlanOfWork | None = None

    def follow(self, entry: journal.AnyEntry) -> None:
        """Update the state with one entry of the journal."""
        match entry:
            case journal.JobStarted():
                self.nodes, self.gpus_per_node = entry.nodes, entry.gpus_per_node
                self.requested = devices_of(entry.nodes, entry.gpus_per_node, entry.configuration)
            case journal.NodeJoined():
                self.present_nodes[entry.node] = True
            case journal.NodeLost():
                self.present_nodes[entry.node] = False
            case journal.WorkerStarted():
                self.places[entry.rank] = entry.node, entry.device
            case journal.WorkerEnded():
                self.ended.add(entry.rank)
            case journal.ProbesTaken():
                for probe in entry.devices:
                    self.probed((probe.node, probe.device), entry.occasion, probe.speed, fit=probe.fit)
            case journal.FailureFound(kind="fail-slow", node=str(node), device=int(device), speed=float(speed)):
                self.slow[entry.failure] = (node, device), speed
            case journal.FailureFound(kind="fail-stop"):
                self.failed.update(entry.ranks)
            case journal.FailureEnded():
                self.slow.pop(entry.failure, None)
            case journal.PlanDecided():
                self.decided = PlanOfWork.of(entry.next_iteration, entry.plan)
            case journal.PlanInEffect() if self.decided is not None:
                self.whole = self.whole and len(self.plans) < MAX_PLANS
                self.plans = [*self.plans[-MAX_PLANS + 1 :], self.decided]
                self.decided = None

    def probed(self, device: Device, occasion: str, speed: float | None, *, fit: bool) -> None:
        """Note a probe, as `resihp.record.fold` does: a device that failed one is unfit until it passes one."""
        if fit and occasion != "suspicion":
            self.unfit.pop(device, None)
        elif occasion in ("start", "join"):
            self.unfit[device] = occasion, speed

    def idle(self) -> list[IdleGpu]:
        """Return every GPU without work under the plan in effect, by node and rank; none before there is a plan."""
        if not self.plans:
            return []
        active = self.plans[-1].active
        newest: dict[str, dict[int, int]] = {}
        for started_rank, (node, device) in sorted(self.places.items()):
            of_node = newest.setdefault(node, {})
            if of_node.get(device, -1) not in active:
                of_node[device] = started_rank
        gpus = []
        for node in self._counted():
            by_device = newest.get(node, {})
            for device in range(max(self.gpus_per_node, *(device + 1 for device in by_device), 0)):
                rank = by_device.get(device)
                if rank is None or rank not in active:
                    gpus.append(IdleGpu(node, self._why(node, device, rank, len(active)), self._since(rank), rank))
        return gpus

    def line(self) -> str:
        """Return a line such as `2 of 8 GPUs idle since the start: rank 3 on n1 (79 % of its peers in the start probe),
        ...`; empty if all have work."""
        gpus = self.idle()
        if not gpus:
            return ""
        total = len(self._counted()) * self.gpus_per_node
        shared = {gpu.since for gpu in gpus}
        head = f"{len(gpus)} of {max(total, len(gpus))} GPUs idle"
        if len(shared) == 1:
            head += _since(*shared)
        order = {node: place for place, node in enumerate(self._counted())}

        def key(gpu: IdleGpu) -> tuple[bool, int, str, int, bool]:
            """Order groups: GPUs that are idle because of other failures come last."""
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

    def _counted(self) -> list[str]:
        """Return the nodes that are part of the job, and those lost last that were not replaced."""
        here = [node for node, present in self.present_nodes.items() if present]
        lost = [node for node, present in self.present_nodes.items() if not present]
        missing = max(self.nodes - len(here), 0)
        return [*here, *(lost[-missing:] if missing else [])]

    def _why(self, node: str, device: int, rank: int | None, active: int) -> str:
        if not self.present_nodes[node]:
            return "its node was lost" if rank is not None else "never came"
        if rank is None:
            return "no process was started on it"
        if rank in self.failed:
            return "it died"
        slowness = self._slowness((node, device))
        if rank in self.plans[-1].mirroring:
            return f"{MIRROR}; {slowness}" if slowness else MIRROR
        if slowness:
            return slowness
        if rank not in self.plans[-1].standby:
            return "its process ended" if rank in self.ended else "not in the plan yet"
        return SPARE if self.requested and active >= self.requested else NO_STAGE

    def _slowness(self, place: Device) -> str:
        """Describe how a device failed its probe, or how slow it is; empty if neither."""
        if place in self.unfit:
            occasion, speed = self.unfit[place]
            probe = "the start probe" if occasion == "start" else "the probe as it joined"
            return f"failed {probe}" if speed is None else f"{100 * speed:.0f} % of its peers in {probe}"
        for slow, speed in self.slow.values():
            if slow == place:
                return f"slow, {100 * speed:.0f} % of its speed"
        return ""

    def _since(self, rank: int | None) -> int | None:
        """Return the first iteration of the earliest plan since which the rank has had no work."""
        at = len(self.plans)
        while at and (rank is None or rank not in self.plans[at - 1].active):
            at -= 1
        return self.plans[at].begins if at else FROM_START if self.whole else None


def of_ledger(reader: Reader, job: Row) -> IdleGpus:
    """Return the state of a job from its rows. `job`: its row, with its `configuration`."""
    from db.layouts import ranks_of

    number = job["id"]
    try:
        configuration = json.loads(job.get("configuration") or "{}")
    except ValueError:
        configuration = {}
    state = IdleGpus(job["nodes"], job["gpus_per_node"])
    state.requested = devices_of(job["nodes"], job["gpus_per_node"], configuration)
    plans = _last_plans(reader, number)
    state.whole = len(plans) <= MAX_PLANS
    if not plans:
        return state
    nodes = sorted(reader.rows("nodes", number), key=lambda row: (row["lost_at"] is not None, row["lost_at"] or 0))
    state.present_nodes = {row["node"]: row["lost_at"] is None and row["joined_at"] is not None for row in nodes}
    workers = reader.narrow("workers", number, ("rank", "node", "device", "ended_at"))
    state.places = {row["rank"]: (row["node"], row["device"]) for row in workers}
    state.ended = {row["rank"] for row in workers if row["ended_at"] is not None}
    waiting: set[int] | None = None
    for row in plans[:MAX_PLANS]:  # layouts are slow to read: stop once all idle GPUs are found
        state.plans.insert(0, PlanOfWork(row["next_iteration"], *ranks_of(row["layout"])))
        if waiting is None:
            waiting = {gpu.rank for gpu in state.idle() if gpu.rank is not None}
        waiting -= state.plans[0].active
        if not waiting:
            break
    if not state.idle():
        return state
    for row in reader.narrow("probes", number, ("id", "kind", "occasion", "node", "device", "speed", "passed")):
        if row["kind"] == "device" and row["device"] is not None:
            state.probed((row["node"], row["device"]), row["occasion"], row["speed"], fit=row["passed"])
    for row in reader.rows("failures", number):
        if row["kind"] == "fail-stop":
            state.failed.update(row["ranks"])
        elif (
            row["kind"] == "fail-slow" and row["ended_iteration"] is None and None not in (row["device"], row["speed"])
        ):
            state.slow[row["failure"]] = (row["node"], row["device"]), row["speed"]
    return state


def _last_plans(reader: Reader, job: int) -> list[Row]:
    """Return plans that took effect, the last one first; one more than `MAX_PLANS` if there are more."""
    from sqlalchemy import select

    from db.models import PlanRow

    columns = PlanRow.__table__.columns
    query = select(columns["next_iteration"], columns["layout"])
    query = query.where(columns["job_id"] == job, columns["in_effect_at"].is_not(None))
    return reader.fetch(query.order_by(columns["epoch"].desc()).limit(MAX_PLANS + 1))


def _gpus(number: int) -> str:
    return "1 GPU" if number == 1 else f"{number} GPUs"


def _since(iteration: int | None) -> str:
    if iteration is None:
        return ""
    return " since the start" if iteration == FROM_START else f" since iteration {iteration}"
