"""The entries of a job's journal, one class for each kind of entry.

Entries are facts and decisions, in the order in which the controller made them. The supervisor writes each entry
(`resihp.record.journal_file`) *before* the actions that follow from it take effect. The SQL ledger (`db`) is a
projection of the journal; it may lag behind the journal, and can be rebuilt from it. Telemetry
(`resihp.protocol.messages.Progress`, per-rank reports) is not part of the journal.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from resihp.parallelism.plan import Plan
from resihp.protocol.inventory import DeviceInventory as DeviceInventory
from resihp.protocol.inventory import NodeInventory as NodeInventory
from resihp.protocol.inventory import Software as Software
from resihp.protocol.messages import Declare, Speed, StepOutcome
from resihp.record.scripts.entries import CheckpointDistrusted as CheckpointDistrusted
from resihp.record.scripts.entries import CounterSeen as CounterSeen
from resihp.record.scripts.entries import Entry as Entry
from resihp.record.scripts.entries import LossNotFinite as LossNotFinite
from resihp.record.scripts.entries import RestartDecided as RestartDecided
from resihp.record.scripts.entries import RollbackDecided as RollbackDecided


class SlurmIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of a job in Slurm's own records.

    `job`: the job's number, which Slurm may give to another job later (sacct's JobIDRaw). `array_job`, `array_task`:
    None unless the job is an element of an array. `submitted_at`: UTC, seconds since 1970; None if Slurm did not report
    it.
    """

    cluster: str
    job: int
    array_job: int | None = None
    array_task: int | None = None
    submitted_at: float | None = None
    account: str = ""
    partition: str = ""
    qos: str = ""


class JobStarted(Entry, frozen=True, kw_only=True):
    """The job was started. First entry of every journal.

    `configuration`: the effective configuration as plain TOML-like data. `leader`: the node on which the supervisor
    runs; empty if that is not one of the job's nodes (`--local`). `run`: common id of all attempts that continue from
    each other's checkpoints; empty in legacy journals. `slurm`: None outside of Slurm, and in legacy journals.
    """

    job: str
    command: tuple[str, ...]
    nodes: int
    gpus_per_node: int
    tp: int
    pp: int
    schedule: str
    host: str
    user: str
    restart_count: int
    version: str
    configuration: dict[str, object]
    leader: str = ""
    run: str = ""
    slurm: SlurmIdentity | None = None


class NodeJoined(Entry, frozen=True, kw_only=True):
    """A node has joined the job. `hardware`: the maker's name of its devices; empty if not known.

    `incarnation`: the number that the node's agent drew when it started (`messages.Join`). Only the agent with this
    number may make promises for the node. Empty in journals of development versions.
    """

    node: str
    host: str
    devices: int
    hardware: str = ""
    incarnation: str = ""
    inventory: NodeInventory | None = None


class NodeLost(Entry, frozen=True, kw_only=True):
    """A node is no longer part of the job.

    `how`: `silent` if the node stopped answering; `agent` if its agent ended while the node still answers; `useless` if
    all its devices are dead; `vacated` if an administrator drained it, which is not a failure. Empty, which means
    `silent`, only in journals of development versions.
    """

    node: str
    reason: str
    how: Literal["", "silent", "agent", "useless", "vacated"] = "silent"


class WorkersOrdered(Entry, frozen=True, kw_only=True):
    """Processes are to be started. `workers`: (rank, node, device) of each. A rank number is assigned only once in a
    round.

    `round`: how often all processes of the script have been started again. A new round begins with rank 0, once all
    processes of the round before it have ended. Written before the agents are told.
    """

    workers: tuple[tuple[int, str, int], ...]
    round: int = 0
    checkpoint: str = ""
    """Path of the checkpoint from which a script that does not declare a model is to resume; empty if none is known."""
    reached: int = 0
    """The last iteration that such a script printed in the round before; 0 if none is known."""


class WorkerStarted(Entry, frozen=True, kw_only=True):
    rank: int
    node: str
    device: int
    pid: int
    epoch: int


class WorkerEnded(Entry, frozen=True, kw_only=True):
    """A process has ended. `exit`: as in subprocess, negative for a signal; None if the process was lost with its node,
    so that its exit status is not known."""

    rank: int
    exit: int | None
    epoch: int


Three = tuple[float, float, float]
"""Seconds of one micro-batch on one healthy device for forward, gradients of inputs, and gradients of weights."""


class LearnedTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Times measured in the job, from which a plan's iteration time was predicted. `layers`: a single element if all
    layers take the same time."""

    layers: tuple[Three, ...]
    embedding: Three
    head: Three
    transfer_s: float = 0.0
    inside_s: float = 0.0
    gradient_s: float = 0.0
    step_s: float = 0.0


class PlanBasis(msgspec.Struct, frozen=True, kw_only=True):
    """The facts behind the decision on a plan that are not recorded elsewhere, for a later explanation of the plan."""

    speeds: tuple[tuple[int, float], ...] = ()
    """(rank, speed) of each rank that was measured to be slow; the speed of a healthy rank is 1."""
    links: tuple[tuple[str, str, float], ...] = ()
    """(node, node, speed) of each slow link; the speed of a healthy link is 1."""
    kept_out: tuple[int, ...] = ()
    """Ranks that were to get no work, because they were unfit, not measured yet, or about to leave."""
    times: LearnedTimes | None = None
    """The measured times; None if none were known."""


class OtherPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A possible plan that was not chosen: its name, and its predicted time of an iteration."""

    name: str
    predicted: float


class PlanDecided(Entry, frozen=True, kw_only=True):
    """A plan was decided. It takes effect later, with `PlanInEffect`.

    `action`, the fate of the iteration that was in progress: "start" if there was none yet, "redo" if it is redone,
    "commit" if it counts, "between" if ranks stopped between two iterations.
    """

    plan: Plan
    next_iteration: int
    action: Literal["start", "redo", "commit", "between"]
    finish: StepOutcome | None
    reason: str
    bytes_planned: int = 0
    """Bytes of state that have to move between ranks, computed from the two layouts alone."""
    predicted: float | None = None
    """Predicted time of an iteration under the plan, in `unit`; None if not known."""
    present: float | None = None
    """Predicted time of an iteration under the plan in effect, in the present situation and in `unit`; None if no plan
    is in effect, or if that plan cannot run any more."""
    unit: Literal["s", "layer times"] = "layer times"
    """Unit of `predicted` and `present`. A layer time is the forward time of one layer on a healthy device; in this
    unit only the ratio of the two predictions is meaningful."""
    basis: PlanBasis | None = None
    """The facts behind the decision; None in legacy journals."""
    considered: tuple[OtherPlan, ...] = ()
    """Other possible plans with their predicted times, in `unit`; empty if no other plan was priced, and in legacy
    journals."""
    unaffected_by: tuple[int, ...] = ()
    """Numbers of the lasting failures that do not slow the plan down, because the slow component has no work under it
    (`resihp.record.slowness`)."""


class IterationCommitted(Entry, frozen=True, kw_only=True):
    """An iteration was committed. `seconds`: its duration on the slowest rank, for the attempt that counted; None if no
    rank survived to report it.

    For a script that does not report to resihp (`StepOutcome.is_printed`): an iteration that it has printed as
    complete, with the mean duration of an iteration. The entry also stands for the iterations since the entry before,
    because a script may print every tenth iteration.
    """

    epoch: int
    outcome: StepOutcome
    seconds: float | None
    predicted_seconds: float | None


class EvaluationDone(Entry, frozen=True, kw_only=True):
    """The weights after `iteration` were evaluated on the evaluation data set. `loss`: the mean over `tokens`
    tokens."""

    epoch: int
    iteration: int
    loss: float
    tokens: int


Component = Literal["process", "device", "node", "link", "script", "job", "collective", "reduction", "data"]
"""The component that failed. The last four can only be slow: "job" stands for whole iterations, "collective" for the
tensor-parallel collectives of a stage's group, "reduction" for gradient sums, "data" for the wait for a stage's first
micro-batch."""
Outcome = Literal["", "slow", "lost", "fine", "unconfirmed", "passed", "dropped"]
"""The outcome of a suspicion. "slow": a verdict of slowness. "lost": the silent component ended or was given up.
"fine": the probe found all devices healthy; the same observation raises no new suspicion for a while. "unconfirmed":
nothing could be measured. "passed": the sign was gone before it was measured. "dropped": another cause explains it, or
the plan under which it was seen is no longer in effect."""


