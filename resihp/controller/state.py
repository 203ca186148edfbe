"""What the controller remembers: members, the transition under way, the iterations that were reported.

Plain records with small, local rules; the decisions are in the modules beside this one.
"""

from __future__ import annotations

import re
import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from resihp.controller.interface import AnyAction, AnyEvent, Order, Say, Settings
from resihp.controller.nodes.measures import Grounds, Measure
from resihp.detector.diagnosis.clues import Clue
from resihp.detector.diagnosis.diagnosis import Diagnosis
from resihp.detector.findings import Finding
from resihp.detector.online.monitor import Monitor
from resihp.detector.probes import Place
from resihp.faults import Fault
from resihp.parallelism.ownership import ParameterSpec
from resihp.parallelism.plan import Plan
from resihp.parallelism.transfers import Base
from resihp.protocol import messages as m
from resihp.protocol.messages import (
    CheckpointPart,
    Declare,
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
from resihp.record.journal import Suspected
from resihp.scheduler.cost.profile import Profile
from resihp.scheduler.transition_cost import Record


@dataclass
class Node:
    name: str
    host: str
    devices: int
    alive: bool = True
    last_beat: float = 0.0
    suspected: bool = False
    hardware: str = ""
    """Of its devices, by their maker's name; empty where it is not known."""


@dataclass
class Member:
    """One worker process, from spawn to exit."""

    rank: int
    node: str
    device: int
    pid: int
    spawned_at: float = 0.0
    joins: bool = False
    """Started while the job was under way: it waits to be given work."""
    alive: bool = True
    declared: Declare | None = None
    """What it trains, once that was found to be what the job trains."""
    raised: Raised | None = None
    finished: bool = False
    fenced: str | None = None
    """Why the controller killed it, if it did."""
    stepped: int = 0
    beat: WorkerBeat | None = None
    beat_at: float = 0.0
    progress_at: float = 0.0
    suspected: bool = False
    exit_status: int | None = None
    clues: tuple[Clue, ...] = ()
    """What was said of its end, by itself and by the kernel."""

    @property
    def ready(self) -> bool:
        """Whether it may be given work, and has to answer: it declared, and was not turned away."""
        return self.alive and self.declared is not None


@dataclass
class Placement:
    """Where a rank was asked to be started, and whether it has been (or never will be)."""

    node: str
    device: int
    settled: bool = False


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
    condemned: tuple[str, int] | None = None
    """(node, device) taken for dead as soon as its process had ended, for what was said of it."""


Outlook = Literal["start", "redo", "commit", "between"]
"""What becomes of the iteration that was under way when a transition began."""


@dataclass
class Transition:
    """From a failure (or the start of the job) to the first committed iteration under a new plan."""

    stage: Literal["parking", "proposing", "building", "first-iteration"]
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
    finding: Finding | None = None
    """The suspicion that it is to confirm."""
    ahead_s: float = 0.0
    """How long after it was asked it can be answered."""


@dataclass(kw_only=True)
class Slow:
    """A device or link with a verdict: slow, but at work."""

    failure: int
    speed: float
    since: int
    """First slow iteration."""


WRITERS_KEPT = 8
"""Plans whose checkpoints may still be under way."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """Something that may call for another plan."""

    reason: str
    since: int
    """First iteration in which things were as they are."""
    failure: int | None = None
    device: object = None
    """What is slower or faster: a device, or a link."""


@dataclass
class Pause:
    """A request to stop after an iteration, while training goes on."""

    epoch: int
    reason: str
    asked: set[int]
    answers: dict[int, Parked] = field(default_factory=dict)
    failures: list[int] = field(default_factory=list)
    """Verdicts that it answers to."""


Meaning = Literal["warning", "time-limit", "cancelled", "preempted", "unknown"]
"""Why somebody wants the job to stop (`journal.JobSignalled`)."""

USELESS = "no device of it can be used any more"
VACATED = "left for an administrator, who drains it"
"""Why a node is left that is alive (`journal.NodeLost`); the latter is no failure."""
PATIENCE = 100
"""Iterations after which a device is suspected again on the same evidence, though its probe was fine."""
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
    hurried: bool = False
    """The iteration under way was given up."""
    writers: tuple[int, ...] = ()
    """Ranks that were ordered to save what they hold."""
    interrupted: str = ""
    """What ended after training as only a signal ends it."""


@dataclass
class ArmedFault:
    fault: Fault
    fired_at: float | None = None
    refused: str = ""
    """Why it could not be carried out when its moment came, if it came."""

    @property
    def excuse(self) -> str:
        """Why it did not fire."""
        in_iteration = self.fault.phase in ("forward", "backward", "reduce", "step")
        return self.refused or f"its {'iteration' if in_iteration else 'transition'} never came"


@dataclass
class IterationReports:
    """Reports of one iteration's step, by rank, until it is committed."""

    by_rank: dict[int, Stepped] = field(default_factory=dict)

    @property
    def outcome(self) -> StepOutcome:
        return next(iter(self.by_rank.values())).outcome

    @property
    def seconds(self) -> float:
        return max(report.seconds for report in self.by_rank.values())


def natural(name: str) -> tuple[tuple[int, str | int], ...]:
    """Sort key that puts n2 before n10."""
    return tuple((1, int(part)) if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name) if part)


