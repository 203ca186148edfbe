"""The controller's interface: the events that it takes, the actions that it returns, and the components that it calls.
Events and actions are plain data; the shell (`resihp.wrapper.supervisor.process`) translates them.

Events come from sockets, the clock and signals. Actions go to agents, the journal and the user. The shell carries out
the actions of one event in the order in which the controller returns them: a `Log` is on disk before the shell carries
out any later action.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from resihp.controller.scripts.interface import Action as Action
from resihp.controller.scripts.interface import CheckpointsFound as CheckpointsFound
from resihp.controller.scripts.interface import EndProcesses as EndProcesses
from resihp.controller.scripts.interface import Event as Event
from resihp.controller.scripts.interface import FindCheckpoints as FindCheckpoints
from resihp.controller.scripts.interface import LookAtWorkers as LookAtWorkers
from resihp.controller.scripts.interface import ProcessesEnded as ProcessesEnded
from resihp.controller.scripts.interface import WorkerPrinted as WorkerPrinted
from resihp.controller.scripts.interface import WorkersSeen as WorkersSeen
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
    """The scheduler as the controller calls it (`resihp.scheduler.planners`)."""

    @property
    def first_plan(self) -> Callable[..., Plan]: ...
    @property
    def decide(self) -> Callable[[Situation], Decision]: ...
    @property
    def without_lost_replicas(self) -> Callable[[Situation], Decision]: ...


@dataclass(frozen=True, kw_only=True)
class Dependencies:
    """Components that the controller calls for decisions that it does not make itself. The simulator passes its own."""

    planner: Planner | None = None
    """None selects the planner named in the job's settings."""
    check: Callable[[Plan], None] = checker.check
    moves: Callable[..., Sequence[Move]] = moves
    outline: Callable[[ModelSpec], Sequence[ParameterSpec]] = outline
    monitor: Callable[[Detection], Detector] = modes.detector


# --- events -----------------------------------------------------------------------------------------------------


class AgentJoined(Event, frozen=True, kw_only=True):
    """A node's agent has connected and joined the job.

    `inventory` lists the processes that already run on the node; it is sent to a supervisor that took over.
    `messages.Join` explains `lease`, `hardware`, `incarnation` and `machine`.
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
    """A node's agent is gone: its process ended, or its connection closed and it did not reconnect within
    `reconnect_s`. This is a fact, not a suspicion.

    `how`: `silent` if nothing on the node answers; `agent` if only the agent ended, as something on the node could
    report. `cannot_start`: the job's folder does not exist on the node, or the agent could not even be started, so that
    another run of the job would fail there as well.
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
    """A node could not start the worker of `rank`. If `rank` is None, the node cannot start any worker."""

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
    """An operator requests that a fault be injected now. `Reply` repeats the number `request`."""

    request: int
    fault: Fault


class StandingAsked(Event, frozen=True, kw_only=True):
    """An operator asks why a rank is, or is not, considered slow. `Reply` repeats the number `request`; its text is a
    `RankAnswer` as JSON."""

    request: int
    rank: int


class StopAsked(Event, frozen=True, kw_only=True):
    """An operator requests the end of the job; with `at_once`, without a checkpoint. `Reply` repeats the number
    `request`."""

    request: int
    at_once: bool


class CheckpointAsked(Event, frozen=True, kw_only=True):
    """An operator requests a checkpoint now. `Reply` repeats the number `request`; it is sent once the checkpoint is
    complete, or once it is certain that none will be written."""

    request: int


class CheckpointLost(Event, frozen=True, kw_only=True):
    """A checkpoint could not be committed although all its parts are written."""

    reason: str


class Signalled(Event, frozen=True, kw_only=True):
    """The supervisor received a signal."""

    signal: int


class AgentSignalled(Event, frozen=True, kw_only=True):
    """A process other than resihp sent a signal to a node's agent, and the agent survived it."""

    node: str
    signal: int


class TimeLeft(Event, frozen=True, kw_only=True):
    """The time left until Slurm's time limit of the job, in seconds; None if there is no limit."""

    seconds: float | None


