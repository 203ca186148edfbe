"""What the controller is told and what it answers. Pure data; the shell (`wrapper.supervisor`) translates.

Events come from sockets, the clock and signals; actions go to agents, the journal and the user. The order of actions
in one answer is the order in which the shell carries them out: `Log` is on disk before what follows it happens.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from resihp.faults import Fault
from resihp.journal import AnyEntry
from resihp.protocol.messages import Beat, WorkerMessage, WorkerOrder


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the job was asked to be. Times in seconds; defaults are those of the design's detection table."""

    job: str
    nodes: int
    gpus_per_node: int
    tp: int
    pp: int
    schedule: str = "1f1b"
    chunks: int = 1
    """Layer chunks of each stage (Megatron's virtual pipeline stages)."""
    sequence_parallel: bool = False
    memory_bytes: int | None = None
    """What each device has for the job; None where it is not known, and then not checked."""
    come_backs: int = 3
    """How often a process may be started again on the same device."""
    faults: tuple[Fault, ...] = ()
    checkpoint_every: int = 0
    beat_s: float = 1.0
    silent_beats: int = 3
    node_given_up_s: float = 6.0
    hang_given_up_s: float = 15.0
    start_budget_s: float = 600.0
    transition_budget_s: float = 60.0
    reconnect_s: float = 1.0


# --- events -----------------------------------------------------------------------------------------------------


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class AgentJoined(Event, frozen=True, kw_only=True):
    node: str
    host: str
    devices: int


class AgentLost(Event, frozen=True, kw_only=True):
    """The agent's process ended, or its connection closed and it did not come back within `reconnect_s`: a fact."""

    node: str
    reason: str


class AgentBeat(Event, frozen=True, kw_only=True):
    node: str
    beat: Beat


class WorkerSpawned(Event, frozen=True, kw_only=True):
    rank: int
    node: str
    device: int
    pid: int


class SpawnRefused(Event, frozen=True, kw_only=True):
    """`rank` None: the node cannot start any worker."""

    node: str
    reason: str
    rank: int | None = None


class WorkerExited(Event, frozen=True, kw_only=True):
    rank: int
    status: int


class WorkerSaid(Event, frozen=True, kw_only=True):
    rank: int
    message: WorkerMessage


class StoreReady(Event, frozen=True, kw_only=True):
    """The rendezvous store listens (again)."""

    host: str
    port: int


class InjectAsked(Event, frozen=True, kw_only=True):
    """An operator wants a fault now; `request` is echoed in `Reply`."""

    request: int
    fault: Fault


class Signalled(Event, frozen=True, kw_only=True):
    """The supervisor received this signal."""

    signal: int


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
    | StoreReady
    | InjectAsked
    | Signalled
    | Tick
)


# --- actions ----------------------------------------------------------------------------------------------------


class Action(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class Log(Action, frozen=True, kw_only=True):
    """Append to the journal, flushed, then hand to the ledger."""

    entry: AnyEntry


class StartWorkers(Action, frozen=True, kw_only=True):
    """`workers`: (rank, device) on `node`. `joins`: the job is under way, they wait to be given work.

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
    """Fault injection: close the connection to the node's agent once; it may come back."""

    node: str


class DropNode(Action, frozen=True, kw_only=True):
    """Close the agent's connection and refuse it from now on."""

    node: str


class Reply(Action, frozen=True, kw_only=True):
    """Answer an operator's request."""

    request: int
    ok: bool
    text: str


class CommitCheckpoint(Action, frozen=True, kw_only=True):
    """Write the manifest that makes the parts in `folder` a complete checkpoint, then prune old ones."""

    iteration: int
    folder: str
    parts: tuple[tuple[str, int], ...]
    seconds: float


class Say(Action, frozen=True, kw_only=True):
    """One line for the user."""

    level: Literal["progress", "notice", "warning", "error"]
    text: str


class End(Action, frozen=True, kw_only=True):
    """Release agents and workers, close the ledger, exit. The last action there is.

    `workers_leave` True: they were told to halt and end by themselves; else they are ended with TERM, then KILL.
    """

    exit_code: int
    reason: str
    workers_leave: bool


AnyAction = (
    Log
    | StartWorkers
    | Order
    | SignalWorker
    | SignalNode
    | CutConnection
    | DropNode
    | Reply
    | CommitCheckpoint
    | Say
    | End
)
