"""Start a job: agents join, their workers start and declare their model, and the first plan is made.

A node or process that is lost during the start, or a node that does not join in time, is left out. The job starts with
the healthy devices if these are enough (`Settings.devices_least`); `early_losses` decides about the cause of a loss.
Ranks are numbered once, when every node has joined or been given up, and later losses do not change the numbers. Called
by `controller`, `failures`, `watchdog`, `early_losses` and `takeover`.
"""

from __future__ import annotations

import signal as signals
from collections.abc import Mapping

import msgspec

from resihp.controller import interface as api
from resihp.controller import iterations, transition
from resihp.controller.fail_stop import endings
from resihp.controller.nodes import joins
from resihp.controller.planning import first_plan
from resihp.controller.probing import probe_orders
from resihp.controller.scripts import script_checkpoints
from resihp.controller.state.job import Job
from resihp.controller.state.members import Member
from resihp.controller.state.transitions import Transition
from resihp.detector import probes
from resihp.errors import LayoutError, NotEnoughDevicesError
from resihp.protocol import messages as m
from resihp.record.journal import JoinRefused, ModelDeclared, WorkersOrdered, WorkerStarted
from resihp.words import natural


def agent_joined(job: Job, event: api.AgentJoined) -> None:
    node = job.nodes.get(event.node)
    if node is not None and not event.lease and joins.is_latecomer(job, event.node):
        joins.come_late(job, event)
        start_workers(job)
        return
    if node is not None and (node.alive or not event.lease):  # the same agent, on a new connection
        node.last_beat = job.now
        return
    if event.lease or job.stage != "gathering":
        joins.node_joined(job, event)
        return
    joins.take_in(job, event)
    if len(job.nodes) == job.settings.nodes:
        start_workers(job)


def is_lost(job: Job, rank: int) -> bool:
    """Return whether the process of a numbered rank has ended, will never start, or is on a lost node."""
    member = job.members.get(rank)
    is_gone = rank in job.record.refused or (member is not None and not member.alive)
    return is_gone or not job.nodes[job.record.placements[rank].node].alive


def devices_left(job: Job) -> int:
    """Return the number of devices with which the job could start: those of nodes that have joined or may still join,
    less those with lost processes."""
    nodes = job.settings.nodes - sum(not node.alive for node in job.nodes.values())
    here = (rank for rank, place in enumerate(job.record.placements) if job.nodes[place.node].alive)
    return nodes * job.settings.gpus_per_node - sum(is_lost(job, rank) for rank in here)


def start_workers(job: Job) -> None:
    """Start a worker on each device without one, once every node has joined or been given up.

    This assigns the rank numbers, for the whole life of the job.
    """
    if job.stage != "gathering" or len(job.nodes) < job.settings.nodes:
        return
    if not job.record.placements:
        job.start.checkpoints_since = job.start.checkpoints_since or job.now
        if not script_checkpoints.is_ready(job, job.start.checkpoints_since):
            return
        _number_ranks(job)
    if not job.start.ordered_at:
        job.start.ordered_at = job.now
    names = tuple(placement.node for placement in job.record.placements)
    here = [rank for rank in range(len(names)) if not is_lost(job, rank)]
    job.start.awaited = {rank for rank in here if rank not in job.members or job.members[rank].declared is None}
    wanted: dict[str, list[int]] = {}
    for rank in here:
        if rank not in job.members and rank not in job.starting:
            wanted.setdefault(names[rank], []).append(rank)
    resumed = job.record.checkpoints.resumed
    for name, ranks in wanted.items():
        job.starting.update(ranks)
        workers = tuple((rank, job.record.placements[rank].device) for rank in ranks)
        job.do(
            api.StartWorkers(
                node=name,
                workers=workers,
                nodes=names,
                round=job.record.round,
                checkpoint="" if resumed is None else resumed.folder,
                checkpoint_iteration=0 if resumed is None else resumed.iteration,
            )
        )


def _number_ranks(job: Job) -> None:
    """Assign a rank number to each device of the nodes that have joined, except for spare nodes that wait."""
    order = sorted((name for name, node in job.nodes.items() if node.alive), key=natural)
    if job.settings.spares_wait:
        order = order[: job.settings.nodes - job.settings.spares]
    devices = [(name, device) for name in order for device in range(job.settings.gpus_per_node)]
    checkpoint = script_checkpoints.choose(job)
    job.log(
        WorkersOrdered(
            workers=tuple((rank, *device) for rank, device in enumerate(devices)),
            checkpoint="" if checkpoint is None else checkpoint.folder,
        )
    )
    if checkpoint is not None:
        job.say("notice", f"resumes from {checkpoint.folder} (iteration {checkpoint.iteration})")


def go_on_without(job: Job) -> None:
    """Start the workers if the node that was just given up was the last one that the job waited for."""
    if len(job.nodes) < job.settings.nodes:
        return
    missing = sorted((name for name, node in job.nodes.items() if not node.alive), key=natural)
    job.say("notice", f"starting without {', '.join(missing)}: the other nodes are enough")
    start_workers(job)


