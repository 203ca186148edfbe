"""Taking over: a controller made from a dead one's journal and from what agents say runs there.

The journal tells what was decided; `begin` reads its record (`record.fold`). What has happened since, agents tell in
their inventories, and until they have, nothing is decided: `handle` keeps whatever comes. Once all agents are back, or
those that are not have had their time, `_conclude` compares the two: processes that are gone have ended, steps that
were taken count, and if every rank of the plan in effect trains as if nothing had happened, it is left to train on.
Anything else is parked, one epoch above all that anybody was ever told of, and decided anew from the plan in effect. A
plan that no quorum knew of was never acted on, so that it is no loss if it is not here.

Called by `controller` alone. Nothing here leads: whether a quorum follows is the shell's to find out.
"""

from __future__ import annotations

import signal as signals
from collections.abc import Iterable, Mapping

from resihp.controller import interface as api
from resihp.controller import iterations, replan_policy, shutdown, startup, transition
from resihp.controller.fail_slow import slowness
from resihp.controller.fail_stop import failures, incidents
from resihp.controller.fail_stop.onsets import Commit, Onsets
from resihp.controller.interface import AnyEvent, Dependencies
from resihp.controller.nodes import drains, joins
from resihp.controller.state.beginnings import Recovery
from resihp.controller.state.job import Job
from resihp.controller.state.transitions import Transition
from resihp.errors import ProtocolError
from resihp.protocol import messages as m
from resihp.record.fold import apply
from resihp.record.journal import AnyEntry, IterationsUnreported, WorkersOrdered, WorkerStarted
from resihp.record.state import JobRecord
from resihp.settings import Settings

PATIENCE_S = 3.0
"""How long agents have to come back to a new supervisor after the first of them."""
NOBODY_PATIENCE_S = 30.0


def begin(
    settings: Settings, entries: Iterable[AnyEntry], dependencies: Dependencies, commits: Iterable[Commit] = ()
) -> Job:
    """What is on record, and nothing else yet. `commits`: the last ones, as for `Controller.recover`.

    Raises ProtocolError for a job that has ended, or not begun."""
    record, begun = JobRecord(), False
    for entry in entries:
        apply(record, entry)
        begun = True
    if record.ended is not None:
        raise ProtocolError(f"job {settings.job}: has ended: {record.ended.reason}")
    if not begun:
        raise ProtocolError(f"job {settings.job}: its journal is empty")
    job = Job(settings, record, dependencies)
    job.stand_at(record.active, record.committed)
    job.onsets = Onsets.before_us(commits)
    job.lifecycle.take_over()
    job.recovery = Recovery(undisturbed=record.plan is not None and record.decided is record.plan)
    shutdown.resume(job)
    return job


def handle(job: Job, event: AnyEvent) -> list[AnyEvent]:
    """One event while agents come back; returns what waited for them, to be handled now, once it is over."""
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
        case api.Signalled():  # what stops the job excuses those who did not come back
            shutdown.signalled(job, event)
        case api.StopAsked():
            shutdown.stop_asked(job, event)
        case api.AgentSignalled():
            shutdown.agent_signalled(job, event)
        case api.StopMeaning():
            shutdown.meaning_told(job, event)
        case api.TimeLeft():
            shutdown.time_left(job, event)
        case api.QuorumLost():
            shutdown.quorum_lost(job, event)
        case _:
            recovery.waiting.append(event)
    if job.stage == "ended" or not _complete(job, recovery):
        return []
    _conclude(job, recovery)
    return recovery.waiting


def _complete(job: Job, recovery: Recovery) -> bool:
    """Whether everybody is back, or has had the time to be."""
    expected = {name for name, node in job.nodes.items() if node.alive and name not in recovery.lost}
    if recovery.began_at is None:
        recovery.began_at = job.now
    if expected <= recovery.inventories.keys():
        return True
    waited_s = job.now - recovery.began_at
    if recovery.inventories:
        recovery.first_at = recovery.first_at or job.now
        return job.now - recovery.first_at > PATIENCE_S
    if waited_s > NOBODY_PATIENCE_S:
        incidents.too_few(job, f"no agent came back to the new supervisor within {NOBODY_PATIENCE_S:.0f} s")
    return False


