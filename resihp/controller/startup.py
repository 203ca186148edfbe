"""The start: agents join, workers are spawned and declare what they train, the first plan is made.

A node that is lost meanwhile, or never comes, is left out if the others fill the first layout: there are spares. Ranks
are given out once, when every node is there or given up, and keep their numbers whatever is lost after that. Called by
`controller`, `failures`, `watchdog` and `takeover`.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from resihp.controller import interface as api
from resihp.controller import iterations, planning, transition
from resihp.controller.fail_slow import probing
from resihp.controller.fail_stop import incidents
from resihp.controller.nodes import joins
from resihp.controller.state import Job, Member, Transition, natural
from resihp.detector import probes
from resihp.errors import LayoutError
from resihp.protocol import messages as m
from resihp.record.journal import ModelDeclared, WorkersOrdered, WorkerStarted


def agent_joined(job: Job, event: api.AgentJoined) -> None:
    node = job.nodes.get(event.node)
    if node is not None and (node.alive or not event.lease):  # the same agent, on a new connection
        node.last_beat = job.now
        return
    if event.lease or job.stage != "gathering":
        joins.node_joined(job, event)
        return
    joins.take_in(job, event)
    if len(job.nodes) == job.settings.nodes:
        start_workers(job)


def places(job: Job) -> list[int]:
    """Ranks that the start waits for: those on nodes that are not lost."""
    return [rank for rank, placement in enumerate(job.record.placements) if job.nodes[placement.node].alive]


def start_workers(job: Job) -> None:
    """Once every node is there or given up: a worker on each device, unless there is one, or one about to be forked.

    The ranks are given out then, for good.
    """
    if len(job.nodes) < job.settings.nodes:
        return
    if not job.record.placements:
        order = sorted((name for name, node in job.nodes.items() if node.alive), key=natural)
        devices = [(name, device) for name in order for device in range(job.settings.gpus_per_node)]
        job.log(WorkersOrdered(workers=tuple((rank, *device) for rank, device in enumerate(devices))))
    names = tuple(placement.node for placement in job.record.placements)
    job.awaited = {rank for rank in places(job) if rank not in job.members or job.members[rank].declared is None}
    live = set(job.live)
    wanted: dict[str, list[int]] = {}
    for rank in places(job):
        if rank not in live and rank not in job.starting:
            wanted.setdefault(names[rank], []).append(rank)
    for name, ranks in wanted.items():
        job.starting.update(ranks)
        workers = tuple((rank, job.record.placements[rank].device) for rank in ranks)
        job.do(api.StartWorkers(node=name, workers=workers, nodes=names))


def node_lost(job: Job, name: str, reason: str, *, cannot_start: bool = False) -> None:
    """End the job if the first layout cannot be filled without this node; for good if no other run would do better."""
    if sum(not node.alive for node in job.nodes.values()) > job.settings.spares:
        when = "training began" if job.nodes[name].devices else "it joined"
        text = f"node {name}: {reason} before {when}"
        if cannot_start:
            incidents.end(job, 5, f"{text}; to be mended first, so not to be run again")
        else:
            incidents.too_few(job, text)


def go_on_without(job: Job) -> None:
    """A node was left out: the others may be all that the job waited for."""
    if len(job.nodes) < job.settings.nodes:
        return
    missing = sorted((name for name, node in job.nodes.items() if not node.alive), key=natural)
    job.say("notice", f"begins without {', '.join(missing)}: the other nodes are enough")
    if not job.record.placements:
        start_workers(job)
    job.awaited.intersection_update(places(job))
    propose_when_ready(job)


def spawned(job: Job, event: api.WorkerSpawned) -> None:
    if event.rank not in job.starting:
        return
    job.starting.discard(event.rank)
    job.nodes[event.node].last_beat = job.now
    job.log(WorkerStarted(rank=event.rank, node=event.node, device=event.device, pid=event.pid, epoch=job.epoch))
    if job.stage == "halting":
        iterations.newcomers_leave(job)


def spawn_refused(job: Job, event: api.SpawnRefused) -> None:
    if job.stage == "gathering":
        incidents.end(job, 2, f"node {event.node}: cannot start workers: {event.reason}")
    else:
        joins.spawn_refused(job, event)


def declared(job: Job, member: Member, declare: m.Declare) -> None:
    if job.stage != "gathering":
        joins.declared(job, member, declare)
        return
    if member.declared is not None:
        return
    member.declared = declare
    job.awaited.discard(member.rank)
    if not job.awaited:
        propose_when_ready(job)


def trains_the_same(job: Job, declare: m.Declare) -> bool:
    """Whether a rank declares what the job trains, wherever it would resume from."""
    return msgspec.structs.replace(declare, resume_from=job.declaration.resume_from) == job.declaration


def refused(job: Job, member: Member, refuse: m.Refuse) -> None:
    """The script cannot start: at the start of the job for the user to mend, later a device that is no good."""
    if job.stage == "gathering":
        incidents.end(job, 2, refuse.reason)
    elif member.declared is None and member.fenced is None:
        joins.turn_away(job, member, refuse.reason)


def propose_when_ready(job: Job) -> None:
    """Once every rank has declared the same model: the first plan."""
    if job.stage != "gathering" or job.departure is not None:
        return
    if not job.record.placements or len(job.live) < len(places(job)):
        return
    declares = {rank: job.members[rank].declared for rank in job.live}
    first = declares[min(declares)]
    if first is None or any(declare is None for declare in declares.values()):
        return
    odd = sorted(rank for rank, declare in declares.items() if declare != first)
    if odd:
        incidents.end(
            job, 2, f"{job.where(odd[0])}: declares another model, batch or version than rank {min(declares)}"
        )
        return
    if job.record.trains != first:
        job.log(ModelDeclared(declare=first))
    if job.settings.examine and not job.examinations:
        order = sorted(job.ready)
        probing.begin(job, "start", order, probes.ring(order))
    elif not job.settings.examine:
        _propose(job)


def measured(job: Job, judged: Mapping[int, probes.Judged]) -> None:
    """Every device has been measured: those that are not fit stand by, the others begin."""
    if job.stage != "gathering" or job.departure is not None:
        return
    for rank, verdict in sorted(judged.items()):
        if not verdict.fit and job.members[rank].alive:
            job.say("warning", f"{job.where(rank)}: fails its probe: {verdict.evidence}")
    _propose(job)


def _propose(job: Job) -> None:
    """The first plan."""
    try:
        choice = planning.first(job)
    except LayoutError as error:
        incidents.end(job, 2, str(error))
        return
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
