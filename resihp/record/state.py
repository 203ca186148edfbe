"""What is durable of a job: the record that its journal's entries add up to.

Everybody who wants to know what a job has decided and what has become of it reads this: the controller that leads it,
one that takes over, agents that choose a leader. Only `fold.apply` changes it. There are no times in it: entries are
applied by whoever reads them, whenever that is.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from resihp.parallelism.plan import Plan
from resihp.protocol.messages import Declare, Speed, StepOutcome
from resihp.record.journal import Diagnosed, JobEnded, JobSignalled, Suspected

Device = tuple[str, int]
"""(node, index)."""
Link = tuple[int, int]
"""The ranks at its ends."""
Occasion = Device | Link | Literal["tuned", "found"]
"""What a plan is changed for: what became slow, fast or came; measured times; a better plan that was found."""
Part = tuple[str, tuple[int, ...]]
"""Something ranks do together, or wait for: its component, and they, as in the failure's entry."""
HowLost = Literal["silent", "agent", "useless", "vacated"]
WRITERS_KEPT = 8
"""Plans whose checkpoints may still be under way."""
RECENT = 20
"""Iterations whose times tell what is usual."""


@dataclass
class KnownNode:
    """A node that joined, or never did and was given up (`devices` 0)."""

    name: str
    host: str
    devices: int
    hardware: str = ""
    """Of its devices, by their maker's name; empty where it is not known."""
    incarnation: str = ""
    """Of its agent; empty where it is not known."""
    alive: bool = True


@dataclass
class KnownWorker:
    """A process, from its start to its exit."""

    rank: int
    node: str
    device: int
    pid: int
    joins: bool = False
    """Started while the job was under way: it waits to be given work."""
    alive: bool = True
    refused: str | None = None
    """Why it was turned away, if it was."""


@dataclass(frozen=True)
class Placement:
    """Where a rank was asked to be started; device -1 where only its number is known."""

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
    """Slow now and then; `speed` is the average."""


@dataclass
class Verdict:
    """A node that a failure found was laid to, and about which nothing has been decided yet."""

    failure: int
    node: str
    cause: str
    ranks: tuple[int, ...]
    hardware: bool
    """Something of it is broken: it did not just die."""


@dataclass
class Drain:
    """What was decided about a node (`journal.DrainDecided`), which need not be a drain."""

    number: int
    node: str
    failure: int
    reason: str
    measure: Literal["drain", "exclude"]
    grounds: Literal["hardware", "died again", "died", "agent"]
    answers: dict[str, str] = field(default_factory=dict)
    """How each rung that answered went."""

    @property
    def settled(self) -> bool:
        """Whether Slurm has taken it, or all has been done to let somebody else do it."""
        return self.answers.get("slurm") == "done" or not {"spool", "exclusion"}.isdisjoint(self.answers)


@dataclass
class LostNode:
    """A node that was given up."""

    name: str
    reason: str
    how: HowLost
    told: bool = False
    """That Slurm does not take it back now is in the journal."""
    released: bool = False

    @property
    def answers(self) -> bool:
        """Whether it did not just fall silent."""
        return self.how != "silent"


@dataclass
class Replacement:
    """A node asked for in place of `instead`. `node`: what came, or is on its way."""

    number: int
    instead: str
    excluded: tuple[str, ...]
    state: Literal["asked", "pending", "running", "joined", "refused", "cancelled", "ended"] = "asked"
    slurm_job: str | None = None
    node: str | None = None
    joined: bool = False
    """Its node was, or is, one of the job's."""
    texts: set[str] = field(default_factory=set)
    """What was said of it: why it waits is told once."""

    @property
    def open(self) -> bool:
        """Asked for, and neither here nor given up."""
        return self.state in ("asked", "pending", "running")