def _conclude(job: Job, recovery: Recovery) -> None:
    """Bring the journal's view up to date with the agents', and go on."""
    job.recovery = None
    job.progress_at = job.now
    drains.take_over(job)
    told = recovery.inventories
    job.epoch = max([job.epoch, *(inventory.epoch for inventory in told.values())])
    said: list[api.WorkerSaid] = []
    for name in sorted(told):
        for worker in told[name].workers:
            said += _meet(job, name, worker)
        for rank, _ in told[name].ended:
            if rank not in job.members:  # started and gone, unheard of: its number is taken
                _know(job, rank, name, -1)
    _complete_losses(job)
    if job.record.first_plan is None:
        _gather_on(job, recovery, said)
        return
    _skip_forgotten(job)
    undisturbed = recovery.undisturbed and job.record.plan is not None and job.epoch == job.record.plan.epoch
    undisturbed = undisturbed and not any(isinstance(s.message, m.Stuck | m.Parked | m.Ready) for s in said)  # it waits
    _hear(job, said)
    faults = [s for s in said if isinstance(s.message, m.FaultDue)]
    recovery.waiting = [*faults, *_parts_in_order(job, said), *recovery.waiting]
    if _is_over(job, told):
        job.move("halting")
        job.halted_at = job.now
        _bury(job, recovery)
        if job.stage == "halting":
            job.order(job.ready, m.Halt(reason=f"iteration {job.record.goal} of {job.record.goal} is committed"))
            iterations.newcomers_leave(job)
            iterations.end_when_gone(job)
        return
    _explain(job)
    lost = _bury(job, recovery)
    if job.record.plan is None:  # the start was under way: all of it once more
        job.move("parking")
        job.transition = Transition(
            epoch=job.epoch, began_at=job.now, stage_at=job.now, committed_before=job.record.committed,
            initial=True,
        )  # fmt: skip
        transition.park(job, "the supervisor died while training began")
    else:
        job.move("running")
        if lost:
            failures.transition_after(job, lost, f"ranks {sorted(lost)} were lost with the supervisor")
        if job.stage == "running":
            _go_on(job, undisturbed and all(job.members[rank].alive for rank in job.record.active))
    if job.has_ended:
        return
    for rank in sorted(lost):
        joins.come_back(job, job.members[rank])
    _order_again(job, told)
    joins.start_latecomers(job)
    replan_policy.resume(job)
    slowness.resume(job)
    drains.resume(job)


def _is_over(job: Job, told: Mapping[str, m.Inventory]) -> bool:
    """Whether training is done, and who is still there has nothing to do but to leave."""
    record = job.record
    running = {worker.rank for inventory in told.values() for worker in inventory.workers}
    evaluated = record.evaluated >= record.goal and all(job.members[r].finished for r in running & record.working)
    return record.committed >= record.goal and (evaluated or not job.declaration.evaluates)


def _hear(job: Job, said: Iterable[api.WorkerSaid]) -> None:
    """What is still true of workers, and counts whatever comes next."""
    for message in said:
        if isinstance(message.message, m.Raised):
            failures.raised(job, job.members[message.rank], message.message)
        elif isinstance(message.message, m.Finished):
            job.members[message.rank].finished = True
        elif isinstance(message.message, m.Evaluated):
            iterations.evaluated(job, message.message)


def _parts_in_order(job: Job, said: Iterable[api.WorkerSaid]) -> list[api.WorkerSaid]:
    """Return the parts of checkpoints that the last supervisor may not have completed, the oldest checkpoint first."""
    parts = [
        (s.message.iteration, s)
        for s in said
        if isinstance(s.message, m.CheckpointPart) and s.message.iteration > job.checkpointed
    ]
    return [s for _, s in sorted(parts, key=lambda part: part[0])]


def _complete_losses(job: Job) -> None:
    """The last supervisor may have died between noting the loss of a node and those of the processes there."""
    for rank in job.live:
        if not job.nodes[job.members[rank].node].alive:
            incidents.bury(job, job.members[rank], None)


def _skip_forgotten(job: Job) -> None:
    """Iterations so long ago that no agent remembers their steps were done all the same."""
    first = min(job.reports, default=0)
    if first > job.record.committed + 1:
        which = f"{job.record.committed + 1} to {first - 1}"
        job.say("warning", f"iterations {which} were done while nobody led; their figures are lost")
        job.log(IterationsUnreported(first=job.record.committed + 1, last=first - 1))


def _go_on(job: Job, undisturbed: bool) -> None:
    """Everybody who has work is there."""
    if undisturbed:
        job.say("notice", f"took over: {len(job.live)} workers train on, iteration {job.record.committed + 1}")
        iterations.commit_reported(job)
        iterations.halt_when_finished(job)
    else:
        transition.park(job, "the supervisor died in the middle of a change")


