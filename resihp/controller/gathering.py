"""The start: agents join, workers are spawned and declare what they train, the first plan is made."""

from __future__ import annotations

from resihp.controller import incidents, transitions
from resihp.controller import interface as api
from resihp.controller.state import Job, Member, Node, Transition, natural
from resihp.errors import LayoutError
from resihp.journal import NodeJoined, WorkerStarted
from resihp.layout import Layout, validate
from resihp.plan import Plan, spread
from resihp.protocol import messages as m


def agent_joined(job: Job, event: api.AgentJoined) -> None:
    node = job.nodes.get(event.node)
    if node is not None:  # the same agent, on a new connection
        node.last_beat = job.now
        return
    job.nodes[event.node] = Node(event.node, event.host, event.devices, last_beat=job.now)
    job.do(api.Log(entry=NodeJoined(node=event.node, host=event.host, devices=event.devices)))
    if len(job.nodes) == job.settings.nodes:
        rank = 0
        for name in sorted(job.nodes, key=natural):
            devices = range(job.settings.gpus_per_node)
            job.do(api.StartWorkers(node=name, workers=tuple((rank + d, d) for d in devices)))
            rank += job.settings.gpus_per_node


def spawned(job: Job, event: api.WorkerSpawned) -> None:
    if event.rank in job.members:
        return
    member = Member(event.rank, event.node, event.device, event.pid, beat_at=job.now, progress_at=job.now)
    job.members[event.rank] = member
    job.do(
        api.Log(
            entry=WorkerStarted(rank=event.rank, node=event.node, device=event.device, pid=event.pid, epoch=job.epoch)
        )
    )


def declared(job: Job, member: Member, declare: m.Declare) -> None:
    if job.phase != "gathering" or member.declared is not None:
        return
    member.declared = declare
    propose_when_ready(job)


def propose_when_ready(job: Job) -> None:
    """Once every rank has declared the same model and the store listens: the first plan."""
    if job.phase != "gathering" or job.store is None:
        return
    if len(job.live) < job.settings.nodes * job.settings.gpus_per_node:
        return
    declares = {rank: member.declared for rank, member in job.members.items()}
    first = declares[min(declares)]
    if first is None or any(declare is None for declare in declares.values()):
        return
    odd = sorted(rank for rank, declare in declares.items() if declare != first)
    if odd:
        incidents.end(
            job, 2, f"{job.where(odd[0])}: declares another model, batch or version than rank {min(declares)}"
        )
        return
    tp, pp = job.settings.tp, job.settings.pp
    dp = len(job.members) // (tp * pp)
    standby = tuple(range(dp * tp * pp, len(job.members)))
    try:
        if dp < 1:
            raise LayoutError(f"layout tp={tp} pp={pp}: needs {tp * pp} devices, the job has {len(job.members)}")
        layout = Layout.uniform(tp=tp, pp=pp, dp=dp, layers=first.model.layers, standby=standby)
        validate(layout, first.model)
        assignment = spread(first.micro_batches, dp)
    except LayoutError as error:
        incidents.end(job, 2, str(error))
        return
    job.goal = first.iterations
    job.committed = first.resume_from
    for member in job.members.values():
        member.stepped = first.resume_from
    job.epoch = 1
    job.phase = "transition"
    job.transition = Transition(
        stage="proposing", epoch=1, began_at=job.now, stage_at=job.now, committed_before=job.committed, initial=True
    )
    begin = f"iteration {job.committed + 1}" if job.committed else "the beginning"
    transitions.propose(
        job, Plan(epoch=1, layout=layout, assignment=assignment, schedule=job.settings.schedule), f"start from {begin}"
    )
