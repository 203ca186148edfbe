"""Take over a job: build a controller from the journal of a dead one and from the agents' inventories.

The journal holds all decisions; `begin` folds it into the record (`record.fold`). The inventories that agents send hold
everything after the last entry. Until they have arrived, nothing is decided, and `handle` queues all other events. Once
all agents have reconnected, or the missing ones have had enough time, `_conclude` compares journal and inventories:
processes that no agent lists have ended, and steps that ranks have taken count. If every rank of the plan in effect
trains undisturbed, training goes on. In any other case all ranks park, in an epoch above any that a rank has heard of,
and the controller makes a new plan from the plan in effect. If a decided plan is missing from this journal, no quorum
had acknowledged it, so no rank has acted on it.

Called only by `controller`. Does not decide about leadership: the shell finds out whether a quorum follows it.
"""

from __future__ import annotations

import signal as signals
from collections.abc import Iterable, Mapping

from resihp.controller import interface as api
from resihp.controller import iterations, replan_policy, shutdown, startup, transition
from resihp.controller.fail_slow import slowness
from resihp.controller.fail_stop import endings, failures, incidents
from resihp.controller.fail_stop.onsets import Commit, Onsets
from resihp.controller.interface import AnyEvent, Dependencies
from resihp.controller.nodes import drains, joins, upkeep
from resihp.controller.rounds import restarts
from resihp.controller.state.beginnings import Recovery
from resihp.controller.state.job import Job
from resihp.controller.state.transitions import Transition
from resihp.errors import ProtocolError
from resihp.protocol import messages as m
from resihp.record.fold import apply
from resihp.record.journal import AnyEntry, IterationsUnreported, WorkersOrdered, WorkerStarted
from resihp.record.state import JobRecord
from resihp.settings import Settings

AGENT_RETURN_S = 3.0
"""Seconds that the other agents have to reconnect to a new supervisor after the first agent has."""
FIRST_AGENT_S = 30.0
"""Seconds after which a new supervisor ends the job if no agent has reconnected."""


def begin(
    settings: Settings, entries: Iterable[AnyEntry], dependencies: Dependencies, commits: Iterable[Commit] = ()
) -> Job:
    """Return the job as recorded in its journal, without any volatile state. `commits`: see `Controller.recover`.

    Raises ProtocolError if the job has ended or its journal is empty.
    """
    record, has_entries = JobRecord(), False
    for entry in entries:
        apply(record, entry)
        has_entries = True
    if record.ended is not None:
        raise ProtocolError(f"job {settings.job}: has ended: {record.ended.reason}")
    if not has_entries:
        raise ProtocolError(f"job {settings.job}: its journal is empty")
    job = Job(settings, record, dependencies)
    job.stand_at(record.active, record.committed)
    job.onsets = Onsets.before_us(commits)
    job.lifecycle.take_over()
    job.recovery = Recovery(undisturbed=record.plan is not None and record.decided is record.plan)
    shutdown.resume(job)
    return job


def handle(job: Job, event: AnyEvent) -> list[AnyEvent]:
    """Handle one event while agents reconnect. Returns the queued events once the take-over is complete, to be handled
    now; until then an empty list."""
    recovery = job.recovery
    assert recovery is not None
    match event:
        case api.AgentJoined() if event.node in job.nodes and job.nodes[event.node].alive:
            job.nodes[event.node].last_beat = job.now
            if event.inventory is not None:
                recovery.inventories[event.node] = event.inventory
        case api.AgentLost() if event.node in job.nodes:
            recovery.lost[event.node] = (event.reason, event.how)
        case api.WorkerExited():
            recovery.exits[event.rank], recovery.clues[event.rank] = event.status, event.clues
        case api.AgentBeat() if event.node in job.nodes:
            job.nodes[event.node].last_beat = job.now
        case api.Tick():
            pass
        case api.StopAsked():  # a request to stop explains why agents do not return
            shutdown.stop_asked(job, event)
        case api.Signalled() | api.AgentSignalled() | api.TimeLeft() | api.StopMeaning() | api.QuorumLost():
            shutdown.hear(job, event)
        case _:
            recovery.waiting.append(event)
    if job.stage == "ended" or not _complete(job, recovery):
        return []
    _conclude(job, recovery)
    return recovery.waiting


