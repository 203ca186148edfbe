"""Inject faults: when a rank reports that it has reached the point at which a fault is due, or at once on an operator's
request."""

from __future__ import annotations

import signal as signals

from resihp.controller import interface as api
from resihp.controller.state.incidents import ArmedFault
from resihp.controller.state.job import Job
from resihp.controller.state.members import Member
from resihp.faults import Fault
from resihp.protocol import messages as m
from resihp.record.journal import FaultInjected
from resihp.words import natural


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
    """Inject a fault; return the reason if that is impossible, else None. `waiting`: the rank that has paused until the
    fault is injected, if there is one."""
    obstacle = _obstacle(job, fault)
    if obstacle is not None:
        return obstacle
    victims = _victims(job, fault)
    job.log(
        FaultInjected(
            fault=fault.id,
            text=str(fault),
            rank=fault.rank,
            node=fault.node,
            iteration=fault.iteration or job.record.committed + 1,
            kind=fault.kind,
        )
    )
    if fault.kind == "disconnect" and fault.node is not None:
        _let_go_on(job, fault, waiting)  # before the cut, while an order still reaches the rank
        job.do(api.CutConnection(node=fault.node))
    elif fault.kind == "slow":
        job.slow_since.update(dict.fromkeys([fault.link] if fault.link else victims, job.now))
        _slow_down(job, fault, victims)
        _let_go_on(job, fault, waiting)
    else:
        for rank in victims:
            job.signalled.setdefault(rank, job.now)
        _break(job, fault, victims)
    return None


def _obstacle(job: Job, fault: Fault) -> str | None:
    """Return the reason for which a fault cannot be injected; None if it can."""
    if fault.rank is not None:
        member = job.members.get(fault.rank)
        if member is None:
            return f"there is no rank {fault.rank}"
        if not member.alive:
            return f"rank {fault.rank} was already gone"
    else:
        for name in _nodes_hit(fault):
            if name not in job.nodes:
                return f"there is no node {name}; the job has {', '.join(sorted(job.nodes, key=natural))}"
            if not job.nodes[name].alive:
                return f"node {name} was already gone"
    if fault.kind == "disconnect" and fault.node is None:
        return "a connection is cut between the supervisor and a node, not a rank"
    return None


def _nodes_hit(fault: Fault) -> tuple[str, ...]:
    return fault.link or (fault.node or "",)


def _victims(job: Job, fault: Fault) -> tuple[int, ...]:
    """Return the ranks that a fault hits: its own rank, or all live ranks of its nodes."""
    if fault.rank is not None:
        return (fault.rank,)
    names = _nodes_hit(fault)
    return tuple(rank for rank in job.live if job.members[rank].node in names)


def _let_go_on(job: Job, fault: Fault, waiting: int | None) -> None:
    """Tell the rank that has paused for a fault, if there is one, to continue."""
    if waiting is not None:
        job.order((waiting,), m.FaultGo(fault=fault.id, fire=False))


def _slow_down(job: Job, fault: Fault, victims: tuple[int, ...]) -> None:
    assert fault.speed is not None
    slow = m.Slow(speed=fault.speed, until=fault.until, link=fault.link, every=fault.every)
    job.order(victims, slow)
    if fault.until is not None:
        job.slowed.append((victims, slow))


def _break(job: Job, fault: Fault, victims: tuple[int, ...]) -> None:
    """Make processes hang or raise by an order, or stop or kill them with a signal."""
    if fault.kind in ("hang", "raise"):
        job.order(victims, m.FaultGo(fault=fault.id, fire=True))
        return
    number = int(signals.SIGSTOP if fault.kind == "stop" else signals.SIGKILL)
    if fault.node is not None:
        job.do(api.SignalNode(node=fault.node, signal=number))
    else:
        job.do(api.SignalWorker(rank=victims[0], signal=number))


def stay_slow(job: Job, rank: int) -> None:
    """Slow down a new process if an injected fault has slowed its device, node or link. Such a fault belongs to the
    device and not to the process that died there."""
    place = job.record.placements[rank]
    for fault in _lasting(job):
        of_device = fault.rank is not None and job.record.placements[fault.rank] == place
        if not of_device and place.node not in (fault.node, *(fault.link or ())):
            continue
        _slow_down(job, fault, (rank,))


def _lasting(job: Job) -> list[Fault]:
    """Return the injected `slow` faults that have not ended, in the order in which they were configured or
    requested."""
    fired = [armed.fault for armed in job.faults.values() if armed.fault.id in job.record.fired]
    return [
        fault for fault in fired if fault.kind == "slow" and (fault.until is None or job.record.committed < fault.until)
    ]


def end_slowness(job: Job) -> None:
    """Tell ranks that a `slow` fault has ended. The supervisor has to do this, because a standby rank does not see
    iterations pass."""
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
