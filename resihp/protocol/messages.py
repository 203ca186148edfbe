"""Types of all messages that cross a socket. msgspec encodes them as tagged msgpack; nothing is ever unpickled.

There are three conversations. Each has one union of messages for each direction:

====================  =====================  ==========================================================
from -> to            union                  carried by
====================  =====================  ==========================================================
worker -> agent       `WorkerMessage`,       inherited socket, plain frames (`channels.LocalChannel`)
                      `MeetingMessage`
agent -> worker       `WorkerOrder`          inherited socket, plain frames
agent -> supervisor   `AgentMessage`         TCP, authenticated frames (`channels.SecureChannel`)
supervisor -> agent   `AgentOrder`           TCP, authenticated frames
command line <->      `OperatorRequest`,     TCP, authenticated frames, on the port that agents use
supervisor            `OperatorReply`
====================  =====================  ==========================================================

An agent forwards messages between workers and supervisor unchanged (`resihp.protocol.forwarding`). It collects and
distributes messages of a rendezvous (`resihp.protocol.rendezvous`).

Iterations count from 1; iteration 0 means none yet. All fields in seconds are durations, not points in time. This
module decides nothing.
"""

from __future__ import annotations

import math
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
from resihp.protocol.script_messages import InspectWorkers as InspectWorkers
from resihp.protocol.script_messages import Message as Message
from resihp.protocol.script_messages import Printed as Printed
from resihp.protocol.script_messages import PrintedFigures as PrintedFigures
from resihp.protocol.script_messages import ScriptProgress as ScriptProgress
from resihp.protocol.script_messages import ScriptSaved as ScriptSaved
from resihp.protocol.script_messages import ScriptTotals as ScriptTotals
from resihp.protocol.script_messages import WorkerLook as WorkerLook
from resihp.protocol.script_messages import WorkersInspected as WorkersInspected

NO_DIGEST = "0" * 16
"""Value of `StepOutcome.samples_digest` if the samples are not known."""


class StepOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the last synchronisation of an iteration: all values that a rank needs to take the step. Equal on
    all ranks.

    A rank may step as soon as it has the outcome. A rank that has not stepped before a failure can still finish the
    step with the outcome from another rank. `clip` is the factor for all gradients. `skip` means that gradients were
    not finite and that no rank may update its parameters. `loss` is the mean over the tokens of the global batch.
    `tokens`, `sum_squared_lengths`, `samples` and `samples_digest` (16 hexadecimal digits,
    `resihp.parallelism.workload.samples_digest`) come from the ranks that computed the micro-batches.
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
    """Number of optimizer updates of the job, including this step; skipped iterations do not count."""
    pause: bool = False
    """Whether at least one rank was asked to park after this iteration; if so, all ranks park."""
    saving: bool = False
    """Whether at least one rank is still writing a checkpoint; if so, no rank begins another checkpoint."""
    save: bool = False
    """Whether at least one rank was ordered to write a checkpoint of this iteration (`SaveNext`); if so, all ranks
    do."""

    @classmethod
    def printed(cls, iteration: int, loss: float | None, tokens: int = 0, sum_squared_lengths: int = 0) -> StepOutcome:
        """Return what is known of an iteration that a script has printed or reported: an unknown loss is NaN, and so
        are the other figures; counts are 0."""
        return cls(
            iteration=iteration,
            clip=1.0,
            skip=False,
            learning_rate=math.nan,
            gradient_norm=math.nan,
            loss=math.nan if loss is None else loss,
            tokens=tokens,
            sum_squared_lengths=sum_squared_lengths,
            samples=0,
            samples_digest=NO_DIGEST,
        )

    @property
    def is_printed(self) -> bool:
        """Whether the outcome is `printed`, so that only its iteration, perhaps its loss and its tokens are known."""
        return not self.samples and self.samples_digest == NO_DIGEST

    @property
    def loss_is_unknown(self) -> bool:
        return self.is_printed and math.isnan(self.loss)


# --- rendezvous: worker <-> agent <-> supervisor -----------------------------------------------------------------


