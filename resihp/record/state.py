"""The durable state of a job: the record that results from applying all entries of its journal.

The controller, a new supervisor and agents that choose a leader all read this record for the job's decisions and
progress. Only `fold.apply` changes it. It contains no times, because the entries may be applied at any later time.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from resihp.parallelism.plan import Plan
from resihp.protocol.messages import Declare, Speed, StepOutcome
from resihp.record.journal import (
    ChangeDecided,
    CounterSeen,
    Diagnosed,
    JobEnded,
    JobSignalled,
    RestartDecided,
    Suspected,
    WorkersOrdered,
)
from resihp.record.scripts.checkpoints import ScriptCheckpoints
from resihp.record.scripts.rollbacks import Rollbacks

Device = tuple[str, int]
"""(node, index of the device on the node)."""
Link = tuple[int, int]
"""The two ranks at the ends of a link."""
Occasion = Device | Link | Literal["tuned", "found"]
"""The cause of a change of plan: a device or link that became slow or recovered; a device that joined; "tuned" for
newly measured times; "found" for a better plan that a search found."""
Part = tuple[str, tuple[int, ...]]
"""Work that several ranks do together or wait for: its component and its ranks, as in `FailureFound`."""
HowLost = Literal["silent", "agent", "useless", "vacated"]
MAX_WRITER_PLANS = 8
"""Number of latest plans for which the writers of checkpoints are kept: a checkpoint may still be incomplete."""
MAX_VOTERS = 63
"""Largest number of agents that choose a leader and keep copies of the journal. If a quarter of 2,048 nodes dies at
once, more than half of these agents survive except in 7 of a million cases."""
RECENT_ITERATIONS = 20
"""Number of latest iterations from which the usual duration is computed."""


def occasions_of(entry: ChangeDecided) -> list[Occasion]:
    """Return the causes of a change of plan: devices, links, "tuned", "found"."""
    occasions: list[Occasion] = [*entry.devices, *entry.links]
    if entry.tuned:
        occasions.append("tuned")
    if entry.found:
        occasions.append("found")
    return occasions


def is_unfit_after(occasion: str, speed: float | None, *, passed: bool, was_unfit: bool) -> bool:
    """Return whether a device gets no work after a probe. `speed`: its speed relative to its peers, None if it could
    not be measured.

    A probe on suspicion changes nothing here; its outcome, if any, is a verdict. A standby device is measured again
    only if it was unfit.
    """
    if occasion == "suspicion":
        return was_unfit
    if passed:
        return was_unfit and speed is None
    return was_unfit or occasion != "standby"


@dataclass
class KnownNode:
    """A node that joined, or a node that never joined and was given up (`devices` is then 0)."""

    name: str
    host: str
    devices: int
    hardware: str = ""
    """The maker's name of its devices; empty if not known."""
    incarnation: str = ""
    """Number that its agent drew when it started; empty if not known."""
    alive: bool = True


@dataclass
class KnownWorker:
    """A worker process, from its start to its exit."""

    rank: int
    node: str
    device: int
    pid: int
    joins: bool = False
    """Whether it started after the first plan was decided, so that it waits to be included in a plan."""
    alive: bool = True
    refused: str | None = None
    """Reason for which it was turned away; None if it was not."""


@dataclass(frozen=True)
class Placement:
    """The node and device on which a rank was ordered to start. `device` is -1 if only the rank's number is known."""

    node: str
    device: int


@dataclass(kw_only=True)
class Slow:
    """A verdict that a device, link, part or job is slow, although it still works."""

    failure: int
    speed: float
    since: int
    """First slow iteration."""
    intermittent: bool = False
    """Whether it is slow only now and then; `speed` is then the average."""


@dataclass
class Verdict:
    """A failure that is attributed to a node, as long as no measure against the node has been decided."""

    failure: int
    node: str
    cause: str
    ranks: tuple[int, ...]
    hardware: bool
    """True if the node's hardware is broken, False if the node merely died."""


