"""What is remembered of a job: the entries of its journal.

Entries are facts and decisions in the order in which the controller made them. The supervisor writes each one down
(`resihp.record.journal_file`) *before* the actions that follow it take effect; the SQL ledger (`db`) is a projection of
the journal and may lag behind it or be rebuilt from it. Telemetry (`resihp.protocol.Progress`, per-rank reports) is not
in it.
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
    """What Slurm's own records call a job. `job`: its number, which is used again some day (sacct's JobIDRaw);
    `array_job`, `array_task`: None of what is no element of an array; `submitted_at`: UTC, seconds since 1970, None
    where Slurm did not tell."""

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

    `leader` is the node on which the supervisor runs; empty where it runs on none of the job's (`--local`). `run`: what
    attempts have in common that go on from each other's checkpoints; empty in journals of before. `slurm`: None outside
    of Slurm, and there.
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
    """`hardware`: what its devices are, by their maker's name; empty where that is not known.

    `incarnation`: of its agent (`messages.Join`), the only one that may make promises for this node; empty in journals
    of 0.1.
    """

    node: str
    host: str
    devices: int
    hardware: str = ""
    incarnation: str = ""
    inventory: NodeInventory | None = None


class NodeLost(Entry, frozen=True, kw_only=True):
    """A node is none of the job's any more.

    `how`: it fell `silent`, its `agent` ended while the node answers, it is `useless` (all its devices are dead), or it
    was `vacated` for an administrator, which is no failure. Empty in journals of 0.1, where `reason` has to tell
    (`fold.how_lost`).
    """

    node: str
    reason: str
    how: Literal["", "silent", "agent", "useless", "vacated"] = ""


class WorkersOrdered(Entry, frozen=True, kw_only=True):
    """Processes are wanted: (rank, node, device) of each. A rank's number is given once in a job's life.

    Written before agents are told; journals of 0.1 know ranks only once they have started.
    """

    workers: tuple[tuple[int, str, int], ...]


class WorkerStarted(Entry, frozen=True, kw_only=True):
    rank: int
    node: str
    device: int
    pid: int
    epoch: int


class WorkerEnded(Entry, frozen=True, kw_only=True):
    """`exit` as in subprocess: negative for a signal; None when it died with its node and nobody saw how."""

    rank: int
    exit: int | None
    epoch: int


Three = tuple[float, float, float]
"""Forward, gradients of inputs, gradients of weights: seconds of one micro-batch on one healthy device."""


class LearnedTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The job's own times, as a plan was priced in them. `layers`: one where all are alike."""

    layers: tuple[Three, ...]
    embedding: Three
    head: Three
    transfer_s: float = 0.0
    inside_s: float = 0.0
    gradient_s: float = 0.0
    step_s: float = 0.0


