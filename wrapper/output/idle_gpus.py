"""Which GPUs of a job have no work, whose they are and why, in one line. The one place that says so. Pure.

`follow` reads it off the journal (the live view); `of_ledger` fills it from a ledger's rows (`resihp status`,
`history cost`, `report`). What it costs is not reckoned here: `db.reading.costs.cost_accounts` does, as `idle` and
`capacity`. Counted are the GPUs that the job was given, spares included, and those of lost nodes for which no other
node came.
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
MOST_TOLD = 6
"""Groups of GPUs that are named one by one."""
PLANS_KEPT = 64
"""Since when a GPU has no work is looked for in them."""
NO_STAGE, SPARE, MIRROR = "no stage for it", "spare", "holds a copy of the state"
START = 0
"""Since the start, as the first iteration without work."""


class IdleGpu(NamedTuple):
    """`rank`: None of a GPU that never had one. `since`: the first iteration without work, `START`, or None where that
    is too long ago to know."""

    node: str
    why: str
    since: int | None
    rank: int | None


class PlanOfWork(NamedTuple):
    """`begins`: the first iteration under the plan. `active`: ranks that compute."""

    begins: int
    active: frozenset[int]
    standby: frozenset[int]
    mirroring: frozenset[int] = frozenset()

    @classmethod
    def of(cls, begins: int, plan: Plan) -> PlanOfWork:
        return cls(begins, frozenset(plan.computing), frozenset(plan.layout.standby), plan.mirroring)


@dataclass
class IdleGpus:
    """What has to be known for it."""

    nodes: int = 0
    gpus_per_node: int = 0
    asked: int = 0
    """GPUs of the layout that was asked for."""
    there: dict[str, bool] = field(default_factory=dict)
    """Nodes that came, or were given up, in that order, and whether they are part of the job."""
    places: dict[int, Device] = field(default_factory=dict)
    """Of every rank that was started."""
    failed: set[int] = field(default_factory=set)
    """Ranks that died, or were lost with something else."""
    ended: set[int] = field(default_factory=set)
    """Ranks whose processes are gone, for whatever reason."""
    unfit: dict[Device, tuple[str, float | None]] = field(default_factory=dict)
    """That failed their probe: on which occasion, and at which speed of their peers'."""
    slow: dict[int, tuple[Device, float]] = field(default_factory=dict)
    """With a verdict that is not over, by its failure: the speed that is left."""
    plans: list[PlanOfWork] = field(default_factory=list)
    """The last ones that took effect, `PLANS_KEPT` at most, in order."""
    whole: bool = True
    """Whether the first of them is the job's first."""
    decided: PlanOfWork | None = None

    def follow(self, entry: journal.AnyEntry) -> None:
        """What one entry of the journal changes."""
        match entry:
            case journal.JobStarted():
                self.nodes, self.gpus_per_node = entry.nodes, entry.gpus_per_node
                self.asked = devices_of(entry.nodes, entry.gpus_per_node, entry.configuration)
            case journal.NodeJoined():
                self.there[entry.node] = True
            case journal.NodeLost():
                self.there[entry.node] = False
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
                self.whole = self.whole and len(self.plans) < PLANS_KEPT
                self.plans = [*self.plans[-PLANS_KEPT + 1 :], self.decided]
                self.decided = None

    def probed(self, device: Device, occasion: str, speed: float | None, *, fit: bool) -> None:
        """As `resihp.record.fold` has it: what failed is not fit until it passes."""
        if fit and occasion != "suspicion":
            self.unfit.pop(device, None)
        elif occasion in ("start", "join"):
            self.unfit[device] = occasion, speed

    def idle(self) -> list[IdleGpu]:
        """Every GPU without work under the plan in effect, by node and rank; none before there is a plan."""
        if not self.plans:
            return []
        active = self.plans[-1].active
        newest: dict[str, dict[int, int]] = {}
        for each, (node, device) in sorted(self.places.items()):
            of_node = newest.setdefault(node, {})
            if of_node.get(device, -1) not in active:
                of_node[device] = each
        found = []
        for node in self._counted():
            known = newest.get(node, {})
            for device in range(max(self.gpus_per_node, *(device + 1 for device in known), 0)):
                rank = known.get(device)
                if rank is None or rank not in active:
                    found.append(IdleGpu(node, self._why(node, device, rank, len(active)), self._since(rank), rank))
        return found

    def line(self) -> str:
        """`2 of 8 GPUs idle since the start: rank 3 on n1 (79 % of its peers in the start probe), ...`; empty where all
        have work."""
        found = self.idle()
        if not found:
            return ""
        total = len(self._counted()) * self.gpus_per_node
        shared = {one.since for one in found}
        head = f"{len(found)} of {max(total, len(found))} GPUs idle"
        if len(shared) == 1:
            head += _since(*shared)
        order = {node: place for place, node in enumerate(self._counted())}

        def key(one: IdleGpu) -> tuple[bool, int, str, int, bool]:
            """What stands by because of others is told after these."""
            since = -1 if one.since is None else one.since
            return one.why in (NO_STAGE, SPARE), order[one.node], one.why, since, one.rank is None

        told = []
        for (_, _, why, since, unknown), group in groupby(sorted(found, key=key), key):
            alike = list(group)
            node, ranks = alike[0].node, [one.rank for one in alike]
            when = "" if len(shared) == 1 else _since(None if since == -1 else since).replace(" since", ", since", 1)
            who = _gpus(len(ranks)) if unknown else rank_list(rank for rank in ranks if rank is not None)
            told.append(f"{who} {'of' if unknown else 'on'} {node} ({why}{when})")
        more = f", and {len(told) - MOST_TOLD} more groups" if len(told) > MOST_TOLD else ""
        return f"{head}: {', '.join(told[:MOST_TOLD])}{more}"

    def _counted(self) -> list[str]:
        """Nodes that are part of the job, and of those that are not the last ones for which none came."""
        here = [node for node, there in self.there.items() if there]
        gone = [node for node, there in self.there.items() if not there]
        missing = max(self.nodes - len(here), 0)
        return [*here, *(gone[-missing:] if missing else [])]

    def _why(self, node: str, device: int, rank: int | None, active: int) -> str:
        if not self.there[node]:
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
        return SPARE if self.asked and active >= self.asked else NO_STAGE

    def _slowness(self, place: Device) -> str:
        """Say how a device failed its probe, or how slow it is; empty for one that is neither."""
        if place in self.unfit:
            occasion, speed = self.unfit[place]
            probe = "the start probe" if occasion == "start" else "the probe as it joined"
            return f"failed {probe}" if speed is None else f"{100 * speed:.0f} % of its peers in {probe}"
        for slow, speed in self.slow.values():
            if slow == place:
                return f"slow, {100 * speed:.0f} % of its speed"
        return ""

    def _since(self, rank: int | None) -> int | None:
        """First iteration of the first of the last plans that give the rank no work."""
        at = len(self.plans)
        while at and (rank is None or rank not in self.plans[at - 1].active):
            at -= 1
        return self.plans[at].begins if at else START if self.whole else None


