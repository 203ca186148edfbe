"""The history of a job in memory: its nodes, workers, plans, failures, suspicions and probes. Decides nothing.

There are two ways to build it, with equal results (tests/db/test_job_history.py). `follow` takes records of
the journal, in order: used by the live view, hooks, traces, metrics and the progress file. `of_ledger` reads rows of a
ledger: used by `status`, `report` and `history cost`. `rank_health` and `idle_gpus` derive the displayed states from
it. Only the last `MAX_PLANS` plans are kept, and no iterations. Times are seconds since 1970.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from resihp.errors import LedgerError
from resihp.record import journal
from resihp.record.recovery import Moments, RecoveryTimes, first_of, recovery
from resihp.record.state import is_unfit_after

if TYPE_CHECKING:
    from resihp.db.reading.reader import Reader
    from resihp.db.reading.watched import WatchedRows
    from resihp.parallelism.layout import Layout
    from resihp.parallelism.plan import Plan

Row = dict[str, Any]
Device = tuple[str, int]
"""(node, device index on the node)."""
MAX_DEVICES = 4096
"""Most devices of a node in a ledger: each device of each node is looked at."""
MAX_PLANS = 64
"""Number of last plans that are kept. They show since when a GPU has had no work."""


class PastNode(NamedTuple):
    """A node of the job. `joined_at`: when it last joined; None if it never did. `lost_at`: when it was lost; None
    while it is part of the job."""

    joined_at: float | None
    lost_at: float | None = None


class PastWorker(NamedTuple):
    """A worker process. `exit`: its exit status, or minus the number of the signal that ended it; None while it runs,
    or if the status is unknown."""

    node: str
    device: int
    ended: bool = False
    exit: int | None = None


class PastFailure(NamedTuple):
    """A failure. `ended`: whether a slow device or link has recovered its speed."""

    kind: str
    component: str
    ranks: tuple[int, ...]
    node: str | None
    device: int | None
    speed: float | None
    moments: Moments
    ended: bool = False


class OpenSuspicion(NamedTuple):
    """A suspicion that is neither confirmed nor cleared. `rank`: the suspected rank; None if it is not about one
    rank."""

    component: str
    ranks: tuple[int, ...]

    @property
    def rank(self) -> int | None:
        return self.ranks[0] if self.ranks and self.component in RANK_COMPONENTS else None


RANK_COMPONENTS = ("device", "process")
"""Components of suspicions that are about one rank, the first of `ranks`. All other components are about several ranks
or a node."""


class RanksByRole(NamedTuple):
    """The ranks of a plan by role. `active`: ranks that compute; `mirroring`: ranks that only hold a copy of the
    state."""

    active: frozenset[int]
    standby: frozenset[int]
    mirroring: frozenset[int] = frozenset()


@dataclass
class PastPlan:
    """A plan that was decided. `begins`: its first iteration.

    `plan` is set if the plan was read from a journal, `layout_json` (LAYOUT in interface.md) if it was read from a
    ledger. `layout_json` is decoded only when needed: for 16,384 ranks this takes 50 ms.
    """

    epoch: int
    begins: int
    plan: Plan | None = None
    layout_json: str = ""
    stored_description: str = ""
    """The description of a plan from a ledger; empty for a plan from a journal."""

    @cached_property
    def description(self) -> str:
        """Return the text of `Plan.describe`."""
        return self.stored_description if self.plan is None else self.plan.describe()

    @property
    def computing(self) -> int:
        """Count the ranks that compute."""
        return len(self.ranks.active) if self.plan is None else len(self.plan.computing)

    @cached_property
    def ranks(self) -> RanksByRole:
        if self.plan is None:
            from resihp.db import layouts

            return RanksByRole(*layouts.ranks_of(self.layout_json))
        return RanksByRole(frozenset(self.plan.computing), frozenset(self.plan.layout.standby), self.plan.mirroring)

    @cached_property
    def layout(self) -> Layout:
        if self.plan is None:
            from resihp.db import layouts

            return layouts.from_json(self.layout_json)
        return self.plan.layout


@dataclass
class JobHistory:
    """The history of a job up to its last record. Several listeners in one thread may share one history."""

    seq: int = 0
    """Number of the last record that was followed; 0 for a history from a ledger."""
    nodes_requested: int = 0
    gpus_per_node: int = 0
    gpus_requested: int = 0
    """Number of GPUs of the requested layout."""
    plans_kept: int = MAX_PLANS
    """Number of last plans in effect to keep; of 16,384 ranks, each takes about 1 MB."""
    running: bool = True
    nodes: dict[str, PastNode] = field(default_factory=dict)
    workers: dict[int, PastWorker] = field(default_factory=dict)
    failures: dict[int, PastFailure] = field(default_factory=dict)
    suspicions: dict[int, OpenSuspicion] = field(default_factory=dict)
    """Open suspicions by number. A suspicion is removed when it is cleared or confirmed by a failure."""
    unfit: dict[Device, tuple[str, float | None]] = field(default_factory=dict)
    """Devices that failed their probe: the occasion of the probe (`start` or `join`), and the speed relative to their
    peers, None if it was not measured."""
    plans: list[PastPlan] = field(default_factory=list)
    """The last plans that took effect, oldest first."""
    has_first_plan: bool = True
    """Whether the first of `plans` is the job's first plan."""
    proposed: PastPlan | None = None
    """The plan that was decided and has not yet taken effect; None if there is none, or if it was refused or
    withdrawn."""

    @classmethod
    def of_records(cls, records: Iterable[journal.Record], plans_kept: int = MAX_PLANS) -> JobHistory:
        """Return the history after these records of a journal, which are in order."""
        history = cls(plans_kept=plans_kept)
        for record in records:
            history.follow(record)
        return history

    @classmethod
    def of_ledger(cls, reader: Reader, job: Row, rows: WatchedRows | None = None) -> JobHistory:
        """Return the history of a job from its ledger. `job`: the job's row; `rows`: the result of
        `resihp.db.reading.watched.read`, if the caller has it already."""
        from resihp.db.reading import watched
        from resihp.db.reading.tables import object_in

        rows = rows or watched.read(reader, job)
        history = cls(running=job["state"] == "running")
        history.nodes_requested, history.gpus_per_node = job["nodes"], _checked_device(job["gpus_per_node"])
        history._request(object_in(job.get("configuration")))
        for row in rows.nodes:
            history.nodes[row["node"]] = PastNode(_seconds(row["joined_at"]), _seconds(row["lost_at"]))
        for row in rows.workers:
            history.workers[row["rank"]] = PastWorker(
                row["node"], _checked_device(row["device"]), row["ended_at"] is not None, row["exit"]
            )
        for row in rows.failures:
            history.failures[row["failure"]] = PastFailure(
                kind=row["kind"],
                component=row["component"],
                ranks=ranks_in(row["ranks"], "a failure"),
                node=row["node"],
                device=row["device"],
                speed=row["speed"],
                moments=Moments.of_times(row["failed_at"], row["noticed_at"]),
                ended=row["ended_iteration"] is not None,
            )
        for row in rows.suspicions:
            history.suspicions[row["suspicion"]] = OpenSuspicion(
                row["component"], ranks_in(row["ranks"], "a suspicion")
            )
        for row in rows.probes:
            history._probe(row["node"], row["device"], row["occasion"], row["speed"], passed=row["passed"])
        in_effect = [row for row in rows.plans if row["in_effect_at"] is not None]
        history.plans = [_plan_of(row) for row in in_effect[-MAX_PLANS:]]
        history.has_first_plan = len(in_effect) <= MAX_PLANS
        last = rows.plans[-1] if rows.plans else None
        if last is not None and last["outcome"] == "pending":
            history.proposed = _plan_of(last)
        return history

    @property
    def shown_plan(self) -> PastPlan | None:
        """The plan that a job's status and the live view show, by the rule of `JobRecord.shown_plan`."""
        return self.plans[-1] if self.plans else self.proposed

    def plan(self, epoch: int) -> PastPlan | None:
        """Return the plan of this epoch; None if it is unknown, or too old to be kept."""
        if self.proposed is not None and self.proposed.epoch == epoch:
            return self.proposed
        return next((plan for plan in reversed(self.plans) if plan.epoch == epoch), None)

    def follow(self, record: journal.Record) -> None:
        """Update the history with one record of the journal. A record that was already followed changes nothing."""
        if record.seq <= self.seq:
            return
        self.seq = record.seq
        entry, at = record.entry, record.at
        match entry:
            case journal.JobStarted():
                self.nodes_requested, self.gpus_per_node = entry.nodes, entry.gpus_per_node
                self._request(entry.configuration)
            case journal.LeaderChosen():
                self.running = True
            case journal.JobEnded():
                self.running = False
            case journal.NodeJoined() | journal.NodeLost() | journal.WorkerStarted() | journal.WorkerEnded():
                self._follow_member(entry, at)
            case journal.PlanDecided():
                self.proposed = PastPlan(entry.plan.epoch, entry.next_iteration, entry.plan)
            case journal.PlanRefused() | journal.PlanWithdrawn():
                if self.proposed is not None and self.proposed.epoch == entry.epoch:
                    self.proposed = None
            case journal.PlanInEffect() | journal.IterationCommitted() | journal.IterationsPacked():
                self._take_effect(entry.epoch)
            case _:
                self._follow_trouble(entry, at)

    def _follow_member(
        self, entry: journal.NodeJoined | journal.NodeLost | journal.WorkerStarted | journal.WorkerEnded, at: float
    ) -> None:
        match entry:
            case journal.NodeJoined():
                self.nodes[entry.node] = PastNode(at)
            case journal.NodeLost():
                node = self.nodes.get(entry.node, PastNode(None))
                self.nodes[entry.node] = node._replace(lost_at=at)
            case journal.WorkerStarted():
                self.workers[entry.rank] = PastWorker(entry.node, entry.device)
            case journal.WorkerEnded():
                if entry.rank in self.workers:
                    self.workers[entry.rank] = self.workers[entry.rank]._replace(ended=True, exit=entry.exit)

    def _follow_trouble(self, entry: journal.AnyEntry, at: float) -> None:
        """Update the history with one entry about probes, suspicions or failures."""
        match entry:
            case journal.ProbesTaken():
                for probe in entry.devices:
                    self._probe(probe.node, probe.device, entry.occasion, probe.speed, passed=probe.fit)
            case journal.Suspected():
                if entry.cleared:
                    self.suspicions.pop(entry.suspicion, None)
                elif entry.suspicion:
                    self.suspicions[entry.suspicion] = OpenSuspicion(entry.component, entry.ranks)
            case journal.FailureFound():
                self._fail(entry, at)
            case journal.FailureEnded():
                if entry.failure in self.failures:
                    self.failures[entry.failure] = self.failures[entry.failure]._replace(ended=True)

    def _request(self, configuration: object) -> None:
        from resihp.db.reading.costs.goodput import (
            devices_of,  # slow to import, and read with every configuration with hooks
        )

        self.gpus_requested = devices_of(self.nodes_requested, self.gpus_per_node, configuration)

    def recovery(self, entry: journal.Reconfigured, at: float) -> RecoveryTimes | None:
        """Return the recovery times for a change of plan: of all failures that it mended, taken together. `at`: the
        time of its record.

        None if the change of plan mended no failure.
        """
        moments = [self.failures[failure].moments for failure in entry.failures if failure in self.failures]
        return recovery(first_of(moments), at) if moments else None

    def _fail(self, entry: journal.FailureFound, at: float) -> None:
        self.failures[entry.failure] = PastFailure(
            kind=entry.kind,
            component=entry.component,
            ranks=entry.ranks,
            node=entry.node,
            device=entry.device,
            speed=entry.speed,
            moments=Moments(entry.failed_at(at), entry.noticed_at(at)),
        )
        for number, suspicion in list(self.suspicions.items()):
            if entry.confirms(suspicion.component, suspicion.ranks):
                del self.suspicions[number]

    def _take_effect(self, epoch: int) -> None:
        if self.proposed is None or self.proposed.epoch != epoch:
            return
        self.has_first_plan = self.has_first_plan and len(self.plans) < self.plans_kept
        self.plans = [*self.plans, self.proposed][-self.plans_kept :]
        self.proposed = None

    def _probe(self, node: str, device: int, occasion: str, speed: float | None, *, passed: bool) -> None:
        place = node, device
        if not is_unfit_after(occasion, speed, passed=passed, was_unfit=place in self.unfit):
            self.unfit.pop(place, None)
        elif not passed and occasion in ("start", "join"):
            self.unfit[place] = occasion, speed

    def __copy__(self) -> JobHistory:
        return replace(self, **{part.name: copy(getattr(self, part.name)) for part in fields(self)})


def _plan_of(row: Row) -> PastPlan:
    return PastPlan(
        row["epoch"], row["next_iteration"], layout_json=row["layout_json"], stored_description=row["description"]
    )


def _seconds(time: datetime | None) -> float | None:
    return None if time is None else time.timestamp()


def ranks_in(value: object, subject: str) -> tuple[int, ...]:
    """Return the ranks of a decoded cell. Raises LedgerError for anything else: imported rows may hold any value."""
    if not isinstance(value, list) or not all(isinstance(rank, int) and rank >= 0 for rank in value):
        raise LedgerError(f"ledger: the ranks of {subject} are not a list of numbers; import the job again")
    return tuple(value)


def _checked_device(value: object) -> int:
    """Return the index of a device, or the number of devices of a node. Raises LedgerError if it is not plausible."""
    if not isinstance(value, int) or not 0 <= value <= MAX_DEVICES:
        raise LedgerError(f"ledger: a node has no device {value!r}; import the job again")
    return value
