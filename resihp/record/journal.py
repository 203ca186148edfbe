"""The entries of a job's journal.

Entries are facts and decisions, in the order in which the controller made them. The supervisor writes each one
(`resihp.record.journal_file`) *before* the actions that follow from it take effect; the SQL ledger (`db`) is a
projection of the journal and may lag behind it or be rebuilt from it. Telemetry (`resihp.protocol.messages.Progress`,
per-rank reports) is not part of it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from resihp.parallelism.plan import Plan
from resihp.protocol.inventory import DeviceInventory as DeviceInventory
from resihp.protocol.inventory import NodeInventory as NodeInventory
from resihp.protocol.inventory import Software as Software
from resihp.protocol.messages import Declare, Speed, StepOutcome


class Entry(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all entries."""


class SlurmIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of a job in Slurm's own records.

    `job`: its number, which Slurm will use again some day (sacct's JobIDRaw); `array_job`, `array_task`: None unless it
    is an element of an array; `submitted_at`: UTC, seconds since 1970, None if Slurm did not report it.
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
    """First entry. `configuration` is the effective configuration as TOML-like plain data.

    `leader` is the node on which the supervisor runs; empty if that is not one of the job's nodes (`--local`). `run`:
    common id of attempts that continue from each other's checkpoints; empty in legacy journals. `slurm`: None outside
    of Slurm, and in legacy journals.
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

    `incarnation`: that of its agent (`messages.Join`), the only one that may make promises for this node; empty in
    journals of 0.1.
    """

    node: str
    host: str
    devices: int
    hardware: str = ""
    incarnation: str = ""
    inventory: NodeInventory | None = None


class NodeLost(Entry, frozen=True, kw_only=True):
    """A node is no longer part of the job.

    `how`: it fell `silent`, its `agent` ended while the node answers, it is `useless` (all its devices are dead), or it
    was `vacated` for an administrator, which is not a failure.
    """

    node: str
    reason: str
    how: Literal["silent", "agent", "useless", "vacated"] = "silent"


class WorkersOrdered(Entry, frozen=True, kw_only=True):
    """Processes are to be started: (rank, node, device) of each. A rank number is assigned once in a job's life.

    Written before agents are told; journals of 0.1 mention ranks only once they have started.
    """

    workers: tuple[tuple[int, str, int], ...]


class WorkerStarted(Entry, frozen=True, kw_only=True):
    rank: int
    node: str
    device: int
    pid: int
    epoch: int


class WorkerEnded(Entry, frozen=True, kw_only=True):
    """`exit` as in subprocess: negative for a signal; None if the process died with its node, so that its exit is not
    known."""

    rank: int
    exit: int | None
    epoch: int


Three = tuple[float, float, float]
"""Forward, gradients of inputs, gradients of weights: seconds of one micro-batch on one healthy device."""


class LearnedTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The job's own times, with which a plan was priced. `layers`: one element if all layers are alike."""

    layers: tuple[Three, ...]
    embedding: Three
    head: Three
    transfer_s: float = 0.0
    inside_s: float = 0.0
    gradient_s: float = 0.0
    step_s: float = 0.0


class PlanBasis(msgspec.Struct, frozen=True, kw_only=True):
    """The basis of the decision on a plan, as far as it is not recorded elsewhere: for a later explanation of the
    plan."""

    speeds: tuple[tuple[int, float], ...] = ()
    """Speeds of ranks that were measured slow; 1 is that of a healthy one."""
    links: tuple[tuple[str, str, float], ...] = ()
    """Speeds of slow links, between two nodes."""
    kept_out: tuple[int, ...] = ()
    """Ranks that were to get no work: unfit, not measured yet, or about to leave."""
    times: LearnedTimes | None = None
    """None if nothing was measured."""


class OtherPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A possible plan that was not chosen: its name, and its predicted time of an iteration."""

    name: str
    predicted: float


class PlanDecided(Entry, frozen=True, kw_only=True):
    """A plan was decided. `action` is the fate of the iteration under way: there was none, it is redone, or it
    counts."""

    plan: Plan
    next_iteration: int
    action: Literal["start", "redo", "commit", "between"]
    finish: StepOutcome | None
    reason: str
    bytes_planned: int = 0
    """State that has to move between ranks, from the two layouts alone."""
    predicted: float | None = None
    """Predicted time of an iteration under the plan, in `unit`; None if not known."""
    present: float | None = None
    """The same for the plan in effect in the present situation; None if there is none, or if it cannot run any more."""
    unit: Literal["s", "layer times"] = "layer times"
    """Unit of the two predictions. A layer time is the forward of one layer on a healthy device; then only their ratio
    is meaningful."""
    basis: PlanBasis | None = None
    """None in legacy journals."""
    considered: tuple[OtherPlan, ...] = ()
    """Other possible plans, in `unit`; empty if no other was priced, and in legacy journals."""
    unaffected_by: tuple[int, ...] = ()
    """Lasting failures that do not slow the plan, because the slow component has no work under it
    (`resihp.record.slowness`)."""


class IterationCommitted(Entry, frozen=True, kw_only=True):
    """An iteration was committed. `seconds` is the duration on the slowest rank, of the attempt that counted; None if
    no rank survived to report it."""

    epoch: int
    outcome: StepOutcome
    seconds: float | None
    predicted_seconds: float | None


class EvaluationDone(Entry, frozen=True, kw_only=True):
    """The weights after `iteration` were evaluated on the evaluation data set; `loss` is the mean over `tokens`."""

    epoch: int
    iteration: int
    loss: float
    tokens: int


Component = Literal["process", "device", "node", "link", "script", "job", "collective", "reduction", "data"]
"""The component that failed. The last four can only be slow: whole iterations, tensor-parallel collectives of a stage's
group, gradient sums, the wait for a stage's first micro-batch."""
Outcome = Literal["", "slow", "lost", "fine", "unconfirmed", "passed", "dropped"]
"""The outcome of a suspicion. "slow": a verdict. "lost": the silent component ended, or was given up. "fine": the probe
found all devices healthy, which starts a cooldown for the same observation. "unconfirmed": nothing could be measured.
"passed": it was over before it was measured. "dropped": another cause explains it, or the plan it was seen under is
gone."""


class Suspected(Entry, frozen=True, kw_only=True):
    """A suspicion: silence, lack of progress, or slowness. Not a failure.

    `cleared` True when it has ended. A suspicion of slowness (of no component in particular if rank and node are None)
    also ends with a failure that is found. For silence, `iteration` and `detected` are the first uncommitted iteration,
    and `change` and `confidence` are meaningless.
    """

    rank: int | None
    node: str | None
    evidence: str
    cleared: bool = False
    kind: Literal["silent", "slow"] = "silent"
    suspicion: int = 0
    """Number of the suspicion in the job, from 1, of slowness and of silence together; the entry that ends a suspicion
    has the same number. 0 in legacy journals, where suspicions of silence had none."""
    component: Component = "device"
    ranks: tuple[int, ...] = ()
    """All suspects, the most likely first; for a link its ends."""
    iteration: int = 0
    """First iteration of the onset; `detected` is that of the detection."""
    detected: int = 0
    change: float = 0.0
    """As `Finding.change`: time over healthy time, minus 1."""
    confidence: float = 0.0
    probe: int = 0
    """Number of the probe that was taken for it; 0 for none."""
    outcome: Outcome = ""
    sign: str = ""
    """The sign of silence: "silent" (a node's heartbeats are missing), "stopped" (the process is stopped), "mute" (its
    interpreter does not answer), "unanswered" (its device does not answer), "stalled" (its peers wait for it)."""
    test: str = ""
    """The test that raised it, with its unit: "s without a beat", "s without progress", or as in
    `resihp.detector.sequential.shifts.Alarm`; empty if there was no test, or in legacy journals."""
    statistic: float | None = None
    """Value of the test, and the threshold that it has to reach for a suspicion."""
    threshold: float | None = None

    @property
    def sort(self) -> str:
        """One word for the kind of suspicion: "slow-compute", "slow-link", "silent", and others to come."""
        if self.kind == "silent":
            return self.sign or ("silent" if self.rank is None else "stalled")
        return "slow-compute" if self.component == "device" else f"slow-{self.component}"


class CoverageChanged(Entry, frozen=True, kw_only=True):
    """The detector's coverage of the job has changed. Before the first such entry, the detector is warming up.

    `detector`: its basis of judgement, as in `findings.Known`, or "iterations" if its mode judges no single rank;
    `unwatched`: ranks with work that have not reported to it for long.
    """

    iteration: int
    detector: Literal["warming up", "workload", "iterations", "plain times"]
    unwatched: tuple[int, ...]


class Diagnosed(msgspec.Struct, frozen=True, kw_only=True):
    """A diagnosis: the kind of error, its ranks, and its place (`resihp.detector.diagnosis`)."""

    code: str
    category: str
    ranks: tuple[int, ...]
    node: str | None
    device: int | None


class FailureFound(Entry, frozen=True, kw_only=True):
    """One root cause. `failure` numbers the job's failures from 1.

    `kind`: `fail-stop` (a process, device or node), `fail-slow` (it works, but slower), `communication` (ranks alive,
    transfer broken), `program` (the training script). `detect_s` is known only if the moment of the fault is
    (injected), else None. For slowness: `iteration` is the first slow one, `speed` the remaining share of the speed of
    a healthy device or link, `confidence` that of the detector, `link` the ranks at its ends.
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
    """Seconds before this entry at which it was noticed: entries wait until all failures of the same moment are known.
    None in legacy journals."""
    failed_s: float | None = None
    """Seconds before this entry at which it failed, as precisely as that can be known
    (`resihp.controller.fail_stop.onsets`); None if nothing shows it, and in legacy journals."""
    speed: float | None = None
    confidence: float | None = None
    link: tuple[int, int] | None = None
    intermittent: bool = False
    """For slowness: only now and then; `speed` is the average."""
    idle: bool = False
    """For slowness: the component has no work under the plan in effect."""
    hardware: bool | None = None
    """Whether hardware of the node is broken, rather than that the node died; None in journals of 0.1."""
    diagnosed: Diagnosed | None = None
    """The diagnosis, if there was one: a device with the same diagnosis again is the cause itself."""
    explains: tuple[str, ...] = ()
    """Node-level log lines used as evidence, beside those in `evidence`; not to be reused for later failures."""

    def noticed_at(self, at: float) -> float:
        """Return the time of the notice. `at`: the time of the failure's record."""
        return at - (self.noticed_s or 0.0)

    def failed_at(self, at: float) -> float | None:
        return None if self.failed_s is None else at - self.failed_s

    def confirms(self, component: str, ranks: tuple[int, ...]) -> bool:
        """Return whether this verdict of slowness ends an open suspicion about `component` and `ranks`."""
        is_alike = component == self.component or (component, self.component) == ("job", "device")
        return self.kind == "fail-slow" and is_alike and (not ranks or not set(ranks).isdisjoint(self.ranks))


class FailureEnded(Entry, frozen=True, kw_only=True):
    """A slow component is as fast as before, from `iteration` on."""

    failure: int
    node: str | None
    device: int | None
    iteration: int
    evidence: str


class DeviceProbe(msgspec.Struct, frozen=True, kw_only=True):
    """One device's part of a probe: its own figures, and its speed relative to its peers (None: nothing to compare
    with)."""

    rank: int
    node: str
    device: int
    flops: float
    memory_bytes: float
    speed: float | None
    fit: bool
    evidence: str
    hardware: str = ""
    """The maker's name; empty if not known."""


class LinkProbe(msgspec.Struct, frozen=True, kw_only=True):
    """A link between two ranks: its speed relative to its peers (None: nothing to compare with), and its own figure."""

    ranks: tuple[int, int]
    nodes: tuple[str, str]
    speed: float | None
    fit: bool
    seconds: float = 0.0
    """Time of one buffer there and back."""


class ProbesTaken(Entry, frozen=True, kw_only=True):
    """Devices and links were measured: before the first iteration, when a device joined, on a suspicion, or regularly
    while a device stands by because it was slow."""

    probe: int
    occasion: Literal["start", "join", "suspicion", "standby"]
    devices: tuple[DeviceProbe, ...]
    links: tuple[LinkProbe, ...]
    seconds: float
    looks: int = 1
    """Number of times that devices in doubt were measured until they were judged."""
    share: Speed | None = None
    """Share of their former speed that all devices have left, as far as the probe of a suspicion shows it."""


class Reconfigured(Entry, frozen=True, kw_only=True):
    """One transition, from the detection of the failure to the first committed iteration after it.

    Phases in seconds, in order: `park` (detected to all parked), `plan` (to all confirmed), `groups` and `state` (the
    slowest rank's own figures), `first_iteration` (resumed to committed). `seconds` is their total as observed.
    `bytes_moved` is the number of bytes that ranks received in all, `extra_bytes` the most that any rank held beside
    its state while it had the state of both layouts. `action` "between": parked between two iterations, no work was
    under way. `planning_s`: the part of `plan_s` before any rank could be told; None in legacy journals, or if not
    measured.
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


class PlanInEffect(Entry, frozen=True, kw_only=True):
    """Every rank has acknowledged its state: from here on the state is where this epoch's layout says.

    The cost of the change, for the price of the next one: `took_s` until all ranks had their state, `busiest_bytes`
    that the busiest rank held beside its own, `communicators` that were built. None in journals of 0.1.
    """

    epoch: int
    took_s: float | None = None
    busiest_bytes: int = 0
    communicators: int = 0


class PlanWithdrawn(Entry, frozen=True, kw_only=True):
    """A plan was decided and proposed, but no rank will act on it, because the job is to stop."""

    epoch: int
    reason: str


class ChangeDecided(Entry, frozen=True, kw_only=True):
    """Training is interrupted for another plan, because of `devices` (node, device) or `links` (two ranks), because
    measured times require other layers and orders (`tuned`), or because a search `found` a better plan.

    Each recent change because of the same component makes the next one more expensive.
    """

    reason: str
    devices: tuple[tuple[str, int], ...] = ()
    links: tuple[tuple[int, int], ...] = ()
    tuned: bool = False
    found: bool = False


class ChangeDeclined(Entry, frozen=True, kw_only=True):
    """Another plan, or another node, was considered, and nothing was changed. For nodes, recorded once for the same
    missing ones.

    `reason`: the occasion; `why`: the reason against a change. The alternative: its `layout`, with the predictions for
    it and for the plan in effect, if there are any, as in `PlanDecided`.
    """

    about: Literal["plan", "node"]
    reason: str
    why: str
    iteration: int
    failures: tuple[int, ...] = ()
    """Verdicts that were the occasion."""
    layout: str = ""
    predicted: float | None = None
    present: float | None = None
    unit: Literal["s", "layer times"] = "layer times"
    considered: tuple[OtherPlan, ...] = ()


class PlanRefused(Entry, frozen=True, kw_only=True):
    """A plan was refused before any rank acted on it: `rank` objected, or the controller's own check failed (`rank`
    None)."""

    epoch: int
    rank: int | None
    reason: str


class JoinRefused(Entry, frozen=True, kw_only=True):
    """A new process on a device was turned away; the job goes on without it."""

    rank: int
    node: str
    device: int
    reason: str
    condemns_device: bool = True
    """Whether its device gets no other process. Journals of 0.1 do not have it; a supervisor of 0.1 acted as if it were
    True."""


class IterationsUnreported(Entry, frozen=True, kw_only=True):
    """Iterations up to `last` were done while no supervisor led, and their figures are lost."""

    first: int
    last: int


class IterationsPacked(Entry, frozen=True, kw_only=True):
    """Consecutive committed iterations, as columns (`resihp.record.packing`).

    It stands for `count` records, the last of which has its number. `first`: the iteration of the first one. Only files
    contain it: the ledger gets the records it stands for.
    """

    epoch: int
    first: int
    count: int
    columns: tuple[bytes, ...]

    @property
    def last(self) -> int:
        """Iteration of the last record it stands for."""
        return self.first + self.count - 1


class ModelDeclared(Entry, frozen=True, kw_only=True):
    """The common declaration of all ranks: the knowledge of the model that a later supervisor needs."""

    declare: Declare
    software: Software | None = None


class LeaderChosen(Entry, frozen=True, kw_only=True):
    """A supervisor took over: the first record of its term, whose numbers begin at `first_seq(term)`.

    `node` is where it runs. `how`: the guardian restarted it, or a quorum of agents chose a successor. `after`: number
    of the last record of the journal it took over.
    """

    term: int
    node: str
    host: str
    how: Literal["restarted", "elected"]
    after: int = 0


class JobSignalled(Entry, frozen=True, kw_only=True):
    """Slurm, or an operator, asks the job to stop; this is not a failure. `nodes`: nodes whose agents were signalled as
    well.

    `meaning`: `warning` (time is running out, sent ahead by --signal), `time-limit`, `cancelled`, `preempted` or
    `unknown`, as far as Slurm reports it; `operator` for a signal to `resihp run` itself, or a request by `resihp
    stop`. That request sends no signal, so `signal` is 0.
    """

    signal: int
    nodes: tuple[str, ...]
    meaning: Literal["warning", "time-limit", "cancelled", "preempted", "unknown", "operator"]


class DrainDecided(Entry, frozen=True, kw_only=True):
    """The measure against a node with a verdict. `drain` numbers these decisions from 1, `failure` is the verdict's.

    `measure`: whether it is drained, or only excluded from the user's next jobs; `grounds`: the reason, as in
    `resihp.controller.nodes.measures`. Older journals have only drains.
    """

    drain: int
    node: str
    failure: int
    reason: str
    measure: Literal["drain", "exclude"] = "drain"
    grounds: Literal["hardware", "died again", "died", "agent"] = "hardware"


class DrainWaived(Entry, frozen=True, kw_only=True):
    """Nothing is done about the node of a failure: it was signalled, other nodes were lost with it, it is the batch
    script's own, or the job only observes."""

    node: str
    failure: int