class MeetingId(msgspec.Struct, frozen=True):
    """Identifies a rendezvous, in which ranks that build communicators exchange their addresses.

    The rendezvous belongs either to an epoch or to a probe; the other number is 0.
    """

    epoch: int = 0
    probe: int = 0

    def __str__(self) -> str:
        return f"epoch {self.epoch}" if self.epoch else f"probe {self.probe}"


class Said(msgspec.Struct, frozen=True, array_like=True):
    """A value that one rank publishes to all other ranks of a communicator: an address or an NCCL id. A key can be set
    only once."""

    group: str
    key: str
    value: bytes


class Attend(Message, frozen=True, kw_only=True):
    """Subscribe the sender to these groups of a rendezvous. Values that were published before are sent to it as
    well."""

    meeting: MeetingId
    groups: tuple[str, ...]


class Publish(Message, frozen=True, kw_only=True):
    """Publish values to all subscribers of their groups. Values for a rendezvous that is over are dropped."""

    meeting: MeetingId
    said: tuple[Said, ...]


class Published(Message, frozen=True, kw_only=True):
    """Deliver published values to a subscriber. An agent gets the values to which any of its workers has subscribed; a
    worker gets the values to which it has subscribed itself."""

    meeting: MeetingId
    said: tuple[Said, ...]


MeetingMessage = Attend | Publish


# --- worker -> agent -> supervisor ------------------------------------------------------------------------------


class Declare(Message, frozen=True, kw_only=True, dict=True):
    """Report that the training script is ready, and declare the training job. The declarations of all ranks must be
    equal except for `memory_bytes` and `software`."""

    model: ModelSpec
    micro_batches: int
    """Number of micro-batches in the global batch after the batch ramp-up."""
    iterations: int
    resume_from: int
    """Iteration of the checkpoint that the job will load; 0 if training starts from scratch."""
    resume_folder: str = ""
    """Folder of this checkpoint; empty if training starts from scratch."""
    fingerprint: str
    """Digest of the settings of model and optimizer, the description of the data set and the versions of libraries."""
    ramp: Ramp = ()
    """Steps of the batch ramp-up; empty without a ramp-up."""
    device: str = "cpu"
    back_end: str = "gloo"
    """Name of the communicators' back end. Together with `device`, the device's type, it determines how much of the
    device's memory is left for training."""
    memory_bytes: int | None = None
    """Total memory of this rank's device in bytes; None for a CPU or a shared device. May differ between ranks."""
    evaluates: bool = False
    """Whether an evaluation follows the last step. If so, every rank with work is needed until it has sent
    `Finished`."""
    software: Software | None = None
    """Versions of software, for the ledger only; `fingerprint` includes the versions that must be equal. None if
    another rank of the node reports them."""

    def trains_as(self, other: Declare) -> bool:
        """Return whether both declarations are equal except for device memory and software."""
        return msgspec.structs.replace(self, memory_bytes=other.memory_bytes, software=other.software) == other

    @cached_property
    def batch_sizes(self) -> BatchSizes:
        return BatchSizes(self.micro_batches, self.ramp)


class Refuse(Message, frozen=True, kw_only=True):
    """Report that the script cannot start for a reason that the user has to fix (a `resihp.errors.UsageError`)."""

    reason: str


class Confirm(Message, frozen=True, kw_only=True):
    """Report that the worker can carry out the proposed plan. `digest` is the plan's digest as computed by the worker
    itself."""

    epoch: int
    digest: str


class Object(Message, frozen=True, kw_only=True):
    """Report that the worker cannot carry out the proposed plan. The worker continues under the plan in effect."""

    epoch: int
    reason: str


class Ready(Message, frozen=True, kw_only=True):
    """Acknowledge a transition: communicators of `epoch` are built, and this rank has the state that the new layout
    assigns to it.

    The rank keeps its old state as well until `Begin`. `groups_s` and `state_s` are the seconds spent on building
    communicators and on transferring state. `bytes_received` counts state received from other ranks. `extra_bytes` is
    the memory of both states together minus that of the larger one.
    """

    epoch: int
    groups_s: float
    state_s: float
    bytes_received: int = 0
    extra_bytes: int = 0


