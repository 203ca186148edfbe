"""What the controller holds beside the record of its job: all that a take-over may forget.

Beats and answers, who is waited for, what is suspected or under way, times of the controller's clock. Durable truth is
`Job.record` (`resihp.record.state`): handlers read it, and change it by `Job.log` alone. Plain data with small, local
rules; the decisions are in the modules beside this one.
"""

from __future__ import annotations

import re
import statistics
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from resihp.controller.ahead.answers import Foresight
from resihp.controller.fail_stop.onsets import Onsets
from resihp.controller.interface import AnyAction, AnyEvent, Dependencies, Log, Order, Planner, Say
from resihp.controller.lifecycle import CHANGES, TRAINING, Lifecycle, Stage
from resihp.detector.diagnosis.diagnosis import Diagnosis
from resihp.detector.findings import Finding
from resihp.detector.probes import Judged, JudgedLink, Place
from resihp.faults import Fault
from resihp.parallelism.ownership import ParameterSpec
from resihp.parallelism.plan import Plan
from resihp.parallelism.transfers import Base
from resihp.protocol import messages as m
from resihp.protocol.messages import (
    CheckpointPart,
    Clue,
    Declare,
    Evaluated,
    Inventory,
    Parked,
    Probed,
    Raised,
    StepOutcome,
    Stepped,
    WorkerBeat,
    WorkerOrder,
)
from resihp.protocol.messages import Speed as DeviceSpeed
from resihp.record.fold import apply, changed
from resihp.record.journal import (
    AnyEntry,
    ChangeDecided,
    DrainDecided,
    FailureFound,
    NodeJoined,
    NodeLost,
    ReplacementAsked,
    WorkerStarted,
)
from resihp.record.state import Device, HowLost, JobRecord, KnownNode, KnownWorker, Link, Occasion
from resihp.scheduler import planners
from resihp.scheduler.cost.profile import Profile
from resihp.settings import Settings


@dataclass
class Node:
    """A node as it is now: what is on record of it, and what is heard of it."""

    known: KnownNode
    last_beat: float = 0.0

    @property
    def name(self) -> str:
        return self.known.name

    @property
    def host(self) -> str:
        return self.known.host

    @property
    def devices(self) -> int:
        return self.known.devices

    @property
    def hardware(self) -> str:
        return self.known.hardware

    @property
    def alive(self) -> bool:
        return self.known.alive


@dataclass
class Member:
    """One worker process as it is now, from spawn to exit."""

    known: KnownWorker
    spawned_at: float = 0.0
    declared: Declare | None = None
    """What it trains, once that was found to be what the job trains."""
    raised: Raised | None = None
    finished: bool = False
    unwilling: str = ""
    """Why its script cannot start, as it said itself."""
    lost_a_peer: bool = False
    """What it raised, or wrote before it ended, follows from another rank's end."""
    fenced: str | None = None
    """Why the controller killed it, if it did."""
    stepped: int = 0
    beat: WorkerBeat | None = None
    beat_at: float = 0.0
    progress_at: float = 0.0
    exit_status: int | None = None
    clues: tuple[Clue, ...] = ()
    """What was said of its end, by itself and by the kernel."""

    @property
    def rank(self) -> int:
        return self.known.rank

    @property
    def node(self) -> str:
        return self.known.node

    @property
    def device(self) -> int:
        return self.known.device

    @property
    def pid(self) -> int:
        return self.known.pid

    @property
    def joins(self) -> bool:
        return self.known.joins

    @property
    def alive(self) -> bool:
        return self.known.alive

    @property
    def ready(self) -> bool:
        """Whether it may be given work, and has to answer: it declared, and was not turned away."""
        return self.known.alive and self.declared is not None


@dataclass(kw_only=True)
class Incident:
    """A root cause found during the transition under way; becomes a FailureFound entry when the new plan is decided."""

    kind: Literal["fail-stop", "communication", "program"]
    component: Literal["process", "device", "node", "link", "script"]
    cause: str
    evidence: str
    found_at: float
    iteration: int
    epoch: int
    ranks: set[int] = field(default_factory=set)
    node: str | None = None
    device: int | None = None
    detect_s: float | None = None
    diagnosis: Diagnosis | None = None
    """Why, as far as anybody said so."""
    died: bool = False
    """A node that was lost, and of which nothing is known to be broken."""
    explains: set[str] = field(default_factory=set)
    """Lines about its node as such that it is told by: they are no cause of what comes later."""
    condemned: Device | None = None
    """(node, device) taken for dead as soon as its process had ended, for what was said of it."""


