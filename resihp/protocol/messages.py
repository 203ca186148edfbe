"""Everything that crosses a socket, typed. Encoded by msgspec as tagged msgpack; nothing is ever unpickled.

Three conversations, each a pair of unions:

====================  =====================  ==========================================================
from -> to            union                  carried by
====================  =====================  ==========================================================
worker -> agent       `WorkerMessage`,       inherited socket, plain frames (`framing.LocalChannel`)
                      `MeetingMessage`
agent -> worker       `WorkerOrder`          the same
agent -> supervisor   `AgentMessage`         TCP, authenticated frames (`framing.SecureChannel`)
supervisor -> agent   `AgentOrder`           the same
command line <->      `OperatorRequest`,     TCP, authenticated frames; same listener as the agents'
supervisor            `OperatorReply`
====================  =====================  ==========================================================

What workers and supervisor say to each other, an agent passes on as it came (`resihp.protocol.forwarding`); what is
said in a meeting (`resihp.protocol.rendezvous`), it gathers and hands out.

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
    """The result of an iteration's last synchronisation, equal on all ranks: what a step needs, and what it used.

    A rank that has it may step; with it, another rank can finish the same step. `clip` multiplies gradients;
    `skip` means that gradients were not finite and no rank may update. `loss` is the mean over tokens of the global
    batch; `samples_digest` (16 hexadecimal digits, `resihp.parallelism.workload.samples_digest`) and the other sums
    come from the ranks that computed the micro-batches.
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
    """Updates that the optimizer has made once this step is taken; skipped iterations do not count."""
    pause: bool = False
    """Some rank was asked to park after this iteration: all do."""
    saving: bool = False
    """Some rank still writes a checkpoint: none begins another."""
    save: bool = False
    """Some rank was told to write a checkpoint of this iteration (`SaveNext`): all do."""


# --- meetings: worker <-> agent <-> supervisor -------------------------------------------------------------------


class MeetingId(msgspec.Struct, frozen=True):
    """Where ranks that build communicators tell each other their addresses: an epoch's, or a probe's. One is 0."""

    epoch: int = 0
    probe: int = 0

    def __str__(self) -> str:
        return f"epoch {self.epoch}" if self.epoch else f"probe {self.probe}"


class Said(msgspec.Struct, frozen=True, array_like=True):
    """What one rank tells all others of a communicator: an address, an NCCL id. Each key is set once."""

    group: str
    key: str
    value: bytes


class Attend(Message, frozen=True, kw_only=True):
    """From now on tell whoever sends this what is said in these groups of the meeting, and what was said before."""

    meeting: MeetingId
    groups: tuple[str, ...]


class Publish(Message, frozen=True, kw_only=True):
    """Tell all who attend its group. What is said in a meeting that is over is heard by nobody."""

    meeting: MeetingId
    said: tuple[Said, ...]


class Published(Message, frozen=True, kw_only=True):
    """To an agent what its workers attend, to a worker what it attends itself."""

    meeting: MeetingId
    said: tuple[Said, ...]


MeetingMessage = Attend | Publish


# --- worker -> agent -> supervisor ------------------------------------------------------------------------------


class Declare(Message, frozen=True, kw_only=True, dict=True):
    """The training script is ready: what it trains. All ranks of a job must declare the same but for `memory_bytes` and
    `software`."""

    model: ModelSpec
    micro_batches: int
    """Of the global batch, once its ramp-up is over."""
    iterations: int
    resume_from: int
    """Iteration of the checkpoint that will be loaded, 0 when starting afresh."""
    fingerprint: str
    """Digest of model and optimizer settings, data set description and library versions."""
    ramp: Ramp = ()
    """Steps of the batch ramp-up, if it has one."""
    device: str = "cpu"
    back_end: str = "gloo"
    """With which communicators, on what they work: both decide how much of a device's memory is left for training."""
    memory_bytes: int | None = None
    """What this rank's device has in all; None for one that is shared, or a processor. Ranks need not agree on it."""
    evaluates: bool = False
    """After the last step comes an evaluation: all ranks with work are needed until they say `Finished`."""
    software: Software | None = None
    """For the record; which versions must be equal is in `fingerprint`. None: others of its node tell."""

    def trains_as(self, other: Declare) -> bool:
        """Whether both declare the same, on whatever devices."""
        return msgspec.structs.replace(self, memory_bytes=other.memory_bytes, software=other.software) == other

    @cached_property
    def batch_sizes(self) -> BatchSizes:
        return BatchSizes(self.micro_batches, self.ramp)