class Workload(Message, frozen=True, kw_only=True):
    """Report the beginning of an iteration, with the workload of each micro-batch of its global batch, by index: number
    of tokens, and sum of squared document lengths.

    The data set is a pure function of the iteration, so only one rank reports: the first rank with work.
    """

    epoch: int
    iteration: int
    tokens: tuple[int, ...]
    squares: tuple[int, ...]


class Stepped(Message, frozen=True, kw_only=True):
    """Report that the worker has taken the step of `outcome.iteration`. As far as the worker knows, this commits the
    iteration."""

    epoch: int
    outcome: StepOutcome
    seconds: float
    compute_s: float
    """Seconds of the rank's own work in this iteration, without waits for peers."""
    reduced_s: float = 0.0
    """Seconds from the beginning of the iteration until all gradients of this rank were reduced."""
    chunks: bytes = b""
    """Measurements of each primitive, encoded by `resihp.detector.observation.pack`; empty if nothing is measured."""


class Evaluated(Message, frozen=True, kw_only=True):
    """Report the loss of the weights after `iteration` on the evaluation data set. Each rank with work reports, and all
    reports are equal.

    `loss` is the mean over `tokens` tokens.
    """

    epoch: int
    iteration: int
    loss: float
    tokens: int


class Parked(Message, frozen=True, kw_only=True):
    """Report that the worker has released its communicators and waits for a plan.

    `epoch` is the epoch in the order to park. `stepped` is the last iteration with a step taken by this rank, and
    `outcome` is the outcome of this step. `ready` is true if this rank still has all gradients of iteration `stepped +
    1`, reduced. `holds` lists the epochs for which this rank has state: that of the plan in effect, and after `Ready`
    that of the next plan. It is empty for a rank without state.
    """

    epoch: int
    holds: tuple[int, ...] = ()
    stepped: int
    outcome: StepOutcome | None
    ready: bool


class Stuck(Message, frozen=True, kw_only=True):
    """Report that a collective or a transfer of `epoch` failed on this worker before an order to park arrived."""

    epoch: int
    error: str


class Raised(Message, frozen=True, kw_only=True):
    """Report that the user's code raised an exception. The process ends after this message."""

    iteration: int
    error: str
    traceback: str


class Finished(Message, frozen=True, kw_only=True):
    """Report that the last iteration is done. The worker now waits for `Halt`."""

    iteration: int


class FaultDue(Message, frozen=True, kw_only=True):
    """Report that this rank has reached the iteration and phase of an injected fault. The rank waits for `FaultGo`."""

    fault: int


class CheckpointPart(Message, frozen=True, kw_only=True):
    """Report that this rank's part of a checkpoint is flushed to disk, or that it could not be written.

    `error` is the reason for a failure; empty if the part was written.
    """

    epoch: int
    iteration: int
    folder: str
    file: str
    bytes: int
    seconds: float
    error: str = ""


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """Speed of a device as measured by a probe, per second of the device's own time. A field is 0 if it was not
    measured."""

    flops: float = 0.0
    """Floating-point operations per second in a matrix product."""
    memory_bytes: float = 0.0
    """Bytes read and written per second while a buffer larger than the caches is copied."""
    hardware: str = ""
    """Manufacturer's name of the measured device. Speeds of different kinds of device must not be compared."""


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """Time of a transfer between this rank and rank `peer`, as measured by a link probe."""

    peer: int
    seconds: float
    """Seconds of an all-reduce of one buffer by the two ranks: the lower quartile of several repetitions, on shared
    devices the fastest."""


class Probed(Message, frozen=True, kw_only=True):
    """The answer to `Probe`. Each of three texts is empty if it does not apply.

    `error` describes a failure of the device. `missed` is the reason why links could not be measured. `untried` is the
    reason why a device that is not broken could not be measured, for example full memory.
    """

    probe: int
    speed: Speed = Speed()
    transfers: tuple[Transfer, ...] = ()
    seconds: float = 0.0
    """Duration of the whole probe in seconds."""
    error: str = ""
    missed: str = ""
    untried: str = ""
    shared: bool = False
    """Whether other workers of the node compute on the same CPUs, or, if so configured, on the same GPU."""