class QuorumLost(Event, frozen=True, kw_only=True):
    """Fewer agents than a quorum follow this supervisor, so its decisions may not count (architecture.md, "Who may
    lead")."""

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
    """Slurm reports the state of a replacement request. The arrival of the node itself is reported by `AgentJoined`,
    with the request's number as `lease`. `withdrawn`: somebody else cancelled its Slurm job.

    `by_slurm`: Slurm has ended or suspended the job for a reason other than its node, which is then not to blame for
    its loss.
    """

    replacement: int
    state: Literal["pending", "running", "refused", "ended", "withdrawn"]
    slurm_job: str | None
    node: str | None
    text: str
    by_slurm: bool = False


class SlurmSees(Event, frozen=True, kw_only=True):
    """Slurm's view of one of the job's nodes. Sent when the view is first known, and whenever it changes."""

    node: str
    state: str
    reason: str


class ReservationAhead(Event, frozen=True, kw_only=True):
    """The next reservation of nodes of the job begins in `seconds`; None: the one last reported was cancelled."""

    name: str
    nodes: tuple[str, ...]
    seconds: float | None


class StopMeaning(Event, frozen=True, kw_only=True):
    """Slurm's answer to the question why the job receives a signal (`journal.JobSignalled`)."""

    meaning: Literal["time-limit", "cancelled", "preempted", "unknown"]


class NodesRemembered(Event, frozen=True, kw_only=True):
    """Usual probe speeds of the nodes' devices in former jobs, as recorded in the ledger. May come late or never."""

    usual: dict[Place, Speed]


class Thought(Event, frozen=True, kw_only=True):
    """The answer to a `Think` action. It may come late, even too late to be of use, or never.

    `decision`: a `scheduler.situation.Decision` encoded as msgpack, which has passed the checker; empty if there is
    none, and then `obstacle` gives the reason.
    """

    question: str
    decision: bytes = b""
    obstacle: str = ""


class PlanningTook(Event, frozen=True, kw_only=True):
    """The planning time of an event: handling the event that decided the plan of `epoch` took `seconds` for planning
    alone."""

    epoch: int
    seconds: float


class Tick(Event, frozen=True, kw_only=True):
    """The clock has advanced; sent about four times a second."""


AnyEvent = (
    AgentJoined
    | AgentLost
    | AgentBeat
    | WorkerSpawned
    | SpawnRefused
    | WorkerExited
    | ProcessesEnded
    | WorkersSeen
    | WorkerSaid
    | WorkerPrinted
    | CheckpointsFound
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
    | ReservationAhead
    | StopMeaning
    | NodesRemembered
    | Thought
    | PlanningTook
    | Tick
)


# --- actions ----------------------------------------------------------------------------------------------------


class Log(Action, frozen=True, kw_only=True):
    """Append an entry to the journal, flush the file, then hand the entry to the ledger."""

    entry: AnyEntry


class StartWorkers(Action, frozen=True, kw_only=True):
    """Start workers on a node. `workers`: a (rank, device) pair for each. `joins`: the job is already training or about
    to, so the new workers wait until a plan includes them.

    `nodes`: the node of every rank of the job so far, including the new ranks; the index is the rank. `round`,
    `checkpoint`: see `journal.WorkersOrdered`. `checkpoint_iteration`: last iteration of this checkpoint.
    """

    node: str
    workers: tuple[tuple[int, int], ...]
    nodes: tuple[str, ...] = ()
    joins: bool = False
    round: int = 0
    checkpoint: str = ""
    checkpoint_iteration: int = 0


class Order(Action, frozen=True, kw_only=True):
    """Send an order to the workers of these ranks, through their agents. Ranks without a connected agent are
    skipped."""

    ranks: tuple[int, ...]
    order: WorkerOrder


class SignalWorker(Action, frozen=True, kw_only=True):
    rank: int
    signal: int


class SignalNode(Action, frozen=True, kw_only=True):
    node: str
    signal: int


class CutConnection(Action, frozen=True, kw_only=True):
    """Inject a fault: close the connection to a node's agent once. The agent may reconnect."""

    node: str