@dataclass
class Drain:
    """A decided measure against a node (`journal.DrainDecided`): a drain, or an exclusion from the user's next jobs."""

    number: int
    node: str
    failure: int
    reason: str
    measure: Literal["drain", "exclude"]
    grounds: Literal["hardware", "died again", "died", "agent"]
    answers: dict[str, str] = field(default_factory=dict)
    """Outcome of each rung of the drain ladder that has answered, by the rung's name."""

    @property
    def settled(self) -> bool:
        """Whether Slurm has accepted the drain or, failing that, one of the other rungs has answered."""
        return self.answers.get("slurm") == "done" or not {"spool", "exclusion"}.isdisjoint(self.answers)


@dataclass
class LostNode:
    """A node that is no longer part of the job."""

    name: str
    reason: str
    how: HowLost
    release_answered: bool = False
    """Whether the journal contains Slurm's answer to a request to take the node back."""
    released: bool = False

    @property
    def answers(self) -> bool:
        """Whether the node was lost for another reason than silence."""
        return self.how != "silent"


@dataclass
class Replacement:
    """A request for a new node in place of the lost node `instead`. `node`: the new node's name; None until known."""

    number: int
    instead: str
    excluded: tuple[str, ...]
    state: Literal["asked", "pending", "running", "joined", "refused", "cancelled", "ended", "withdrawn"] = "asked"
    slurm_job: str | None = None
    node: str | None = None
    joined: bool = False
    """Whether the new node has ever joined the job."""
    texts: set[str] = field(default_factory=set)
    """Slurm's texts about the request; each reason for waiting is recorded once."""

    @property
    def open(self) -> bool:
        """Whether the request is still waiting for its node."""
        return self.state in ("asked", "pending", "running")


@dataclass(frozen=True)
class ChangeCost:
    """Cost of a change of plan: bytes that the busiest rank held beside its state, number of communicators built, and
    seconds."""

    busiest_bytes: int
    communicators: int
    seconds: float


class Proposed(NamedTuple):
    """A plan that was decided but is not in effect yet."""

    plan: Plan
    leader: str
    """Node of the leader that decided the plan."""
    voters: frozenset[str]