class PlanBasis(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan was decided from, as far as nothing else tells it: for whoever explains the plan afterwards."""

    speeds: tuple[tuple[int, float], ...] = ()
    """Of ranks that were measured slow, 1 a healthy one's."""
    links: tuple[tuple[str, str, float], ...] = ()
    """Slow ones, between two nodes."""
    kept_out: tuple[int, ...] = ()
    """Ranks that were not to get work: unfit, not measured yet, or about to leave."""
    times: LearnedTimes | None = None
    """None where nothing was measured."""


class OtherPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan that was possible, and was not taken: what it would have been called, and its time of an iteration."""

    name: str
    predicted: float


class PlanDecided(Entry, frozen=True, kw_only=True):
    """`action` tells what becomes of the iteration that was under way: none was, it is redone, or it counts."""

    plan: Plan
    next_iteration: int
    action: Literal["start", "redo", "commit", "between"]
    finish: StepOutcome | None
    reason: str
    bytes_planned: int = 0
    """State that has to travel between ranks, from the two layouts alone."""
    predicted: float | None = None
    """Time of an iteration under the plan, in `unit`; None where nobody could tell."""
    present: float | None = None
    """The same for the plan in effect, as things are now; None when there is none, or when it cannot run any more."""
    unit: Literal["s", "layer times"] = "layer times"
    """Of the two predictions. A layer time is the forward of one layer on a healthy device; only ratios tell then."""
    basis: PlanBasis | None = None
    """None in journals that do not tell."""
    considered: tuple[OtherPlan, ...] = ()
    """What else was possible, in `unit`; empty where nothing else was priced, and in journals of before."""
    unaffected_by: tuple[int, ...] = ()
    """Failures that last and do not slow it, as what is slow has no work under it (`resihp.record.slowness`)."""


class IterationCommitted(Entry, frozen=True, kw_only=True):
    """`seconds` is the slowest rank's, of the attempt that counted; None if no rank lived to report it."""

    epoch: int
    outcome: StepOutcome
    seconds: float | None
    predicted_seconds: float | None


class EvaluationDone(Entry, frozen=True, kw_only=True):
    """The weights after `iteration`, on the data set to evaluate on; `loss` is the mean over `tokens`."""

    epoch: int
    iteration: int
    loss: float
    tokens: int


Component = Literal["process", "device", "node", "link", "script", "job", "collective", "reduction", "data"]
"""What failed. The last four are only ever slow: whole iterations, tensor-parallel collectives of a stage's group, the
sums of gradients, the wait for a stage's first micro-batch."""
Outcome = Literal["", "slow", "lost", "fine", "unconfirmed", "passed", "dropped"]
"""What a suspicion came to. "slow": a verdict. "lost": what was silent ended, or was given up. "fine": the probe found
all well, which pardons what was seen for a while. "unconfirmed": nothing could be measured. "passed": it was over
before. "dropped": others of the same suspicion explain it, or the plan it was seen under is gone."""


class Suspected(Entry, frozen=True, kw_only=True):
    """Silence or lack of progress, or being slow. Not a failure.

    `cleared` True when it has ended. A suspicion to be slow, of nobody in particular where rank and node are None, also
    ends with a failure that is found. Of silence, `iteration` and `detected` are the first one not committed, and
    `change` and `confidence` say nothing.
    """

    rank: int | None
    node: str | None
    evidence: str
    cleared: bool = False
    kind: Literal["silent", "slow"] = "silent"
    suspicion: int = 0
    """Numbers the job's suspicions from 1, of slowness and of silence together; the entry that ends one bears its
    number. 0 in journals of before: there those of silence had none."""
    component: Component = "device"
    ranks: tuple[int, ...] = ()
    """All suspects, the most likely first; of a link its ends."""
    iteration: int = 0
    """Of the onset; and of its detection, below."""
    detected: int = 0
    change: float = 0.0
    """As `Finding.change`: time over healthy, less 1."""
    confidence: float = 0.0
    probe: int = 0
    """The probe that was taken for it; 0 for none."""
    outcome: Outcome = ""
    sign: str = ""
    """What silence shows itself by: "silent" (a node's beats do not come), "stopped" (the process is), "mute" (its
    interpreter does not answer), "unanswered" (its device does not), "stalled" (its peers wait for it)."""
    test: str = ""
    """What was tested when it was raised, and its unit: "s without a beat", "s without progress", or as
    `resihp.detector.sequential.shifts.Alarm` has it; empty where nothing was, or in journals of before."""
    statistic: float | None = None
    """What the test came to, and what it has to reach to be a suspicion."""
    threshold: float | None = None

    @property
    def sort(self) -> str:
        """One word for what is suspected: "slow-compute", "slow-link", "silent", and whatever else is to come."""
        if self.kind == "silent":
            return self.sign or ("silent" if self.rank is None else "stalled")
        return "slow-compute" if self.component == "device" else f"slow-{self.component}"


class CoverageChanged(Entry, frozen=True, kw_only=True):
    """What the detector sees of the job, where that is not what it saw before. None yet: it is warming up.

    `detector`: what it judges by, as in `findings.Known`, or "iterations" where its mode judges no rank by itself;
    `unwatched`: ranks with work of which it has not been told anything for long.
    """

    iteration: int
    detector: Literal["warming up", "workload", "iterations", "plain times"]
    unwatched: tuple[int, ...]


class Diagnosed(msgspec.Struct, frozen=True, kw_only=True):
    """Which kind of error, whose, and where (`resihp.detector.diagnosis`)."""

    code: str
    category: str
    ranks: tuple[int, ...]
    node: str | None
    device: int | None


class FailureFound(Entry, frozen=True, kw_only=True):
    """One root cause. `failure` numbers the job's failures from 1.

    `kind`: `fail-stop` (a process, device or node), `fail-slow` (it works, but slower), `communication` (ranks alive,
    transfer broken), `program` (the training script). `detect_s` is known only where the moment of the fault is
    (injected), else None. For what is slow: `iteration` is the first slow one, `speed` what is left of a healthy
    device's or link's, `confidence` how sure the detector is, `link` the ranks at its ends.
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
    """Seconds before this entry at which it was noticed: entries wait until it is known what else had failed. None in
    journals of before."""
    failed_s: float | None = None
    """Seconds before this entry at which it failed, as well as that can be known
    (`resihp.controller.fail_stop.onsets`); None where nothing tells, and in journals of before."""
    speed: float | None = None
    confidence: float | None = None
    link: tuple[int, int] | None = None
    intermittent: bool = False
    """Of what is slow: now and then; `speed` is what is left on average."""
    idle: bool = False
    """Of what is slow: it has no work under the plan in effect."""
    hardware: bool | None = None
    """Whether something of the node is broken, rather than that it died; None in journals of 0.1."""
    diagnosed: Diagnosed | None = None
    """What the diagnosis came to, where there was one: a device that does it again is at fault itself."""
    explains: tuple[str, ...] = ()
    """Lines about its node as such that it is told by, beside those of the evidence: they explain nothing later."""

    def noticed_at(self, at: float) -> float:
        """`at`: the time of its record."""
        return at - (self.noticed_s or 0.0)

    def failed_at(self, at: float) -> float | None:
        return None if self.failed_s is None else at - self.failed_s


class FailureEnded(Entry, frozen=True, kw_only=True):
    """What was slow is as fast as before, from `iteration` on."""

    failure: int
    node: str | None
    device: int | None
    iteration: int
    evidence: str


class DeviceProbe(msgspec.Struct, frozen=True, kw_only=True):
    """One device's part of a probe: its own figures, and its speed against its peers' (None: nothing to compare)."""

    rank: int
    node: str
    device: int
    flops: float
    memory_bytes: float
    speed: float | None
    fit: bool
    evidence: str
    hardware: str = ""
    """By its maker's name; empty where that is not known."""


class LinkProbe(msgspec.Struct, frozen=True, kw_only=True):
    """A link between two ranks: its speed against its peers' (None: nothing to compare with), and its own figure."""

    ranks: tuple[int, int]
    nodes: tuple[str, str]
    speed: float | None
    fit: bool
    seconds: float = 0.0
    """Of one buffer there and back."""


class ProbesTaken(Entry, frozen=True, kw_only=True):
    """Devices and links were measured: before the first iteration, when a device joined, on a suspicion, or now and
    then one that stands by because it was slow."""

    probe: int
    occasion: Literal["start", "join", "suspicion", "standby"]
    devices: tuple[DeviceProbe, ...]
    links: tuple[LinkProbe, ...]
    seconds: float
    looks: int = 1
    """How often devices in doubt were measured until they were judged."""
    share: Speed | None = None
    """What is left for all devices of what they gave before, as far as a suspicion's probe shows it."""


class Reconfigured(Entry, frozen=True, kw_only=True):
    """One transition, from the failure's detection to the first committed iteration after it.

    Phases in seconds, in order: `park` (detected to all parked), `plan` (to all confirmed), `groups` and `state`
    (slowest rank's own figures), `first_iteration` (resumed to committed). `seconds` is their total as observed.
    `bytes_moved` is what ranks received in all, `extra_bytes` the most that any rank held beside its state while both
    layouts' were there. `action` "between": parked between two iterations, no work was under way. `planning_s`: of
    `plan_s`, what it took to decide before any rank could be told; None in journals of before, or where it was not
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

    What the change took, for the price of the next one: `took_s` until all had their state, `busiest_bytes` that the
    busiest rank held beside its own, `communicators` that were built. None in journals of 0.1.
    """

    epoch: int
    took_s: float | None = None
    busiest_bytes: int = 0
    communicators: int = 0


class PlanWithdrawn(Entry, frozen=True, kw_only=True):
    """A plan that was decided and proposed, and that nobody will act on: the job is to stop."""

    epoch: int
    reason: str


class ChangeDecided(Entry, frozen=True, kw_only=True):
    """Training is interrupted for another plan, because of `devices` (node, device) or `links` (two ranks), because
    measured times ask for other layers and orders (`tuned`), or because a search `found` a better one.

    Each recent change on account of the same one makes the next one dearer.
    """

    reason: str
    devices: tuple[tuple[str, int], ...] = ()
    links: tuple[tuple[int, int], ...] = ()
    tuned: bool = False
    found: bool = False


class ChangeDeclined(Entry, frozen=True, kw_only=True):
    """Another plan, or another node, was thought of, and nothing was changed. Of nodes told once for those missing.

    `reason`: what called for it; `why` nothing was changed. What was thought of: its `layout`, with the prediction for
    it and for the plan in effect, where there are any, as in `PlanDecided`.
    """

    about: Literal["plan", "node"]
    reason: str
    why: str
    iteration: int
    failures: tuple[int, ...] = ()
    """Verdicts that called for it."""
    layout: str = ""
    predicted: float | None = None
    present: float | None = None
    unit: Literal["s", "layer times"] = "layer times"
    considered: tuple[OtherPlan, ...] = ()


class PlanRefused(Entry, frozen=True, kw_only=True):
    """A plan that no rank acted on: `rank` objected, or the controller's own check failed (`rank` None)."""

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
    """Whether its device gets no other process. Journals of 0.1 do not say; a supervisor of 0.1 took it for yes."""


class IterationsUnreported(Entry, frozen=True, kw_only=True):
    """Iterations up to `last` were done while nobody led, and nobody remembers their figures."""

    first: int
    last: int


class IterationsPacked(Entry, frozen=True, kw_only=True):
    """Iterations that were committed one after the other, as columns (`resihp.record.packing`).

    It stands for `count` records, of which its own number is the last. `first`: the first one's iteration. Only files
    hold it: the ledger is told what it stands for.
    """

    epoch: int
    first: int
    count: int
    columns: tuple[bytes, ...]

    @property
    def last(self) -> int:
        """The last one's iteration."""
        return self.first + self.count - 1


class ModelDeclared(Entry, frozen=True, kw_only=True):
    """What the job trains, once all ranks have declared the same: what a later supervisor needs to know of it."""

    declare: Declare
    software: Software | None = None


class LeaderChosen(Entry, frozen=True, kw_only=True):
    """A supervisor took over: the first record of its term, whose numbers begin at `first_seq(term)`.

    `node` is where it runs. `how`: the guardian started it again, or a quorum of agents chose a successor. `after`:
    number of the last record of the journal that it took over.
    """

    term: int
    node: str
    host: str
    how: Literal["restarted", "elected"]
    after: int = 0


class JobSignalled(Entry, frozen=True, kw_only=True):
    """Slurm, or an operator, wants the job to stop; nobody is to blame. `nodes`: whose agents were signalled as well.

    `meaning`: `warning` (time is running out, sent ahead by --signal), `time-limit`, `cancelled`, `preempted` or
    `unknown`, as far as Slurm tells; `operator` for whoever signalled `resihp run` itself, or asked with `resihp stop`,
    which sends no signal: then it is 0.
    """

    signal: int
    nodes: tuple[str, ...]
    meaning: Literal["warning", "time-limit", "cancelled", "preempted", "unknown", "operator"]


class DrainDecided(Entry, frozen=True, kw_only=True):
    """What is done about a node with a verdict. `drain` numbers these decisions from 1, `failure` is the verdict's.

    `measure`: whether it is drained, or only left out of the user's next jobs; `grounds`: what for, as
    `resihp.controller.nodes.measures` has it. Older journals know drains alone.
    """

    drain: int
    node: str
    failure: int
    reason: str
    measure: Literal["drain", "exclude"] = "drain"
    grounds: Literal["hardware", "died again", "died", "agent"] = "hardware"


class DrainWaived(Entry, frozen=True, kw_only=True):
    """Nothing is done about the node of a failure: it was signalled, not alone, or is the batch script's own, or the
    job only observes."""

    node: str
    failure: int


class DrainAnswered(Entry, frozen=True, kw_only=True):
    """How one rung of the drain ladder went. `unknown`: no answer, it may have happened."""

    drain: int
    node: str
    step: Literal["slurm", "spool", "exclusion"]
    outcome: Literal["done", "refused", "unknown"]
    text: str


class NodeReleased(Entry, frozen=True, kw_only=True):
    """A node was given back to Slurm, or could not be now."""

    node: str
    outcome: Literal["done", "refused", "unknown"]
    text: str


class ReplacementAsked(Entry, frozen=True, kw_only=True):
    """A node is wanted in place of `node`. `replacement` numbers the job's requests from 1."""

    replacement: int
    node: str
    excluded: tuple[str, ...]
    reason: str


class ReplacementChanged(Entry, frozen=True, kw_only=True):
    """What became of a request. `node` is the new node's name, once it is known."""

    replacement: int
    state: Literal["pending", "running", "joined", "refused", "cancelled", "ended"]
    slurm_job: str | None
    node: str | None
    text: str


class SlurmSaw(Entry, frozen=True, kw_only=True):
    """Slurm's own view of a node that we had an opinion about, when it changed."""

    node: str
    state: str
    text: str


class FaultInjected(Entry, frozen=True, kw_only=True):
    """Written before the fault is carried out. `kind` is empty in journals of 0.1, whose `text` begins with it."""

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
    """`state`: completed, failed, cancelled (signalled), abnormal (found dead by a successor or a reader)."""

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
"""Record numbers of a term: a record's number is unique for the life of the job, whoever wrote it."""


def first_seq(term: int) -> int:
    return (term - 1) * TERM_SEQS + 1


def term_of(seq: int) -> int:
    """The term in which a record was written; 0 for no record."""
    return (seq - 1) // TERM_SEQS + 1 if seq else 0


class Record(msgspec.Struct, frozen=True):
    """One journal record: number, UTC time in seconds since 1970, entry.

    Numbers are consecutive from 1, but for a gap where a new term begins (`first_seq`).
    """

    seq: int
    at: float
    entry: AnyEntry