@dataclass
class Verdict:
    """A node that a failure found was laid to; something is done about it, unless more is learnt meanwhile."""

    failure: int
    node: str
    cause: str
    ranks: tuple[int, ...]
    found_at: float
    hardware: bool
    """Something of it is broken: it did not just die."""


@dataclass
class Drain:
    """What was decided about a node (`journal.DrainDecided`), which need not be a drain."""

    number: int
    node: str
    failure: int
    reason: str
    measure: Measure
    grounds: Grounds
    decided_at: float
    answers: dict[str, str] = field(default_factory=dict)
    """How each rung that answered went."""

    @property
    def settled(self) -> bool:
        """Whether Slurm has taken it, or all has been done to let somebody else do it."""
        return self.answers.get("slurm") == "done" or not {"spool", "exclusion"}.isdisjoint(self.answers)


@dataclass
class LostNode:
    """A node that was given up, and how far it is given back to Slurm."""

    name: str
    lost_at: float
    reason: str
    tries: int = 0
    """How often Slurm was asked to take it back."""
    next_try_at: float = 0.0
    asked: bool = False
    """Slurm's answer to the last try is still to come."""
    told: bool = False
    """A refusal is in the journal."""
    released: bool = False

    @property
    def answers(self) -> bool:
        return still_answers(self.reason)


def still_answers(reason: str) -> bool:
    """Whether a lost node did not just fall silent (`NodeLost.reason`): its agent alone ended, as somebody there could
    tell (`wrapper.supervisor.agents`), or we left it (`upkeep`)."""
    return reason.startswith(("its agent ", USELESS, VACATED))


@dataclass
class Request:
    """A node asked for in place of `instead`. `node`: what came, or is on its way."""

    number: int
    instead: str
    excluded: tuple[str, ...]
    state: Literal["asked", "pending", "running", "joined", "refused", "cancelled", "ended"] = "asked"
    slurm_job: str | None = None
    node: str | None = None
    joined: bool = False
    """Its node was, or is, one of the job's."""
    asked_at: float | None = None
    """None where a supervisor before this one asked."""
    texts: set[str] = field(default_factory=set)
    """What was said of it: why it waits is told once."""

    @property
    def open(self) -> bool:
        """Asked for, and neither here nor given up."""
        return self.state in ("asked", "pending", "running")