class DrainAnswered(Entry, frozen=True, kw_only=True):
    """The result of one rung of the drain ladder. `unknown`: no answer, so it may have been done."""

    drain: int
    node: str
    step: Literal["slurm", "spool", "exclusion"]
    outcome: Literal["done", "refused", "unknown"]
    text: str


class NodeReleased(Entry, frozen=True, kw_only=True):
    """A node was given back to Slurm, or could not be given back now."""

    node: str
    outcome: Literal["done", "refused", "unknown"]
    text: str


class ReplacementAsked(Entry, frozen=True, kw_only=True):
    """A node is requested in place of `node`. `replacement` numbers the job's requests from 1."""

    replacement: int
    node: str
    excluded: tuple[str, ...]
    reason: str


class ReplacementChanged(Entry, frozen=True, kw_only=True):
    """The state of a request has changed. `node` is the new node's name, once it is known."""

    replacement: int
    state: Literal["pending", "running", "joined", "refused", "cancelled", "ended"]
    slurm_job: str | None
    node: str | None
    text: str


class SlurmSaw(Entry, frozen=True, kw_only=True):
    """Slurm's own view of one of our nodes, when it is unexpected or has changed."""

    node: str
    state: str
    text: str


class FaultInjected(Entry, frozen=True, kw_only=True):
    """A fault is injected; written before it is carried out. `kind` is empty in journals of 0.1, where `text` begins
    with it."""

    fault: int
    text: str
    rank: int | None
    node: str | None
    iteration: int
    kind: str = ""