def _complete(job: Job, recovery: Recovery) -> bool:
    """Return whether all agents have reconnected, or the missing ones have had enough time."""
    expected = {name for name, node in job.nodes.items() if node.alive and name not in recovery.lost}
    if recovery.began_at is None:
        recovery.began_at = job.now
    if expected <= recovery.inventories.keys():
        return True
    waited_s = job.now - recovery.began_at
    if recovery.inventories:
        recovery.first_at = recovery.first_at or job.now
        return job.now - recovery.first_at > AGENT_RETURN_S
    if waited_s > FIRST_AGENT_S:
        endings.too_few(job, f"no agent reconnected to the new supervisor within {FIRST_AGENT_S:.0f} s")
    return False


def _conclude(job: Job, recovery: Recovery) -> None:
    """Reconcile the journal with the agents' inventories, and continue the job."""
    job.recovery = None
    job.progress_at = job.now
    upkeep.take_over(job)
    drains.resume(job)
    inventories = recovery.inventories
    job.epoch = max([job.epoch, *(inventory.epoch for inventory in inventories.values())])
    events = _meet_all(job, inventories)
    _complete_losses(job)
    if job.record.first_plan is None:
        _gather_on(job, recovery, events)
        return
    _skip_forgotten(job)
    undisturbed = _is_undisturbed(job, recovery, events)
    _hear(job, events)
    faults = [event for event in events if isinstance(event.message, m.FaultDue)]
    recovery.waiting = [*faults, *_parts_in_order(job, events), *recovery.waiting]
    if _is_over(job, inventories):
        _halt(job, recovery)
        return
    _explain(job)
    lost_ranks = _mark_dead(job, recovery)
    if job.record.plan is None:
        _start_again(job)
    else:
        job.move("running")
        if lost_ranks:
            failures.replan_after_loss(job, lost_ranks, f"ranks {sorted(lost_ranks)} were lost with the supervisor")
        if job.stage == "running":
            _go_on(job, undisturbed and all(job.members[rank].alive for rank in job.record.active))
    if job.stage in ("closing", "ended"):
        return
    for rank in sorted(lost_ranks):
        joins.respawn(job, job.members[rank])
    _order_again(job, inventories)
    joins.start_latecomers(job)
    replan_policy.resume(job)
    slowness.resume(job)
    upkeep.resume(job)


def _meet_all(job: Job, inventories: Mapping[str, m.Inventory]) -> list[api.WorkerSaid]:
    """Register all workers in the agents' inventories; return their messages that are still valid."""
    events: list[api.WorkerSaid] = []
    for name in sorted(inventories):
        for worker in inventories[name].workers:
            events += _meet(job, name, worker)
        for rank, _ in inventories[name].ended:
            if rank not in job.members:  # it started and ended unrecorded, so its number is used
                _know(job, rank, name, -1)
    return events


def _is_undisturbed(job: Job, recovery: Recovery, events: Iterable[api.WorkerSaid]) -> bool:
    """Return whether the plan in effect is the newest plan and no worker waits for an order."""
    if not recovery.undisturbed or job.record.plan is None or job.epoch != job.record.plan.epoch:
        return False
    return not any(isinstance(event.message, m.Stuck | m.Parked | m.Ready) for event in events)


def _halt(job: Job, recovery: Recovery) -> None:
    """Tell the remaining workers to exit, because training is done."""
    job.move("halting")
    job.halted_at = job.now
    _mark_dead(job, recovery)
    if job.stage == "halting":
        job.order(job.ready, m.Halt(reason=f"iteration {job.record.goal} of {job.record.goal} is committed"))
        iterations.newcomers_leave(job)
        iterations.end_when_gone(job)