class Progress(Message, frozen=True, kw_only=True):
    """A heartbeat from a thread of the worker, with the progress of training.

    `primitives` counts the chunks and synchronisations done since the process started; it grows as long as training
    makes progress. `activity` is the activity of the main thread: a rank in `communication` is a victim of a slow peer,
    not the cause. `unanswered_s` is the time in seconds for which the device has not answered during its present
    operation; 0 if the device has answered or was not asked.
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
    | ScriptSaved
    | Probed
    | Progress
)


# --- supervisor -> agent -> worker ------------------------------------------------------------------------------


class Propose(Message, frozen=True, kw_only=True):
    """Ask a worker to check a plan, compute its digest and answer with `Confirm` or `Object`. The worker changes
    nothing yet.

    `base` locates the state that the plan's layout will need. Without a base, no rank has state that counts, and every
    rank loads it from the checkpoint in the folder `checkpoint`, or initialises it if that is empty. `nodes` is the
    node of each rank of the job.
    """

    plan: Plan
    next_iteration: int
    base: Base | None = None
    checkpoint: str = ""
    nodes: dict[int, str] = msgspec.field(default_factory=dict)


class Go(Message, frozen=True, kw_only=True):
    """Order a transition, once all ranks have confirmed the plan of `epoch`: take the step of `finish` unless it is
    taken, build communicators, transfer state, and answer with `Ready`.

    `finish` is None if no step has to be completed. A rank without work in the new plan may still have to send state.
    """

    epoch: int
    next_iteration: int
    finish: StepOutcome | None


class Begin(Message, frozen=True, kw_only=True):
    """Put the plan of `epoch` into effect, since all ranks have sent `Ready`: free the state that only the previous
    layout needed, and train."""

    epoch: int
    evaluated: int = 0
    """Last iteration with an evaluation in the journal; this evaluation is not repeated. 0 for none."""


class Park(Message, frozen=True, kw_only=True):
    """Order a worker to stop training, release all communicators and answer with `Parked`. `epoch` is the epoch in
    preparation.

    With `after_iteration`, the worker parks between two iterations: it continues until the last synchronisation of an
    iteration has informed every rank (`StepOutcome.pause`), so that no work is lost.
    """

    epoch: int
    reason: str
    after_iteration: bool = False


class Save(Message, frozen=True, kw_only=True):
    """Order a parked rank with work in `replica` of the plan in effect, that of `epoch`, to write a checkpoint.

    The checkpoint contains the state after iteration `finish.iteration`; a rank that has not taken this step takes it
    first. Together, the ranks of the replica write the complete state, and each answers with a `CheckpointPart`. Other
    ranks ignore the order.
    """

    epoch: int
    replica: int
    finish: StepOutcome


class SaveNext(Message, frozen=True, kw_only=True):
    """Order one rank that trains to write a checkpoint after the iteration in progress, and to continue training.

    The last synchronisation of the iteration passes the order on to all other ranks (`StepOutcome.save`). If a
    checkpoint is still being written at that time, the order is passed on in a later iteration. `number` is the number
    of the order.
    """

    number: int


class FaultGo(Message, frozen=True, kw_only=True):
    """Answer to `FaultDue`: with `fire`, carry out the fault (`hang`, `raise`) or, for other faults, wait to be killed;
    otherwise continue."""

    fault: int
    fire: bool


class Probe(Message, frozen=True, kw_only=True):
    """Order a measurement of the device, between two iterations or while parked. The answer is `Probed`.

    With `pairs`, ranks that are all parked or without work measure their links as well. `pairs` is a sequence of
    rounds, each consisting of disjoint pairs of ranks, and is the same for all ranks. The rendezvous of the ranks has
    the probe's number (`MeetingId`).

    With `after_iteration`, ranks that train measure only links, after all of them have taken the step of this
    iteration, on communicators made for the probe. All other ranks continue training. A rank that is past this
    iteration, or parks, reports this in `Probed.missed`.
    """

    probe: int
    after_iteration: int | None = None
    pairs: tuple[tuple[tuple[int, int], ...], ...] = ()


class Slow(Message, frozen=True, kw_only=True):
    """Inject a fault: from now on behave as a device of relative speed `speed`, up to but not including iteration
    `until`.

    `until` None: for the rest of the job. With `link`, the link between these two nodes is slow instead of the device.
    With `every`, the fault has an effect only in iterations that are multiples of `every`.
    """

    speed: float
    until: int | None = None
    link: tuple[str, str] | None = None
    every: int = 1


class Halt(Message, frozen=True, kw_only=True):
    """Order a worker to leave the training loop, because training is over. With `at_once`, the process ends in the
    middle of its work."""

    reason: str
    at_once: bool = False


class Start(Message, frozen=True, kw_only=True):
    """The first frame on a worker's socket, with the worker's identity and settings. `faults` are the faults to
    inject."""

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
    """Memory of the device available to the job, in bytes. None if it is unknown; memory is not checked in this
    case."""
    joins: bool = False
    """Whether the job is already in progress, so that the worker waits until a plan gives it work."""
    round: int = 0
    """How often all processes of the script have been started again."""
    resume_from: str = ""
    """Path of the checkpoint from which a script that does not declare a model is to resume; empty if none is known."""
    resume_iteration: int = 0
    """Last iteration of this checkpoint."""


WorkerOrder = Start | Propose | Go | Begin | Park | Save | SaveNext | Probe | Slow | FaultGo | Halt | Published


# --- agent -> supervisor ----------------------------------------------------------------------------------------


class Join(Message, frozen=True, kw_only=True):
    """The first message of an agent on every connection; it is not numbered.

    `term` is the latest term in which the agent has promised to follow a leader, 0 for none; a supervisor of an earlier
    term is deposed. `log` is the number of the last record in the agent's copy of the journal. `peer_port` is the port
    on which the agent listens to other agents; its address is `host`, as seen by the supervisor. `lease` is the number
    of the replacement request that this node answers, 0 for a node of the job's own allocation. `hardware` is the
    manufacturer's name of the node's devices, empty if unknown. `machine` is the node's inventory. `incarnation` is
    drawn at random when the agent's process starts: process ids are reused (in a container at each start), and a
    restarted agent has lost its promises. `meeting_port` is a port that the agent keeps free for the rendezvous of a
    script that creates its own process groups; 0 for none.
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
    """One live worker, as described to a supervisor that did not start it.

    `steps` are reports of steps that are not committed according to the agent's copy of the journal. `said` lists, in
    order of arrival, the latest of each message that still applies to the worker: `Declare`, `Evaluated`, `Parked`,
    `Stuck`, `Raised`, `Ready`, `Finished`, `FaultDue`. It also has the last few `CheckpointPart` messages, since these
    may not have reached any supervisor.
    """

    rank: int
    device: int
    pid: int
    steps: tuple[Stepped, ...] = ()
    said: tuple[WorkerMessage, ...] = ()