class DropNode(Action, frozen=True, kw_only=True):
    """Close the connection to a node's agent, and refuse its connections from now on. `in_order`: the agent answers and
    nothing of the node is needed any more, so the agent is told to end its processes and itself."""

    node: str
    in_order: bool = False


class DrainNode(Action, frozen=True, kw_only=True):
    """Climb the drain ladder for a node that a verdict names. Each rung answers with a `DrainStep` event.

    `measure` "exclude" uses only the rung that excludes the node from the user's own jobs. `grounds`: see
    `DrainDecided`.
    """

    drain: int
    node: str
    reason: str
    measure: Literal["drain", "exclude"] = "drain"
    grounds: Literal["hardware", "died again", "died", "agent"] = "hardware"


class ReleaseNode(Action, frozen=True, kw_only=True):
    """Give a node back to Slurm. The job keeps the nodes in `keep`. Answered with a `ReleaseAnswered` event."""

    node: str
    keep: tuple[str, ...]


class AskReplacement(Action, frozen=True, kw_only=True):
    """Submit a Slurm job of one node, to join this job, on a node outside `exclude`. Answered with `ReplacementNews`
    events."""

    replacement: int
    exclude: tuple[str, ...]


class CancelReplacement(Action, frozen=True, kw_only=True):
    replacement: int
    reason: str


class WatchReplacements(Action, frozen=True, kw_only=True):
    """Ask Slurm now about all replacement requests, because the Slurm job of one of them is ending. Answered with
    `ReplacementNews` events."""


class WatchNode(Action, frozen=True, kw_only=True):
    """Poll Slurm's view of a lost node until Slurm has noticed the loss as well. Answered with `SlurmSees` events."""

    node: str


class AskWhy(Action, frozen=True, kw_only=True):
    """Ask Slurm why the job receives a signal. Answered with a `StopMeaning` event."""


class AskTimeLeft(Action, frozen=True, kw_only=True):
    """Ask Slurm for the time left until the job's time limit, because a decision depends on it and the limit may have
    changed. Answered with a `TimeLeft` event."""


class Reply(Action, frozen=True, kw_only=True):
    """Answer an operator's request. `request`: the number of the request; `ok`: whether it succeeded."""

    request: int
    ok: bool
    text: str


class Think(Action, frozen=True, kw_only=True):
    """Make a plan for a situation that may arise, in a separate process. Nothing waits for the plan.

    Answered with a `Thought` event, or not at all. `search_s`: seconds to spend on searching for a better plan after
    the first plan is found. A newer question replaces one that is still queued.
    """

    question: str
    situation: Situation
    search_s: float
    why: str


class TellScores(Action, frozen=True, kw_only=True):
    """Send the detector's scores of some ranks to the ledger, as telemetry: (rank, level, evidence). The level is None
    if it is not known."""

    iteration: int
    scores: tuple[tuple[int, float | None, float], ...]


class CommitCheckpoint(Action, frozen=True, kw_only=True):
    """Write the manifest that turns the parts in `folder` into a complete checkpoint, then delete old checkpoints."""

    iteration: int
    folder: str
    parts: tuple[tuple[str, int], ...]
    seconds: float
    layout: str = ""
    """The layout under which the checkpoint was written, in words, for lists of checkpoints."""


class Say(Action, frozen=True, kw_only=True):
    """Print one line for the user."""

    level: Literal["progress", "notice", "warning", "error"]
    text: str


class End(Action, frozen=True, kw_only=True):
    """Release agents and workers, close the ledger, and exit. Always the last action.

    `workers_leave` True: workers have been told to stop and exit by themselves. False: agents end the workers with
    TERM, then KILL.
    """

    exit_code: int
    reason: str
    workers_leave: bool
    requeue: bool = False
    """Whether to ask Slurm to run the job again; the new run continues from the last checkpoint."""


AnyAction = (
    Log
    | StartWorkers
    | EndProcesses
    | FindCheckpoints
    | LookAtWorkers
    | Order
    | SignalWorker
    | SignalNode
    | CutConnection
    | DropNode
    | DrainNode
    | ReleaseNode
    | AskReplacement
    | CancelReplacement
    | WatchReplacements
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