@dataclass
class Upkeep:
    """Bad nodes and what is done about them, new nodes that were asked for: as far as the journal tells of it."""

    verdicts: dict[str, Verdict] = field(default_factory=dict)
    """Found and not yet acted on, by node."""
    drains: dict[int, Drain] = field(default_factory=dict)
    lost: dict[str, LostNode] = field(default_factory=dict)
    requests: dict[int, Request] = field(default_factory=dict)
    ask_after: float = 0.0
    """No node is asked for before: the last request was refused, or ended."""
    failed_requests: int = 0
    waits_s: list[float] = field(default_factory=list)
    """How long nodes took to come that this supervisor asked for."""
    slurm_sees: dict[str, tuple[str, str]] = field(default_factory=dict)
    """(state, text) by node, as last journaled."""
    kept: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Nodes that an administrator drains and that the layout cannot do without, as Slurm saw them then."""


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
    lost: dict[str, str] = field(default_factory=dict)
    """Ranks that ended and nodes that were lost meanwhile: how, and why."""
    clues: dict[int, tuple[Clue, ...]] = field(default_factory=dict)
    """What was said of the ends of ranks meanwhile."""
    waiting: list[AnyEvent] = field(default_factory=list)
    """What else came meanwhile."""
    unexplained: dict[int, int | None] = field(default_factory=dict)
    unexplained_nodes: dict[str, str] = field(default_factory=dict)
    """Ranks that ended, and how, and nodes that were lost, and why, of which the journal has no failure yet."""


@dataclass(frozen=True)
class Forecast:
    """What the iteration under way should take, by its own workload."""

    epoch: int
    iteration: int
    seconds: float


Phase = Literal["recovering", "gathering", "transition", "running", "halting", "ended"]


class Job:
    """All that the controller knows, and the actions of the event being handled. Methods here only speak or look up."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.phase: Phase = "gathering"
        self.nodes: dict[str, Node] = {}
        self.members: dict[int, Member] = {}
        self.placements: list[Placement] = []
        """Of every rank ever asked for, by rank."""
        self.dead_devices: set[tuple[str, int]] = set()
        """(node, device) on which no process is to be started again."""
        self.epoch = 0
        self.plan: Plan | None = None
        """The plan in effect: what the state of every rank follows. Set by `take_effect` alone."""
        self.active: tuple[int, ...] = ()
        """Ranks with work in the plan in effect, ascending."""
        self.working: frozenset[int] = frozenset()
        """The same, to look up."""
        self.first_plan: Plan | None = None
        self.transition: Transition | None = None
        self.pause: Pause | None = None
        self.unconsidered: set[int] = set()
        """Newcomers that became ready, and may be worth an interruption."""
        self.trains: Declare | None = None
        """What the job trains, once all ranks have declared the same."""
        self.recovery: Recovery | None = None
        self.departure: Departure | None = None
        self.agent_signals: dict[str, AgentSignal] = {}
        """The last signal that each node's agent received from outside."""
        self.deadline: float | None = None
        """When Slurm's time limit ends the job, if it has one."""
        self.upkeep = Upkeep()
        self.monitor = Monitor(patience=PATIENCE)
        """What is known of healthy times, and who is suspected to be slow."""
        self.expected_epoch = 0
        """Epoch of the plan whose healthy times the monitor expects."""
        self.examinations: dict[int, Examination] = {}
        """Probes under way, by number."""
        self.probes = 0
        self.slow: dict[tuple[str, int], Slow] = {}
        """(node, device) that are slow and at work."""
        self.slow_links: dict[tuple[int, int], Slow] = {}
        """The same for links, by the ranks at their ends."""
        self.findings: tuple[Finding, ...] = ()
        """What the monitor found and nobody has acted on yet."""
        self.suspects_slow: Suspected | None = None
        """The suspicion to be slow that is in the journal, and neither cleared nor a failure yet."""
        self.acquitted: set[int] = set()
        """Ranks that were suspected to be slow, and whose probe was fine."""
        self.unmeasured: set[int] = set()
        """Newcomers whose device is still to be measured before they are given work."""
        self.reconsider: list[Change] = []
        """Why another plan may be better now, and the verdicts behind it."""
        self.reconsider_at = 0.0
        """Not before then: when another plan begins to be worth it."""
        self.changes: dict[object, list[float]] = {}
        """When plans were changed on account of which device or link."""
        self.records: list[Record] = []
        """What transitions have taken."""
        self.recheck_at = 0.0
        """When what stands by for being slow is measured next."""
        self.vacating: set[str] = set()
        """Nodes whose ranks are to stand by, so that they can be left."""
        self.unfit: set[tuple[str, int]] = set()
        """(node, device) that failed the probe before they were given work: they stand by."""
        self.reference: dict[tuple[str, int], DeviceSpeed] = {}
        """What each device's last good probe gave."""
        self.link_seconds: dict[tuple[int, int], float] = {}
        """What links took at the start, by the ranks at their ends in ascending order."""
        self.usual_speeds: dict[Place, DeviceSpeed] = {}
        """What devices of nodes gave in former jobs."""
        self.specs: tuple[ParameterSpec, ...] = ()
        self.committed = 0
        self.goal = 0
        self.store: tuple[str, int] | None = None
        self.faults = {fault.id: ArmedFault(fault) for fault in settings.faults}
        self.incidents: list[Incident] = []
        self.diagnoses: list[Diagnosis] = []
        """Of the incidents so far: what a device does again is its own fault."""
        self.explained: dict[str, set[str]] = {}
        """Lines about a node as such, by node, that a failure was told by: they are no cause of what comes later."""
        self.failures = 0
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
        self.last_outcome: StepOutcome | None = None
        self.recent: deque[float] = deque(maxlen=20)
        self.workloads: deque[tuple[int, int]] = deque(maxlen=50)
        """Tokens and squared lengths of recent iterations."""
        self.profile: Profile | None = None
        """What layers and transfers take, once that is learnt."""
        self.forecast: Forecast | None = None
        """Of the last iteration whose workload was told and whose time could be predicted."""
        self.parts: dict[tuple[int, int, str], dict[int, CheckpointPart]] = {}
        self.writers: dict[int, tuple[int, ...]] = {}
        """Who writes checkpoints under each of the last few plans, by epoch."""
        self.checkpointed = 0
        """Iteration of the newest checkpoint all of whose parts are written."""
        self.started_at: float | None = None
        self.enough_at: float | None = None
        """Since when so many nodes are there that the others can be spared."""
        self.progress_at = 0.0
        self.halted_at = 0.0
        self.raised_at: float | None = None
        self.now = 0.0
        self.actions: list[AnyAction] = []

    @property
    def live(self) -> tuple[int, ...]:
        """Every process, also those that are still starting."""
        return tuple(sorted(rank for rank, member in self.members.items() if member.alive))

    @property
    def ready(self) -> tuple[int, ...]:
        """Ranks that can be given work, standby ones included."""
        return tuple(sorted(rank for rank, member in self.members.items() if member.ready))

    @property
    def node_of(self) -> dict[int, str]:
        """The node of every rank that was ever asked for."""
        return {rank: placement.node for rank, placement in enumerate(self.placements)}

    @property
    def declaration(self) -> Declare:
        """What the job trains."""
        assert self.trains is not None
        return self.trains

    @property
    def has_ended(self) -> bool:
        return self.phase == "ended"

    @property
    def furthest(self) -> int:
        """The furthest iteration whose step any rank has reported."""
        return max((member.stepped for member in self.members.values()), default=0)

    @property
    def usual_s(self) -> float:
        """Seconds of an iteration, as far as recent ones tell; 0 when none was seen."""
        return statistics.median(self.recent) if self.recent else 0.0

    @property
    def predicted_s(self) -> float:
        """Seconds to be expected of the iteration under way: the usual, or more where its own workload says so."""
        ahead = self.forecast
        if ahead is None or self.plan is None or ahead.epoch != self.plan.epoch or ahead.iteration <= self.committed:
            return self.usual_s
        return max(self.usual_s, ahead.seconds)

    def take_effect(self, plan: Plan) -> None:
        self.plan = plan
        self.active = plan.layout.active
        self.working = frozenset(self.active)
        self.writers[plan.epoch] = plan.layout.replicas[0].ranks
        self.writers = dict(sorted(self.writers.items())[-WRITERS_KEPT:])

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