class Refuse(Message, frozen=True, kw_only=True):
    """The script cannot start, for a reason that is the user's to mend (a `resihp.errors.UsageError`)."""

    reason: str


class Confirm(Message, frozen=True, kw_only=True):
    """The worker could carry out the proposed plan; `digest` is the one it computed itself."""

    epoch: int
    digest: str


class Object(Message, frozen=True, kw_only=True):
    """The worker cannot carry out the proposed plan; it goes on as before."""

    epoch: int
    reason: str


class Ready(Message, frozen=True, kw_only=True):
    """Communicators of `epoch` are built and the state that its layout needs here is in place, beside the old one.

    The rank's acknowledgement in the transition's transaction: it holds on to what it held before until `Begin`.
    `bytes_received` counts state that came from other ranks, `extra_bytes` what the rank holds beyond the larger of
    the old state and the new one.
    """

    epoch: int
    groups_s: float
    state_s: float
    bytes_received: int = 0
    extra_bytes: int = 0


class Workload(Message, frozen=True, kw_only=True):
    """An iteration begins: N and sum of squared lengths of each micro-batch of its global batch, by index.

    The data set is a pure function of the iteration, so one rank tells for all: the first that has work.
    """

    epoch: int
    iteration: int
    tokens: tuple[int, ...]
    squares: tuple[int, ...]


class Stepped(Message, frozen=True, kw_only=True):
    """The worker's parameters have taken the step of `outcome.iteration` (for it, the iteration is committed)."""

    epoch: int
    outcome: StepOutcome
    seconds: float
    compute_s: float
    """Own work, without waits for peers."""
    reduced_s: float = 0.0
    """From the iteration's beginning until all gradients of this rank were summed."""
    chunks: bytes = b""
    """Measurements of each primitive (`resihp.detector.observation.pack`); empty where nobody measures."""


class Evaluated(Message, frozen=True, kw_only=True):
    """The weights after `iteration` have been evaluated; each rank with work tells, and all tell the same.

    `loss` is the mean over `tokens`.
    """

    epoch: int
    iteration: int
    loss: float
    tokens: int


class Parked(Message, frozen=True, kw_only=True):
    """The worker has let go of its communicators and waits for a plan.

    `epoch` is the one that the order to park announced. `stepped` is the last iteration whose step it took, with
    its outcome; `ready` tells that all gradients of iteration `stepped + 1` are reduced on this rank and still held.
    `holds` lists the epochs whose layouts its state follows: the one in effect and, after `Ready`, the next one; empty
    for a rank without state.
    """

    epoch: int
    holds: tuple[int, ...] = ()
    stepped: int
    outcome: StepOutcome | None
    ready: bool


class Stuck(Message, frozen=True, kw_only=True):
    """A collective or transfer of `epoch` failed under the worker before anybody asked it to park."""

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
    """An armed fault's moment has come on this rank, which waits for `FaultGo`."""

    fault: int


class CheckpointPart(Message, frozen=True, kw_only=True):
    """This rank's part of a checkpoint is on disk, flushed; or it could not be written, and `error` tells why."""

    epoch: int
    iteration: int
    folder: str
    file: str
    bytes: int
    seconds: float
    error: str = ""


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """What a device made of a probe. Per second of its own time; 0 for what was not tried."""

    flops: float = 0.0
    """Floating-point operations of a matrix product."""
    memory_bytes: float = 0.0
    """Read and written in copies of a buffer that is larger than the caches."""
    hardware: str = ""
    """What it was measured on, by its maker's name: figures of another kind say nothing about this one's."""


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """What a link to another rank made of a probe."""

    peer: int
    seconds: float
    """Of one buffer there and back, the lower quartile of several."""


