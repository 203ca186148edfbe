"""All messages that cross a socket, typed. Encoded by msgspec as tagged msgpack; nothing is ever unpickled.

Three conversations, each a pair of unions:

====================  =====================  ==========================================================
from -> to            union                  carried by
====================  =====================  ==========================================================
worker -> agent       `WorkerMessage`,       inherited socket, plain frames (`channels.LocalChannel`)
                      `MeetingMessage`
agent -> worker       `WorkerOrder`          the same
agent -> supervisor   `AgentMessage`         TCP, authenticated frames (`channels.SecureChannel`)
supervisor -> agent   `AgentOrder`           the same
command line <->      `OperatorRequest`,     TCP, authenticated frames; same listener as the agents'
supervisor            `OperatorReply`
====================  =====================  ==========================================================

Messages between workers and supervisor are forwarded by the agent unchanged (`resihp.protocol.forwarding`); messages in
a meeting (`resihp.protocol.rendezvous`) are collected and distributed by it.

Iterations count from 1; 0 means none yet. Seconds are intervals. Nothing here decides anything.
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import msgspec

from resihp.faults import Fault
from resihp.parallelism.batch_sizes import BatchSizes, Ramp
from resihp.parallelism.model import ModelSpec
from resihp.parallelism.plan import Plan
from resihp.parallelism.transfers import Base
from resihp.protocol.inventory import NodeInventory as Machine
from resihp.protocol.inventory import Software


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all messages."""


class StepOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an iteration's last synchronisation, equal on all ranks: all values that a step needs or has used.

    A rank that has it may step; with it, another rank can finish the same step. `clip` multiplies gradients; `skip`
    means that gradients were not finite and no rank may update. `loss` is the mean over tokens of the global batch;
    `samples_digest` (16 hexadecimal digits, `resihp.parallelism.workload.samples_digest`) and the other sums come from
    the ranks that computed the micro-batches.
    """

    iteration: int
    clip: float
    skip: bool
    learning_rate: float
    gradient_norm: float
    loss: float
    tokens: int
    sum_squared_lengths: int
    samples: int
    samples_digest: str
    updates: int = 0
    """Number of updates that the optimizer has made once this step is taken; skipped iterations do not count."""
    pause: bool = False
    """Whether some rank was asked to park after this iteration: all do."""
    saving: bool = False
    """Whether some rank still writes a checkpoint: none begins another."""
    save: bool = False
    """Whether some rank was told to write a checkpoint of this iteration (`SaveNext`): all do."""


# --- meetings: worker <-> agent <-> supervisor -------------------------------------------------------------------


class MeetingId(msgspec.Struct, frozen=True):
    """The meeting in which ranks that build communicators exchange their addresses: an epoch's, or a probe's. One of
    the two is 0."""

    epoch: int = 0
    probe: int = 0

    def __str__(self) -> str:
        return f"epoch {self.epoch}" if self.epoch else f"probe {self.probe}"


class Said(msgspec.Struct, frozen=True, array_like=True):
    """A value that one rank publishes to all others for a communicator: an address, an NCCL id. Each key is set
    once."""

    group: str
    key: str
    value: bytes


class Attend(Message, frozen=True, kw_only=True):
    """Subscribe the sender to these groups of the meeting: earlier values are sent as well."""

    meeting: MeetingId
    groups: tuple[str, ...]


class Publish(Message, frozen=True, kw_only=True):
    """Publish values to all subscribers of their groups. Values for a meeting that is over are dropped."""

    meeting: MeetingId
    said: tuple[Said, ...]


class Published(Message, frozen=True, kw_only=True):
    """Published values: for an agent those its workers have subscribed to, for a worker its own subscriptions."""

    meeting: MeetingId
    said: tuple[Said, ...]


MeetingMessage = Attend | Publish


# --- worker -> agent -> supervisor ------------------------------------------------------------------------------


class Declare(Message, frozen=True, kw_only=True, dict=True):
    """The training script is ready and declares what it trains. All ranks of a job must declare the same except for
    `memory_bytes` and `software`."""

    model: ModelSpec
    micro_batches: int
    """Number of micro-batches of the global batch, once its ramp-up is over."""
    iterations: int
    resume_from: int
    """Iteration of the checkpoint that will be loaded; 0 when starting afresh."""
    fingerprint: str
    """Digest of model and optimizer settings, data set description and library versions."""
    ramp: Ramp = ()
    """Steps of the batch ramp-up, if it has one."""
    device: str = "cpu"
    back_end: str = "gloo"
    """Communicator back end and device type: both determine how much of a device's memory is left for training."""
    memory_bytes: int | None = None
    """Total memory of this rank's device; None for a shared device, or a processor. Ranks need not agree on it."""
    evaluates: bool = False
    """Whether an evaluation follows the last step: all ranks with work are needed until they send `Finished`."""
    software: Software | None = None
    """For the record; the versions that must be equal are part of `fingerprint`. None: other ranks of the node report
    it."""

    def trains_as(self, other: Declare) -> bool:
        """Return whether both declare the same, on whatever devices."""
        return msgspec.structs.replace(self, memory_bytes=other.memory_bytes, software=other.software) == other

    @cached_property
    def batch_sizes(self) -> BatchSizes:
        return BatchSizes(self.micro_batches, self.ramp)


