"""Processes that start while the job is under way: a crashed worker's next one on its device, all those of a new node.

Decides when a device gets another process, whether the newcomer may join, and whether it is worth an interruption.
A node is taken in only when it was asked for (`replacements`); one that was left out stays out.
A newcomer counts for nothing until it has declared what the job trains; then it is a standby rank, and part of every
transition. One that is turned away never stops the job. Called by `gathering`, `failures`, `judge`, `consent` and, at
the end of each event, by the controller.
"""

from __future__ import annotations

import signal as signals
from collections.abc import Mapping

import msgspec

from resihp.controller import interface as api
from resihp.controller import planning, transition
from resihp.controller.fail_slow import probing
from resihp.controller.nodes import replacements
from resihp.controller.state import Job, Member, Node, Placement
from resihp.detector import probes
from resihp.errors import LayoutError, NotEnoughDevicesError
from resihp.protocol import messages as m
from resihp.record.journal import JoinRefused, NodeJoined


def come_back(job: Job, lost: Member) -> None:
    """Start another process where one died, unless the script raised, or the device is dead or had its chances."""
    device = (lost.node, lost.device)
    if job.phase not in ("transition", "running") or job.furthest >= job.goal:
        return
    if job.departure is not None or job.excused(lost.node, job.now):
        return
    if lost.raised is not None or device in job.dead_devices or not job.nodes[lost.node].alive:
        return
    if sum((p.node, p.device) == device for p in job.placements) > job.settings.come_backs:
        return
    rank = len(job.placements)
    job.placements.append(Placement(lost.node, lost.device))
    names = tuple(placement.node for placement in job.placements)
    job.say("notice", f"node {lost.node} device {lost.device}: started again, as rank {rank}")
    job.do(api.StartWorkers(node=lost.node, workers=((rank, lost.device),), nodes=names, joins=True))


def node_joined(job: Job, event: api.AgentJoined) -> None:
    """An agent of a node that the job did not begin with."""
    request = replacements.expected(job, event.lease)
    if request is not None and (odd := _other_hardware(job, event)):
        job.say("warning", f"node {event.node}: does not join: {odd}")
        job.do(api.DropNode(node=event.node))
        replacements.unfit(job, request, event.node, f"node {event.node} does not join: {odd}")
        return
    if request is None or event.node in job.nodes or job.phase not in ("transition", "running"):
        known = f"request {event.lease} is over" if event.lease else "nobody asked for it"
        why = "it was left out before" if event.node in job.nodes else known
        job.say("notice", f"node {event.node}: does not join: {why}")
        job.do(api.DropNode(node=event.node))
        if request is not None:
            replacements.cancel(job, request, f"node {event.node} does not join: {why}")
        return
    take_in(job, event)
    replacements.joined(job, request, event.node)
    job.say("notice", f"node {event.node}: joined in place of {request.instead}")
    start_node(job, event.node)


def take_in(job: Job, event: api.AgentJoined) -> None:
    """From here on it is one of the job's nodes."""
    node = Node(event.node, event.host, event.devices, last_beat=job.now, hardware=event.hardware)
    job.nodes[event.node] = node
    job.do(
        api.Log(
            entry=NodeJoined(node=node.name, host=node.host, devices=node.devices, hardware=node.hardware),
        )
    )


def _other_hardware(job: Job, event: api.AgentJoined) -> str:
    """What is odd about a newcomer's devices; nothing where theirs, or those of the job's nodes, are not known.

    Devices of another kind compute at another speed, and may round otherwise.
    """
    known = {node.hardware for node in job.nodes.values()} - {""}
    if not event.hardware or not known or event.hardware in known:
        return ""
    return f"its devices are {event.hardware}, the job's are {' and '.join(sorted(known))}"


def start_node(job: Job, name: str) -> None:
    """A worker on each device of a node that came later, unless there are some already."""
    node = job.nodes[name]
    if not node.alive or any(placement.node == name for placement in job.placements):
        return
    first = len(job.placements)
    job.placements += [Placement(name, device) for device in range(node.devices)]
    names = tuple(placement.node for placement in job.placements)
    workers = tuple((first + device, device) for device in range(node.devices))
    job.do(api.StartWorkers(node=name, workers=workers, nodes=names, joins=True))