@dataclass
class JobRecord:
    """All durable state of a job. Only `fold.apply` changes it; any other state of a rank or node may be lost in a
    take-over."""

    nodes: dict[str, KnownNode] = field(default_factory=dict)
    workers: dict[int, KnownWorker] = field(default_factory=dict)
    placements: list[Placement] = field(default_factory=list)
    """Node and device of every rank of the round that was ever ordered to start; the index is the rank."""
    refused: dict[int, str] = field(default_factory=dict)
    """Ranks that were turned away or could not be started, with the reason."""
    round: int = 0
    """How often all processes of the script have been started again."""
    restart: RestartDecided | None = None
    """The decision to start the script again, until its processes are ordered to start; None if there is none."""
    planned_rounds: int = 0
    """Number of restarts for which no failure was the reason."""
    fruitless: int = 0
    """Number of restarts in a row that followed a round without progress."""
    last_restart_reason: str = ""
    failed_on: dict[Device, int] = field(default_factory=dict)
    """Number of rounds in which the first failure was that of a single process, by its device."""
    counted_round: int = -1
    """The last round of which a failure is counted in `failed_on`."""
    enrolled: set[int] = field(default_factory=set)
    """Ranks that were part of any plan. Their declarations match the job's."""
    dead_devices: set[Device] = field(default_factory=set)
    """Devices on which no further process is started."""
    epoch: int = 0
    """The highest epoch in the journal; 0 before the first plan."""
    decided: Plan | None = None
    """The newest decided plan, whether it takes effect or not; None before the first plan."""
    plan: Plan | None = None
    """The plan in effect, which determines the state that each rank holds; None before the first plan takes effect."""
    active: tuple[int, ...] = ()
    """Ranks with work under the plan in effect, ascending."""
    working: frozenset[int] = frozenset()
    """The ranks of `active`, as a set."""
    computing: tuple[int, ...] = ()
    """Ranks of `active` that process micro-batches: all but the ranks of mirrors."""
    first_plan: Plan | None = None
    writers: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Ranks that write checkpoints under each of the last `MAX_WRITER_PLANS` plans, by epoch."""
    trains: Declare | None = None
    """The common declaration of all ranks; None until all have declared the same."""
    goal: int = 0
    committed: int = 0
    last_outcome: StepOutcome | None = None
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_ITERATIONS))
    """Seconds that each of the latest iterations took."""
    committed_before: int = 0
    """`committed` when the present round began."""
    recovered: int = 0
    """Number of the last failure that a change of plan or a restart has mended; 0 if there is none."""
    recovered_epoch: int = 0
    """Epoch of the last change of plan that was completed, or number of the last restart."""
    counter: CounterSeen | None = None
    """The iteration counter of a script that does not report to resihp; None if none was seen. `committed` is then the
    furthest iteration that it has printed, and `goal` its goal, 0 if not printed."""
    loss_not_finite: int = 0
    """First iteration of such a script since which no finite loss was printed; 0 if there is none."""
    evaluated: int = 0
    """Last iteration after which the weights were evaluated; 0 if there is none."""
    checkpointed: int = 0
    """Iteration of the newest complete checkpoint; 0 if there is none."""
    checkpoints: ScriptCheckpoints = field(default_factory=ScriptCheckpoints)
    """Those of a script that does not declare a model."""
    rollbacks: Rollbacks = field(default_factory=Rollbacks)
    failures: int = 0
    """Number of the last failure found; 0 if there is none."""
    last_failed: str = ""
    """Component of the last failure found, slowness left out; empty if there is none."""
    diagnosed: list[Diagnosed] = field(default_factory=list)
    explained: dict[str, set[str]] = field(default_factory=dict)
    """Log lines that were used as evidence of failures, by node. They explain no later failure."""
    slow_failures: set[int] = field(default_factory=set)
    """Numbers of all verdicts of slowness, which no restart mends."""
    slow: dict[Device, Slow] = field(default_factory=dict)
    slow_links: dict[Link, Slow] = field(default_factory=dict)
    slow_job: Slow | None = None
    """Verdict that the whole job is slow: all ranks are slower than before, and none stands out. None without such a
    verdict."""
    slow_parts: dict[Part, Slow] = field(default_factory=dict)
    """Verdicts that one kind of work of a group of ranks is slow; the ranks do this work together, or wait for it."""
    suspicions: int = 0
    """Number of the last suspicion, of slowness or of silence; 0 if there is none."""
    detector: str = "warming up"
    """The basis of the detector's judgements, as in `CoverageChanged`."""
    unwatched: tuple[int, ...] = ()
    """Ranks with work that have sent the detector no report for many iterations."""
    suspects_slow: Suspected | None = None
    """The open suspicion of slowness; None if there is none."""
    suspects_silent: dict[int | str, Suspected] = field(default_factory=dict)
    """Open suspicions of silence, by rank or by node name. Empty for journals that do not number suspicions of
    silence."""
    unfit: set[Device] = field(default_factory=set)
    """Devices that stand by because they failed a probe before they were given work."""
    unanswered: set[Device] = field(default_factory=set)
    """Devices that answered their last probe with an error or not at all. They do not even hold a copy of state."""
    unfit_probes: dict[Device, int] = field(default_factory=dict)
    """Number of probes in a row that each unfit device has failed. The higher it is, the longer the time until the next
    probe."""
    reference: dict[Device, Speed] = field(default_factory=dict)
    """Speeds that each device showed in its first successful probe, corrected for the loss of speed common to all
    devices at that time."""
    common_share: Speed | None = None
    """Share of the speeds in `reference` that all devices have left, by the last probe of all devices; None means all
    of it."""
    link_seconds: dict[Link, float] = field(default_factory=dict)
    """Transfer times of links at the start, in seconds, by the ranks at their ends in ascending order."""
    probes: int = 0
    """Number of the last probe; 0 if there is none."""
    changes: dict[Occasion, int] = field(default_factory=dict)
    """Number of changes of plan, by cause."""
    costs: list[ChangeCost] = field(default_factory=list)
    """Costs of all changes of plan so far, in order."""
    fired: set[int] = field(default_factory=set)
    """Ids of the faults that were injected."""
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    """Failures attributed to a node about which no measure has been decided yet, by node."""
    drains: dict[int, Drain] = field(default_factory=dict)
    lost: dict[str, LostNode] = field(default_factory=dict)
    replacements: dict[int, Replacement] = field(default_factory=dict)
    failed_requests: int = 0
    slurm_sees: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Slurm's last recorded view of each node: (state, text)."""
    signalled: JobSignalled | None = None
    """The last signal or request to stop the job; None if there was none."""
    unexplained: dict[int, int | None] = field(default_factory=dict)
    """Ranks that ended and that no failure names yet, with their exit status (None if it is not known)."""
    unexplained_nodes: dict[str, str] = field(default_factory=dict)
    """Lost nodes that no failure names yet, with the reason of their loss."""
    ended: JobEnded | None = None
    leader: str = ""
    """Node of the latest leader; empty if the leader runs on none of the job's nodes."""
    proposed: Proposed | None = None
    """The plan that was decided and is neither in effect, refused nor withdrawn; None if there is none."""
    incumbent: str = ""
    """Node of the leader that decided the plan in effect. Its agent decides between two equal halves of the voters."""
    voters: frozenset[str] = frozenset()
    """Nodes with agents that choose a leader: `voters_of` the plan in effect. Before the first plan takes effect, the
    first nodes that joined."""

    def count_failed_process(self, node: str | None, device: int | None) -> None:
        """Count a failure of a single process, if it is attributed to a device and the first of its round."""
        if node is not None and device is not None and self.counted_round < self.round:
            self.counted_round = self.round
            self.failed_on[node, device] = self.failed_on.get((node, device), 0) + 1

    def decide_restart(self, decision: RestartDecided) -> None:
        """Apply the decision to start the script again."""
        self.restart = decision
        if decision.is_planned:
            self.planned_rounds += 1
            return
        self.last_restart_reason = decision.reason
        self.fruitless = 0 if decision.progressed else self.fruitless + 1

    def begin_round(self, order: WorkersOrdered) -> None:
        """Forget the processes of the round that has ended, because the ranks of the new round begin at 0."""
        self.checkpoints.begin_round(order, self.restart)
        self.committed_before = self.committed
        self.round, self.restart = order.round, None
        self.placements, self.workers, self.refused, self.unexplained = [], {}, {}, {}
        for subject in [subject for subject in self.suspects_silent if isinstance(subject, int)]:
            del self.suspects_silent[subject]

    @property
    def needs_voters(self) -> bool:
        """Whether a node that joins becomes a voter: no plan is in effect yet, and there are fewer than `MAX_VOTERS`
        voters."""
        return self.plan is None and len(self.voters) < MAX_VOTERS

    def voters_of(self, plan: Plan) -> frozenset[str]:
        """Return the nodes of a plan that have a voting agent, standby nodes included: all nodes of a small plan,
        `MAX_VOTERS` nodes of a large one.

        The nodes are chosen by a hash of their names. So the voters are spread over racks, and a plan that lost or
        gained some nodes keeps most of its voters.
        """
        nodes = {self.placements[rank].node for rank in plan.layout.ranks if rank < len(self.placements)}
        if len(nodes) <= MAX_VOTERS:
            return frozenset(nodes)
        return frozenset(sorted(nodes, key=lambda node: hashlib.blake2b(node.encode()).digest())[:MAX_VOTERS])

    @property
    def shown_plan(self) -> Plan | None:
        """The plan that a job's status shows: the plan in effect; before the first one, the proposed plan; None without
        either. `JobHistory` and the ledger's `Reader` have a property or method of this name, with the same rule."""
        if self.plan is not None:
            return self.plan
        return None if self.proposed is None else self.proposed.plan