def _gather_on(job: Job, recovery: Recovery, said: list[api.WorkerSaid]) -> None:
    """The start was not complete: no plan had been decided yet."""
    job.move("gathering")
    if job.record.unexplained or job.record.lost:
        job.start.early_at = job.now
    told = [rank for inventory in recovery.inventories.values() for rank, _ in inventory.ended]
    for rank in sorted({*told, *recovery.exits} - job.members.keys()):  # began and ended, unheard of
        place = job.record.placements[rank]
        job.log(WorkerStarted(rank=rank, node=place.node, device=place.device, pid=0, epoch=job.epoch))
    for lost in tuple(job.record.lost.values()):
        if job.stage == "gathering" and job.departure is None:
            failures.node_lost_early(job, lost.name, lost.reason)
    _bury(job, recovery)
    startup.start_workers(job)
    recovery.waiting = [*said, *recovery.waiting]


def _meet(job: Job, node: str, running: m.RunningWorker) -> list[api.WorkerSaid]:
    """A live worker: known, or started by an order whose answer never reached the journal."""
    member = job.members.get(running.rank)
    if member is None and running.rank in job.record.refused:  # given up before it came
        job.do(api.SignalWorker(rank=running.rank, signal=int(signals.SIGKILL)))
        return []
    if member is None and not running.pid:  # about to be forked: that will be told
        _know(job, running.rank, node, running.device)
        job.starting.add(running.rank)
        return []
    if member is None or member.node != node:
        started = WorkerStarted(rank=running.rank, node=node, device=running.device, pid=running.pid, epoch=job.epoch)
        job.log(started)
        member = job.members[running.rank]
    member.beat_at = member.progress_at = member.spawned_at = job.now
    said = [api.WorkerSaid(rank=running.rank, message=message) for message in running.said]
    for message in running.said:
        if isinstance(message, m.Declare) and (job.record.trains is None or startup.trains_the_same(job, message)):
            member.declared = message if job.record.trains is None else job.record.trains
            if member.joins and (job.record.plan is None or running.rank not in job.record.plan.layout.ranks):
                joins.came(job, running.rank)
    for step in running.steps:
        job.note_step(member, step.epoch, step.outcome, step)
    return said


def _know(job: Job, rank: int, node: str, device: int) -> None:
    """A rank that an agent knows of and the journal may not, as with one of 0.1: its number is taken."""
    known = job.record.placements[rank] if rank < len(job.record.placements) else None
    if known is None or known.node != node:
        job.log(WorkersOrdered(workers=((rank, node, device),)))


def _order_again(job: Job, told: Mapping[str, m.Inventory]) -> None:
    """Processes that were ordered while the job was under way, and of which their agents have not heard."""
    if not job.under_way or job.departure is not None or job.furthest >= job.record.goal:
        return
    ended = {rank for inventory in told.values() for rank, _ in inventory.ended}
    names = tuple(placement.node for placement in job.record.placements)
    known = {*job.record.workers, *job.record.refused, *job.starting, *ended}
    wanted: dict[str, list[tuple[int, int]]] = {}
    for rank, place in enumerate(job.record.placements):
        if rank in known or place.device < 0 or (place.node, place.device) in job.dead_devices:
            continue
        if place.node in told and job.nodes[place.node].alive:
            wanted.setdefault(place.node, []).append((rank, place.device))
    for node, workers in wanted.items():
        job.starting.update(rank for rank, _ in workers)
        job.do(api.StartWorkers(node=node, workers=tuple(workers), nodes=names, joins=True))


def _explain(job: Job) -> None:
    """Losses that the journal tells of and no failure does: the decision that would have named them was not made."""
    for rank, exit in job.record.unexplained.items():
        if exit is not None and job.members[rank].declared is not None:
            failures.incident(job, job.members[rank], exit)
    failures.explain_nodes(job)


def _bury(job: Job, recovery: Recovery) -> set[int]:
    """Who is gone: processes that are not there any more, and nodes that did not come back. Returns the ranks."""
    told = recovery.inventories
    before = set(job.live)
    exits = {rank: status for inventory in told.values() for rank, status in inventory.ended} | recovery.exits
    running = {worker.rank for inventory in told.values() for worker in inventory.workers} - exits.keys()
    for rank, member in sorted(job.members.items()):
        if member.alive and rank not in running and member.node in told and job.stage != "ended":
            status, clues = exits.get(rank, -signals.SIGKILL), recovery.clues.get(rank, ())
            failures.exited(job, api.WorkerExited(rank=rank, status=status, clues=clues))
    facts_first = sorted(job.nodes.items(), key=lambda item: item[0] not in recovery.lost)
    for name, node in facts_first:
        reason, how = recovery.lost.get(name, ("its agent did not come back to the new supervisor", "silent"))
        if node.alive and (name not in told or name in recovery.lost) and job.stage != "ended":
            failures.node_lost(job, name, reason, how)
    return before - set(job.live)