class Refuse(Message, frozen=True, kw_only=True):
    """The script cannot start, for a reason that the user has to fix (a `resihp.errors.UsageError`)."""

    reason: str


class Confirm(Message, frozen=True, kw_only=True):
    """The worker can carry out the proposed plan; `digest` is the one it computed itself."""

    epoch: int
    digest: str


class Object(Message, frozen=True, kw_only=True):
    """The worker cannot carry out the proposed plan and goes on as before."""

    epoch: int
    reason: str


class Ready(Message, frozen=True, kw_only=True):
    """Communicators of `epoch` are built, and the state that its layout needs on this rank is in place, beside the old
    state.

    The rank's acknowledgement in the transaction of a transition: it keeps the old state until `Begin`.
    `bytes_received` counts state that came from other ranks, `extra_bytes` the bytes that the rank holds beyond the
    larger of the old state and the new one.
    """

    epoch: int
    groups_s: float
    state_s: float
    bytes_received: int = 0
    extra_bytes: int = 0


class Workload(Message, frozen=True, kw_only=True):
    """An iteration begins: N and sum of squared lengths of each micro-batch of its global batch, by index.

    The data set is a pure function of the iteration, so one rank reports for all: the first that has work.
    """

    epoch: int
    iteration: int
    tokens: tuple[int, ...]
    squares: tuple[int, ...]


class Stepped(Message, frozen=True, kw_only=True):
    """The worker's parameters have taken the step of `outcome.iteration` (as far as it knows, the iteration is
    committed)."""

    epoch: int
    outcome: StepOutcome
    seconds: float
    compute_s: float
    """Time of its own work, without waits for peers."""
    reduced_s: float = 0.0
    """Time from the beginning of the iteration until all gradients of this rank were summed."""
    chunks: bytes = b""
    """Measurements of each primitive (`resihp.detector.observation.pack`); empty if nothing is measured."""


class Evaluated(Message, frozen=True, kw_only=True):
    """The weights after `iteration` have been evaluated; each rank with work reports it, and all report the same.

    `loss` is the mean over `tokens`.
    """

    epoch: int
    iteration: int
    loss: float
    tokens: int


class Parked(Message, frozen=True, kw_only=True):
    """The worker has released its communicators and waits for a plan.

    `epoch` is the one that the order to park announced. `stepped` is the last iteration whose step it took, with its
    outcome; `ready`: all gradients of iteration `stepped + 1` are reduced on this rank and still held. `holds` lists
    the epochs whose layouts its state follows: the one in effect and, after `Ready`, the next one; empty for a rank
    without state.
    """

    epoch: int
    holds: tuple[int, ...] = ()
    stepped: int
    outcome: StepOutcome | None
    ready: bool


class Stuck(Message, frozen=True, kw_only=True):
    """A collective or transfer of `epoch` failed on the worker before it was asked to park."""

    epoch: int
    error: str


class Raised(Message, frozen=True, kw_only=True):
    """The user's code raised; the process ends after this."""

    iteration: int
    error: str
    traceback: str


class Finished(Message, frozen=True, kw_only=True):
    """The last iteration is done; the worker waits for `Halt`."""

    iteration: int