class Inventory(Message, frozen=True, kw_only=True):
    """The first numbered message of an agent to the leader of a new term: the agent accepts the leader and lists its
    workers.

    `ended` has (rank, exit status) of every worker that has ended on the node. `epoch` is the newest epoch in any order
    that the agent has received.
    """

    workers: tuple[RunningWorker, ...] = ()
    ended: tuple[tuple[int, int], ...] = ()
    epoch: int = 0


class Signalled(Message, frozen=True, kw_only=True):
    """Report that the agent received this signal from outside resihp. The agent continues and waits for the
    supervisor's decision."""

    signal: int


class Spawned(Message, frozen=True, kw_only=True):
    rank: int
    device: int
    pid: int


class SpawnFailed(Message, frozen=True, kw_only=True):
    """Report that the fork server could not start or fork, with the interpreter's error message. `rank` is the rank
    that could not be started, None if the fork server can start no worker at all."""

    reason: str
    rank: int | None = None


MAX_LINES_AFTER = 99


class Clue(msgspec.Struct, frozen=True, kw_only=True):
    """One significant line of a log. `at` is the time of the line in seconds since 1970, UTC, or None if unknown.

    `kind` names the line's row in `resihp.detector.diagnosis.signatures` (`xid 79` for Xids). `named` has the items
    that the line names, of xid, pid, bus, node, peer, error. `raised` marks an exception that ended a traceback.
    `chained` marks an exception that was raised while the previous clue of the same log was handled. `age_s` is the age
    of the line in seconds when it was read, which is as soon as its process has ended; None if its time is unknown.
    `lines_after` is the number of lines of ordinary output after this line, at most `MAX_LINES_AFTER`: a program that
    continues to print has survived the event.
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
"""Exit status of a worker that ended itself because aborting its communicators hung. No node is to blame."""


class RoundEnded(Message, frozen=True, kw_only=True):
    """Answer to `EndRound`, after the `Exited` of each worker. `round`: as in the order. `meeting_port`: as in `Join`,
    for the next round."""

    round: int
    meeting_port: int


class Exited(Message, frozen=True, kw_only=True):
    """Report that a worker has ended, after all messages of this worker have been forwarded. `status` is as in
    subprocess: negative for a signal.

    `clues` are significant lines of the worker's log and of the node's kernel log.
    """

    rank: int
    pid: int
    status: int
    clues: tuple[Clue, ...] = ()


class FromWorker(Message, frozen=True, kw_only=True):
    """Forward a message of one of the node's workers. `body` is the encoded `WorkerMessage`, which the supervisor
    decodes.

    The body is a byte string, so that an invalid message does not break the agent's connection.
    """

    rank: int
    body: bytes


class WorkerBeat(msgspec.Struct, frozen=True, kw_only=True):
    """The latest progress of one worker as known to its agent.

    `age_s` is the time in seconds since the worker's last heartbeat. `state` is the letter of the kernel's process
    state (R, S, D, T, Z). `progress` is None before the first heartbeat. `idle_s` is the time in seconds for which
    neither the process nor any of its children has used a CPU, waited for a disk or written output; None if a worker of
    the node has sent `Declare`. `script` has the totals of a script, if they have changed since the last beat.
    """

    rank: int
    age_s: float
    state: str
    progress: Progress | None
    idle_s: float | None = None
    script: ScriptTotals | None = None


class Beat(Message, frozen=True, kw_only=True):
    """Heartbeat of an agent, sent once a second, with the progress of all its workers. So the cost grows with the
    number of nodes, not of devices.

    `met` is true if no worker has sent `Declare` while a worker has listened at the `meeting_port`, has connected there
    after rank 0 had ended, or has called `resihp.iteration`. The script then creates its own process groups, if any.
    """

    workers: tuple[WorkerBeat, ...]
    met: bool = False


AgentMessage = (
    Join
    | Inventory
    | Spawned
    | SpawnFailed
    | Exited
    | RoundEnded
    | WorkersInspected
    | FromWorker
    | Printed
    | Beat
    | Signalled
    | Attend
    | Publish
)


# --- supervisor -> agent ----------------------------------------------------------------------------------------


class Spawn(Message, frozen=True, kw_only=True):
    """Start one worker for each `Start`; the agent passes the `Start` on to the worker. `environment` is added to the
    worker's environment.

    `nodes` is the node of each rank of the job so far, as (node, number of consecutive ranks). `Start.nodes` is empty
    in this message, since there are many agents and even more ranks; the agent fills it in.
    """

    workers: tuple[Start, ...]
    environment: dict[str, str]
    nodes: tuple[tuple[str, int], ...] = ()


class EndRound(Message, frozen=True, kw_only=True):
    """End all workers of the node and all processes that they have started: SIGTERM, then SIGKILL after `grace_s`
    seconds. If the order is repeated (by a new supervisor) after `round` has ended, it is only answered again."""

    round: int
    grace_s: float


class ToWorkers(Message, frozen=True, kw_only=True):
    """An order to workers. `body` is the `WorkerOrder`, encoded once for all recipients, which agents pass on unchanged
    (`forwarding.order_in`). `deflated` tells whether it is compressed."""

    ranks: tuple[int, ...]
    body: bytes
    deflated: bool = False


class HangUp(Message, frozen=True, kw_only=True):
    """Close the socket of a worker that sends undecodable messages. This ends the worker."""

    rank: int
    reason: str


class Signal(Message, frozen=True, kw_only=True):
    """Send a signal to one worker, to kill a hung worker or to inject a fault."""

    rank: int
    signal: int


class KillNode(Message, frozen=True, kw_only=True):
    """Inject a fault: send SIGKILL (or SIGSTOP) to every process of the virtual node, including the agent."""

    signal: int


class Lead(Message, frozen=True, kw_only=True):
    """A supervisor's first message on every connection: it claims to lead, and states how long its journal is. Not
    numbered.

    An agent accepts a term later than all terms of its promises, if `log` is not less than its own or if a quorum has
    already accepted the term (`settled`). It then starts a new conversation and answers with `Inventory`. If the agent
    follows this term already, the conversation of the term is resumed. For any other term the agent disconnects.
    """

    term: int
    node: str
    log: int
    settled: bool = False


class Alive(Message, frozen=True, kw_only=True):
    """Heartbeat of the supervisor, sent to each agent once a second; not numbered."""


class Replicate(Message, frozen=True, kw_only=True):
    """Update an agent's copy of the journal: drop all records after number `after`, then append `records`.

    The agent acknowledges the message at once; a decision takes effect when a quorum of agents has acknowledged it.
    `deflated` means that many records are compressed into one item (`forwarding.records_in`).
    """

    after: int
    records: tuple[bytes, ...]
    deflated: bool = False


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """The address of an agent, sent to other agents."""

    node: str
    host: str
    port: int


class Roster(Message, frozen=True, kw_only=True):
    """Addresses of agents, to be asked when the supervisor is lost. `peers` are new agents and agents with a changed
    address; `left` are nodes that have left the job.

    With `whole`, the message replaces all earlier rosters.
    """

    peers: tuple[Peer, ...]
    left: tuple[str, ...] = ()
    whole: bool = False


class Release(Message, frozen=True, kw_only=True):
    """Order an agent to wait up to `grace_s` seconds until its workers have ended, to kill the remaining workers, and
    to exit."""

    grace_s: float


AgentOrder = (
    Lead
    | Alive
    | Replicate
    | Roster
    | Spawn
    | EndRound
    | InspectWorkers
    | ToWorkers
    | HangUp
    | Signal
    | KillNode
    | Release
    | Published
)


# --- agent <-> agent --------------------------------------------------------------------------------------------


class AskVote(Message, frozen=True, kw_only=True):
    """Ask an agent whether it would follow a supervisor of `term` on the sender's node, because the sender has lost the
    supervisor. The question binds neither side.

    `log` is the number of the last record in the candidate's copy of the journal.
    """

    node: str
    term: int
    log: int


class Vote(Message, frozen=True, kw_only=True):
    """The answer to `AskVote`. `term` is the latest term in which the voter has promised to follow a leader.
    `incarnation` is as in `Join`."""

    node: str
    granted: bool
    term: int
    reason: str = ""
    incarnation: str = ""


class Successor(Message, frozen=True, kw_only=True):
    """Tell an agent to connect to the supervisor of `term`, which is being started at this address because a quorum
    would follow it."""

    node: str
    term: int
    host: str
    port: int


class Noted(Message, frozen=True, kw_only=True):
    """The answer to `Successor`."""


PeerMessage = AskVote | Vote | Successor | Noted


# --- command line <-> supervisor --------------------------------------------------------------------------------


class Inject(Message, frozen=True, kw_only=True):
    """Ask a running job to inject a fault at once."""

    kind: str
    rank: int | None = None
    node: str | None = None
    link: tuple[str, str] | None = None
    """The two nodes of a slow link (kind `slow`), in ascending order of their names."""
    speed: float | None = None
    """Relative speed for kind `slow`."""


class AskStanding(Message, frozen=True, kw_only=True):
    """Ask a running job for the detector's assessment of a rank. `OperatorReply.text` is a `RankAnswer` as JSON."""

    rank: int


class AskStop(Message, frozen=True, kw_only=True):
    """Ask a running job to end after a checkpoint of the iteration in progress. With `at_once`, it ends without a
    checkpoint."""

    at_once: bool = False


class AskCheckpoint(Message, frozen=True, kw_only=True):
    """Ask a running job to write a checkpoint now. The reply is sent when the checkpoint is complete."""


class OperatorReply(Message, frozen=True, kw_only=True):
    ok: bool
    text: str


OperatorRequest = Inject | AskStanding | AskStop | AskCheckpoint