Outlook = Literal["start", "redo", "commit", "between"]
"""What becomes of the iteration that was under way when a transition began."""


@dataclass
class Transition:
    """From a failure (or the start of the job) to the first committed iteration under a new plan."""

    epoch: int
    began_at: float
    stage_at: float
    committed_before: int
    initial: bool = False
    attempts: int = 1
    graceful: bool = False
    """Everybody was asked to stop between two iterations."""
    urged: bool = False
    """Whoever has not parked was asked to stop at once."""
    cautious: bool = False
    """A plan was refused: propose no other than one that is known to work."""
    resizes: bool = False
    """Nothing but the number of micro-batches changes, as the job's ramp-up says."""
    tuned: Plan | None = None
    """What it is about, where the plan is known already."""
    waiting: set[int] = field(default_factory=set)
    """Ranks whose answer this stage still needs."""
    asked: set[int] = field(default_factory=set)
    """Ranks that take part: asked to park for this epoch, or of the first plan."""
    parked: dict[int, Parked] = field(default_factory=dict)
    plan: Plan | None = None
    base: Base | None = None
    next_iteration: int = 1
    finish: StepOutcome | None = None
    action: Outlook = "start"
    reason: str = ""
    failures: list[int] = field(default_factory=list)
    moved_at: float = 0.0
    """When a rank last showed that it builds or moves state."""
    park_s: float = 0.0
    plan_s: float = 0.0
    planning_s: float | None = None
    """Of these, those in which nothing was done but to decide; None where nobody has told."""
    groups_s: float = 0.0
    state_s: float = 0.0
    begun_at: float = 0.0
    bytes_moved: int = 0
    extra_bytes: int = 0


@dataclass(kw_only=True)
class Examination:
    """A probe under way: who is measured, and for what."""

    probe: int
    occasion: Literal["start", "join", "suspicion", "standby"]
    asked: tuple[int, ...]
    asked_at: float
    answers: dict[int, Probed] = field(default_factory=dict)
    silent: set[int] = field(init=False)
    """Who was asked and has not answered."""
    findings: list[Finding] = field(default_factory=list)
    """What it is to confirm; what is found meanwhile of the same devices as well."""
    ahead_s: float = 0.0
    """How long after it was asked it can be answered."""
    after: int = 0
    """The furthest iteration whose step was reported when it was asked."""
    looks: int = 1
    """How often devices in doubt were measured."""
    best: dict[int, DeviceSpeed] = field(default_factory=dict)
    """Of what devices in doubt and their witnesses gave in all looks but the first."""
    settled: dict[int, Judged] = field(default_factory=dict)
    """Devices that were in doubt: what these looks found."""
    slow_looks: tuple[JudgedLink, ...] = ()
    """Of a link: what former looks found, all of them that it is slow."""
    _settled: int = 0
    """So many of `asked` have answered or died."""

    def __post_init__(self) -> None:
        self.silent = set(self.asked)

    def waits(self, may_answer: Callable[[int], bool]) -> bool:
        """Whether anybody is silent who may still answer; who once may not never will."""
        while self._settled < len(self.asked):
            rank = self.asked[self._settled]
            if rank in self.silent and may_answer(rank):
                return True
            self._settled += 1
        return False

    @property
    def link(self) -> Link | None:
        """That is under suspicion."""
        return self.findings[0].link if self.findings else None

    def answered(self, rank: int, answer: Probed) -> None:
        self.answers[rank] = answer
        self.silent.discard(rank)


JUDGED = 100
"""Iterations of a plan that are remembered, for what they take longer since an onset."""


@dataclass(frozen=True, kw_only=True)
class Lasting:
    """Iterations take longer although every device's probe is fine, or who is slow does not explain it: told once that
    has lasted."""

    finding: Finding
    epoch: int
    since: int
    """The furthest iteration when all were measured."""


@dataclass
class Inquiry:
    """What is remembered of suspicions to be slow, beside what is on record."""

    acquitted: dict[int, int] = field(default_factory=dict)
    """Ranks whose probe did not confirm one: the furthest iteration then."""
    lasting: Lasting | None = None
    """What nobody could be blamed for."""
    healthy_s: float | None = None
    judged: deque[tuple[int, float, float]] = field(default_factory=lambda: deque(maxlen=JUDGED))
    """Iterations of the plan in effect: number, seconds, and what was predicted where all is well."""
    """What the last iteration would have taken where all is well, as far as that is known."""