def of_ledger(reader: Reader, job: Row) -> IdleGpus:
    """The same of a job's rows. `job`: its row, with its `configuration`."""
    from db.layouts import ranks_of

    number = job["id"]
    try:
        configuration = json.loads(job.get("configuration") or "{}")
    except ValueError:
        configuration = {}
    found = IdleGpus(job["nodes"], job["gpus_per_node"])
    found.asked = devices_of(job["nodes"], job["gpus_per_node"], configuration)
    plans = _last_plans(reader, number)
    found.whole = len(plans) <= PLANS_KEPT
    if not plans:
        return found
    nodes = sorted(reader.rows("nodes", number), key=lambda row: (row["lost_at"] is not None, row["lost_at"] or 0))
    found.there = {row["node"]: row["lost_at"] is None and row["joined_at"] is not None for row in nodes}
    workers = reader.narrow("workers", number, ("rank", "node", "device", "ended_at"))
    found.places = {row["rank"]: (row["node"], row["device"]) for row in workers}
    found.ended = {row["rank"] for row in workers if row["ended_at"] is not None}
    waiting: set[int] | None = None
    for row in plans[:PLANS_KEPT]:  # layouts take time to read: no more of them than it takes
        found.plans.insert(0, PlanOfWork(row["next_iteration"], *ranks_of(row["layout"])))
        if waiting is None:
            waiting = {gpu.rank for gpu in found.idle() if gpu.rank is not None}
        waiting -= found.plans[0].active
        if not waiting:
            break
    if not found.idle():
        return found
    for row in reader.narrow("probes", number, ("id", "kind", "occasion", "node", "device", "speed", "passed")):
        if row["kind"] == "device" and row["device"] is not None:
            found.probed((row["node"], row["device"]), row["occasion"], row["speed"], fit=row["passed"])
    for row in reader.rows("failures", number):
        if row["kind"] == "fail-stop":
            found.failed.update(row["ranks"])
        elif (
            row["kind"] == "fail-slow" and row["ended_iteration"] is None and None not in (row["device"], row["speed"])
        ):
            found.slow[row["failure"]] = (row["node"], row["device"]), row["speed"]
    return found


def _last_plans(reader: Reader, job: int) -> list[Row]:
    """That took effect, the last one first; one more than are looked at, where there are as many."""
    from sqlalchemy import select

    from db.models import PlanRow

    columns = PlanRow.__table__.columns
    query = select(columns["next_iteration"], columns["layout"])
    query = query.where(columns["job_id"] == job, columns["in_effect_at"].is_not(None))
    return reader.fetch(query.order_by(columns["epoch"].desc()).limit(PLANS_KEPT + 1))


def _gpus(number: int) -> str:
    return "1 GPU" if number == 1 else f"{number} GPUs"


def _since(iteration: int | None) -> str:
    if iteration is None:
        return ""
    return " since the start" if iteration == START else f" since iteration {iteration}"
