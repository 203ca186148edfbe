"""The durable state of a job: the record that its journal's entries add up to.

All readers of a job's decisions and progress use this record: the controller that leads it, one that takes over, and
agents that choose a leader. Only `fold.apply` changes it. It contains no times, because entries are applied whenever
somebody reads them.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from resihp.parallelism.plan import Plan
from resihp.protocol.messages import Declare, Speed, StepOutcome
from resihp.record.journal import ChangeDecided, Diagnosed, JobEnded, JobSignalled, Suspected

Device = tuple[str, int]
"""(node, index)."""
Link = tuple[int, int]
"""The ranks at its ends."""
Occasion = Device | Link | Literal["tuned", "found"]
"""The occasion of a change of plan: a device or link that became slow or fast, or that joined; measured times; a better
plan that was found."""
Part = tuple[str, tuple[int, ...]]
"""A part of the work of several ranks, which they do together or wait for: its component and its ranks, as in the
failure's entry."""
HowLost = Literal["silent", "agent", "useless", "vacated"]
MAX_WRITER_PLANS = 8
"""Number of latest plans whose checkpoints may still be under way."""
MAX_VOTERS = 63
"""Largest number of agents that choose a leader and keep copies of the journal. If a quarter of 2,048 nodes dies at
once, more than half of these agents survive except in 7 cases of a million."""
RECENT_ITERATIONS = 20
"""Number of latest iterations whose durations show the usual one."""


def occasions_of(entry: ChangeDecided) -> list[Occasion]:
    """Return the devices, links or other occasions of a change of plan."""
    occasions: list[Occasion] = [*entry.devices, *entry.links]
    if entry.tuned:
        occasions.append("tuned")
    if entry.found:
        occasions.append("found")
    return occasions


@dataclass
class KnownNode:
    """A node that joined, or one that never joined and was given up (`devices` 0)."""

    name: str
    host: str
    devices: int
    hardware: str = ""
    """The maker's name of its devices; empty where it is not known."""
    incarnation: str = ""
    """Incarnation of its agent; empty where it is not known."""
    alive: bool = True


@dataclass
class KnownWorker:
    """A process, from its start to its exit."""

    rank: int
    node: str
    device: int
    pid: int
    joins: bool = False
    """Whether it started while the job was under way, so that it waits to be given work."""
    alive: bool = True
    refused: str | None = None
    """Reason why it was turned away, if it was."""


@dataclass(frozen=True)
class Placement:
    """The place where a rank was ordered to start; device -1 where only its number is known."""

    node: str
    device: int


@dataclass(kw_only=True)
class Slow:
    """A device or link with a verdict: slow, but at work."""

    failure: int
    speed: float
    since: int
    """First slow iteration."""
    intermittent: bool = False
    """Whether it is slow only now and then; `speed` is the average."""


@dataclass
class Verdict:
    """A node to which a failure is attributed, and about which nothing has been decided yet."""

    failure: int
    node: str
    cause: str
    ranks: tuple[int, ...]
    hardware: bool
    """Whether its hardware is broken, rather than that it just died."""


@dataclass
class Drain:
    """A decision about a node (`journal.DrainDecided`), which need not be a drain."""

    number: int
    node: str
    failure: int
    reason: str
    measure: Literal["drain", "exclude"]
    grounds: Literal["hardware", "died again", "died", "agent"]
    answers: dict[str, str] = field(default_factory=dict)
    """Outcome of each rung that answered."""

    @property
    def settled(self) -> bool:
        """Whether Slurm has accepted it, or everything has been done to let others do it."""
        return self.answers.get("slurm") == "done" or not {"spool", "exclusion"}.isdisjoint(self.answers)


@dataclass
class LostNode:
    """A node that was given up."""

    name: str
    reason: str
    how: HowLost
    release_answered: bool = False
    """Whether the journal has an answer of Slurm to giving it back."""
    released: bool = False

    @property
    def answers(self) -> bool:
        """Whether it did not just fall silent."""
        return self.how != "silent"


@dataclass
class Replacement:
    """A node asked for in place of `instead`. `node`: the node that came, or is on its way."""

    number: int
    instead: str
    excluded: tuple[str, ...]
    state: Literal["asked", "pending", "running", "joined", "refused", "cancelled", "ended"] = "asked"
    slurm_job: str | None = None
    node: str | None = None
    joined: bool = False
    """Whether its node was, or is, one of the job's."""
    texts: set[str] = field(default_factory=set)
    """Slurm's texts about it: each reason for waiting is recorded once."""

    @property
    def open(self) -> bool:
        """Whether it is neither fulfilled nor given up."""
        return self.state in ("asked", "pending", "running")


@dataclass(frozen=True)
class ChangeCost:
    """Cost of a change of plans: bytes that its busiest rank held beside its state, communicators, seconds."""

    busiest_bytes: int
    communicators: int
    seconds: float


class Proposed(NamedTuple):
    """A plan that was decided."""

    plan: Plan
    leader: str
    """Node of the leader that decided it."""
    voters: frozenset[str]