class CheckpointCommitted(Entry, frozen=True, kw_only=True):
    iteration: int
    folder: str
    bytes: int
    seconds: float


class JobEnded(Entry, frozen=True, kw_only=True):
    """The job has ended. `state`: completed, failed, cancelled (signalled), abnormal (found dead by a successor or a
    reader)."""

    exit_code: int | None
    state: Literal["completed", "failed", "cancelled", "abnormal"]
    reason: str


AnyEntry = (
    JobStarted
    | NodeJoined
    | NodeLost
    | WorkersOrdered
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
    | FaultInjected
    | CheckpointCommitted
    | JobEnded
)


TERM_SEQS = 10**9
"""Number of record numbers per term: a record's number is unique for the life of the job, whichever supervisor wrote
it."""


def first_seq(term: int) -> int:
    return (term - 1) * TERM_SEQS + 1


def term_of(seq: int) -> int:
    """Return the term in which a record was written; 0 for no record."""
    return (seq - 1) // TERM_SEQS + 1 if seq else 0


class Record(msgspec.Struct, frozen=True):
    """One journal record: number, UTC time in seconds since 1970, entry.

    Numbers are consecutive from 1, except for a gap where a new term begins (`first_seq`).
    """

    seq: int
    at: float
    entry: AnyEntry
