"""Fault injection: carries faults out when a rank reports that their moment has come, or at once for an operator."""

from __future__ import annotations

import signal as signals

from resihp.controller import interface as api
from resihp.controller.state.incidents import ArmedFault
from resihp.controller.state.job import Job
from resihp.controller.state.members import Member, natural
from resihp.faults import Fault
from resihp.protocol import messages as m
from resihp.record.journal import FaultInjected


def fault_due(job: Job, member: Member, fault_id: int) -> None:
    armed = job.faults.get(fault_id)
    if armed is None or fault_id in job.record.fired:
        job.order((member.rank,), m.FaultGo(fault=fault_id, fire=False))
        return
    obstacle = inject(job, armed.fault, member.rank)
    armed.refused = obstacle or ""
    hits_itself = armed.fault.hits(member.rank, member.node)
    if obstacle is not None or not (hits_itself or armed.fault.kind in ("disconnect", "slow")):
        job.order((member.rank,), m.FaultGo(fault=fault_id, fire=False))


def inject(job: Job, fault: Fault, waiting: int | None = None) -> str | None:
    """Inject a fault, for which rank `waiting` waits; return the reason if that is not possible."""
    if fault.rank is not None:
        member = job.members.get(fault.rank)
        if member is None:
            return f"there is no rank {fault.rank}"
        if not member.alive:
            return f"rank {fault.rank} was already gone"
        victims = [fault.rank]
    else:
        names = fault.link or (fault.node or "",)
        for name in names:
            if name not in job.nodes:
                return f"there is no node {name}; the job has {', '.join(sorted(job.nodes, key=natural))}"
            if not job.nodes[name].alive:
                return f"node {name} was already gone"
        victims = [rank for rank in job.live if job.members[rank].node in names]
    if fault.kind == "disconnect" and fault.node is None:
        return "a connection is cut between the supervisor and a node, not a rank"
    entry = FaultInjected(
        fault=fault.id,
        text=str(fault),
        rank=fault.rank,
        node=fault.node,
        iteration=fault.iteration or job.record.committed + 1,
        kind=fault.kind,
    )
    job.log(entry)
    if fault.kind == "disconnect" and fault.node is not None:
        if waiting is not None:  # while an order still reaches it
            job.order((waiting,), m.FaultGo(fault=fault.id, fire=False))
        job.do(api.CutConnection(node=fault.node))
        return None
    if fault.kind == "slow":
        assert fault.speed is not None
        job.slow_since.update(dict.fromkeys([fault.link] if fault.link else victims, job.now))
        slow = m.Slow(speed=fault.speed, until=fault.until, link=fault.link, every=fault.every)
        job.order(tuple(victims), slow)
        if fault.until is not None:
            job.slowed.append((tuple(victims), slow))
        if waiting is not None:
            job.order((waiting,), m.FaultGo(fault=fault.id, fire=False))
        return None
    for rank in victims:
        job.signalled.setdefault(rank, job.now)
    if fault.kind in ("hang", "raise"):
        job.order(tuple(victims), m.FaultGo(fault=fault.id, fire=True))
        return None
    number = int(signals.SIGSTOP if fault.kind == "stop" else signals.SIGKILL)
    if fault.node is not None:
        job.do(api.SignalNode(node=fault.node, signal=number))
    else:
        member = job.members[victims[0]]
        job.do(api.SignalWorker(rank=member.rank, signal=number))
    return None


def stay_slow(job: Job, rank: int) -> None:
    """Slow down a new process on a device, node or link that an injected fault has made slow: the device is slow, not
    the process that died on it."""
    place = job.record.placements[rank]
    for fault in _lasting(job):
        of_device = fault.rank is not None and job.record.placements[fault.rank] == place
        if not of_device and place.node not in (fault.node, *(fault.link or ())):
            continue
        assert fault.speed is not None
        slow = m.Slow(speed=fault.speed, until=fault.until, link=fault.link, every=fault.every)
        job.order((rank,), slow)
        if fault.until is not None:
            job.slowed.append(((rank,), slow))


def _lasting(job: Job) -> list[Fault]:
    """Return the injected `slow` faults that are not over, in the order in which they were armed or asked for."""
    fired = [armed.fault for armed in job.faults.values() if armed.fault.id in job.record.fired]
    return [
        fault for fault in fired if fault.kind == "slow" and (fault.until is None or job.record.committed < fault.until)
    ]


def end_slowness(job: Job) -> None:
    """Tell ranks that a `slow` fault is over: a standby rank does not see iterations pass."""
    over = [slowed for slowed in job.slowed if job.record.committed >= (slowed[1].until or 0)]
    for ranks, slow in over:
        job.order(tuple(rank for rank in ranks if job.members[rank].alive), m.Slow(speed=1.0, link=slow.link))
    job.slowed = [slowed for slowed in job.slowed if slowed not in over]


def inject_asked(job: Job, event: api.InjectAsked) -> None:
    if event.fault.kind in ("hang", "raise"):
        obstacle: str | None = f"{event.fault.kind} needs a moment: use resihp run --fault"
    else:
        obstacle = inject(job, event.fault)
        if obstacle is None and event.fault.kind == "slow":
            job.faults[event.fault.id] = ArmedFault(event.fault)
    text = obstacle or f"{event.fault} injected in iteration {job.record.committed + 1}"
    job.do(api.Reply(request=event.request, ok=obstacle is None, text=text))
