"""The controller's interface: the events it takes, the actions it answers with, and the components it calls. Events and
actions are pure data, which the shell (`wrapper.supervisor.process`) translates.

Events come from sockets, the clock and signals; actions go to agents, the journal and the user. The order of actions in
one answer is the order in which the shell carries them out: `Log` is on disk before anything after it happens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from resihp.detector import modes
from resihp.detector.interface import Detector
from resihp.detector.probes import Place
from resihp.faults import Fault
from resihp.parallelism.model import ModelSpec
from resihp.parallelism.ownership import ParameterSpec
from resihp.parallelism.parameter_outline import outline
from resihp.parallelism.plan import Plan
from resihp.parallelism.transfers import Move, moves
from resihp.pipeline import checker
from resihp.protocol.inventory import NodeInventory as Machine
from resihp.protocol.messages import Beat, Clue, Inventory, Speed, WorkerMessage, WorkerOrder
from resihp.record.journal import AnyEntry
from resihp.scheduler.situation import Decision, Situation
from resihp.settings import Detection

# --- components it calls ------------------------------------------------------------------------------------------


class Planner(Protocol):
    """The controller's view of the scheduler (`resihp.scheduler.planners`)."""

    @property
    def first_plan(self) -> Callable[..., Plan]: ...
    @property
    def decide(self) -> Callable[[Situation], Decision]: ...
    @property
    def without_lost_replicas(self) -> Callable[[Situation], Decision]: ...


@dataclass(frozen=True, kw_only=True)
class Dependencies:
    """Components that answer questions the controller does not decide itself. A simulated job brings its own."""

    planner: Planner | None = None
    """None: the planner that the job's settings name."""
    check: Callable[[Plan], None] = checker.check
    moves: Callable[..., Sequence[Move]] = moves
    outline: Callable[[ModelSpec], Sequence[ParameterSpec]] = outline
    monitor: Callable[[Detection], Detector] = modes.detector


# --- events -----------------------------------------------------------------------------------------------------


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class AgentJoined(Event, frozen=True, kw_only=True):
    """A node's agent has joined.

    `inventory` lists the processes that run there already, under a supervisor that took over. `lease`, `hardware`,
    `incarnation`, `machine`: see `messages.Join`.
    """

    node: str
    host: str
    devices: int
    lease: int = 0
    hardware: str = ""
    incarnation: str = ""
    inventory: Inventory | None = None
    machine: Machine | None = None


class AgentLost(Event, frozen=True, kw_only=True):
    """The agent's process ended, or its connection closed and it did not return within `reconnect_s`: a fact, not a
    suspicion.

    `how`: the node is `silent`, or its `agent` alone ended, as something on the node could report. `cannot_start`: the
    agent found nothing of the job there, or could not even be started, so no further run would fare better.
    """

    node: str
    reason: str
    how: Literal["silent", "agent"] = "silent"
    cannot_start: bool = False


class AgentBeat(Event, frozen=True, kw_only=True):
    node: str
    beat: Beat


class WorkerSpawned(Event, frozen=True, kw_only=True):
    rank: int
    node: str
    device: int
    pid: int


class SpawnRefused(Event, frozen=True, kw_only=True):
    """A node could not start a worker; `rank` None: it cannot start any."""

    node: str
    reason: str
    rank: int | None = None


class WorkerExited(Event, frozen=True, kw_only=True):
    rank: int
    status: int
    clues: tuple[Clue, ...] = ()


class WorkerSaid(Event, frozen=True, kw_only=True):
    rank: int
    message: WorkerMessage


class InjectAsked(Event, frozen=True, kw_only=True):
    """An operator requests a fault now; `request` is echoed in `Reply`."""

    request: int
    fault: Fault


class StandingAsked(Event, frozen=True, kw_only=True):
    """An operator asks why a rank is, or is not, considered slow; `request` is echoed in `Reply`, whose text is a
    `RankAnswer` as JSON."""

    request: int
    rank: int


class StopAsked(Event, frozen=True, kw_only=True):
    """An operator requests the end of the job, `at_once` without a checkpoint; `request` is echoed in `Reply`."""

    request: int
    at_once: bool