@dataclass(frozen=True)
class ChangeCost:
    """What a change of plans took: bytes that its busiest rank held beside its state, communicators, seconds."""

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
    """All that is durable. `apply` in `fold` is the only writer; what a rank or node is now besides is volatile."""

    nodes: dict[str, KnownNode] = field(default_factory=dict)
    workers: dict[int, KnownWorker] = field(default_factory=dict)
    placements: list[Placement] = field(default_factory=list)
    """Of every rank ever asked for, by rank."""
    refused: dict[int, str] = field(default_factory=dict)
    """Ranks that were turned away, or could not be started, and why."""
    enrolled: set[int] = field(default_factory=set)
    """Ranks that were part of a plan: they train what the job trains."""
    dead_devices: set[Device] = field(default_factory=set)
    """On which no process is to be started again."""
    epoch: int = 0
    """The highest that is in the journal."""
    decided: Plan | None = None
    """The newest plan."""
    plan: Plan | None = None
    """The plan in effect: what the state of every rank follows."""
    active: tuple[int, ...] = ()
    """Ranks with work in the plan in effect, ascending."""
    working: frozenset[int] = frozenset()
    """The same, to look up."""
    computing: tuple[int, ...] = ()
    """Those of them that have micro-batches: all but the ranks of mirrors."""
    first_plan: Plan | None = None
    writers: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Who writes checkpoints under each of the last few plans, by epoch."""
    trains: Declare | None = None
    """What the job trains, once all ranks have declared the same."""
    goal: int = 0
    committed: int = 0
    last_outcome: StepOutcome | None = None
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    """Seconds of the last iterations."""
    evaluated: int = 0
    """Last iteration whose weights were evaluated."""
    checkpointed: int = 0
    """Iteration of the newest complete checkpoint."""
    failures: int = 0
    """How many were found."""
    diagnosed: list[Diagnosed] = field(default_factory=list)
    explained: dict[str, set[str]] = field(default_factory=dict)
    """Lines that failures were told by, by node: they are no cause of what comes later."""
    slow: dict[Device, Slow] = field(default_factory=dict)
    slow_links: dict[Link, Slow] = field(default_factory=dict)
    slow_job: Slow | None = None
    """Everybody is slower than before, and nobody stands out."""
    slow_parts: dict[Part, Slow] = field(default_factory=dict)
    """What a group of ranks does together, or waits for."""
    suspicions: int = 0
    """So far, to be slow or silent."""
    detector: str = "warming up"
    """What the detector judges by, as in `CoverageChanged`."""
    unwatched: tuple[int, ...] = ()
    """Ranks with work of which it has not been told anything for long."""
    suspects_slow: Suspected | None = None
    """The suspicion to be slow that is neither cleared nor a failure yet."""
    suspects_silent: dict[int | str, Suspected] = field(default_factory=dict)
    """Those of silence that have not ended, by rank or by the name of a node; of journals that number them."""
    unfit: set[Device] = field(default_factory=set)
    """That failed the probe before they were given work: they stand by."""
    unanswered: set[Device] = field(default_factory=set)
    """Devices whose last probe failed or gave no answer: not even a copy of state is safe there."""
    unfit_probes: dict[Device, int] = field(default_factory=dict)
    """How many probes in a row each of them failed: the more, the later it is measured again."""
    reference: dict[Device, Speed] = field(default_factory=dict)
    """What each device's first good probe gave, or would have, had all not lost a share of it by then."""
    common_share: Speed | None = None
    """What is left for all devices of that, by the last probe of everybody; None for all of it."""
    link_seconds: dict[Link, float] = field(default_factory=dict)
    """What links took at the start, by the ranks at their ends in ascending order."""
    probes: int = 0
    """The highest number of a probe."""
    changes: dict[Occasion, int] = field(default_factory=dict)
    """How often plans were changed on account of what."""
    costs: list[ChangeCost] = field(default_factory=list)
    """What changes of plans have taken."""
    fired: set[int] = field(default_factory=set)
    """Faults that were injected."""
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    """By node."""
    drains: dict[int, Drain] = field(default_factory=dict)
    lost: dict[str, LostNode] = field(default_factory=dict)
    replacements: dict[int, Replacement] = field(default_factory=dict)
    failed_requests: int = 0
    slurm_sees: dict[str, tuple[str, str]] = field(default_factory=dict)
    """(state, text) by node."""
    signalled: JobSignalled | None = None
    """That the job is to stop."""
    unexplained: dict[int, int | None] = field(default_factory=dict)
    """Ranks that ended, and how, of which no failure tells."""
    unexplained_nodes: dict[str, str] = field(default_factory=dict)
    """The same of nodes, and why they were lost."""
    ended: JobEnded | None = None
    leader: str = ""
    """Node of the latest leader; empty where it runs on none of the job's."""
    proposed: Proposed | None = None
    """The plan that was decided and is not in effect, nor refused or withdrawn."""
    incumbent: str = ""
    """Where the leader was that decided the plan in effect: its agent decides between equal halves."""
    voters: frozenset[str] = frozenset()
    """Nodes whose agents choose a leader (`fold.voters_of` the plan in effect); before there is one, of the first that
    have joined."""

    @property
    def shown_plan(self) -> Plan | None:
        """Return the plan that a job's status is about: the one in effect; before the first, the one proposed."""
        if self.plan is not None:
            return self.plan
        return None if self.proposed is None else self.proposed.plan
