"""A job as its controller holds it: what is durable changes by `Job.log` alone, what follows from an entry at once."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from typing import Literal

from resihp.controller.ahead.answers import Foresight
from resihp.controller.fail_stop.onsets import Onsets
from resihp.controller.interface import AnyAction, Dependencies, Log, Order, Planner, Say
from resihp.controller.lifecycle import CHANGES, TRAINING, Lifecycle, Stage
from resihp.controller.state.beginnings import Beginning, Recovery
from resihp.controller.state.examinations import Examination, Inquiry, Rechecks
from resihp.controller.state.incidents import ArmedFault, Incident
from resihp.controller.state.iterations import Forecast, IterationReports, Tuning
from resihp.controller.state.members import Member, Node
from resihp.controller.state.requests import COINCIDENCE_S, LEFT_S, AgentSignal, Departure, Saves
from resihp.controller.state.transitions import Change, Pause, Transition
from resihp.controller.state.upkeep import GivingBack, Upkeep
from resihp.detector.findings import Finding
from resihp.detector.probes import Place
from resihp.parallelism.ownership import ParameterSpec
from resihp.protocol import messages as m
from resihp.protocol.messages import CheckpointPart, Declare, StepOutcome, Stepped, WorkerOrder
from resihp.protocol.messages import Speed as DeviceSpeed
from resihp.record.fold import apply, changed
from resihp.record.journal import (
    AnyEntry,
    ChangeDecided,
    DrainDecided,
    FailureFound,
    NodeJoined,
    NodeLost,
    ProbesTaken,
    ReplacementAsked,
    WorkerStarted,
)
from resihp.record.state import Device, JobRecord, KnownWorker, Occasion
from resihp.scheduler import planners
from resihp.scheduler.cost.profile import Profile
from resihp.settings import Settings


class Job:
    """The record of a job, all that is volatile beside it, and the actions of the event being handled."""

    def __init__(
        self, settings: Settings, record: JobRecord | None = None, dependencies: Dependencies | None = None
    ) -> None:
        self.settings = settings
        self.dependencies = dependencies or Dependencies()
        self.record = record or JobRecord()
        """What is durable. Only `log` changes it."""
        self.lifecycle = Lifecycle()
        self.nodes = {name: Node(known) for name, known in self.record.nodes.items()}
        self.members = {rank: self._member(known) for rank, known in self.record.workers.items()}
        self.still: set[int] = set()
        """Ranks whose last beat told of a stopped process, or of a checkpoint that is being written."""
        self.starting: set[int] = set()
        """Ranks that were asked to be started, and neither have been nor never will be."""
        self.epoch = self.record.epoch
        """The highest that anybody was told of."""
        self.transition: Transition | None = None
        self.pause: Pause | None = None
        self.recovery: Recovery | None = None
        self.departure: Departure | None = None
        self.agent_signals: dict[str, AgentSignal] = {}
        """The last signal that each node's agent received from outside."""
        self.deadline: float | None = None
        """When Slurm's time limit ends the job, if it has one."""
        self.upkeep, self.foresight, self.saves = Upkeep(), Foresight(), Saves()
        self.monitor = self.dependencies.monitor(settings.detection)
        """What is known of healthy times, and who is suspected to be slow."""
        self.expected_epoch = 0
        """Epoch of the plan whose healthy times the monitor expects."""
        self.examinations: dict[int, Examination] = {}
        """Probes under way, by number."""
        self.links_planned_for = False
        """Slow links were looked at once it was known what transfers take."""
        self.probes = 0
        """Number of the last one that was asked for."""
        self.findings: tuple[Finding, ...] = ()
        """What the monitor found and nobody has acted on yet."""
        self.judged_by = self.record.detector
        """What the detector judged by when it was last looked at."""
        self.inquiry = Inquiry()
        """What is remembered of suspicions to be slow."""
        self.unmeasured: set[int] = set()
        """Newcomers whose device is still to be measured before they are given work."""
        self.reconsider: list[Change] = []
        """Why another plan may be better now, and the verdicts behind it."""
        self.reconsider_at = 0.0
        """Not before then: when another plan begins to be worth it."""
        self.changed_at: dict[Occasion, list[float]] = {}
        """When plans were changed on account of which device or link; for a new supervisor, when it began to lead."""
        self.rechecks = Rechecks()
        self.vacating: set[str] = set()
        """Nodes whose ranks are to stand by, so that they can be left."""
        self.usual_speeds: dict[Place, DeviceSpeed] = {}
        """What devices of nodes gave in former jobs."""
        self.specs: tuple[ParameterSpec, ...] = ()
        self.faults = {fault.id: ArmedFault(fault) for fault in settings.faults}
        self.incidents: list[Incident] = []
        self.signalled: dict[int, float] = {}
        """When a fault was injected into a rank that may end it, by rank."""
        self.slow_since: dict[int | tuple[str, str], float] = {}
        """When a `slow` fault was last injected, by rank, or by the nodes that a link joins."""
        self.errors: dict[int, tuple[int, str]] = {}
        """What each rank's script raised, and in which iteration, by rank."""
        self.slowed: list[tuple[tuple[int, ...], m.Slow]] = []
        """Injected slowness that ends by itself, and which ranks were told."""
        self.stuck: tuple[float, int, str] | None = None
        self.rebuilds = 0
        """Communication failures since the last committed iteration."""
        self.reports: dict[int, IterationReports] = {}
        self.furthest = 0
        """The furthest iteration whose step any rank has reported."""
        self.onsets = Onsets()
        self.workloads: deque[tuple[int, int, int]] = deque(maxlen=50)
        """Tokens, squared lengths and micro-batches of recent iterations."""
        self.profile: Profile | None = None
        """What layers and transfers take, once that is learnt."""
        self.tuning = Tuning()
        self.forecast: Forecast | None = None
        """Of the last iteration whose workload was told and whose time could be predicted."""
        self.parts: dict[tuple[int, int, str], dict[int, CheckpointPart]] = {}
        self.checkpointed = self.record.checkpointed
        """Iteration of the newest checkpoint all of whose parts are written."""
        self.started_at: float | None = None
        self.start = Beginning()
        self.progress_at = 0.0
        self.halted_at = 0.0
        self.now = 0.0
        self.actions: list[AnyAction] = []

    def _member(self, known: KnownWorker) -> Member:
        enrolled = known.rank in self.record.enrolled
        return Member(known, declared=self.record.trains if enrolled else None, fenced=known.refused)

    @property
    def planner(self) -> Planner:
        return self.dependencies.planner or planners.named(self.settings.planner)

    def log(self, entry: AnyEntry) -> None:
        """Journal an entry: the only way in which what is durable changes."""
        self.do(Log(entry=entry))
        self.apply(entry)

    def apply(self, entry: AnyEntry) -> None:
        """Take in an entry that is in the journal; what is volatile follows at once."""
        apply(self.record, entry)
        match entry:
            case NodeJoined() | NodeLost():
                if entry.node not in self.nodes or isinstance(entry, NodeJoined):
                    self.nodes[entry.node] = Node(self.record.nodes[entry.node], last_beat=self.now)
                    self.upkeep.releases.pop(entry.node, None)
                if isinstance(entry, NodeLost):
                    self.upkeep.releases[entry.node] = GivingBack(lost_at=self.now)
                    self.upkeep.unwatched.append(entry.node)
            case WorkerStarted():
                member = self.members[entry.rank] = self._member(self.record.workers[entry.rank])
                member.spawned_at = member.beat_at = member.progress_at = self.now
            case FailureFound() if entry.node in self.record.verdicts:
                if self.record.verdicts[entry.node].failure == entry.failure:
                    self.upkeep.found_at[entry.node] = self.now
            case DrainDecided():
                self.upkeep.decided_at[entry.drain] = self.now
            case ReplacementAsked():
                self.upkeep.asked_at[entry.replacement] = self.now
            case ProbesTaken():
                for probe in entry.devices:
                    self.rechecks.unfit_at.pop((probe.node, probe.device), None)
            case ChangeDecided():
                for what in changed(entry):
                    self.changed_at.setdefault(what, []).append(self.now)
            case _:
                pass

    @property
    def live(self) -> tuple[int, ...]:
        """Every process, also those that are still starting."""
        return tuple(sorted(rank for rank, member in self.members.items() if member.alive))

    @property
    def ready(self) -> tuple[int, ...]:
        """Ranks that can be given work, standby ones included."""
        return tuple(sorted(rank for rank, member in self.members.items() if member.ready))

    @property
    def dead_devices(self) -> set[Device]:
        """On which no process is to be started again: for good, or for an incident that is not a failure yet."""
        condemned = {i.condemned for i in self.incidents if i.condemned is not None}
        return self.record.dead_devices | condemned if condemned else self.record.dead_devices

    @property
    def needs_all(self) -> bool:
        """Whether its program cannot do without any process: it makes process groups of its own, or is known not to
        say what it trains."""
        return not self.settings.declares or (self.start.met and not self.has_declared)

    @property
    def has_declared(self) -> bool:
        """Whether any process has said what it trains, and has not taken it back."""
        return any(member.declared is not None for member in self.members.values())

    @property
    def node_of(self) -> dict[int, str]:
        """The node of every rank that was ever asked for."""
        return {rank: placement.node for rank, placement in enumerate(self.record.placements)}

    @property
    def declaration(self) -> Declare:
        """What the job trains."""
        assert self.record.trains is not None
        return self.record.trains

    @property
    def micro_batches(self) -> int:
        """Of the first iteration that is not committed: how many a plan that is made now has to deal."""
        return self.declaration.batch_sizes.at(self.record.committed + 1)

    @property
    def stage(self) -> Stage:
        return self.lifecycle.stage

    def move(self, stage: Stage) -> None:
        """To another stage of the job's life."""
        self.lifecycle.move(stage, self.now)

    @property
    def changing(self) -> bool:
        """Training stands still, from one plan to the next."""
        return self.stage in CHANGES

    @property
    def training(self) -> bool:
        """A plan is in effect, and iterations are under way."""
        return self.stage in TRAINING

    @property
    def under_way(self) -> bool:
        """Training has been planned, and is not done."""
        return self.changing or self.training

    @property
    def may_interrupt(self) -> bool:
        """Whether training may be interrupted now for what would be better, but need not be.

        Not while anything else is under way, nor once the job is to stop.
        """
        return self.stage == "running" and self.departure is None

    @property
    def can_still_gain(self) -> bool:
        """Whether a change could help at all: the iteration under way is finished before it does."""
        return self.furthest + 1 < self.record.goal

    @property
    def has_ended(self) -> bool:
        return self.stage == "ended"

    def awaiting(self, member: Member, epoch: int, stage: Stage) -> Transition | None:
        """The transition under way, if it still waits for this rank's answer to this stage.

        What is of another epoch was said before this one was heard of, and what comes late was said twice. An answer
        before its question is told: that is a fault of ours, or of whoever speaks for the rank.
        """
        transition = self.transition
        if transition is None or epoch != self.epoch:
            return None
        early = self.changing and CHANGES.index(self.stage) < CHANGES.index(stage)
        if early and self.departure is None:  # once the job is to stop, a plan may have been withdrawn
            self.say("warning", f"{self.where(member.rank)}: answers to {stage} in epoch {epoch}, while {self.stage}")
        return transition if self.stage == stage and member.rank in transition.waiting else None

    def note_step(self, member: Member, epoch: int, outcome: StepOutcome, report: Stepped | None = None) -> None:
        """A rank took the step of an iteration; without its `report` where it told so in another way."""
        member.stepped = max(member.stepped, outcome.iteration)
        self.furthest = max(self.furthest, member.stepped)
        if outcome.iteration > self.record.committed:
            reports = self.reports.setdefault(outcome.iteration, IterationReports(outcome))
            reports.add(member.rank, epoch, report)

    def stand_at(self, ranks: Iterable[int], iteration: int) -> None:
        """What these ranks have done counts up to this iteration, and no further."""
        for rank in ranks:
            self.members[rank].stepped = iteration
        self.furthest = max((member.stepped for member in self.members.values()), default=0)

    @property
    def usual_s(self) -> float:
        """Seconds of an iteration, as far as recent ones tell; 0 when none was seen."""
        return statistics.median(self.record.recent) if self.record.recent else 0.0

    @property
    def predicted_s(self) -> float:
        """Seconds to be expected of the iteration under way: the usual, or more where its own workload says so."""
        ahead, record = self.forecast, self.record
        if ahead is None or record.plan is None or ahead.epoch != record.plan.epoch:
            return self.usual_s
        if ahead.iteration <= record.committed:
            return self.usual_s
        return max(self.usual_s, ahead.seconds)

    def do(self, action: AnyAction) -> None:
        self.actions.append(action)

    def say(self, level: Literal["progress", "notice", "warning", "error"], text: str) -> None:
        self.do(Say(level=level, text=text))

    def order(self, ranks: tuple[int, ...], order: WorkerOrder) -> None:
        if ranks:
            self.do(Order(ranks=ranks, order=order))

    def excused(self, node: str, at: float) -> bool:
        """Whether what died there at that time died because somebody was telling agents to stop."""
        together = any(abs(at - signal.at) <= COINCIDENCE_S for signal in self.agent_signals.values())
        own = self.agent_signals.get(node)
        return together or (own is not None and 0.0 <= at - own.at <= LEFT_S)

    def device_of(self, rank: int) -> tuple[str, int]:
        """(node, index): what speeds and verdicts belong to."""
        member = self.members[rank]
        return member.node, member.device

    def where(self, rank: int) -> str:
        member = self.members[rank]
        return f"rank {rank} ({member.node} device {member.device})"

    def where_link(self, link: tuple[int, int]) -> str:
        a, b = link
        return f"link {self.members[a].node}-{self.members[b].node} (ranks {a} and {b})"