class Suspected(Entry, frozen=True, kw_only=True):
    """A suspicion of silence, lack of progress or slowness begins or ends. A suspicion is not a failure.

    `cleared`: True for the entry that ends the suspicion. A suspicion of slowness also ends when a failure is found. A
    suspicion of slowness without rank and node concerns no component in particular. For silence, `iteration` and
    `detected` are the first uncommitted iteration, and `change` and `confidence` are meaningless.
    """

    rank: int | None
    node: str | None
    evidence: str
    cleared: bool = False
    kind: Literal["silent", "slow"] = "silent"
    suspicion: int = 0
    """Number of the suspicion within the job, from 1; suspicions of slowness and of silence are numbered together. The
    entry that ends a suspicion has the same number. 0 in legacy journals, which did not number suspicions of
    silence."""
    component: Component = "device"
    ranks: tuple[int, ...] = ()
    """All suspected ranks, the most likely first; for a link, the ranks at its ends."""
    iteration: int = 0
    """First iteration in which the sign appeared (onset); `detected` is the iteration in which it was detected."""
    detected: int = 0
    change: float = 0.0
    """Relative change of time: measured time over healthy time, minus 1 (`Finding.change`)."""
    confidence: float = 0.0
    probe: int = 0
    """Number of the probe that measured the suspects; 0 if there was none."""
    outcome: Outcome = ""
    sign: str = ""
    """The sign of silence: "silent" (a node's heartbeats are missing), "stopped" (the process is stopped), "mute" (its
    interpreter does not answer), "unanswered" (its device does not answer), "stalled" (its peers wait for it)."""
    test: str = ""
    """The test that raised the suspicion, with its unit: "s without a beat", "s without progress", or a name from
    `resihp.detector.sequential.shifts.Alarm`. Empty if there was no test, and in legacy journals."""
    statistic: float | None = None
    """Value of the test, and, as `threshold`, the value from which on the test raises a suspicion; None if there was no
    test."""
    threshold: float | None = None

    @property
    def sort(self) -> str:
        """Kind of the suspicion in one word: "slow-compute", "slow-link", "silent" and others."""
        if self.kind == "silent":
            return self.sign or ("silent" if self.rank is None else "stalled")
        return "slow-compute" if self.component == "device" else f"slow-{self.component}"


class CoverageChanged(Entry, frozen=True, kw_only=True):
    """The detector's coverage of the job has changed. Before the first such entry the detector is warming up.

    `detector`: the basis of the detector's judgements, as in `findings.Known`, or "iterations" if it judges whole
    iterations and no single rank. `unwatched`: ranks with work that have sent the detector no report for many
    iterations.
    """

    iteration: int
    detector: Literal["warming up", "workload", "iterations", "plain times"]
    unwatched: tuple[int, ...]


class Diagnosed(msgspec.Struct, frozen=True, kw_only=True):
    """A diagnosis of a failure: the kind of error, the ranks concerned, and the place (`resihp.detector.diagnosis`)."""

    code: str
    category: str
    ranks: tuple[int, ...]
    node: str | None
    device: int | None


class FailureFound(Entry, frozen=True, kw_only=True):
    """The root cause of a failure was found. `failure` numbers the job's failures from 1.

    `kind`: `fail-stop` (a process, device or node stopped), `fail-slow` (a component works, but more slowly),
    `communication` (all ranks are alive, but a transfer broke), `program` (the training script failed). `detect_s`:
    seconds from the fault to its detection, known only for injected faults; else None. For slowness: `iteration` is the
    first slow one, `speed` the remaining share of a healthy device's or link's speed, `confidence` the detector's
    confidence, `link` the ranks at the ends of the link.
    """

    failure: int
    kind: Literal["fail-stop", "fail-slow", "communication", "program"]
    component: Component
    cause: str
    ranks: tuple[int, ...]
    node: str | None
    device: int | None
    iteration: int
    epoch: int
    evidence: str
    detect_s: float | None
    noticed_s: float | None = None
    """Seconds from the notice of the failure to this entry, which is delayed until all failures of the same moment are
    known. None in legacy journals."""
    failed_s: float | None = None
    """Seconds from the failure itself to this entry, as precisely as can be known
    (`resihp.controller.fail_stop.onsets`). None if nothing shows the moment, and in legacy journals."""
    speed: float | None = None
    confidence: float | None = None
    link: tuple[int, int] | None = None
    intermittent: bool = False
    """For slowness: whether the component is slow only now and then; `speed` is then the average."""
    idle: bool = False
    """For slowness: whether the component has no work under the plan in effect."""
    hardware: bool | None = None
    """True if hardware of the node is broken; False if not, for instance if the node merely died; None in journals of
    development versions."""
    diagnosed: Diagnosed | None = None
    """The diagnosis; None if there was none. If a device gets the same diagnosis in a later failure, the device itself
    is the cause."""
    explains: tuple[str, ...] = ()
    """Log lines about the node that were used as evidence, in addition to `evidence`. They explain no later failure."""

    def noticed_at(self, at: float) -> float:
        """Return the time at which the failure was noticed. `at`: the time of the failure's record."""
        return at - (self.noticed_s or 0.0)

    def failed_at(self, at: float) -> float | None:
        return None if self.failed_s is None else at - self.failed_s

    def confirms(self, component: str, ranks: tuple[int, ...]) -> bool:
        """Return whether this failure is a verdict of slowness that ends an open suspicion about `component` and
        `ranks`."""
        is_alike = component == self.component or (component, self.component) == ("job", "device")
        return self.kind == "fail-slow" and is_alike and (not ranks or not set(ranks).isdisjoint(self.ranks))