class Probed(Message, frozen=True, kw_only=True):
    """The answer to `Probe`. `error` tells how the device fails, `missed` why its links could not be measured,
    `untried` why the device was not, through no fault of its own: it was full."""

    probe: int
    speed: Speed = Speed()
    transfers: tuple[Transfer, ...] = ()
    seconds: float = 0.0
    """What it took in all."""
    error: str = ""
    missed: str = ""
    untried: str = ""
    shared: bool = False
    """Other workers of its machine compute on the same processors, or on the same GPU on purpose."""


class Progress(Message, frozen=True, kw_only=True):
    """A beat from the worker's own thread: where training stands.

    `primitives` counts chunks and synchronisations done since the process started; it grows while training does.
    `activity` tells what the main thread is in: peers that wait in communication are victims, not culprits.
    `unanswered_s`: for how long the device has not answered what it is in; 0 if it did, or was not asked.
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

    `base` tells where the state is that the plan's layout will need, `nodes` which node each rank of the job is on;
    without a base nobody has stepped yet, and every rank draws its state or loads it from the checkpoint.
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
    """All ranks are ready: the plan of `epoch` is in effect. Let go of what only the layout before needed, iterate."""

    epoch: int
    evaluated: int = 0
    """Last iteration whose evaluation is on record: it is not carried out again."""


class Park(Message, frozen=True, kw_only=True):
    """Stop what you do, let go of all communicators, report; `epoch` is the one being prepared.

    With `after_iteration`, stop between two iterations: go on until an iteration's last synchronisation has told every
    rank of it (`StepOutcome.pause`), so that no work is lost.
    """

    epoch: int
    reason: str
    after_iteration: bool = False


class Save(Message, frozen=True, kw_only=True):
    """To a parked rank that has work in `replica` of the plan of `epoch`, which is in effect: write a checkpoint.

    It is of iteration `finish.iteration`, whose step the rank takes first if it has not. Together the replica's ranks
    write all of the state; each answers with a `CheckpointPart`. Anybody else ignores it.
    """

    epoch: int
    replica: int
    finish: StepOutcome


class SaveNext(Message, frozen=True, kw_only=True):
    """To one rank that trains: write a checkpoint after the iteration under way, and train on. The iteration's last
    synchronisation tells all others (`StepOutcome.save`); while one is still being written, a later iteration's does.

    `number` counts these orders.
    """

    number: int


class FaultGo(Message, frozen=True, kw_only=True):
    """Carry out the fault (`hang`, `raise`), or wait to be killed (the others), or go on (`fire` False)."""

    fault: int
    fire: bool


class Probe(Message, frozen=True, kw_only=True):
    """Measure the device, between two iterations or while parked; answered with `Probed`.

    With `pairs`, ranks that all are parked or without work measure the links between them as well: each round is of
    disjoint pairs, and everybody knows all rounds. They meet under the probe's number (`MeetingId`).

    With `after_iteration`, ranks that train measure the links alone, when all have taken the step of that iteration, on
    communicators of their own. Everybody else trains on. Whoever is past that moment, or parks, says so instead.
    """

    probe: int
    after_iteration: int | None = None
    pairs: tuple[tuple[tuple[int, int], ...], ...] = ()


class Slow(Message, frozen=True, kw_only=True):
    """Fault injection: from now on be as a device of this speed, up to but not including iteration `until`.

    With `link`, it is the link between those two nodes that has this speed, of a healthy one's. With `every`, only in
    one of so many iterations, those that it divides.
    """

    speed: float
    until: int | None = None
    link: tuple[str, str] | None = None
    every: int = 1


class Halt(Message, frozen=True, kw_only=True):
    """Training is over; leave the training loop. With `at_once`, end the process, wherever it is."""

    reason: str
    at_once: bool = False


class Start(Message, frozen=True, kw_only=True):
    """First frame on a worker's socket: who it is. `faults` are armed from the beginning."""

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
    """What the device has for the job; None where it is not known, and then not checked."""
    joins: bool = False
    """Whether the job is under way already: it waits to be given work."""