class CheckpointAsked(Event, frozen=True, kw_only=True):
    """An operator requests a checkpoint now; `request` is echoed in `Reply` once there is one, or there will be
    none."""

    request: int


class CheckpointLost(Event, frozen=True, kw_only=True):
    """A checkpoint whose parts are all written could not be committed."""

    reason: str


class Signalled(Event, frozen=True, kw_only=True):
    """The supervisor received this signal."""

    signal: int


class AgentSignalled(Event, frozen=True, kw_only=True):
    """Somebody other than us sent a signal to the node's agent, which survived it."""

    node: str
    signal: int


class TimeLeft(Event, frozen=True, kw_only=True):
    """Seconds until Slurm's time limit of the job; None when there is no limit."""

    seconds: float | None


class QuorumLost(Event, frozen=True, kw_only=True):
    """Fewer agents than a quorum answer: decisions made now may not count (architecture.md, "Who may lead")."""

    reason: str


class DrainStep(Event, frozen=True, kw_only=True):
    """The result of one rung of the drain ladder (`journal.DrainAnswered`)."""

    drain: int
    node: str
    step: Literal["slurm", "spool", "exclusion"]
    outcome: Literal["done", "refused", "unknown"]
    text: str


class ReleaseAnswered(Event, frozen=True, kw_only=True):
    node: str
    outcome: Literal["done", "refused", "unknown"]
    text: str


class ReplacementNews(Event, frozen=True, kw_only=True):
    """A request's state as Slurm reports it. The node's arrival is reported by `AgentJoined` with its `lease`."""

    replacement: int
    state: Literal["pending", "running", "refused", "ended"]
    slurm_job: str | None
    node: str | None
    text: str


class SlurmSees(Event, frozen=True, kw_only=True):
    """Slurm's view of one of the job's nodes, sent when it is first known and when it changes."""

    node: str
    state: str
    reason: str


class StopMeaning(Event, frozen=True, kw_only=True):
    """Slurm's answer to why the job is being signalled (`journal.JobSignalled`)."""

    meaning: Literal["time-limit", "cancelled", "preempted", "unknown"]


class NodesRemembered(Event, frozen=True, kw_only=True):
    """Usual probe speeds of the nodes' devices in former jobs, as far as the ledger has them; may come late or
    never."""

    usual: dict[Place, Speed]


class Thought(Event, frozen=True, kw_only=True):
    """The answer to `Think`; may come late, or too late to be of use, or never.

    `decision`: a `scheduler.situation.Decision` as msgpack, which the checker has passed; empty if there is none, and
    then `obstacle` gives the reason.
    """

    question: str
    decision: bytes = b""
    obstacle: str = ""


class PlanningTook(Event, frozen=True, kw_only=True):
    """Seconds spent on nothing but planning while the event was handled in which the plan of `epoch` was decided."""

    epoch: int
    seconds: float


class Tick(Event, frozen=True, kw_only=True):
    """Time has passed; sent about four times a second."""


AnyEvent = (
    AgentJoined
    | AgentLost
    | AgentBeat
    | WorkerSpawned
    | SpawnRefused
    | WorkerExited
    | WorkerSaid
    | InjectAsked
    | StandingAsked
    | StopAsked
    | CheckpointAsked
    | CheckpointLost
    | Signalled
    | AgentSignalled
    | TimeLeft
    | QuorumLost
    | DrainStep
    | ReleaseAnswered
    | ReplacementNews
    | SlurmSees
    | StopMeaning
    | NodesRemembered
    | Thought
    | PlanningTook
    | Tick
)


# --- actions ----------------------------------------------------------------------------------------------------


