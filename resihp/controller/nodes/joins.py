"""Handle processes that start after the first plan: the next worker on a device after a crash, and all workers of a new
node.

Decides when a device gets another process, and whether the new process may join; `replan_policy` decides whether giving
it work is worth an interruption. A node may join only if it was requested (`replacements`), or if it is one of the
job's own nodes for which the start did not wait any longer. A node that was left out for another reason stays out. A
new process has no role until it has declared the job's model; then it is a standby rank and takes part in every
transition. A process that is turned away never stops the job. Called by `startup`, `failures`, `watchdog` and
`consent`.
"""

from __future__ import annotations

import signal as signals
from collections.abc import Iterable, Mapping

import msgspec

from resihp.controller import fault_injection, replan_policy, transition
from resihp.controller import interface as api
from resihp.controller.fail_stop import own_causes
from resihp.controller.nodes import replacements
from resihp.controller.probing import probe_orders
from resihp.controller.state.job import Job
from resihp.controller.state.members import Member
from resihp.detector import probes
from resihp.protocol import messages as m
from resihp.record.journal import JoinRefused, NodeJoined, WorkersOrdered
from resihp.words import natural


def respawn(job: Job, dead: Member) -> None:
    """Start another process in place of a dead one, unless the script raised an exception, the device is dead, or the
    device has used up its respawns.

    An error of storage or of a service does not count as the script's: it may have passed.
    """
    device = (dead.node, dead.device)
    if not job.under_way or job.furthest >= job.record.goal:
        return
    if job.stop_request is not None or job.excused(dead.node, job.now):
        return
    outside = own_causes.failed_on_its_device(job, dead) or own_causes.is_from_outside(job, dead.rank)
    by_script = dead.raised is not None and not outside
    if by_script or dead.unwilling or device in job.dead_devices or not job.nodes[dead.node].alive:
        return
    if sum((p.node, p.device) == device for p in job.record.placements) > job.settings.come_backs:
        return
    job.say("notice", f"node {dead.node} device {dead.device}: started again, as rank {len(job.record.placements)}")
    _order(job, dead.node, (dead.device,))


def _order(job: Job, node: str, devices: Iterable[int]) -> None:
    """Order a process on each of these devices of a node. The new ranks are journaled before any agent is told."""
    first = len(job.record.placements)
    workers = tuple(enumerate(devices, first))
    job.log(WorkersOrdered(workers=tuple((rank, node, device) for rank, device in workers)))
    job.starting.update(rank for rank, _ in workers)
    names = tuple(placement.node for placement in job.record.placements)
    job.do(api.StartWorkers(node=node, workers=workers, nodes=names, joins=True))


def node_joined(job: Job, event: api.AgentJoined) -> None:
    """Handle the agent of a node with which the job did not start: let the node join if it was requested, else refuse
    it."""
    request = replacements.expected(job, event.lease)
    if request is not None and (odd := _other_hardware(job, event)):
        job.say("warning", f"node {event.node}: does not join: {odd}")
        job.do(api.DropNode(node=event.node))
        replacements.unfit(job, request, event.node, f"node {event.node} does not join: {odd}")
        return
    if request is None or event.node in job.nodes or not (job.under_way or job.runs_script):
        cause = f"request {event.lease} is over" if event.lease else "it was not requested"
        why = "it was left out before" if event.node in job.nodes else cause
        job.say("notice", f"node {event.node}: does not join: {why}")
        job.do(api.DropNode(node=event.node))
        if request is not None:
            replacements.cancel(job, request, f"node {event.node} does not join: {why}")
        return
    take_in(job, event)
    replacements.joined(job, request, event.node)
    job.say("notice", f"node {event.node}: joined in place of {request.instead}")
    if not job.runs_script:
        start_node(job, event.node)


def take_in(job: Job, event: api.AgentJoined) -> None:
    """Add a node to the job."""
    job.log(
        NodeJoined(
            node=event.node,
            host=event.host,
            devices=event.devices,
            hardware=event.hardware,
            incarnation=event.incarnation,
            inventory=event.machine,
        )
    )


def _other_hardware(job: Job, event: api.AgentJoined) -> str:
    """Return, in words, how a new node's devices differ from the job's; empty if they do not, or if either kind is not
    known.

    Devices of another kind compute at another speed, and may round differently.
    """
    kinds = {node.hardware for node in job.nodes.values()} - {""}
    if not event.hardware or not kinds or event.hardware in kinds:
        return ""
    return f"its devices are {event.hardware}, the job's are {' and '.join(sorted(kinds))}"


def is_latecomer(job: Job, name: str) -> bool:
    """Return whether one of the job's own nodes was given up because it had not joined in time."""
    node = job.nodes[name]
    return not node.alive and not node.devices


def come_late(job: Job, event: api.AgentJoined) -> None:
    """Let one of the job's own nodes join after it was given up. Its processes join those that train or are about to.

    The node is refused if it was given back to Slurm or is being drained, or if training is done.
    """
    lost_node, release = job.record.lost[event.node], job.maintenance.releases[event.node]
    drained = any(drain.node == event.node and drain.measure == "drain" for drain in job.record.drains.values())
    late = job.stage not in ("gathering", "restarting") and not job.under_way
    if lost_node.released or release.asked or drained or late:
        why = "training is done" if late else "it is being drained" if drained else "it was given back"
        job.say("notice", f"node {event.node}: joins too late: {why}")
        job.do(api.DropNode(node=event.node))
        return
    take_in(job, event)
    job.say("notice", f"node {event.node}: joined late")
    if job.under_way:
        start_node(job, event.node)