WorkerOrder = Start | Propose | Go | Begin | Park | Save | SaveNext | Probe | Slow | FaultGo | Halt | Published


# --- agent -> supervisor ----------------------------------------------------------------------------------------


class Join(Message, frozen=True, kw_only=True):
    """First message of an agent on every connection, outside of all numbers.

    `term` is the newest that it has promised itself to, 0 none yet; a supervisor of a lower one is deposed. `log` is
    the number of the last record in its copy of the journal. `peer_port`: where it listens to other agents, on `host`'s
    address as seen by the supervisor. `lease`: the number of the replacement request that it answers, 0 for a node
    of the job's own allocation. `hardware`: its devices' name by their maker, empty where that is not known.
    `machine`: what the node is made of.
    `incarnation`: drawn by the agent's process as it starts. Process ids come again, in a container at each start, and
    an agent that was started again knows nothing of what it has promised. `meeting_port`: one that it keeps free, for
    ranks of a script that makes process groups of its own to meet at; 0 for none.
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

    `steps`: reports of steps that the journal's copy does not show as committed. `said`: the last of each that is still
    true of it, in order of arrival: `Declare`, `Evaluated`, `Parked`, `Stuck`, `Raised`, `Ready`, `Finished`,
    `FaultDue`; and the last few `CheckpointPart`, of which nobody may have heard.
    """

    rank: int
    device: int
    pid: int
    steps: tuple[Stepped, ...] = ()
    said: tuple[WorkerMessage, ...] = ()


class Inventory(Message, frozen=True, kw_only=True):
    """An agent's first numbered message to a leader of a new term: it accepts it, and this is what it has.

    `ended`: (rank, exit status) of every worker that has ended there. `epoch`: the newest in any order that came.
    """

    workers: tuple[RunningWorker, ...] = ()
    ended: tuple[tuple[int, int], ...] = ()
    epoch: int = 0


class Signalled(Message, frozen=True, kw_only=True):
    """Somebody else than us sent this signal to the agent; it goes on, and waits for what the supervisor decides."""

    signal: int


class Spawned(Message, frozen=True, kw_only=True):
    rank: int
    device: int
    pid: int


class SpawnFailed(Message, frozen=True, kw_only=True):
    """The fork server could not start or fork: the interpreter's own words. `rank` None: it cannot fork any."""

    reason: str
    rank: int | None = None


MOST_LINES_AFTER = 99


class Clue(msgspec.Struct, frozen=True, kw_only=True):
    """One telling line of a log. `at` in seconds since 1970, UTC.

    `kind` names its row in `resihp.detector.diagnosis.signatures` (`xid 79` for Xids).
    `named`: what the line names, of xid, pid, bus, node, peer, error. `raised`: an exception that ended a traceback;
    `chained`: raised while the clue before it, of the same log, was handled. `age_s`: how old the line was when it was
    read, which is as soon as its process has ended; None if its time is not known. `lines_after`: how many lines of
    ordinary output follow it in the log, at most `MOST_LINES_AFTER`: a program that goes on has lived with it.
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
"""Exit status of a worker that ended itself because an abort of its communicators did not end: no node's fault."""


class Exited(Message, frozen=True, kw_only=True):
    """`status` as in subprocess: negative for a signal. All that the worker had sent was forwarded before this.

    `clues`: what its log and its node's kernel say of it.
    """

    rank: int
    pid: int
    status: int
    clues: tuple[Clue, ...] = ()


class FromWorker(Message, frozen=True, kw_only=True):
    """What a worker of the node has said. `body`: a `WorkerMessage` as it came, for the supervisor to decode.

    A byte string, so that whatever a worker says ends where it ends: it cannot break its agent's connection.
    """

    rank: int
    body: bytes


class WorkerBeat(msgspec.Struct, frozen=True, kw_only=True):
    """Last progress of one worker as its agent knows it.

    `age_s` is the time since the worker's own thread last beat; `state` the kernel's process state letter (R, S, D,
    T, Z). `idle_s`: for how long neither the process nor anything that it started has done any work; None of a worker
    that has said what it trains, and of those of an agent that does not look.
    """

    rank: int
    age_s: float
    state: str
    progress: Progress | None
    idle_s: float | None = None