@dataclass
class JobRecord:
    """All durable state. `apply` in `fold` is the only writer; any other state of a rank or node is volatile."""

    nodes: dict[str, KnownNode] = field(default_factory=dict)
    workers: dict[int, KnownWorker] = field(default_factory=dict)
    placements: list[Placement] = field(default_factory=list)
    """Place of every rank ever ordered, by rank."""
    refused: dict[int, str] = field(default_factory=dict)
    """Ranks that were turned away, or could not be started, with the reason."""
    enrolled: set[int] = field(default_factory=set)
    """Ranks that were part of a plan: they train what the job trains."""
    dead_devices: set[Device] = field(default_factory=set)
    """Devices on which no process is started again."""
    epoch: int = 0
    """The highest epoch in the journal."""
    decided: Plan | None = None
    """The newest plan."""
    plan: Plan | None = None
    """The plan in effect, which determines the state of every rank."""
    active: tuple[int, ...] = ()
    """Ranks with work in the plan in effect, ascending."""
    working: frozenset[int] = frozenset()
    """The same as a set."""
    computing: tuple[int, ...] = ()
    """Those of them that have micro-batches: all but the ranks of mirrors."""
    first_plan: Plan | None = None
    writers: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Ranks that write checkpoints under each of the last few plans, by epoch."""
    trains: Declare | None = None
    """The ranks' declaration, once all have declared the same."""
    goal: int = 0
    committed: int = 0
    last_outcome: StepOutcome | None = None
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_ITERATIONS))
    """Seconds of the last iterations."""
    evaluated: int = 0
    """Last iteration whose weights were evaluated."""
    checkpointed: int = 0
    """Iteration of the newest complete checkpoint."""
    failures: int = 0
    """Number of failures found."""
    diagnosed: list[Diagnosed] = field(default_factory=list)
    explained: dict[str, set[str]] = field(default_factory=dict)
    """Log lines used as evidence of failures, by node; not to be reused for later failures."""
    slow: dict[Device, Slow] = field(default_factory=dict)
    slow_links: dict[Link, Slow] = field(default_factory=dict)
    slow_job: Slow | None = None
    """Verdict on the job: all ranks are slower than before, and none stands out."""
    slow_parts: dict[Part, Slow] = field(default_factory=dict)
    """Verdicts on work that a group of ranks does together, or waits for."""
    suspicions: int = 0
    """Number of suspicions so far, of slowness or silence."""
    detector: str = "warming up"
    """The detector's basis of judgement, as in `CoverageChanged`."""
    unwatched: tuple[int, ...] = ()
    """Ranks with work that have not reported to the detector for long."""
    suspects_slow: Suspected | None = None
    """The suspicion of slowness that is neither cleared nor a failure yet."""
    suspects_silent: dict[int | str, Suspected] = field(default_factory=dict)
    """Open suspicions of silence, by rank or by the name of a node; only of journals that number them."""
    unfit: set[Device] = field(default_factory=set)
    """Devices on standby because they failed the probe before they were given work."""
    unanswered: set[Device] = field(default_factory=set)
    """Devices whose last probe failed or had no answer: not even a copy of state is safe there."""
    unfit_probes: dict[Device, int] = field(default_factory=dict)
    """Number of probes in a row that each of them failed: the more, the later it is measured again."""
    reference: dict[Device, Speed] = field(default_factory=dict)
    """Speeds of each device's first good probe, corrected for the loss common to all devices at the time."""
    common_share: Speed | None = None
    """Share of these speeds that all devices have left, by the last probe of all devices; None for all of it."""
    link_seconds: dict[Link, float] = field(default_factory=dict)
    """Transfer times of links at the start, by the ranks at their ends in ascending order."""
    probes: int = 0
    """The highest number of a probe."""
    changes: dict[Occasion, int] = field(default_factory=dict)
    """Number of changes of plan, by occasion."""
    costs: list[ChangeCost] = field(default_factory=list)
    """Costs of the changes of plan so far."""
    fired: set[int] = field(default_factory=set)
    """Faults that were injected."""
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    """Verdicts by node."""
    drains: dict[int, Drain] = field(default_factory=dict)
    lost: dict[str, LostNode] = field(default_factory=dict)
    replacements: dict[int, Replacement] = field(default_factory=dict)
    failed_requests: int = 0
    slurm_sees: dict[str, tuple[str, str]] = field(default_factory=dict)
    """(state, text) by node."""
    signalled: JobSignalled | None = None
    """The signal, or request, to stop the job."""
    unexplained: dict[int, int | None] = field(default_factory=dict)
    """Ranks that ended, with their exit, and that no failure names yet."""
    unexplained_nodes: dict[str, str] = field(default_factory=dict)
    """The same for nodes, with the reason of their loss."""
    ended: JobEnded | None = None
    leader: str = ""
    """Node of the latest leader; empty if it runs on none of the job's nodes."""
    proposed: Proposed | None = None
    """The plan that was decided and is neither in effect, refused nor withdrawn."""
    incumbent: str = ""
    """Node of the leader that decided the plan in effect: its agent decides between equal halves."""
    voters: frozenset[str] = frozenset()
    """Nodes whose agents choose a leader (`voters_of` the plan in effect); before there is a plan, the first nodes
    that joined."""

    @property
    def needs_voters(self) -> bool:
        """Return whether another node may become a voter although there is no plan yet."""
        return self.plan is None and len(self.voters) < MAX_VOTERS

    def voters_of(self, plan: Plan) -> frozenset[str]:
        """Return the voters among the nodes of a plan, standby ones included: all of a small plan, and of a large one
        so many that no rack has many.

        They are chosen by a hash of their names, so that a plan that lost some nodes, or gained others, keeps most of
        its voters.
        """
        nodes = {self.placements[rank].node for rank in plan.layout.ranks if rank < len(self.placements)}
        if len(nodes) <= MAX_VOTERS:
            return frozenset(nodes)
        return frozenset(sorted(nodes, key=lambda node: hashlib.blake2b(node.encode()).digest())[:MAX_VOTERS])

    @property
    def shown_plan(self) -> Plan | None:
        """Return the plan that a job's status is about: the one in effect; before the first, the one proposed."""
        if self.plan is not None:
            return self.plan
        return None if self.proposed is None else self.proposed.plan
