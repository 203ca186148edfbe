"""The start: agents join, workers are spawned and declare what they train, the first plan is made.

A node that is lost meanwhile, or never comes, is left out if the others fill the first layout: there are spares. Ranks
are given out once, when every node is there or given up, and keep their numbers whatever is lost after that. Called by
`controller`, `failures`, `judge` and `recovery`.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from resihp.controller import interface as api
from resihp.controller import iterations, planning, transition
from resihp.controller.fail_slow import probing
from resihp.controller.fail_stop import incidents
from resihp.controller.nodes import joins
from resihp.controller.state import Job, Member, Placement, Transition, natural
from resihp.detector import probes
from resihp.errors import LayoutError
from resihp.protocol import messages as m
from resihp.record.journal import ModelDeclared, WorkerStarted


def agent_joined(job: Job, event: api.AgentJoined) -> None:
    node = job.nodes.get(event.node)
    if node is not None and (node.alive or not event.lease):  # the same agent, on a new connection
        node.last_beat = job.now
        return
    if event.lease or job.phase != "gathering":
        joins.node_joined(job, event)
        return
    joins.take_in(job, event)
    if len(job.nodes) == job.settings.nodes:
        start_workers(job)


def place(job: Job) -> None:
    """Once every node is there or given up: give out the ranks, for good."""
    if job.placements or len(job.nodes) < job.settings.nodes:
        return
    order = sorted((name for name, node in job.nodes.items() if node.alive), key=natural)
    job.placements = [Placement(name, d, settled=True) for name in order for d in range(job.settings.gpus_per_node)]


def places(job: Job) -> list[int]:
    """Ranks that the start waits for: those on nodes that are not lost."""
    return [rank for rank, placement in enumerate(job.placements) if job.nodes[placement.node].alive]


def start_workers(job: Job) -> None:
    """Once every node is there or given up: a worker on each device, unless there is one, or one about to be forked."""
    place(job)
    names = tuple(placement.node for placement in job.placements)
    live = job.live
    wanted: dict[str, list[int]] = {}
    for rank in places(job):
        if rank not in live and job.placements[rank].settled:
            wanted.setdefault(names[rank], []).append(rank)
    for name, ranks in wanted.items():
        for rank in ranks:
            job.placements[rank].settled = False
        workers = tuple((rank, job.placements[rank].device) for rank in ranks)
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
    if not job.placements:
        start_workers(job)
    propose_when_ready(job)


def spawned(job: Job, event: api.WorkerSpawned) -> None:
    if event.rank >= len(job.placements) or job.placements[event.rank].settled:
        return
    job.placements[event.rank].settled = True
    job.nodes[event.node].last_beat = job.now
    member = Member(event.rank, event.node, event.device, event.pid, beat_at=job.now, progress_at=job.now)
    member.spawned_at = job.now
    member.joins = job.phase != "gathering"
    job.members[event.rank] = member
    job.do(
        api.Log(
            entry=WorkerStarted(rank=event.rank, node=event.node, device=event.device, pid=event.pid, epoch=job.epoch)
        )
    )
    if job.phase == "halting":
        iterations.newcomers_leave(job)


def spawn_refused(job: Job, event: api.SpawnRefused) -> None:
    if job.phase == "gathering":
        incidents.end(job, 2, f"node {event.node}: cannot start workers: {event.reason}")
    else:
        joins.spawn_refused(job, event)


def declared(job: Job, member: Member, declare: m.Declare) -> None:
    if job.phase != "gathering":
        joins.declared(job, member, declare)
        return
    if member.declared is not None:
        return
    member.declared = declare
    propose_when_ready(job)


def trains_the_same(job: Job, declare: m.Declare) -> bool:
    """Whether a rank declares what the job trains, wherever it would resume from."""
    assert job.trains is not None
    return msgspec.structs.replace(declare, resume_from=job.trains.resume_from) == job.trains


def refused(job: Job, member: Member, refuse: m.Refuse) -> None:
    """The script cannot start: at the start of the job for the user to mend, later a device that is no good."""
    if job.phase == "gathering":
        incidents.end(job, 2, refuse.reason)
    elif member.declared is None and member.fenced is None:
        joins.turn_away(job, member, refuse.reason)


def propose_when_ready(job: Job) -> None:
    """Once every rank has declared the same model and the store listens: the first plan."""
    if job.phase != "gathering" or job.store is None or job.departure is not None:
        return
    if not job.placements or len(job.live) < len(places(job)):
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
    job.trains = first
    job.goal = first.iterations
    job.committed = first.resume_from
    if job.settings.examine and not job.examinations:
        order = sorted(job.ready)
        probing.begin(job, "start", order, probes.ring(order))
    elif not job.settings.examine:
        _propose(job)


def measured(job: Job, judged: Mapping[int, probes.Judged]) -> None:
    """Every device has been measured: those that are not fit stand by, the others begin."""
    if job.phase != "gathering" or job.departure is not None:
        return
    for rank, verdict in sorted(judged.items()):
        if not verdict.fit and job.members[rank].alive:
            job.unfit.add((job.members[rank].node, job.members[rank].device))
            job.say("warning", f"{job.where(rank)}: fails its probe: {verdict.evidence}")
    _propose(job)


def _propose(job: Job) -> None:
    """The first plan."""
    first = job.declaration
    try:
        choice = planning.first(job)
    except LayoutError as error:
        incidents.end(job, 2, str(error))
        return
    job.do(api.Log(entry=ModelDeclared(declare=first)))
    for member in job.members.values():
        member.stepped = first.resume_from
    job.epoch = choice.plan.epoch
    job.first_plan = choice.plan
    job.phase = "transition"
    job.transition = Transition(
        stage="proposing",
        epoch=choice.plan.epoch,
        began_at=job.now,
        stage_at=job.now,
        committed_before=job.committed,
        initial=True,
        asked=set(job.ready),
        reason=f"start from {f'iteration {job.committed + 1}' if job.committed else 'the beginning'}"
        + (f"; {choice.reason}" if choice.reason else ""),
    )
    transition.propose(job, choice)
