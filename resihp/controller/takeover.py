"""Taking over: a controller made from a dead one's journal and from what agents say runs there.

The journal tells what was decided; `replay` reads it. What has happened since, agents tell in their inventories, and
until they have, nothing is decided: `handle` keeps whatever comes. Once all agents are back, or those that are not have
had their time, `_conclude` compares the two: processes that are gone have ended, steps that were taken count, and if
every rank of the plan in effect trains as if nothing had happened, it is left to train on. Anything else is parked, one
epoch above all that anybody was ever told of, and decided anew from the plan in effect. A plan that no quorum knew of
was never acted on, so that it is no loss if it is not here.

Called by `controller` alone. Nothing here leads: whether a quorum follows is the shell's to find out.
"""

from __future__ import annotations

import signal as signals
from collections.abc import Iterable

from resihp.controller import interface as api
from resihp.controller import iterations, replan_policy, shutdown, startup, transition
from resihp.controller.fail_slow import slowness
from resihp.controller.fail_stop import failures, incidents, root_causes
from resihp.controller.interface import AnyEvent, Settings
from resihp.controller.nodes import drains, joins
from resihp.controller.state import VACATED, IterationReports, Job, Member, Node, Placement, Recovery, Transition
from resihp.errors import ProtocolError
from resihp.parallelism.plan import Plan
from resihp.protocol import messages as m
from resihp.record.journal import (
    AnyEntry,
    CheckpointCommitted,
    FailureFound,
    FaultInjected,
    IterationCommitted,
    JobEnded,
    JobSignalled,
    JoinRefused,
    ModelDeclared,
    NodeJoined,
    NodeLost,
    PlanDecided,
    PlanInEffect,
    Reconfigured,
    WorkerEnded,
    WorkerStarted,
)

PATIENCE_S = 3.0
"""How long agents have to come back to a new supervisor after the first of them."""
NOBODY_PATIENCE_S = 30.0


def replay(settings: Settings, entries: Iterable[AnyEntry]) -> Job:
    """The state that a journal tells of. Raises ProtocolError for one of a job that has ended, or not begun."""
    job = Job(settings)
    plans: dict[int, Plan] = {}
    ended: dict[int, int | None] = {}
    lost: dict[str, str] = {}
    begun = False
    for entry in entries:
        begun = True
        match entry:
            case JobEnded():
                raise ProtocolError(f"job {settings.job}: has ended: {entry.reason}")
            case ModelDeclared():
                job.trains = entry.declare
                job.goal = entry.declare.iterations
                job.committed = max(job.committed, entry.declare.resume_from)
            case NodeJoined():
                job.nodes[entry.node] = Node(entry.node, entry.host, entry.devices, hardware=entry.hardware)
                startup.place(job)
            case NodeLost():
                if not entry.reason.startswith(VACATED):
                    lost[entry.node] = entry.reason
                job.nodes.setdefault(entry.node, Node(entry.node, host="", devices=0)).alive = False
                startup.place(job)
            case WorkerStarted():
                _place(job, entry.rank, entry.node, entry.device)
                member = Member(entry.rank, entry.node, entry.device, entry.pid)
                member.joins = job.first_plan is not None
                job.members[entry.rank] = member
            case WorkerEnded():
                ended[entry.rank] = entry.exit
                if entry.rank in job.members:
                    job.members[entry.rank].alive = False
                job.epoch = max(job.epoch, entry.epoch)
            case JoinRefused():
                ended.pop(entry.rank, None)
                if entry.rank in job.members:
                    job.members[entry.rank].fenced = entry.reason
                _place(job, entry.rank, entry.node, entry.device)
                job.dead_devices.add((entry.node, entry.device))
            case PlanDecided():
                plans[entry.plan.epoch] = entry.plan
                for rank in entry.plan.layout.ranks:
                    job.members[rank].declared = job.trains
                job.first_plan = job.first_plan or entry.plan
                job.epoch = max(job.epoch, entry.plan.epoch)
            case PlanInEffect() if entry.epoch in plans:
                job.take_effect(plans[entry.epoch])
            case Reconfigured():
                took_s = entry.park_s + entry.plan_s + entry.groups_s + entry.state_s
                replan_policy.took(job, took_s, entry.extra_bytes)
            case IterationCommitted():
                job.committed = entry.outcome.iteration
                job.last_outcome = entry.outcome
                if entry.seconds is not None:
                    job.recent.append(entry.seconds)
            case FailureFound(kind="fail-slow"):
                job.failures = max(job.failures, entry.failure)
            case FailureFound():
                job.failures = max(job.failures, entry.failure)
                for rank in entry.ranks:
                    ended.pop(rank, None)
                if entry.component == "node" and entry.node is not None:
                    lost.pop(entry.node, None)
                incidents.condemn(job, entry)
                root_causes.remember(job, entry)
            case CheckpointCommitted():
                job.checkpointed = entry.iteration
            case JobSignalled():
                shutdown.replay(job, entry)
            case FaultInjected():
                if entry.fault in job.faults:
                    job.faults[entry.fault].fired_at = 0.0
                if entry.text.startswith("kill:") and entry.rank in job.members:  # as `injection` has it
                    job.dead_devices.add((job.members[entry.rank].node, job.members[entry.rank].device))
            case _:
                pass
        drains.replay(job, entry)
        slowness.replay(job, entry)
    if not begun:
        raise ProtocolError(f"job {settings.job}: its journal is empty")
    for rank in job.active:
        job.members[rank].stepped = job.committed
    job.phase = "recovering"
    job.recovery = Recovery(undisturbed=job.plan is not None and max(plans) == job.plan.epoch)
    job.recovery.unexplained, job.recovery.unexplained_nodes = ended, lost
    return job