class FailureEnded(Entry, frozen=True, kw_only=True):
    """A slow component works at its former speed again, from `iteration` on."""

    failure: int
    node: str | None
    device: int | None
    iteration: int
    evidence: str


class DeviceProbe(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a probe for one device: its absolute figures, and its speed relative to its peers (None if there
    was nothing to compare it with)."""

    rank: int
    node: str
    device: int
    flops: float
    memory_bytes: float
    speed: float | None
    fit: bool
    evidence: str
    hardware: str = ""
    """The maker's name of the device; empty if not known."""


class LinkProbe(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a probe for a link between two ranks: its speed relative to its peers (None if there was nothing to
    compare it with), and its transfer time."""

    ranks: tuple[int, int]
    nodes: tuple[str, str]
    speed: float | None
    fit: bool
    seconds: float = 0.0
    """Seconds to send one buffer there and back."""


class ProbesTaken(Entry, frozen=True, kw_only=True):
    """A probe measured devices and links: before the first iteration ("start"), when a device joined ("join"), on a
    suspicion, or regularly while a slow or unfit device stands by ("standby")."""

    probe: int
    occasion: Literal["start", "join", "suspicion", "standby"]
    devices: tuple[DeviceProbe, ...]
    links: tuple[LinkProbe, ...]
    seconds: float
    looks: int = 1
    """Number of times that doubtful devices were measured until they were judged."""
    share: Speed | None = None
    """Share of its former speed that every device has left, if a probe of all devices on a suspicion shows it; else
    None."""


class Reconfigured(Entry, frozen=True, kw_only=True):
    """One transition was completed, from the detection of the failure to the first committed iteration after it.

    Phases in order, in seconds: `park_s` (from detection until all ranks have parked), `plan_s` (until all ranks have
    confirmed the plan), `groups_s` and `state_s` (building communicators and moving state, on the slowest rank),
    `first_iteration_s` (from the resumption to the first commit). `seconds`: the observed total. `bytes_moved`: bytes
    that all ranks together received. `extra_bytes`: the most bytes that any rank held beside its own state while it
    held the state of both layouts. `action` "between": ranks parked between two iterations, so no work was in progress.
    `planning_s`: the part of `plan_s` before any rank could be told the plan; None in legacy journals, or if not
    measured.

    Also the restart of a script that does not declare a model, `is_restart`: `epoch` is then the number of the restart,
    `action` is "redo", `park_s` the time until its processes had ended, and `first_iteration_s` that until it printed
    an iteration.
    """

    epoch: int
    failures: tuple[int, ...]
    attempts: int
    action: Literal["redo", "commit", "between"]
    park_s: float
    plan_s: float
    groups_s: float
    state_s: float
    first_iteration_s: float
    seconds: float
    bytes_moved: int = 0
    extra_bytes: int = 0
    planning_s: float | None = None
    is_restart: bool = False


class PlanInEffect(Entry, frozen=True, kw_only=True):
    """Every rank has acknowledged its state, and the plan of `epoch` is in effect: from now on this plan's layout says
    which rank holds which state.

    The other fields give the cost of the change, from which the cost of the next change is predicted. `took_s`: seconds
    until all ranks had their state; None in journals of development versions. `busiest_bytes`: bytes that the busiest
    rank held beside its own state. `communicators`: number of communicators that were built.
    """

    epoch: int
    took_s: float | None = None
    busiest_bytes: int = 0
    communicators: int = 0


class PlanWithdrawn(Entry, frozen=True, kw_only=True):
    """A proposed plan was withdrawn before any rank acted on it, because the job is to stop."""

    epoch: int
    reason: str


class ChangeDecided(Entry, frozen=True, kw_only=True):
    """Training is interrupted for another plan. The cause is given by `devices` (node, device), by `links` (two ranks),
    by `tuned` (measured times call for other layers and orders), or by `found` (a search found a better plan).

    Each recent change because of one component makes the next change because of the same component more expensive.
    """

    reason: str
    devices: tuple[tuple[str, int], ...] = ()
    links: tuple[tuple[int, int], ...] = ()
    tuned: bool = False
    found: bool = False


class ChangeDeclined(Entry, frozen=True, kw_only=True):
    """Another plan, or another node, was considered, but nothing was changed. About nodes, one entry is written for the
    same set of missing nodes.

    `reason`: the occasion; `why`: the argument against the change. The alternative is described by `layout`, with
    predictions for it and for the plan in effect, if there are any, as in `PlanDecided`.
    """

    about: Literal["plan", "node"]
    reason: str
    why: str
    iteration: int
    failures: tuple[int, ...] = ()
    """Numbers of the failures that were the occasion."""
    layout: str = ""
    predicted: float | None = None
    present: float | None = None
    unit: Literal["s", "layer times"] = "layer times"
    considered: tuple[OtherPlan, ...] = ()


class PlanRefused(Entry, frozen=True, kw_only=True):
    """A plan was refused before any rank acted on it: `rank` refused it, or the controller's own check failed (`rank`
    None)."""

    epoch: int
    rank: int | None
    reason: str


class JoinRefused(Entry, frozen=True, kw_only=True):
    """A new process on a device was turned away or could not be started. The job goes on without it."""

    rank: int
    node: str
    device: int
    reason: str
    condemns_device: bool = True
    """Whether the device gets no further process."""


class IterationsUnreported(Entry, frozen=True, kw_only=True):
    """Iterations `first` to `last` were completed while no supervisor led the job, and their figures are lost."""

    first: int
    last: int


class IterationsPacked(Entry, frozen=True, kw_only=True):
    """Consecutive committed iterations, packed into columns (`resihp.record.packing`).

    Stands for `count` records and has the number of the last of them. `first`: the first iteration. Only journal files
    contain this entry; the ledger gets the original records.
    """

    epoch: int
    first: int
    count: int
    columns: tuple[bytes, ...]

    @property
    def last(self) -> int:
        """The last iteration that the entry stands for."""
        return self.first + self.count - 1


class ModelDeclared(Entry, frozen=True, kw_only=True):
    """All ranks have declared the same model and workload. A later supervisor reads them here."""

    declare: Declare
    software: Software | None = None


class LeaderChosen(Entry, frozen=True, kw_only=True):
    """A supervisor took over the job. First record of the supervisor's term; the numbers of the term's records begin at
    `first_seq(term)`.

    `node`: where the supervisor runs. `how`: "restarted" by the guardian, or "elected" by a quorum of agents. `after`:
    number of the last record of the journal that it took over.
    """

    term: int
    node: str
    host: str
    how: Literal["restarted", "elected"]
    after: int = 0


class JobSignalled(Entry, frozen=True, kw_only=True):
    """Slurm or an operator asks the job to stop. This is not a failure. `nodes`: nodes with agents that received a
    signal as well.

    `meaning`: as reported by Slurm, `warning` (time is running out; sent early because of --signal), `time-limit`,
    `cancelled`, `preempted` or `unknown`; or `operator` for a signal to `resihp run` itself and for a request of
    `resihp stop`. `resihp stop` sends no signal, so `signal` is then 0.
    """

    signal: int
    nodes: tuple[str, ...]
    meaning: Literal["warning", "time-limit", "cancelled", "preempted", "unknown", "operator"]


class DrainDecided(Entry, frozen=True, kw_only=True):
    """A measure against a failed node was decided. `drain` numbers these decisions from 1; `failure` is the number of
    the failure.

    `measure`: whether the node is drained, or only excluded from the user's next jobs. `grounds`: the reason, as in
    `resihp.controller.nodes.measures`. Legacy journals contain only drains.
    """

    drain: int
    node: str
    failure: int
    reason: str
    measure: Literal["drain", "exclude"] = "drain"
    grounds: Literal["hardware", "died again", "died", "agent"] = "hardware"


class DrainWaived(Entry, frozen=True, kw_only=True):
    """No measure is taken against the node of a failure: the node had been signalled, other nodes were lost with it, it
    is the node of the batch script, or the job only observes."""

    node: str
    failure: int


class DrainAnswered(Entry, frozen=True, kw_only=True):
    """The result of one rung of the drain ladder. `unknown`: Slurm did not answer, so the rung may have succeeded."""

    drain: int
    node: str
    step: Literal["slurm", "spool", "exclusion"]
    outcome: Literal["done", "refused", "unknown"]
    text: str


class NodeReleased(Entry, frozen=True, kw_only=True):
    """A node was given back to Slurm, or Slurm did not accept it now."""

    node: str
    outcome: Literal["done", "refused", "unknown"]
    text: str


class ReplacementAsked(Entry, frozen=True, kw_only=True):
    """A new node is requested from Slurm in place of the lost node `node`. `replacement` numbers the job's requests
    from 1."""

    replacement: int
    node: str
    excluded: tuple[str, ...]
    reason: str


class ReplacementChanged(Entry, frozen=True, kw_only=True):
    """The state of a replacement request has changed. `node`: the name of the new node, once known.

    `cancelled`: this job no longer needs it. `withdrawn`: somebody else cancelled its Slurm job. `ended`: the Slurm job
    has ended for another reason.
    """

    replacement: int
    state: Literal["pending", "running", "joined", "refused", "cancelled", "ended", "withdrawn"]
    slurm_job: str | None
    node: str | None
    text: str


class SlurmSaw(Entry, frozen=True, kw_only=True):
    """Slurm's own view of one of the job's nodes, recorded when it is unexpected or has changed."""

    node: str
    state: str
    text: str


class ReservationSeen(Entry, frozen=True, kw_only=True):
    """A reservation begins on nodes of the job in `seconds`, before the job's time limit; `seconds` is None if it was
    cancelled."""

    reservation: str
    nodes: tuple[str, ...]
    seconds: float | None


class FaultInjected(Entry, frozen=True, kw_only=True):
    """A fault is injected. Written before it is carried out. `kind` is empty in journals of development versions, where
    `text` begins with the kind."""

    fault: int
    text: str
    rank: int | None
    node: str | None
    iteration: int
    kind: str = ""


class CheckpointCommitted(Entry, frozen=True, kw_only=True):
    """A checkpoint is complete. `folder`: its path. `modified`: for a checkpoint of a script that does not declare a
    model, the time of its last change in seconds since 1970; None for one of `resihp.Trainer`."""

    iteration: int
    folder: str
    bytes: int
    seconds: float
    modified: float | None = None


class JobEnded(Entry, frozen=True, kw_only=True):
    """The job has ended. `state`: "completed"; "failed"; "cancelled" (by a signal or request); "abnormal" (a successor
    or a reader found it dead)."""

    exit_code: int | None
    state: Literal["completed", "failed", "cancelled", "abnormal"]
    reason: str


AnyEntry = (
    JobStarted
    | NodeJoined
    | NodeLost
    | WorkersOrdered
    | RestartDecided
    | RollbackDecided
    | WorkerStarted
    | WorkerEnded
    | PlanDecided
    | IterationCommitted
    | EvaluationDone
    | Suspected
    | CoverageChanged
    | FailureFound
    | FailureEnded
    | ProbesTaken
    | Reconfigured
    | PlanInEffect
    | PlanWithdrawn
    | ChangeDecided
    | ChangeDeclined
    | PlanRefused
    | JoinRefused
    | IterationsUnreported
    | IterationsPacked
    | CounterSeen
    | LossNotFinite
    | CheckpointDistrusted
    | ModelDeclared
    | LeaderChosen
    | JobSignalled
    | DrainDecided
    | DrainWaived
    | DrainAnswered
    | NodeReleased
    | ReplacementAsked
    | ReplacementChanged
    | SlurmSaw
    | ReservationSeen
    | FaultInjected
    | CheckpointCommitted
    | JobEnded
)


TERM_SEQS = 10**9
"""Number of record numbers in each term. Terms have separate ranges, so that a record's number is unique in the life of
the job, whichever supervisor wrote the record."""


def first_seq(term: int) -> int:
    return (term - 1) * TERM_SEQS + 1


def term_of(seq: int) -> int:
    """Return the term in which record number `seq` was written; 0 if `seq` is 0 (no record)."""
    return (seq - 1) // TERM_SEQS + 1 if seq else 0


class Record(msgspec.Struct, frozen=True):
    """One record of a journal: its number, its time (UTC, seconds since 1970), and its entry.

    Numbers are consecutive from 1, except for a gap where a new term begins (`first_seq`).
    """

    seq: int
    at: float
    entry: AnyEntry
