"""All state of a job in its controller. Durable state changes only by `Job.log`; volatile state that depends on an
entry is updated at the same time."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from typing import Literal

from resihp.controller.ahead.answers import PlanCache
from resihp.controller.fail_stop.onsets import Onsets
from resihp.controller.interface import AnyAction, Dependencies, Log, Order, Planner, Say
from resihp.controller.lifecycle import CHANGING_STAGES, TRAINING_STAGES, Lifecycle, Stage
from resihp.controller.state.beginnings import Beginning, Recovery
from resihp.controller.state.checkpoint_search import CheckpointSearch
from resihp.controller.state.examinations import Examination, Inquiry, Rechecks
from resihp.controller.state.incidents import ArmedFault, Incident
from resihp.controller.state.iterations import Forecast, IterationReports, PrintedCounter, Tuning
from resihp.controller.state.members import Member, Node
from resihp.controller.state.requests import (
    COINCIDENCE_S,
    LONE_SIGNAL_S,
    AgentSignal,
    Closing,
    Saves,
    StopRequest,
)
from resihp.controller.state.transitions import Change, Pause, Transition
from resihp.controller.state.upkeep import GivingBack, NodeMaintenance
from resihp.detector.findings import Finding
from resihp.detector.probes import Place
from resihp.parallelism.ownership import ParameterSpec
from resihp.protocol import messages as m
from resihp.protocol.messages import CheckpointPart, Declare, StepOutcome, Stepped, WorkerOrder
from resihp.protocol.messages import Speed as DeviceSpeed
from resihp.record.fold import apply
from resihp.record.journal import (
    AnyEntry,
    ChangeDecided,
    DrainDecided,
    FailureFound,
    NodeJoined,
    NodeLost,
    ProbesTaken,
    ReplacementAsked,
    WorkersOrdered,
    WorkerStarted,
)
from resihp.record.state import Device, JobRecord, KnownWorker, Occasion, occasions_of
from resihp.scheduler import planners
from resihp.scheduler.cost.profile import Profile
from resihp.settings import Settings


class Job:
    """The record of a job, all volatile state beside the record, and the actions that the event in progress has
    produced."""

    def __init__(
        self, settings: Settings, record: JobRecord | None = None, dependencies: Dependencies | None = None
    ) -> None:
        self.settings = settings
        self.dependencies = dependencies or Dependencies()
        self.record = record or JobRecord()
        """Durable state. Only `log` and `apply` change it."""
        self.lifecycle = Lifecycle()
        self.nodes = {name: Node(known) for name, known in self.record.nodes.items()}
        self.members = {rank: self._member(known) for rank, known in self.record.workers.items()}
        self.still: set[int] = set()
        """Ranks for which the last heartbeat reported a stopped process, or a checkpoint being written."""
        self.starting: set[int] = set()
        """Ranks that were ordered to start and have not started yet."""
        self.epoch = self.record.epoch
        """The highest epoch that any rank has heard of."""
        self.transition: Transition | None = None
        self.pause: Pause | None = None
        self.recovery: Recovery | None = None
        self.stop_request: StopRequest | None = None
        self.closing: Closing | None = None
        self.agent_signals: dict[str, AgentSignal] = {}
        """The last signal that each node's agent received from a process other than resihp, by node."""
        self.deadline: float | None = None
        """Time at which Slurm's time limit ends the job; None if it is unknown or there is no limit."""
        self.maintenance, self.plan_cache, self.saves = NodeMaintenance(), PlanCache(), Saves()
        self.monitor = self.dependencies.monitor(settings.detection)
        """The detector: learns healthy times, and finds slow devices and links."""
        self.expected_epoch = 0
        """Epoch of the plan that the monitor was last given; 0 before the first."""
        self.examinations: dict[int, Examination] = {}
        """Probes in progress, by number."""
        self.links_planned_for = False
        """Whether the planner has considered the slow links since transfer times became known."""
        self.probes = 0
        """Number of the last probe that was ordered."""
        self.findings: tuple[Finding, ...] = ()
        """Findings of the detector that the controller has not acted on yet."""
        self.judged_by = self.record.detector
        """The basis of the detector's judgements at the last check of its coverage."""
        self.inquiry = Inquiry()
        """Data about past suspicions of slowness."""
        self.unmeasured: set[int] = set()
        """New ranks that get work only after a probe of their device."""
        self.reconsider: list[Change] = []
        """Changes that may call for another plan and that the planner has not considered yet."""
        self.reconsider_at = 0.0
        """Earliest time at which the changes in `reconsider` are considered again."""
        self.changed_at: dict[Occasion, list[float]] = {}
        """Times at which plans were changed, by cause. A new supervisor uses the time of its take-over for all earlier
        changes."""
        self.rechecks = Rechecks()
        self.vacating: set[str] = set()
        """Nodes with ranks that are to stand by, so that the nodes can be given back to Slurm."""
        self.usual_speeds: dict[Place, DeviceSpeed] = {}
        """Usual probe speeds of the nodes' devices in former jobs, as far as the ledger has reported them."""
        self.specs: tuple[ParameterSpec, ...] = ()
        self.faults = {fault.id: ArmedFault(fault) for fault in settings.faults}
        self.incidents: list[Incident] = []
        self.signalled: dict[int, float] = {}
        """Time at which a fault that may end a rank was injected, by rank."""
        self.slow_since: dict[int | tuple[str, str], float] = {}
        """Time of the last injected `slow` fault, by rank, or by the two nodes that a link joins."""
        self.errors: dict[int, tuple[int, str]] = {}
        """(iteration, exception) that each rank's script raised, by rank."""
        self.slowed: list[tuple[tuple[int, ...], m.Slow]] = []
        """Orders to be slow that end at a given iteration, and the ranks that got them."""
        self.stuck: tuple[float, int, str] | None = None
        self.rebuilds = 0
        """Number of communication failures since the last committed iteration."""
        self.reports: dict[int, IterationReports] = {}
        self.furthest = 0
        """The latest iteration with a step that any rank has reported."""
        self.onsets = Onsets()
        self.workloads: deque[tuple[int, int, int]] = deque(maxlen=50)
        """(tokens, sum of squared lengths, micro-batches) of recent iterations."""
        self.profile: Profile | None = None
        """Times of layers and transfers; None until the detector has learned them."""
        self.tuning, self.counter, self.search = Tuning(), PrintedCounter(), CheckpointSearch.of(self.record)
        self.forecast: Forecast | None = None
        """Predicted time of the last iteration with a reported workload; None if no time could be predicted yet."""
        self.parts: dict[tuple[int, int, str], dict[int, CheckpointPart]] = {}
        self.checkpointed = self.record.checkpointed
        """Iteration of the newest checkpoint with all parts written; 0 if there is none."""
        self.started_at: float | None = None
        self.start = Beginning(met=bool(self.record.round))
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
        """Journal an entry and apply it to the record. The controller changes durable state in no other way."""
        self.do(Log(entry=entry))
        self.apply(entry)

    def apply(self, entry: AnyEntry) -> None:
        """Apply a journaled entry to the record, and update the volatile state that depends on it."""
        apply(self.record, entry)
        match entry:
            case NodeJoined() | NodeLost():
                if entry.node not in self.nodes or isinstance(entry, NodeJoined):
                    self.nodes[entry.node] = Node(self.record.nodes[entry.node], last_beat=self.now)
                    self.maintenance.releases.pop(entry.node, None)
                if isinstance(entry, NodeLost):
                    self.maintenance.releases[entry.node] = GivingBack(lost_at=self.now)
                    self.maintenance.unwatched.append(entry.node)
            case WorkersOrdered() if not self.record.workers and entry.round:
                self.members, self.still = {}, set()
            case WorkerStarted():
                member = self.members[entry.rank] = self._member(self.record.workers[entry.rank])
                member.spawned_at = member.beat_at = member.progress_at = self.now
            case FailureFound() if entry.node in self.record.verdicts:
                if self.record.verdicts[entry.node].failure == entry.failure:
                    self.maintenance.found_at[entry.node] = self.now
            case DrainDecided():
                self.maintenance.decided_at[entry.drain] = self.now
            case ReplacementAsked():
                self.maintenance.asked_at[entry.replacement] = self.now
            case ProbesTaken():
                for probe in entry.devices:
                    self.rechecks.unfit_at.pop((probe.node, probe.device), None)
            case ChangeDecided():
                for occasion in occasions_of(entry):
                    self.changed_at.setdefault(occasion, []).append(self.now)
            case _:
                pass

    @property
    def live(self) -> tuple[int, ...]:
        """All live ranks, including ranks that are still starting."""
        return tuple(sorted(rank for rank, member in self.members.items() if member.alive))

    @property
    def ready(self) -> tuple[int, ...]:
        """Ranks that can be given work, including standby ranks."""
        return tuple(sorted(rank for rank, member in self.members.items() if member.ready))

    @property
    def dead_devices(self) -> set[Device]:
        """Devices on which no further process is started: those in the record, and those condemned by an incident that
        is not journaled as a failure yet."""
        condemned = {i.condemned for i in self.incidents if i.condemned is not None}
        return self.record.dead_devices | condemned if condemned else self.record.dead_devices

    @property
    def needs_all(self) -> bool:
        """Whether the script needs all its processes: it creates its own process groups, or is known not to declare a
        model."""
        return not self.settings.declares or (self.start.met and not self.has_declared)

    @property
    def runs_script(self) -> bool:
        """Whether the processes of a script that does not declare a model run, or are being started again."""
        script_is_known = self.needs_all and not self.has_declared and bool(self.record.placements)
        return script_is_known and self.stage in ("gathering", "restarting")

    @property
    def has_declared(self) -> bool:
        """Whether any process has made a valid declaration of the model and workload."""
        return any(member.declared is not None for member in self.members.values())

    @property
    def node_of(self) -> dict[int, str]:
        """The node of every rank that was ever ordered to start."""
        return {rank: placement.node for rank, placement in enumerate(self.record.placements)}

    @property
    def declaration(self) -> Declare:
        """The common declaration of all ranks. Must not be read before there is one."""
        assert self.record.trains is not None
        return self.record.trains

    @property
    def begins_after(self) -> int:
        """Iteration of the state that ranks load or draw while none of them has any."""
        return self.record.rollbacks.loaded(self.record.trains)[0]

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches in the first uncommitted iteration. A plan that is made now has to distribute this
        number."""
        return self.declaration.batch_sizes.at(self.record.committed + 1)

    @property
    def stage(self) -> Stage:
        return self.lifecycle.stage

    def move(self, stage: Stage) -> None:
        """Change to another stage of the job's life. Raises InvalidMoveError if the table does not allow it."""
        self.lifecycle.move(stage, self.now)

    @property
    def changing(self) -> bool:
        """Whether the job is between two plans, so that no rank trains."""
        return self.stage in CHANGING_STAGES

    @property
    def training(self) -> bool:
        """Whether a plan is in effect and ranks train."""
        return self.stage in TRAINING_STAGES

    @property
    def under_way(self) -> bool:
        """Whether the start is over and training is not done: ranks train or a change of plan is in progress."""
        return self.changing or self.training

    @property
    def may_interrupt(self) -> bool:
        """Whether training may be interrupted now for an improvement that is not urgent.

        It may not during a pause or a change of plan, nor once the job is to stop.
        """
        return self.stage == "running" and self.stop_request is None

    @property
    def can_still_gain(self) -> bool:
        """Whether a new plan could still help: at least one iteration is left after the one in progress, which a change
        waits for."""
        return self.furthest + 1 < self.record.goal

    @property
    def has_ended(self) -> bool:
        return self.stage == "ended"

    def awaiting(self, member: Member, epoch: int, stage: Stage) -> Transition | None:
        """Return the transition in progress if it still waits for this rank's answer in `stage`, else None.

        Answers of another epoch are outdated, and repeated answers are ignored. An answer that comes before its
        question is logged, because it shows a bug in resihp or in the process that answers for the rank.
        """
        transition = self.transition
        if transition is None or epoch != self.epoch:
            return None
        early = self.changing and CHANGING_STAGES.index(self.stage) < CHANGING_STAGES.index(stage)
        if early and self.stop_request is None:  # once the job is to stop, a plan may have been withdrawn
            text = f"answered stage {stage} of epoch {epoch} while the job is in stage {self.stage}"
            self.say("warning", f"{self.where(member.rank)}: {text}")
        return transition if self.stage == stage and member.rank in transition.waiting else None

    def note_step(self, member: Member, epoch: int, outcome: StepOutcome, report: Stepped | None = None) -> None:
        """Note that a rank took the step of an iteration. `report`: None if the rank did not report the step in the
        usual message. A step before a rollback does not count."""
        if epoch < self.record.rollbacks.epoch:
            return
        member.stepped = max(member.stepped, outcome.iteration)
        self.furthest = max(self.furthest, member.stepped)
        if outcome.iteration > self.record.committed:
            reports = self.reports.setdefault(outcome.iteration, IterationReports(outcome))
            reports.add(member.rank, epoch, report)

    def stand_at(self, ranks: Iterable[int], iteration: int) -> None:
        """Set the progress of these ranks to `iteration`: the last step that they have taken."""
        for rank in ranks:
            self.members[rank].stepped = iteration
        self.furthest = max((member.stepped for member in self.members.values()), default=0)

    @property
    def usual_s(self) -> float:
        """Median duration of recent iterations in seconds; 0 if there were none."""
        return statistics.median(self.record.recent) if self.record.recent else 0.0

    @property
    def predicted_s(self) -> float:
        """Expected seconds of the iteration in progress: the usual time, or more if the iteration's workload requires
        more."""
        forecast, record = self.forecast, self.record
        if forecast is None or record.plan is None or forecast.epoch != record.plan.epoch:
            return self.usual_s
        if forecast.iteration <= record.committed:
            return self.usual_s
        return max(self.usual_s, forecast.seconds)

    def do(self, action: AnyAction) -> None:
        self.actions.append(action)

    def say(self, level: Literal["progress", "notice", "warning", "error"], text: str) -> None:
        self.do(Say(level=level, text=text))

    def order(self, ranks: tuple[int, ...], order: WorkerOrder) -> None:
        if ranks:
            self.do(Order(ranks=ranks, order=order))

    def excused(self, node: str, at: float) -> bool:
        """Return whether a signal to agents explains a death on `node` at time `at`."""
        together = any(abs(at - signal.at) <= COINCIDENCE_S for signal in self.agent_signals.values())
        own = self.agent_signals.get(node)
        return together or (own is not None and 0.0 <= at - own.at <= LONE_SIGNAL_S)

    def device_of(self, rank: int) -> tuple[str, int]:
        """Return (node, index) of a rank's device. Speeds and verdicts are stored under this key."""
        member = self.members[rank]
        return member.node, member.device

    def where(self, rank: int) -> str:
        member = self.members[rank]
        return f"rank {rank} ({member.node} device {member.device})"

    def where_link(self, link: tuple[int, int]) -> str:
        a, b = link
        return f"link {self.members[a].node}-{self.members[b].node} (ranks {a} and {b})"