def _start_again(job: Job) -> None:
    """Restart the start of the job: the supervisor died before a plan took effect."""
    job.move("parking")
    job.transition = Transition(
        epoch=job.epoch,
        began_at=job.now,
        stage_at=job.now,
        committed_before=job.record.committed,
        initial=True,
    )
    transition.park(job, "the supervisor died while training was starting")


def _is_over(job: Job, inventories: Mapping[str, m.Inventory]) -> bool:
    """Return whether training is done, so that the remaining workers only have to exit."""
    record = job.record
    running = {worker.rank for inventory in inventories.values() for worker in inventory.workers}
    evaluated = record.evaluated >= record.goal and all(job.members[r].finished for r in running & record.working)
    return record.committed >= record.goal and (evaluated or not job.declaration.evaluates)


def _hear(job: Job, events: Iterable[api.WorkerSaid]) -> None:
    """Apply those messages of workers that are valid whatever happens next."""
    for event in events:
        if isinstance(event.message, m.Raised):
            failures.raised(job, job.members[event.rank], event.message)
        elif isinstance(event.message, m.Finished):
            job.members[event.rank].finished = True
        elif isinstance(event.message, m.Evaluated):
            iterations.evaluated(job, event.message)


def _parts_in_order(job: Job, events: Iterable[api.WorkerSaid]) -> list[api.WorkerSaid]:
    """Return the reported parts of checkpoints that the previous supervisor may not have completed, oldest checkpoint
    first."""
    parts = [
        (event.message.iteration, event)
        for event in events
        if isinstance(event.message, m.CheckpointPart) and event.message.iteration > job.checkpointed
    ]
    return [event for _, event in sorted(parts, key=lambda part: part[0])]


def _complete_losses(job: Job) -> None:
    """Mark the processes of lost nodes dead, if the previous supervisor died before it did so."""
    for rank in job.live:
        if not job.nodes[job.members[rank].node].alive:
            incidents.mark_dead(job, job.members[rank], None)


def _skip_forgotten(job: Job) -> None:
    """Record as done, without figures, the iterations for which no agent still has the reports of steps."""
    first = min(job.reports, default=0)
    if first > job.record.committed + 1:
        span = f"{job.record.committed + 1} to {first - 1}"
        job.say("warning", f"iterations {span} were done while no supervisor led; their figures are lost")
        job.log(IterationsUnreported(first=job.record.committed + 1, last=first - 1))


def _go_on(job: Job, undisturbed: bool) -> None:
    """Continue when no rank with work is lost: train on if nothing was in progress, else park all ranks."""
    if undisturbed:
        job.say("notice", f"took over: {len(job.live)} workers train on, iteration {job.record.committed + 1}")
        iterations.commit_reported(job)
        iterations.halt_when_finished(job)
    else:
        transition.park(job, "the supervisor died in the middle of a change")


def _gather_on(job: Job, recovery: Recovery, events: list[api.WorkerSaid]) -> None:
    """Continue the start of a job for which no plan had been decided."""
    if job.record.restart is not None:
        job.move("restarting")
        _mark_dead(job, recovery)
        restarts.resume(job)
        return
    job.move("gathering")
    if job.record.placements:
        job.start.ordered_at = job.now  # when the processes started is not known on this clock
    if job.record.unexplained or job.record.lost:
        job.start.early_at = job.now
    ended = [rank for inventory in recovery.inventories.values() for rank, _ in inventory.ended]
    for rank in sorted({*ended, *recovery.exits} - job.members.keys()):  # unrecorded start and end
        place = job.record.placements[rank]
        job.log(WorkerStarted(rank=rank, node=place.node, device=place.device, pid=0, epoch=job.epoch))
    for lost_node in tuple(job.record.lost.values()):
        if job.stage == "gathering" and job.stop_request is None:
            failures.node_lost_early(job, lost_node.name, lost_node.reason)
    _mark_dead(job, recovery)
    startup.start_workers(job)
    recovery.waiting = [*events, *recovery.waiting]