@dataclass(kw_only=True)
class SecondLooks:
    """Devices in doubt after the start's examination, measured again beside the same witnesses."""

    first: Examination
    """What everybody answered, kept until they are judged."""
    doubted: tuple[int, ...]
    witnesses: tuple[int, ...]
    turns: list[tuple[int, ...]] = field(default_factory=list)
    """Who is measured next, and after them, in the look under way."""
    taken: int = 0
    """Looks after the first one, with the one under way."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """Something that may call for another plan."""

    reason: str
    since: int
    """First iteration in which things were as they are."""
    device: Occasion
    """What is slower or faster, or new; or that a better plan was found."""
    failure: int | None = None
    rank: int | None = None
    """The newcomer that could be given work. Unlike a slow-down, it is not expected to pass."""
    question: str = ""
    """To which a better plan was found, as long as that is the answer to how things are."""


@dataclass
class Pause:
    """A request to stop after an iteration, while training goes on."""

    epoch: int
    reason: str
    asked: set[int]
    answers: dict[int, Parked] = field(default_factory=dict)
    failures: list[int] = field(default_factory=list)
    """Verdicts that it answers to."""
    resizes: bool = False
    """Everybody stops by itself: the next iteration has another number of micro-batches."""
    tuned: Plan | None = None
    """The plan to go on with, if nothing comes in between."""


Meaning = Literal["warning", "time-limit", "cancelled", "preempted", "unknown", "operator"]
"""Why somebody wants the job to stop (`journal.JobSignalled`)."""

COINCIDENCE_S = 2.0
"""Agents that are signalled within this time are signalled together; so long deaths around it are nobody's fault."""
LEFT_S = 60.0
"""How long after its agent alone was signalled a node may end for that reason."""


@dataclass
class AgentSignal:
    """Somebody told a node's agent to stop."""

    signal: int
    at: float
    told: bool = False


@dataclass(kw_only=True)
class Departure:
    """The job was asked to stop, and how far it is. Times are the controller's."""

    signal: int
    first_at: float
    """When it began; what dies from then on is nobody's fault."""
    asked_at: float
    """When the last request came: its grace counts from here."""
    nodes: set[str] = field(default_factory=set)
    """Whose agents were signalled as well."""
    meaning: Meaning | None = None
    """None while Slurm is being asked."""
    told: bool = False
    """It is in the journal."""
    writers: tuple[int, ...] = ()
    """Ranks that were ordered to save what they hold."""
    interrupted: str = ""
    """What ended after training as only a signal ends it."""


@dataclass
class ArmedFault:
    fault: Fault
    refused: str = ""
    """Why it could not be carried out when its moment came, if it came."""

    @property
    def excuse(self) -> str:
        """Why it did not fire."""
        in_iteration = self.fault.phase in ("forward", "backward", "reduce", "step")
        return self.refused or f"its {'iteration' if in_iteration else 'transition'} never came"


@dataclass
class IterationReports:
    """What ranks said of one iteration's step, until it is committed."""

    outcome: StepOutcome
    """The same for all."""
    epoch: int = 0
    """The highest in which anybody took it."""
    by_rank: dict[int, Stepped | None] = field(default_factory=dict)
    """Who took it; None where a rank said so as it parked, which does not tell how long it took."""
    evaluation: Evaluated | None = None
    """Of the weights after it, told before it was committed."""
    _working: frozenset[int] = frozenset()
    _lacking: set[int] = field(default_factory=set)
    """Of these ranks, those that have not reported: kept, for thousands of reports each ask for it."""

    def add(self, rank: int, epoch: int, report: Stepped | None) -> None:
        """What a rank says first counts."""
        if rank not in self.by_rank:
            self.by_rank[rank] = report
            self.epoch = max(self.epoch, epoch)
        self._lacking.discard(rank)

    def is_complete(self, working: frozenset[int]) -> bool:
        """Whether all ranks that have work have reported."""
        if self._working is not working:
            self._working, self._lacking = working, set(working - self.by_rank.keys())
        return not self._lacking

    def of_epoch(self, epoch: int) -> dict[int, Stepped]:
        """Reports that tell how long it took, under one plan."""
        known = ((rank, report) for rank, report in self.by_rank.items() if report is not None and report.seconds)
        return {rank: report for rank, report in known if report.epoch == epoch}

    @property
    def seconds(self) -> float | None:
        """The slowest rank's; None where none told."""
        return max((report.seconds for report in self.by_rank.values() if report is not None), default=0.0) or None