class FaultDue(Message, frozen=True, kw_only=True):
    """The moment of an armed fault has come on this rank, which waits for `FaultGo`."""

    fault: int


class CheckpointPart(Message, frozen=True, kw_only=True):
    """This rank's part of a checkpoint is on disk, flushed; or it could not be written, and `error` gives the
    reason."""

    epoch: int
    iteration: int
    folder: str
    file: str
    bytes: int
    seconds: float
    error: str = ""


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """Speed of a device in a probe, per second of its own time; 0 for a part that was not tried."""

    flops: float = 0.0
    """Floating-point operations of a matrix product."""
    memory_bytes: float = 0.0
    """Bytes read and written in copies of a buffer that is larger than the caches."""
    hardware: str = ""
    """Maker's name of the measured hardware: figures of another kind of device do not compare."""


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a probe of the link to another rank."""

    peer: int
    seconds: float
    """Time of one buffer there and back, the lower quartile of several."""


class Probed(Message, frozen=True, kw_only=True):
    """The answer to `Probe`. `error`: how the device fails; `missed`: why its links could not be measured; `untried`:
    why the device could not be measured although it is not broken (its memory was full)."""

    probe: int
    speed: Speed = Speed()
    transfers: tuple[Transfer, ...] = ()
    seconds: float = 0.0
    """Duration of the whole probe."""
    error: str = ""
    missed: str = ""
    untried: str = ""
    shared: bool = False
    """Whether other workers of its machine compute on the same processors, or deliberately on the same GPU."""


class Progress(Message, frozen=True, kw_only=True):
    """A heartbeat from the worker's own thread, with the progress of training.

    `primitives` counts chunks and synchronisations done since the process started; it grows while training does.
    `activity` is that of the main thread: peers that wait in communication are victims, not causes. `unanswered_s`: for
    how long the device has not answered in its present operation; 0 if it did, or was not asked.
    """

    epoch: int
    iteration: int
    primitives: int
    activity: Literal["starting", "compute", "communication", "parked", "checkpoint", "idle"]
    unanswered_s: float = 0.0


WorkerMessage = (
    Declare
    | Refuse
    | Confirm
    | Object
    | Ready
    | Workload
    | Stepped
    | Evaluated
    | Parked
    | Stuck
    | Raised
    | Finished
    | FaultDue
    | CheckpointPart
    | Probed
    | Progress
)


# --- supervisor -> agent -> worker ------------------------------------------------------------------------------


class Propose(Message, frozen=True, kw_only=True):
    """Check this plan, compute its digest, confirm; change nothing yet.

    `base`: where the state is that the plan's layout will need; `nodes`: the node of each rank of the job. Without a
    base no rank has stepped yet, and every rank initialises its state or loads it from the checkpoint.
    """

    plan: Plan
    next_iteration: int
    base: Base | None = None
    nodes: dict[int, str] = {}


class Go(Message, frozen=True, kw_only=True):
    """All ranks confirmed `epoch`: finish the step of `finish` if it is not taken yet, build, move state, acknowledge.

    A rank that has no work in the plan may still have state to send.
    """

    epoch: int
    next_iteration: int
    finish: StepOutcome | None


class Begin(Message, frozen=True, kw_only=True):
    """All ranks are ready: the plan of `epoch` is in effect. Free the state that only the previous layout needed, and
    iterate."""

    epoch: int
    evaluated: int = 0
    """Last iteration whose evaluation is on record: it is not carried out again."""


class Park(Message, frozen=True, kw_only=True):
    """Stop training, release all communicators, report; `epoch` is the one being prepared.

    With `after_iteration`, stop between two iterations: go on until an iteration's last synchronisation has informed
    every rank (`StepOutcome.pause`), so that no work is lost.
    """

    epoch: int
    reason: str
    after_iteration: bool = False


class Save(Message, frozen=True, kw_only=True):
    """To a parked rank that has work in `replica` of the plan of `epoch`, which is in effect: write a checkpoint.

    It is of iteration `finish.iteration`, whose step the rank takes first if it has not. Together the replica's ranks
    write all of the state; each answers with a `CheckpointPart`. Other ranks ignore the order.
    """

    epoch: int
    replica: int
    finish: StepOutcome


class SaveNext(Message, frozen=True, kw_only=True):
    """To one rank that trains: write a checkpoint after the iteration under way, and train on. The iteration's last
    synchronisation informs all others (`StepOutcome.save`); while a checkpoint is still being written, that of a later
    iteration does.

    `number` counts these orders.
    """

    number: int


class FaultGo(Message, frozen=True, kw_only=True):
    """Carry out the fault (`hang`, `raise`), or wait to be killed (the others), or go on (`fire` False)."""

    fault: int
    fire: bool


class Probe(Message, frozen=True, kw_only=True):
    """Measure the device, between two iterations or while parked; answered with `Probed`.

    With `pairs`, ranks that are all parked or without work measure the links between them as well: each round consists
    of disjoint pairs, and every rank knows all rounds. They meet under the probe's number (`MeetingId`).

    With `after_iteration`, ranks that train measure only the links, once all have taken the step of that iteration, on
    communicators of their own. All other ranks train on. A rank that is past that moment, or parks, reports that
    instead.
    """

    probe: int
    after_iteration: int | None = None
    pairs: tuple[tuple[tuple[int, int], ...], ...] = ()


class Slow(Message, frozen=True, kw_only=True):
    """Fault injection: from now on behave as a device of this speed, up to but not including iteration `until`.

    With `link`, the link between those two nodes has this speed, relative to a healthy one. With `every`, the device is
    slow only in iterations that are multiples of it.
    """

    speed: float
    until: int | None = None
    link: tuple[str, str] | None = None
    every: int = 1


class Halt(Message, frozen=True, kw_only=True):
    """Training is over; leave the training loop. With `at_once`, end the process, whatever it does."""

    reason: str
    at_once: bool = False


class Start(Message, frozen=True, kw_only=True):
    """First frame on a worker's socket: its identity. `faults` are armed from the beginning."""

    rank: int
    node: str
    device: int
    world_size: int
    nodes: tuple[str, ...] = ()
    """Node of each rank of the job so far, by rank."""
    faults: tuple[Fault, ...]
    checkpoint_folder: str
    checkpoint_every: int
    resume: bool
    memory_bytes: int | None = None
    """Memory of the device for the job; None if not known, and then not checked."""
    joins: bool = False
    """Whether the job is under way already, so that the worker waits to be given work."""