class Beat(Message, frozen=True, kw_only=True):
    """Sent once a second, workers aggregated: cost grows with nodes, not devices.

    `met`: a worker has listened at the `meeting_port`, or came there once rank 0 had ended, and none has declared what
    it trains: the script makes process groups of its own, as with torch.distributed's `env://`.
    """

    workers: tuple[WorkerBeat, ...]
    met: bool = False


AgentMessage = Join | Inventory | Spawned | SpawnFailed | Exited | FromWorker | Beat | Signalled | Attend | Publish


# --- supervisor -> agent ----------------------------------------------------------------------------------------


class Spawn(Message, frozen=True, kw_only=True):
    """Start one worker for each `Start`, which the agent passes on. `environment` is added to the worker's own.

    `nodes`: the node of each rank of the job so far, as (node, how many ranks in a row); the agent writes them out in
    each `Start`, where they come empty: there are many agents, and more ranks.
    """

    workers: tuple[Start, ...]
    environment: dict[str, str]
    nodes: tuple[tuple[str, int], ...] = ()


class ToWorkers(Message, frozen=True, kw_only=True):
    """`body`: a `WorkerOrder`, encoded once for all; agents pass it on as it is (`forwarding.order_in`)."""

    ranks: tuple[int, ...]
    body: bytes
    deflated: bool = False


class HangUp(Message, frozen=True, kw_only=True):
    """What this worker says cannot be read: close its socket, which ends it."""

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
    """A supervisor's first message on every connection, outside of all numbers: who leads, and how much it knows.

    An agent accepts a term later than all that it has promised, if `log` is not less than its own or a quorum has
    accepted it already (`settled`): it starts a new conversation and answers with `Inventory`. The same term goes on
    where it was. Anything else it leaves.
    """

    term: int
    node: str
    log: int
    settled: bool = False


class Alive(Message, frozen=True, kw_only=True):
    """Once a second, outside of all numbers: the supervisor is there."""


class Replicate(Message, frozen=True, kw_only=True):
    """Records for the agent's copy of the journal: drop what it has after number `after`, append these.

    An agent acknowledges it at once: decisions take effect when a quorum of agents has. Many go as one
    (`forwarding.records_in`).
    """

    after: int
    records: tuple[bytes, ...]
    deflated: bool = False


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """An agent, for other agents: where it listens."""

    node: str
    host: str
    port: int


class Roster(Message, frozen=True, kw_only=True):
    """Whom to ask when the supervisor is gone: who is new or has another address, and nodes that were left out.

    `whole`: nothing that was told before counts.
    """

    peers: tuple[Peer, ...]
    left: tuple[str, ...] = ()
    whole: bool = False


class Release(Message, frozen=True, kw_only=True):
    """Wait up to `grace_s` for the workers to end, then kill what is left, then exit."""

    grace_s: float


AgentOrder = Lead | Alive | Replicate | Roster | Spawn | ToWorkers | HangUp | Signal | KillNode | Release | Published


# --- agent <-> agent --------------------------------------------------------------------------------------------


class AskVote(Message, frozen=True, kw_only=True):
    """The supervisor is gone for me: would you follow a supervisor of `term` on my node? Binds nobody.

    `log` is the number of the last record in the candidate's copy of the journal.
    """

    node: str
    term: int
    log: int


class Vote(Message, frozen=True, kw_only=True):
    """`term` is the newest that the voter has promised itself to; `incarnation` as in `Join`."""

    node: str
    granted: bool
    term: int
    reason: str = ""
    incarnation: str = ""


class Successor(Message, frozen=True, kw_only=True):
    """A quorum would follow: a supervisor of `term` is being started, connect there."""

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
    """Of `slow`: names ascending."""
    speed: float | None = None
    """Of `slow`."""


class AskStanding(Message, frozen=True, kw_only=True):
    """Ask a running job how a rank stands with the detector. The reply's text is a `RankAnswer` as JSON."""

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