def _place(job: Job, rank: int, node: str, device: int) -> None:
    """Remember where a rank was asked to be started; of those that never were, only the number is known."""
    while len(job.placements) <= rank:
        job.placements.append(Placement("", -1, settled=True))
    job.placements[rank] = Placement(node, device, settled=True)


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
            recovery.lost[event.node] = event.reason
        case api.WorkerExited():
            recovery.exits[event.rank], recovery.clues[event.rank] = event.status, event.clues
        case api.AgentBeat() if event.node in job.nodes:
            job.nodes[event.node].last_beat = job.now
        case api.StoreReady():
            job.store = (event.host, event.port)
        case api.Tick():
            pass
        case api.Signalled():  # what stops the job excuses those who did not come back
            shutdown.signalled(job, event)
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
    if job.phase == "ended" or not _complete(job, recovery):
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
    told = recovery.inventories
    job.epoch = max([job.epoch, *(inventory.epoch for inventory in told.values())])
    said: list[api.WorkerSaid] = []
    for name in sorted(told):
        for worker in told[name].workers:
            said += _meet(job, name, worker)
        for rank, _ in told[name].ended:
            if rank not in job.members:  # started and gone, unheard of: its number is taken
                _place(job, rank, name, -1)
    _complete_losses(job, recovery)
    if job.first_plan is None:
        _gather_on(job, recovery, said)
        return
    _skip_forgotten(job)
    undisturbed = recovery.undisturbed and job.plan is not None and job.epoch == job.plan.epoch
    for message in said:
        undisturbed = undisturbed and not isinstance(message.message, m.Stuck | m.Parked | m.Ready)  # it waits
        if isinstance(message.message, m.Raised):
            failures.raised(job, job.members[message.rank], message.message)
        elif isinstance(message.message, m.Finished):
            job.members[message.rank].finished = True
    recovery.waiting = [*(s for s in said if isinstance(s.message, m.FaultDue)), *recovery.waiting]
    if job.committed >= job.goal:
        job.phase, job.halted_at = "halting", job.now
        _bury(job, recovery)
        if job.phase == "halting":
            job.order(job.ready, m.Halt(reason=f"iteration {job.goal} of {job.goal} is committed"))
            iterations.newcomers_leave(job)
            iterations.end_when_gone(job)
        return
    _explain(job, recovery)
    lost = _bury(job, recovery)
    if job.plan is None:  # the start was under way: all of it once more
        job.phase = "transition"
        job.transition = Transition(
            stage="parking", epoch=job.epoch, began_at=job.now, stage_at=job.now, committed_before=job.committed,
            initial=True,
        )  # fmt: skip
        transition.park(job, "the supervisor died while training began")
    else:
        job.phase = "running"
        if lost:
            failures.transition_after(job, lost, f"ranks {sorted(lost)} were lost with the supervisor")
        if job.phase == "running" and job.transition is None:
            _go_on(job, undisturbed and all(job.members[rank].alive for rank in job.active))
    for rank in sorted(lost):
        joins.come_back(job, job.members[rank])
    slowness.resume(job)
    drains.resume(job)


def _complete_losses(job: Job, recovery: Recovery) -> None:
    """The last supervisor may have died between noting the loss of a node and those of the processes there."""
    for rank in job.live:
        if not job.nodes[job.members[rank].node].alive:
            incidents.bury(job, job.members[rank], None)
            recovery.unexplained[rank] = None