def _meet(job: Job, node: str, running: m.RunningWorker) -> list[api.WorkerSaid]:
    """Register a live worker. It may be missing from the journal if its start was ordered but its report never reached
    the journal."""
    member = job.members.get(running.rank)
    if member is None and running.rank in job.record.refused:  # given up before it started
        job.do(api.SignalWorker(rank=running.rank, signal=int(signals.SIGKILL)))
        return []
    if member is None and not running.pid:  # about to be forked: its agent will report it
        _know(job, running.rank, node, running.device)
        job.starting.add(running.rank)
        return []
    if member is None or member.node != node:
        started = WorkerStarted(rank=running.rank, node=node, device=running.device, pid=running.pid, epoch=job.epoch)
        job.log(started)
        member = job.members[running.rank]
    member.beat_at = member.progress_at = member.spawned_at = job.now
    events = [api.WorkerSaid(rank=running.rank, message=message) for message in running.said]
    for message in running.said:
        if isinstance(message, m.Declare) and (job.record.trains is None or startup.trains_the_same(job, message)):
            member.declared = message if job.record.trains is None else job.record.trains
            if member.joins and (job.record.plan is None or running.rank not in job.record.plan.layout.ranks):
                joins.became_ready(job, running.rank)
    for step in running.steps:
        job.note_step(member, step.epoch, step.outcome, step)
    return events


def _know(job: Job, rank: int, node: str, device: int) -> None:
    """Record a rank that an agent lists but the journal may lack, so that its number is not given
    again."""
    placement = job.record.placements[rank] if rank < len(job.record.placements) else None
    if placement is None or placement.node != node:
        job.log(WorkersOrdered(workers=((rank, node, device),)))


def _order_again(job: Job, inventories: Mapping[str, m.Inventory]) -> None:
    """Repeat the orders to start processes that their agents do not list. Applies to processes that were ordered during
    training."""
    if not job.under_way or job.stop_request is not None or job.furthest >= job.record.goal:
        return
    ended = {rank for inventory in inventories.values() for rank, _ in inventory.ended}
    names = tuple(placement.node for placement in job.record.placements)
    known_ranks = {*job.record.workers, *job.record.refused, *job.starting, *ended}
    wanted: dict[str, list[tuple[int, int]]] = {}
    for rank, place in enumerate(job.record.placements):
        if rank in known_ranks or place.device < 0 or (place.node, place.device) in job.dead_devices:
            continue
        if place.node in inventories and job.nodes[place.node].alive:
            wanted.setdefault(place.node, []).append((rank, place.device))
    for node, workers in wanted.items():
        job.starting.update(rank for rank, _ in workers)
        job.do(api.StartWorkers(node=node, workers=tuple(workers), nodes=names, joins=True))


def _explain(job: Job) -> None:
    """Find the causes of recorded losses that no failure explains, because the previous supervisor died before it
    decided on them."""
    for rank, exit in job.record.unexplained.items():
        if exit is not None and job.members[rank].declared is not None:
            failures.incident(job, job.members[rank], exit)
    failures.explain_nodes(job)


def _mark_dead(job: Job, recovery: Recovery) -> set[int]:
    """Mark dead the processes that have ended and the nodes with agents that did not return; return the lost ranks."""
    inventories = recovery.inventories
    before = set(job.live)
    exits = {rank: status for inventory in inventories.values() for rank, status in inventory.ended} | recovery.exits
    running = {worker.rank for inventory in inventories.values() for worker in inventory.workers} - exits.keys()
    for rank, member in sorted(job.members.items()):
        if member.alive and rank not in running and member.node in inventories and job.stage != "ended":
            status, clues = exits.get(rank, -signals.SIGKILL), recovery.clues.get(rank, ())
            failures.exited(job, api.WorkerExited(rank=rank, status=status, clues=clues))
    facts_first = sorted(job.nodes.items(), key=lambda item: item[0] not in recovery.lost)
    for name, node in facts_first:
        reason, how = recovery.lost.get(name, ("its agent did not reconnect to the new supervisor", "silent"))
        if node.alive and (name not in inventories or name in recovery.lost) and job.stage != "ended":
            failures.node_lost(job, name, reason, how)
    return before - set(job.live)