def start_latecomers(job: Job) -> None:
    """Start workers on nodes that joined while workers of other nodes were already starting."""
    placed = {placement.node for placement in job.record.placements}
    for name in sorted(job.nodes.keys() - placed, key=natural):
        start_node(job, name)


def start_node(job: Job, name: str) -> None:
    """Start a worker on each device of a node that joined later, unless workers were ordered there before."""
    node = job.nodes[name]
    if job.stop_request is not None or job.furthest >= job.record.goal or not node.alive:
        return
    if not any(placement.node == name for placement in job.record.placements):
        _order(job, name, range(node.devices))


def declared(job: Job, member: Member, declare: m.Declare) -> None:
    """Accept a new process if it declares the same model and workload as the job, else turn it away. The checkpoint
    that it found does not matter."""
    if member.declared is not None or member.fenced is not None or not job.under_way:
        return
    first = job.declaration
    odd = [
        name
        for name in m.Declare.__struct_fields__
        if name not in ("resume_from", "resume_folder", "software") and getattr(declare, name) != getattr(first, name)
    ]
    if odd:
        turn_away(job, member, f"declares another {' and '.join(name.replace('_', ' ') for name in odd)} than the job")
        return
    member.declared = msgspec.structs.replace(declare, resume_from=first.resume_from, resume_folder=first.resume_folder)
    fault_injection.stay_slow(job, member.rank)
    job.say("notice", f"{job.where(member.rank)}: ready to join")
    became_ready(job, member.rank)
    if member.rank in job.unmeasured:
        probe_orders.begin(job, "join", (member.rank,))
    if job.pause is not None:
        job.pause.reason += f", rank {member.rank} joined"
        transition.ask_to_pause(job, (member.rank,))


def became_ready(job: Job, rank: int) -> None:
    """Have the planner consider work for a new rank that is ready; if devices are to be probed, only after a probe of
    its device."""
    if job.settings.examine:
        job.unmeasured.add(rank)
    else:
        replan_policy.consider_newcomer(job, rank)


def measured(job: Job, judged: Mapping[int, probes.Judged]) -> None:
    """Act on the probe of a new rank's device. If the device is not fit, the rank stands by, unless the job has to use
    unfit devices already."""
    uses_unfit = any(job.device_of(rank) in job.record.unfit for rank in job.record.computing)
    for rank, verdict in judged.items():
        member = job.members[rank]
        job.unmeasured.discard(rank)
        if not member.ready:
            continue
        if verdict.fit or job.settings.observes or (uses_unfit and verdict.speed is not None):
            replan_policy.consider_newcomer(job, rank)
        if not verdict.fit and job.settings.observes:
            text = f"fails its probe: {verdict.evidence}; observe mode: it gets work all the same"
            job.say("warning", f"{job.where(rank)}: {text}")
        elif not verdict.fit:
            when = probe_orders.measured_again(job, rank)
            job.say("warning", f"{job.where(rank)}: failed its probe, kept on standby: {verdict.evidence}; {when}")


def turn_away(job: Job, member: Member, reason: str) -> None:
    """Kill a new process that cannot take part, and start no further process on its device. The job goes on."""
    member.declared = None
    member.fenced = reason
    refuse(job, member.rank, reason, condemns=True)
    job.do(api.SignalWorker(rank=member.rank, signal=int(signals.SIGKILL)))


def refuse(job: Job, rank: int, reason: str, *, condemns: bool) -> None:
    """Journal that a new process does not join. `condemns`: whether its device gets no further process."""
    node, device = job.record.placements[rank].node, job.record.placements[rank].device
    job.say("warning", f"rank {rank} ({node} device {device}): does not join: {reason}")
    job.log(JoinRefused(rank=rank, node=node, device=device, reason=reason, condemns_device=condemns))


def exited(job: Job, member: Member, ending: str) -> None:
    """Handle a new process that ended before it was ready. Unless its script was the cause, another process is started
    on the device."""
    if member.fenced is not None:
        return
    if member.raised is not None:
        ending = f"raised {member.raised.error}"
    refuse(job, member.rank, f"{ending} before it was ready", condemns=member.raised is not None)
    respawn(job, member)


def spawn_refused(job: Job, rank: int, reason: str) -> None:
    """Handle a new process that could not be started."""
    job.starting.discard(rank)
    refuse(job, rank, reason, condemns=False)


def judge(job: Job) -> None:
    """Turn away new processes that are not ready within the start budget."""
    starting = [member for member in job.members.values() if member.declared is None]
    for member in sorted(starting, key=lambda member: member.rank):
        late = job.now - member.spawned_at > job.settings.start_budget_s
        if member.alive and member.fenced is None and late:
            turn_away(job, member, f"not ready within {job.settings.start_budget_s:.0f} s of its start")