def declared(job: Job, member: Member, declare: m.Declare) -> None:
    """A newcomer trains what the job trains, or it is turned away. The checkpoint that it found does not matter."""
    if member.declared is not None or member.fenced is not None or job.phase not in ("transition", "running"):
        return
    first = job.declaration
    odd = [
        name
        for name in m.Declare.__struct_fields__
        if name != "resume_from" and getattr(declare, name) != getattr(first, name)
    ]
    if odd:
        turn_away(job, member, f"declares another {' and '.join(name.replace('_', ' ') for name in odd)} than the job")
        return
    member.declared = msgspec.structs.replace(declare, resume_from=first.resume_from)
    job.say("notice", f"{job.where(member.rank)}: ready to join")
    if job.settings.examine:
        job.unmeasured.add(member.rank)
        probing.begin(job, "join", (member.rank,))
    else:
        job.unconsidered.add(member.rank)
    if job.pause is not None:
        job.pause.reason += f", rank {member.rank} joined"
        transition.ask_to_pause(job, (member.rank,))


def measured(job: Job, judged: Mapping[int, probes.Judged]) -> None:
    """A newcomer's device was measured: one that is not fit stands by."""
    for rank, verdict in judged.items():
        member = job.members[rank]
        job.unmeasured.discard(rank)
        if not member.ready:
            continue
        if verdict.fit:
            job.unfit.discard((member.node, member.device))
            job.unconsidered.add(rank)
        else:
            job.unfit.add((member.node, member.device))
            job.say("warning", f"{job.where(rank)}: stands by, it fails its probe: {verdict.evidence}")


def consider(job: Job) -> None:
    """Once nothing else is going on: interrupt training for newcomers if the planner would give one of them work."""
    plan = job.plan
    if job.phase != "running" or job.transition is not None or job.pause is not None or plan is None:
        return
    if job.departure is not None:
        return
    idle = job.unconsidered & set(job.ready) - set(job.active)
    job.unconsidered = set()
    if not idle or job.furthest + 1 >= job.goal:  # the iteration under way is finished before anybody could help
        return
    try:
        better = planning.best(job, job.epoch + 1, set(job.ready), planning.base_while_running(job)).plan
    except (LayoutError, NotEnoughDevicesError):
        return
    if better.layout.active != job.active:
        transition.pause(job, f"rank {', '.join(map(str, sorted(idle)))} joined")


def turn_away(job: Job, member: Member, reason: str) -> None:
    """A newcomer that cannot take part is ended, and its device left alone; the job goes on."""
    member.declared = None
    member.fenced = reason
    job.dead_devices.add((member.node, member.device))
    refuse(job, member.rank, reason)
    job.do(api.SignalWorker(rank=member.rank, signal=int(signals.SIGKILL)))


def refuse(job: Job, rank: int, reason: str) -> None:
    placement = job.placements[rank]
    job.say("warning", f"rank {rank} ({placement.node} device {placement.device}): does not join: {reason}")
    job.do(api.Log(entry=JoinRefused(rank=rank, node=placement.node, device=placement.device, reason=reason)))


def exited(job: Job, member: Member, ending: str) -> None:
    """A newcomer ended before it was ready; unless its script is at fault, its device has another try."""
    if member.fenced is not None:
        return
    if member.raised is not None:
        job.dead_devices.add((member.node, member.device))
        ending = f"raised {member.raised.error}"
    refuse(job, member.rank, f"{ending} before it was ready")
    come_back(job, member)


def spawn_refused(job: Job, event: api.SpawnRefused) -> None:
    """The node could not start a newcomer, or none at all."""
    for rank, placement in enumerate(job.placements):
        if placement.node == event.node and not placement.settled and event.rank in (None, rank):
            placement.settled = True
            refuse(job, rank, event.reason)


def judge(job: Job) -> None:
    """Newcomers have the start's budget to get ready."""
    for rank in job.live:
        member = job.members[rank]
        if not member.ready and member.fenced is None and job.now - member.spawned_at > job.settings.start_budget_s:
            turn_away(job, member, f"not ready within {job.settings.start_budget_s:.0f} s of its start")