WorkerOrder = Start | Propose | Go | Begin | Park | Save | SaveNext | Probe | Slow | FaultGo | Halt | Published


# --- agent -> supervisor ----------------------------------------------------------------------------------------


class Join(Message, frozen=True, kw_only=True):
    """First message of an agent on every connection, not numbered.

    `term` is the newest term that it has promised itself to, 0 none yet; a supervisor of a lower one is deposed. `log`
    is the number of the last record in its copy of the journal. `peer_port`: where it listens to other agents, on
    `host`'s address as seen by the supervisor. `lease`: the number of the replacement request that it answers, 0 for a
    node of the job's own allocation. `hardware`: the maker's name of its devices, empty if not known. `machine`: the
    node's inventory. `incarnation`: drawn by the agent's process as it starts. Process ids are reused (in a container
    at each start), and an agent that was restarted has forgotten its promises. `meeting_port`: a port that it keeps
    free as the meeting point of the ranks of a script that makes its own process groups; 0 for none.
    """

    node: str
    host: str
    pid: int
    devices: int
    epoch: int
    term: int = 0
    log: int = 0
    peer_port: int = 0
    lease: int = 0
    hardware: str = ""
    incarnation: str = ""
    machine: Machine | None = None
    meeting_port: int = 0


class RunningWorker(msgspec.Struct, frozen=True, kw_only=True):
    """One live worker, for a supervisor that did not start it.

    `steps`: reports of steps that the journal's copy does not show as committed. `said`: the last of each message that
    is still true of it, in order of arrival: `Declare`, `Evaluated`, `Parked`, `Stuck`, `Raised`, `Ready`, `Finished`,
    `FaultDue`; and the last few `CheckpointPart`, which may not have reached any supervisor.
    """

    rank: int
    device: int
    pid: int
    steps: tuple[Stepped, ...] = ()
    said: tuple[WorkerMessage, ...] = ()


