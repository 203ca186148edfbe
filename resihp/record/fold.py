"""Define the effect of each journal entry on the job's record. No other module defines it.

`apply` is called for each entry in order: by the controller for its own decisions, by a new supervisor for earlier
decisions, and by any other reader of a journal. It makes no decision and knows no time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from resihp.protocol.messages import Speed
from resihp.record.journal import (
    AnyEntry,
    ChangeDecided,
    CheckpointCommitted,
    CheckpointDistrusted,
    CounterSeen,
    CoverageChanged,
    DrainAnswered,
    DrainDecided,
    DrainWaived,
    EvaluationDone,
    FailureEnded,
    FailureFound,
    FaultInjected,
    IterationCommitted,
    IterationsPacked,
    IterationsUnreported,
    JobEnded,
    JobSignalled,
    JobStarted,
    JoinRefused,
    LeaderChosen,
    LossNotFinite,
    ModelDeclared,
    NodeJoined,
    NodeLost,
    NodeReleased,
    PlanDecided,
    PlanInEffect,
    PlanRefused,
    PlanWithdrawn,
    ProbesTaken,
    Reconfigured,
    ReplacementAsked,
    ReplacementChanged,
    RestartDecided,
    RollbackDecided,
    SlurmSaw,
    Suspected,
    WorkerEnded,
    WorkersOrdered,
    WorkerStarted,
)
from resihp.record.state import (
    MAX_WRITER_PLANS,
    RECENT_ITERATIONS,
    ChangeCost,
    Drain,
    JobRecord,
    KnownNode,
    KnownWorker,
    LostNode,
    Placement,
    Proposed,
    Replacement,
    Slow,
    Verdict,
    is_unfit_after,
    occasions_of,
)


def fold(entries: Iterable[AnyEntry]) -> JobRecord:
    """Return the record that results from these entries, applied in order."""
    record = JobRecord()
    for entry in entries:
        apply(record, entry)
    return record


def apply(record: JobRecord, entry: AnyEntry) -> None:
    """Update the record with one entry. An entry without an effect leaves it unchanged."""
    match entry:
        case JobStarted():
            record.leader = record.incumbent = entry.leader
        case LeaderChosen():
            record.leader = entry.node
        case RestartDecided():
            record.decide_restart(entry)
        case RollbackDecided():
            _roll_back(record, entry)
        case NodeJoined() | NodeLost() | WorkersOrdered() | WorkerStarted() | WorkerEnded() | JoinRefused():
            _places(record, entry)
        case ModelDeclared() | PlanDecided() | PlanRefused() | PlanWithdrawn() | PlanInEffect() | ChangeDecided():
            _plans(record, entry)
        case IterationCommitted() | IterationsPacked() | IterationsUnreported():
            _progress(record, entry)
        case CheckpointCommitted() | EvaluationDone() | CounterSeen() | LossNotFinite() | CheckpointDistrusted():
            _progress(record, entry)
        case FailureFound(kind="fail-slow") | FailureEnded() | ProbesTaken():
            _speeds(record, entry)
        case Suspected():
            _suspicion(record, entry)
        case FailureFound():
            _failure(record, entry)
        case FaultInjected():
            _fault(record, entry)
        case DrainDecided() | DrainWaived() | DrainAnswered() | NodeReleased() | SlurmSaw():
            _maintenance(record, entry)
        case ReplacementAsked() | ReplacementChanged():
            _replacement(record, entry)
        case Reconfigured():
            record.recovered, record.recovered_epoch = max((record.recovered, *entry.failures)), entry.epoch
        case CoverageChanged():
            record.detector, record.unwatched = entry.detector, entry.unwatched
        case JobSignalled():
            record.signalled = entry
            record.verdicts.clear()  # no measure is taken against nodes that failed before the stop
        case JobEnded():
            record.ended = entry
        case _:
            pass


# --- nodes and processes ------------------------------------------------------------------------------------------


def _places(
    record: JobRecord, entry: NodeJoined | NodeLost | WorkersOrdered | WorkerStarted | WorkerEnded | JoinRefused
) -> None:
    match entry:
        case NodeJoined():
            record.nodes[entry.node] = KnownNode(
                entry.node, entry.host, entry.devices, entry.hardware, entry.incarnation
            )
            record.lost.pop(entry.node, None)  # it was given up and has joined after all
            record.unexplained_nodes.pop(entry.node, None)
            record.verdicts.pop(entry.node, None)
            if record.needs_voters:
                record.voters |= {entry.node}
        case NodeLost():
            record.nodes.setdefault(entry.node, KnownNode(entry.node, host="", devices=0)).alive = False
            if record.plan is None:
                record.voters -= {entry.node}
            record.lost[entry.node] = LostNode(entry.node, entry.reason, entry.how or "silent")
            if entry.how != "vacated":
                record.unexplained_nodes[entry.node] = entry.reason
        case WorkersOrdered():
            if entry.round > record.round:
                record.begin_round(entry)
            elif not record.placements:
                record.checkpoints.begin_round(entry, None)
            for rank, node, device in entry.workers:
                _place(record, rank, node, device)
        case WorkerStarted():
            _place(record, entry.rank, entry.node, entry.device)
            worker = KnownWorker(entry.rank, entry.node, entry.device, entry.pid)
            worker.joins = record.first_plan is not None
            record.workers[entry.rank] = worker
        case WorkerEnded():
            record.unexplained[entry.rank] = entry.exit
            record.epoch = max(record.epoch, entry.epoch)
            if entry.rank in record.workers:
                record.workers[entry.rank].alive = False
        case JoinRefused():
            _place(record, entry.rank, entry.node, entry.device)
            record.unexplained.pop(entry.rank, None)
            if record.first_plan is None:  # a later failure names the rank
                record.unexplained[entry.rank] = None
            record.refused[entry.rank] = entry.reason
            if entry.rank in record.workers:
                record.workers[entry.rank].refused = entry.reason
            if entry.condemns_device:
                record.dead_devices.add((entry.node, entry.device))


def _place(record: JobRecord, rank: int, node: str, device: int) -> None:
    """Note the node and device on which a rank was ordered to start. Skipped rank numbers get an empty placement."""
    while len(record.placements) <= rank:
        record.placements.append(Placement("", -1))
    record.placements[rank] = Placement(node, device)


# --- plans --------------------------------------------------------------------------------------------------------


def _plans(
    record: JobRecord,
    entry: ModelDeclared | PlanDecided | PlanRefused | PlanWithdrawn | PlanInEffect | ChangeDecided,
) -> None:
    match entry:
        case ModelDeclared():
            record.trains = entry.declare
            record.goal = entry.declare.iterations
            if record.counter is not None:  # the script printed iterations of something else before
                record.counter, record.committed, record.last_outcome = None, 0, None
                record.recent.clear()
            record.committed = max(record.committed, entry.declare.resume_from)
        case PlanDecided():
            record.decided = entry.plan
            record.proposed = Proposed(entry.plan, record.leader, record.voters_of(entry.plan))
            record.first_plan = record.first_plan or entry.plan
            record.enrolled.update(entry.plan.layout.ranks)
            record.epoch = max(record.epoch, entry.plan.epoch)
        case PlanRefused() | PlanWithdrawn() if (
            record.proposed is not None and record.proposed.plan.epoch == entry.epoch
        ):
            # No rank has acted on this plan, so a quorum of its voters is no longer needed. A quorum of the voters of
            # the plan in effect was needed all the time, so every later quorum shares an agent with every earlier one.
            record.proposed = None
        case PlanInEffect() if record.proposed is not None and record.proposed.plan.epoch == entry.epoch:
            plan, record.incumbent, record.voters = record.proposed
            if record.plan is not None and record.plan.micro_batches != plan.micro_batches:
                # a larger batch must not make ranks look late
                growth = plan.micro_batches / record.plan.micro_batches
                record.recent = deque((seconds * growth for seconds in record.recent), maxlen=RECENT_ITERATIONS)
            record.plan, record.proposed = plan, None
            record.active = plan.layout.active
            record.working = frozenset(record.active)
            record.computing = plan.computing
            if plan.layout.replicas:
                record.writers[plan.epoch] = plan.layout.model_copy(0).ranks
            record.writers = dict(sorted(record.writers.items())[-MAX_WRITER_PLANS:])
            if entry.took_s is not None:
                record.costs.append(ChangeCost(entry.busiest_bytes, entry.communicators, entry.took_s))
        case ChangeDecided():
            for occasion in occasions_of(entry):
                record.changes[occasion] = record.changes.get(occasion, 0) + 1


def _progress(
    record: JobRecord,
    entry: IterationCommitted
    | IterationsPacked
    | IterationsUnreported
    | CheckpointCommitted
    | EvaluationDone
    | CounterSeen
    | LossNotFinite
    | CheckpointDistrusted,
) -> None:
    match entry:
        case IterationCommitted():
            record.committed = entry.outcome.iteration
            record.last_outcome = entry.outcome
            if entry.seconds is not None:
                record.recent.append(entry.seconds)
            if math.isfinite(entry.outcome.loss):
                record.loss_not_finite = 0
        case IterationsUnreported() | IterationsPacked():  # `journal_file.LEFT_UNPACKED` others follow packed ones
            record.committed = entry.last
        case CheckpointCommitted() if entry.modified is None and entry.iteration > record.committed:
            pass  # it was completed after a rollback: its iterations are trained again
        case CheckpointCommitted():
            record.checkpointed = max(record.checkpointed, entry.iteration)
            if entry.modified is None:
                record.rollbacks.saved(entry.iteration, entry.folder)
            if entry.modified is not None and record.checkpoints.found(entry, record.restart):
                record.fruitless = 0
        case CheckpointDistrusted():
            record.checkpoints.distrust(entry)
            if entry.failure:  # an older checkpoint deserves a try
                record.fruitless = max(0, record.fruitless - 1)
        case EvaluationDone():
            record.evaluated = max(record.evaluated, entry.iteration)
        case CounterSeen():
            record.counter = entry
            record.goal = entry.goal or 0
        case LossNotFinite():
            record.loss_not_finite = entry.iteration


def _roll_back(record: JobRecord, entry: RollbackDecided) -> None:
    """Forget everything after the iteration from which training goes on. The plan in effect stays until the next one is
    in effect."""
    record.rollbacks.decide(entry)
    record.epoch = max(record.epoch, entry.epoch)
    record.committed, record.last_outcome = entry.iteration, None
    record.evaluated = min(record.evaluated, entry.iteration)
    record.writers = {}


# --- failures -----------------------------------------------------------------------------------------------------


def _failure(record: JobRecord, entry: FailureFound) -> None:
    """Apply a failure other than slowness."""
    record.failures, record.last_failed = max(record.failures, entry.failure), entry.component
    if entry.diagnosed is not None:
        record.diagnosed.append(entry.diagnosed)
    lines = {*entry.evidence.splitlines(), *entry.explains}
    for node in {record.workers[rank].node for rank in entry.ranks if rank in record.workers}:
        record.explained.setdefault(node, set()).update(lines)
    for rank in entry.ranks:
        record.unexplained.pop(rank, None)
    if entry.component == "process":
        record.count_failed_process(entry.node, entry.device)
    if entry.node is None or entry.component not in ("node", "device"):
        return
    if entry.component == "node":
        record.unexplained_nodes.pop(entry.node, None)
    if entry.kind != "fail-stop":
        return
    if entry.component == "device" and entry.device is not None:
        record.dead_devices.add((entry.node, entry.device))
    if record.signalled is not None:
        return
    lost, hardware = record.lost.get(entry.node), entry.hardware
    if hardware is None:  # journal of a development version
        hardware = lost is None or entry.cause != f"node {lost.name}: {lost.reason}"
    verdict = record.verdicts.get(entry.node)
    if verdict is None or not verdict.hardware:
        record.verdicts[entry.node] = Verdict(entry.failure, entry.node, entry.cause, entry.ranks, hardware)


def _fault(record: JobRecord, entry: FaultInjected) -> None:
    record.fired.add(entry.fault)
    kind = entry.kind or entry.text.partition(":")[0]
    if kind == "kill" and entry.rank in record.workers:
        worker = record.workers[entry.rank]
        record.dead_devices.add((worker.node, worker.device))


def _suspicion(record: JobRecord, entry: Suspected) -> None:
    """Apply the beginning or the end of a suspicion.

    At most one suspicion of slowness is open in the job; a further one is journaled as already ended. At most one
    suspicion of silence is open for each rank and each node.
    """
    record.suspicions = max(record.suspicions, entry.suspicion)
    if entry.kind == "silent":
        subject = entry.node if entry.rank is None else entry.rank
        if subject is None:
            return
        if entry.cleared:
            record.suspects_silent.pop(subject, None)
        elif entry.suspicion:
            record.suspects_silent[subject] = entry
        return
    open_suspicion = record.suspects_slow
    if not entry.cleared:
        record.suspects_slow = entry
    elif open_suspicion is None or entry.suspicion == open_suspicion.suspicion:
        record.suspects_slow = None


def _speeds(record: JobRecord, entry: FailureFound | FailureEnded | ProbesTaken) -> None:
    match entry:
        case FailureFound():
            record.failures = max(record.failures, entry.failure)
            record.slow_failures.add(entry.failure)
            if entry.speed is None:
                return
            slow = Slow(
                failure=entry.failure, speed=entry.speed, since=entry.iteration, intermittent=entry.intermittent
            )
            record.suspects_slow = None
            if entry.component == "job":
                record.slow_job = slow
            elif entry.component in ("collective", "reduction", "data"):
                record.slow_parts[entry.component, entry.ranks] = slow
            elif entry.link is not None:
                record.slow_links[entry.link] = slow
            elif entry.node is not None and entry.device is not None:
                record.slow[entry.node, entry.device] = slow
        case FailureEnded(node=str(node), device=int(device)) if (
            device_slowness := record.slow.get((node, device))
        ) is not None and device_slowness.failure == entry.failure:
            del record.slow[node, device]
        case FailureEnded():
            if record.slow_job is not None and record.slow_job.failure == entry.failure:
                record.slow_job, record.common_share = None, None
            for slows in (record.slow, record.slow_links, record.slow_parts):
                for subject in [subject for subject, slow in slows.items() if slow.failure == entry.failure]:
                    del slows[subject]  # type: ignore[arg-type]
        case ProbesTaken():
            _probes(record, entry)


def _probes(record: JobRecord, entry: ProbesTaken) -> None:
    if entry.occasion == "start":
        others = record.link_seconds if entry.probe == record.probes else {}  # from other entries of the same probe
        record.link_seconds = others | {link.ranks: link.seconds for link in entry.links if link.seconds}
    record.probes = max(record.probes, entry.probe)
    if entry.share is not None:
        record.common_share = entry.share
    share = record.common_share or Speed(flops=1.0, memory_bytes=1.0)
    for probe in entry.devices:
        place = (probe.node, probe.device)
        if probe.fit and probe.flops:
            flops, memory_bytes = probe.flops / share.flops, probe.memory_bytes / share.memory_bytes
            record.reference.setdefault(place, Speed(flops=flops, memory_bytes=memory_bytes, hardware=probe.hardware))
        no_answer = not probe.fit and probe.speed is None
        (record.unanswered.add if no_answer else record.unanswered.discard)(place)
        if entry.occasion == "suspicion":
            continue
        unfit = is_unfit_after(entry.occasion, probe.speed, passed=probe.fit, was_unfit=place in record.unfit)
        if not unfit:
            record.unfit.discard(place)
            record.unfit_probes.pop(place, None)
        elif not probe.fit:
            record.unfit.add(place)
            record.unfit_probes[place] = record.unfit_probes.get(place, 0) + 1


# --- nodes out, nodes in ------------------------------------------------------------------------------------------


def _maintenance(
    record: JobRecord, entry: DrainDecided | DrainWaived | DrainAnswered | NodeReleased | SlurmSaw
) -> None:
    match entry:
        case DrainDecided():
            record.drains[entry.drain] = Drain(
                entry.drain, entry.node, entry.failure, entry.reason, entry.measure, entry.grounds
            )
            record.verdicts.pop(entry.node, None)
        case DrainWaived():
            record.verdicts.pop(entry.node, None)
        case DrainAnswered() if entry.drain in record.drains:
            record.drains[entry.drain].answers[entry.step] = entry.outcome
        case NodeReleased() if entry.node in record.lost:
            record.lost[entry.node].release_answered = True
            record.lost[entry.node].released = entry.outcome == "done"
        case SlurmSaw():
            record.slurm_sees[entry.node] = (entry.state, entry.text)


def _replacement(record: JobRecord, entry: ReplacementAsked | ReplacementChanged) -> None:
    match entry:
        case ReplacementAsked():
            record.replacements[entry.replacement] = Replacement(entry.replacement, entry.node, entry.excluded)
        case ReplacementChanged() if entry.replacement in record.replacements:
            request = record.replacements[entry.replacement]
            if request.open and entry.state in ("refused", "ended"):
                record.failed_requests += 1
            request.state, request.slurm_job, request.node = entry.state, entry.slurm_job, entry.node
            request.joined = request.joined or entry.state == "joined"
            request.texts.add(entry.text)