class Action(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class Log(Action, frozen=True, kw_only=True):
    """Append to the journal, flushed, then hand to the ledger."""

    entry: AnyEntry


class StartWorkers(Action, frozen=True, kw_only=True):
    """Start workers on a node. `workers`: (rank, device) on `node`. `joins`: the job is under way, so they wait to be
    given work.

    `nodes` names the node of each rank of the job so far, these included, by rank.
    """

    node: str
    workers: tuple[tuple[int, int], ...]
    nodes: tuple[str, ...] = ()
    joins: bool = False


class Order(Action, frozen=True, kw_only=True):
    """Send to these workers, through their agents. Ranks whose agent is gone are skipped."""

    ranks: tuple[int, ...]
    order: WorkerOrder


class SignalWorker(Action, frozen=True, kw_only=True):
    rank: int
    signal: int


class SignalNode(Action, frozen=True, kw_only=True):
    node: str
    signal: int


class CutConnection(Action, frozen=True, kw_only=True):
    """Inject a fault: close the connection to the node's agent once; it may reconnect."""

    node: str


class DropNode(Action, frozen=True, kw_only=True):
    """Close the agent's connection and refuse it from now on."""

    node: str


class DrainNode(Action, frozen=True, kw_only=True):
    """Climb the drain ladder for a node with a verdict; each rung answers with `DrainStep`.

    `measure` "exclude": only the rung that keeps the node out of the user's own jobs. `grounds`: as in `DrainDecided`.
    """

    drain: int
    node: str
    reason: str
    measure: Literal["drain", "exclude"] = "drain"
    grounds: Literal["hardware", "died again", "died", "agent"] = "hardware"


class ReleaseNode(Action, frozen=True, kw_only=True):
    """Give a node back to Slurm: the job keeps `keep`. Answered with `ReleaseAnswered`."""

    node: str
    keep: tuple[str, ...]


class AskReplacement(Action, frozen=True, kw_only=True):
    """Submit a job of one node that joins this one, on a node outside `exclude`. Answered with `ReplacementNews`."""

    replacement: int
    exclude: tuple[str, ...]


class CancelReplacement(Action, frozen=True, kw_only=True):
    replacement: int
    reason: str


class WatchNode(Action, frozen=True, kw_only=True):
    """Poll Slurm's view of a node until Slurm, too, knows that the node was lost; answered with `SlurmSees`."""

    node: str


class AskWhy(Action, frozen=True, kw_only=True):
    """Ask Slurm why the job is being signalled. Answered with `StopMeaning`."""


class AskTimeLeft(Action, frozen=True, kw_only=True):
    """Ask Slurm for the time left now: a decision depends on it, and the limit may have been changed. Answered with
    `TimeLeft`."""


class Reply(Action, frozen=True, kw_only=True):
    """Answer an operator's request."""

    request: int
    ok: bool
    text: str


class Think(Action, frozen=True, kw_only=True):
    """Make a plan for a situation that may arise, beside the job; nothing waits for it.

    Answered with `Thought`, or not at all. `search_s`: seconds spent on the search for a better plan after the first
    one. A new question takes precedence over one not yet begun.
    """

    question: str
    situation: Situation
    search_s: float
    why: str


class TellScores(Action, frozen=True, kw_only=True):
    """Hand the detector's scores of some ranks to the ledger, as telemetry: (rank, level, evidence); the level is None
    where it is not known."""

    iteration: int
    scores: tuple[tuple[int, float | None, float], ...]


class CommitCheckpoint(Action, frozen=True, kw_only=True):
    """Write the manifest that makes the parts in `folder` a complete checkpoint, then prune old ones."""

    iteration: int
    folder: str
    parts: tuple[tuple[str, int], ...]
    seconds: float
    layout: str = ""
    """The layout under which it was written, for lists of checkpoints."""


class Say(Action, frozen=True, kw_only=True):
    """One line for the user."""

    level: Literal["progress", "notice", "warning", "error"]
    text: str


class End(Action, frozen=True, kw_only=True):
    """Release agents and workers, close the ledger, exit. Always the last action.

    `workers_leave` True: workers were told to halt and end by themselves; otherwise they are ended with TERM, then
    KILL.
    """

    exit_code: int
    reason: str
    workers_leave: bool
    requeue: bool = False
    """Ask Slurm to run the job again, which then continues from the last checkpoint."""


AnyAction = (
    Log
    | StartWorkers
    | Order
    | SignalWorker
    | SignalNode
    | CutConnection
    | DropNode
    | DrainNode
    | ReleaseNode
    | AskReplacement
    | CancelReplacement
    | WatchNode
    | AskWhy
    | AskTimeLeft
    | Reply
    | Think
    | TellScores
    | CommitCheckpoint
    | Say
    | End
)