class Inventory(Message, frozen=True, kw_only=True):
    """An agent's first numbered message to the leader of a new term: it accepts the leader, and lists its workers.

    `ended`: (rank, exit status) of every worker that has ended there. `epoch`: the newest in any order received.
    """

    workers: tuple[RunningWorker, ...] = ()
    ended: tuple[tuple[int, int], ...] = ()
    epoch: int = 0


class Signalled(Message, frozen=True, kw_only=True):
    """Somebody other than us sent this signal to the agent, which goes on and waits for the supervisor's decision."""

    signal: int


class Spawned(Message, frozen=True, kw_only=True):
    rank: int
    device: int
    pid: int


class SpawnFailed(Message, frozen=True, kw_only=True):
    """The fork server could not start or fork: the interpreter's own error message. `rank` None: it cannot fork any
    worker."""

    reason: str
    rank: int | None = None


MAX_LINES_AFTER = 99


class Clue(msgspec.Struct, frozen=True, kw_only=True):
    """One significant line of a log. `at` in seconds since 1970, UTC.

    `kind` names its row in `resihp.detector.diagnosis.signatures` (`xid 79` for Xids). `named`: the items that the line
    names, of xid, pid, bus, node, peer, error. `raised`: an exception that ended a traceback; `chained`: raised while
    the clue before it, of the same log, was handled. `age_s`: how old the line was when it was read, which happens as
    soon as its process has ended; None if its time is not known. `lines_after`: number of lines of ordinary output
    after it in the log, at most `MAX_LINES_AFTER`: a program that goes on has survived it.
    """

    kind: str
    line: str
    at: float | None = None
    named: dict[str, str] = {}
    raised: bool = False
    chained: bool = False
    age_s: float | None = None
    lines_after: int = 0


ABORT_STATUS = 117
"""Exit status of a worker that ended itself because an abort of its communicators hung: not caused by a node."""


class Exited(Message, frozen=True, kw_only=True):
    """A worker has ended. `status` as in subprocess: negative for a signal. All messages of the worker were forwarded
    before this one.

    `clues`: significant lines of its log and of its node's kernel.
    """

    rank: int
    pid: int
    status: int
    clues: tuple[Clue, ...] = ()


class FromWorker(Message, frozen=True, kw_only=True):
    """A message of a worker of the node. `body`: a `WorkerMessage` unchanged, for the supervisor to decode.

    It is a byte string, so that an invalid message does not break the agent's connection.
    """

    rank: int
    body: bytes


class WorkerBeat(msgspec.Struct, frozen=True, kw_only=True):
    """Last progress of one worker as known to its agent.

    `age_s` is the time since the worker's own thread last sent a heartbeat; `state` the kernel's process state letter
    (R, S, D, T, Z). `idle_s`: for how long neither the process nor any of its children has done any work; None for a
    worker that has declared what it trains, and if the agent does not observe it.
    """

    rank: int
    age_s: float
    state: str
    progress: Progress | None
    idle_s: float | None = None


class Beat(Message, frozen=True, kw_only=True):
    """Heartbeat of an agent, sent once a second, workers aggregated: its cost grows with nodes, not devices.

    `met`: a worker has listened at the `meeting_port`, or connected there once rank 0 had ended, and none has declared
    what it trains: the script makes its own process groups, as with torch.distributed's `env://`.
    """

    workers: tuple[WorkerBeat, ...]
    met: bool = False


AgentMessage = Join | Inventory | Spawned | SpawnFailed | Exited | FromWorker | Beat | Signalled | Attend | Publish


# --- supervisor -> agent ----------------------------------------------------------------------------------------


class Spawn(Message, frozen=True, kw_only=True):
    """Start one worker for each `Start`, which the agent passes on. `environment` is added to the worker's own.

    `nodes`: the node of each rank of the job so far, as (node, number of consecutive ranks); the agent expands them in
    each `Start`, where they are empty, because there are many agents and even more ranks.
    """

    workers: tuple[Start, ...]
    environment: dict[str, str]
    nodes: tuple[tuple[str, int], ...] = ()