def _skip_forgotten(job: Job) -> None:
    """Iterations so long ago that no agent remembers their steps were done all the same."""
    first = min(job.reports, default=0)
    if first > job.committed + 1:
        which = f"{job.committed + 1} to {first - 1}"
        job.say("warning", f"iterations {which} were done while nobody led; their figures are lost")
        job.committed = first - 1


def _go_on(job: Job, undisturbed: bool) -> None:
    """Everybody who has work is there."""
    if undisturbed:
        job.say("notice", f"took over: {len(job.live)} workers train on, iteration {job.committed + 1}")
        iterations.commit_reported(job)
        iterations.halt_when_finished(job)
    else:
        transition.park(job, "the supervisor died in the middle of a change")


def _gather_on(job: Job, recovery: Recovery, said: list[api.WorkerSaid]) -> None:
    """The start was not complete: no plan had been decided yet."""
    job.phase = "gathering"
    if job.departure is None:
        for name, reason in recovery.unexplained_nodes.items():
            startup.node_lost(job, name, reason)
        if job.has_ended:
            return
        _explain_nodes(job, recovery)
        incidents.log_incidents(job)
    told = [rank for inventory in recovery.inventories.values() for rank, _ in inventory.ended]
    unheard = [rank for rank in (*told, *recovery.exits) if rank not in job.members]
    if unheard:
        incidents.end(job, 1, f"rank {min(unheard)}: ended before training began; its log tells more")
        return
    _bury(job, recovery)
    if job.phase == "gathering":
        startup.start_workers(job)
        startup.propose_when_ready(job)
        recovery.waiting = [*said, *recovery.waiting]


def _meet(job: Job, node: str, running: m.RunningWorker) -> list[api.WorkerSaid]:
    """A live worker: known, or started by an order whose answer never reached the journal."""
    member = job.members.get(running.rank)
    if member is None and not running.pid:  # about to be forked: that will be told
        _place(job, running.rank, node, running.device)
        job.placements[running.rank].settled = False
        return []
    if member is None or member.node != node:
        _place(job, running.rank, node, running.device)
        member = job.members[running.rank] = Member(running.rank, node, running.device, running.pid)
        member.joins = job.first_plan is not None
        started = WorkerStarted(rank=running.rank, node=node, device=running.device, pid=running.pid, epoch=job.epoch)
        job.do(api.Log(entry=started))
    member.beat_at = member.progress_at = member.spawned_at = job.now
    said = [api.WorkerSaid(rank=running.rank, message=message) for message in running.said]
    for message in running.said:
        if isinstance(message, m.Declare) and (job.trains is None or startup.trains_the_same(job, message)):
            member.declared = message if job.trains is None else job.trains
            if member.joins and (job.plan is None or running.rank not in job.plan.layout.ranks):
                (job.unmeasured if job.settings.examine else job.unconsidered).add(running.rank)
    for step in running.steps:
        member.stepped = max(member.stepped, step.outcome.iteration)
        if step.outcome.iteration > job.committed:
            reports = job.reports.setdefault(step.outcome.iteration, IterationReports())
            reports.by_rank.setdefault(running.rank, step)
    return said


def _explain(job: Job, recovery: Recovery) -> None:
    """Losses that the journal tells of and no failure does: the decision that would have named them was not made."""
    for rank, exit in recovery.unexplained.items():
        if exit is not None and job.members[rank].declared is not None:
            failures.incident(job, job.members[rank], exit)
    _explain_nodes(job, recovery)


def _explain_nodes(job: Job, recovery: Recovery) -> None:
    for name, reason in recovery.unexplained_nodes.items():
        ended = recovery.unexplained.items()
        ranks = [rank for rank, exit in ended if exit is None and job.members[rank].node == name]
        failures.node_incident(job, name, reason, ranks)


def _bury(job: Job, recovery: Recovery) -> set[int]:
    """Who is gone: processes that are not there any more, and nodes that did not come back. Returns the ranks."""
    told = recovery.inventories
    before = set(job.live)
    exits = {rank: status for inventory in told.values() for rank, status in inventory.ended} | recovery.exits
    running = {worker.rank for inventory in told.values() for worker in inventory.workers} - exits.keys()
    for rank, member in sorted(job.members.items()):
        if member.alive and rank not in running and member.node in told and job.phase != "ended":
            status, clues = exits.get(rank, -signals.SIGKILL), recovery.clues.get(rank, ())
            failures.exited(job, api.WorkerExited(rank=rank, status=status, clues=clues))
    for name, node in job.nodes.items():
        reason = recovery.lost.get(name, "its agent did not come back to the new supervisor")
        if node.alive and (name not in told or name in recovery.lost) and job.phase != "ended":
            failures.node_lost(job, name, reason)
    return before - set(job.live)