def spawned(job: Job, event: api.WorkerSpawned) -> None:
    if event.rank in job.record.refused and event.rank not in job.members:  # it was given up before it started
        job.do(api.SignalWorker(rank=event.rank, signal=int(signals.SIGKILL)))
    if event.rank not in job.starting:
        return
    job.starting.discard(event.rank)
    job.nodes[event.node].last_beat = job.now
    job.log(WorkerStarted(rank=event.rank, node=event.node, device=event.device, pid=event.pid, epoch=job.epoch))
    if job.stage == "halting":
        iterations.newcomers_leave(job)


def spawn_refused(job: Job, event: api.SpawnRefused) -> None:
    """Handle the report of a node that could not start one worker, or any worker."""
    ranks = [rank for rank in sorted(job.starting) if job.record.placements[rank].node == event.node]
    for rank in ranks if event.rank is None else [rank for rank in ranks if rank == event.rank]:
        if job.stage == "gathering":
            never_started(job, rank, event.reason)
        elif job.stage == "restarting":
            job.starting.discard(rank)
        else:
            joins.spawn_refused(job, rank, event.reason)


def never_started(job: Job, rank: int, reason: str) -> None:
    """Record, before the first plan, that a rank will not start."""
    place = job.record.placements[rank]
    job.starting.discard(rank)
    job.start.awaited.discard(rank)
    job.start.early_at = job.now
    job.say("warning", f"rank {rank} ({place.node} device {place.device}): could not be started: {reason}")
    job.log(JoinRefused(rank=rank, node=place.node, device=place.device, reason=reason, condemns_device=False))


def declared(job: Job, member: Member, declare: m.Declare) -> None:
    if job.stage != "gathering":
        joins.declared(job, member, declare)
        return
    if member.declared is not None or member.fenced is not None:
        return
    member.declared = declare
    job.start.awaited.discard(member.rank)


def trains_the_same(job: Job, declare: m.Declare) -> bool:
    """Return whether a rank's declaration matches the job's, regardless of the checkpoint to resume from."""
    first = job.declaration
    same = msgspec.structs.replace(declare, resume_from=first.resume_from, resume_folder=first.resume_folder)
    return same.trains_as(first)


def refused(job: Job, member: Member, refuse: m.Refuse) -> None:
    """Note that a rank's script reports that it cannot start. If all ranks report this, it is the user's mistake; if
    one rank does, its device is bad."""
    if job.stage == "gathering":
        member.unwilling = refuse.reason
        job.start.early_at = job.now
    elif job.stage != "restarting" and member.declared is None and member.fenced is None:
        joins.turn_away(job, member, refuse.reason)


def propose(job: Job) -> None:
    """Prepare the first plan, once every remaining rank has declared its model. Ends the job if the declarations
    differ."""
    declares = {rank: job.members[rank].declared for rank in job.ready}
    first = declares[min(declares)]
    assert first is not None
    odd = sorted(rank for rank, declare in declares.items() if declare is None or not declare.trains_as(first))
    if odd:
        endings.end(job, 2, f"{job.where(odd[0])}: declares another model, batch or version than rank {min(declares)}")
        return
    sizes = [declare.memory_bytes for declare in declares.values() if declare is not None]
    smallest = min((size for size in sizes if size is not None), default=None)
    declared = (declare.software for _, declare in sorted(declares.items()) if declare is not None)
    software = next((versions for versions in declared if versions is not None), None)
    first = msgspec.structs.replace(first, memory_bytes=None if None in sizes else smallest, software=None)
    if job.record.trains != first:
        job.log(ModelDeclared(declare=first, software=software))
    if job.settings.examine and not job.start.examined:
        order = sorted(job.ready)
        probe_orders.begin(job, "start", order, probes.ring(order))
    else:
        _propose(job)


def measured(job: Job, judged: Mapping[int, probes.Judged]) -> None:
    """Continue the start after the probe of all devices. Devices that failed the probe stand by."""
    if job.stage != "gathering" or job.stop_request is not None:
        return
    kept = "; observe mode: it gets work all the same" if job.settings.observes else ""
    for rank, verdict in sorted(judged.items()):
        if not verdict.fit and job.members[rank].alive:
            job.say("warning", f"{job.where(rank)}: fails its probe: {verdict.evidence}{kept}")
    job.start.examined = True


def _propose(job: Job) -> None:
    """Propose the first plan, and restart the processes that were lost during the start; these join later."""
    try:
        choice = first_plan.choose(job)
    except NotEnoughDevicesError as error:
        endings.too_few(job, str(error))
        return
    except LayoutError as error:
        endings.end(job, 2, str(error))
        return
    job.errors.clear()
    job.stand_at(job.members, job.declaration.resume_from)
    job.epoch = choice.plan.epoch
    job.move("proposing")
    job.transition = Transition(
        epoch=choice.plan.epoch,
        began_at=job.now,
        stage_at=job.now,
        committed_before=job.record.committed,
        initial=True,
        asked=set(job.ready),
        reason=f"start from {f'iteration {job.record.committed + 1}' if job.record.committed else 'the beginning'}"
        + (f"; {choice.reason}" if choice.reason else ""),
    )
    transition.propose(job, choice)
    for _, member in sorted(job.members.items()):
        if not member.alive:
            joins.respawn(job, member)
    joins.start_latecomers(job)