class ToWorkers(Message, frozen=True, kw_only=True):
    """An order to workers. `body`: a `WorkerOrder`, encoded once for all; agents pass it on unchanged
    (`forwarding.order_in`)."""

    ranks: tuple[int, ...]
    body: bytes
    deflated: bool = False


class HangUp(Message, frozen=True, kw_only=True):
    """The worker sends undecodable messages: close its socket, which ends it."""

    rank: int
    reason: str


class Signal(Message, frozen=True, kw_only=True):
    """Send a signal to one worker (fence a hung one, inject a fault)."""

    rank: int
    signal: int


class KillNode(Message, frozen=True, kw_only=True):
    """Fault injection: SIGKILL (or SIGSTOP) to every process of the virtual node, the agent included."""

    signal: int


class Lead(Message, frozen=True, kw_only=True):
    """A supervisor's first message on every connection, not numbered: its leadership, and the extent of its journal.

    An agent accepts a term later than all that it has promised, if `log` is not less than its own or a quorum has
    accepted that term already (`settled`): it starts a new conversation and answers with `Inventory`. The same term
    resumes its conversation. For any other term the agent disconnects.
    """

    term: int
    node: str
    log: int
    settled: bool = False


class Alive(Message, frozen=True, kw_only=True):
    """Sent once a second, not numbered: the supervisor is alive."""


class Replicate(Message, frozen=True, kw_only=True):
    """Records for the agent's copy of the journal: drop the records after number `after`, append these.

    An agent acknowledges it at once: decisions take effect when a quorum of agents has. Many records are sent as one
    (`forwarding.records_in`).
    """

    after: int
    records: tuple[bytes, ...]
    deflated: bool = False


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """The address of an agent, for other agents."""

    node: str
    host: str
    port: int


class Roster(Message, frozen=True, kw_only=True):
    """Agents to ask once the supervisor is gone: new ones or those with another address, and nodes that left the job.

    `whole`: it replaces all earlier ones.
    """

    peers: tuple[Peer, ...]
    left: tuple[str, ...] = ()
    whole: bool = False


class Release(Message, frozen=True, kw_only=True):
    """Wait up to `grace_s` for the workers to end, then kill the rest, then exit."""

    grace_s: float


AgentOrder = Lead | Alive | Replicate | Roster | Spawn | ToWorkers | HangUp | Signal | KillNode | Release | Published


# --- agent <-> agent --------------------------------------------------------------------------------------------


class AskVote(Message, frozen=True, kw_only=True):
    """The sender has lost the supervisor: would the receiver follow a supervisor of `term` on the sender's node? Binds
    nobody.

    `log` is the number of the last record in the candidate's copy of the journal.
    """

    node: str
    term: int
    log: int


class Vote(Message, frozen=True, kw_only=True):
    """The answer to `AskVote`. `term` is the newest that the voter has promised itself to; `incarnation` as in
    `Join`."""

    node: str
    granted: bool
    term: int
    reason: str = ""
    incarnation: str = ""


class Successor(Message, frozen=True, kw_only=True):
    """A quorum would follow: a supervisor of `term` is being started; connect to it."""

    node: str
    term: int
    host: str
    port: int


class Noted(Message, frozen=True, kw_only=True):
    """The answer to `Successor`."""


PeerMessage = AskVote | Vote | Successor | Noted


# --- command line <-> supervisor --------------------------------------------------------------------------------


class Inject(Message, frozen=True, kw_only=True):
    """Ask a running job for a fault at once."""

    kind: str
    rank: int | None = None
    node: str | None = None
    link: tuple[str, str] | None = None
    """For `slow`: names in ascending order."""
    speed: float | None = None
    """For `slow`."""


class AskStanding(Message, frozen=True, kw_only=True):
    """Ask a running job how the detector judges a rank. The reply's text is a `RankAnswer` as JSON."""

    rank: int


class AskStop(Message, frozen=True, kw_only=True):
    """Ask a running job to end: after a checkpoint of the iteration under way, or `at_once` without one."""

    at_once: bool = False


class AskCheckpoint(Message, frozen=True, kw_only=True):
    """Ask a running job for a checkpoint now. Answered when it is complete."""


class OperatorReply(Message, frozen=True, kw_only=True):
    ok: bool
    text: str


OperatorRequest = Inject | AskStanding | AskStop | AskCheckpoint