def natural(name: str) -> tuple[tuple[int, str | int], ...]:
    """Sort key that puts n2 before n10."""
    return tuple((1, int(part)) if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name) if part)


@dataclass
class GivingBack:
    """How far a lost node is given back to Slurm, and since when it is lost for this supervisor."""

    lost_at: float
    tries: int = 0
    """How often Slurm was asked to take it back."""
    next_try_at: float = 0.0
    asked: bool = False
    """Slurm's answer to the last try is still to come."""


@dataclass
class Upkeep:
    """Bad nodes and new ones: since when this supervisor knows of them, and what it waits for."""

    found_at: dict[str, float] = field(default_factory=dict)
    """When each verdict was found, by node."""
    decided_at: dict[int, float] = field(default_factory=dict)
    """When each drain was decided."""
    releases: dict[str, GivingBack] = field(default_factory=dict)
    """Of lost nodes."""
    unwatched: list[str] = field(default_factory=list)
    """Nodes that were lost just now."""
    asked_at: dict[int, float] = field(default_factory=dict)
    """When each node was asked for that this supervisor asked for."""
    ask_after: float = 0.0
    """No node is asked for before: the last request was refused, or ended."""
    declined: tuple[str, ...] = ()
    """Lost nodes for which nobody was asked for, as was told last."""
    waits_s: list[float] = field(default_factory=list)
    """How long nodes took to come that this supervisor asked for."""
    kept: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Nodes that an administrator drains and that the layout cannot do without, as Slurm saw them then."""


@dataclass
class Saves:
    """Checkpoints that operators asked for."""

    askers: dict[int, int] = field(default_factory=dict)
    """Requests that are still to be answered, and after which iteration each was made."""
    number: int = 0
    """Of the last order to write one."""
    epoch: int = 0
    """In which that was given: who was told may not have passed it on before another plan."""


@dataclass
class Beginning:
    """How far the start is, until there is a first plan."""

    enough_at: float | None = None
    """Since when so many nodes are there that the others can be spared."""
    ordered_at: float = 0.0
    """When this supervisor asked for the first processes."""
    awaited: set[int] = field(default_factory=set)
    """Ranks that have neither declared what they train nor been lost."""
    early_at: float | None = None
    """When something was last lost, or went wrong."""
    told: set[str] = field(default_factory=set)
    """What scripts ended with, as was told: of many ranks that end alike, the first is."""
    met: bool = False
    """Ranks have met by themselves, without having said what they train (`messages.Beat`)."""
    examined: bool = False
    """Devices and links have been measured."""
    second_looks: SecondLooks | None = None
    """While devices are in doubt."""


@dataclass
class Recovery:
    """A new supervisor waits for the agents of a dead one."""

    undisturbed: bool
    """The journal knows of no plan that was decided and is not in effect."""
    began_at: float | None = None
    first_at: float | None = None
    """When the first agent came back."""
    inventories: dict[str, Inventory] = field(default_factory=dict)
    exits: dict[int, int] = field(default_factory=dict)
    lost: dict[str, tuple[str, HowLost]] = field(default_factory=dict)
    """Ranks that ended and nodes that were lost meanwhile: how, and why."""
    clues: dict[int, tuple[Clue, ...]] = field(default_factory=dict)
    """What was said of the ends of ranks meanwhile."""
    waiting: list[AnyEvent] = field(default_factory=list)
    """What else came meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Promise:
    """What a plan that was tuned by measured times is to be: `ratio` of what iterations took `before`."""

    ratio: float
    before: float
    """Median seconds a token under the plan before it."""
    epoch: int = 0
    """Of the plan; 0 until it is decided."""


@dataclass
class Tuning:
    """How far the job is with being tuned by its own times (`resihp.controller.tuning.retuning`)."""

    epoch: int = 0
    """Of the plan whose iterations are counted."""
    seen: int = 0
    """Iterations committed under it."""
    look_at: int = 1
    """With which of them the tuner may be asked next."""
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=40))
    """Seconds a token of the last of them, the very first left out."""
    settled: tuple[object, ...] | None = None
    """Layout, shares and orders for which the tuner was asked last, or which it made."""
    profile: Profile | None = None
    """With which times it was asked."""
    promise: Promise | None = None
    """That is still to be looked up."""


@dataclass(frozen=True)
class Forecast:
    """What the iteration under way should take, by its own workload."""

    epoch: int
    iteration: int
    seconds: float


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
        self.recheck_at = 0.0
        """When what stands by for being slow is measured next."""
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
