"""What a lost worker, a lost node, an exception or broken communication leads to."""

from __future__ import annotations

import re
import signal as signals
from collections.abc import Collection

from resihp.controller import interface as api
from resihp.controller import iterations, startup
from resihp.controller import transition as transitions
from resihp.controller.fail_stop import incidents, root_causes, silence
from resihp.controller.nodes import joins
from resihp.controller.state.incidents import Incident
from resihp.controller.state.job import Job
from resihp.controller.state.members import Member
from resihp.detector.diagnosis.diagnosis import read_log
from resihp.protocol import messages as m
from resihp.record.describe import rank_list
from resihp.record.journal import NodeLost
from resihp.record.state import HowLost

_NUMBERS = re.compile(r"\d+")
_OF_GLOO = re.compile(r"\[\S*gloo/\S+:\d+\] | This is typically caused by a remote worker crashing\.[^\n]*")
"""Where in its own source gloo raised it, and what it advises."""
MAX_REBUILDS = 5
"""Communication failures in a row, all ranks alive and no iteration committed, before the job gives up."""


def exited(job: Job, event: api.WorkerExited) -> None:
    member = job.members.get(event.rank)
    if member is None or not member.alive:
        return
    job.nodes[member.node].last_beat = job.now  # its agent tells of it
    member.exit_status, member.clues = event.status, event.clues
    root_causes.note_failed(job, member)
    incidents.bury(job, member, event.status)
    if job.stage == "halting":
        told = f"{job.where(member.rank)}: {ending(event.status)} after training was done"
        if event.status == 0 or member.declared is None or member.fenced is not None:
            iterations.end_when_gone(job)
        elif job.departure is not None and job.departure.meaning != "warning":
            job.departure.interrupted = told
        else:
            incidents.end(job, 1, told)
        return
    if job.stage == "gathering":
        exited_early(job, member, event.status)
        return
    if member.declared is None:
        joins.exited(job, member, ending(event.status))
        return
    incident(job, member, event.status)
    transition_after(job, {member.rank}, f"{job.where(member.rank)}: {_ending_of(member, event.status)}")
    joins.come_back(job, member)


def exited_early(job: Job, member: Member, status: int) -> None:
    """An exit before the first plan: of a plain program that is done, or it is weighed by `early_losses`."""
    job.start.awaited.discard(member.rank)
    if status == 0 and member.declared is None:
        return
    job.start.early_at = job.now
    if member.fenced is None and member.raised is None and job.departure is None:
        _tell_early(job, member, ending(status), always=status < 0 and member.follows != "surely")


def raised(job: Job, member: Member, raised: m.Raised) -> None:
    member.raised, member.raised_clues = raised, read_log(raised.traceback, kernel_lines=False)
    root_causes.note_failed(job, member)
    if member.declared is None and member.joins:
        return
    job.errors[member.rank] = (raised.iteration, raised.error)
    if job.stage == "gathering":
        job.start.early_at = job.now
        if member.alive:  # until it ends
            job.start.awaited.add(member.rank)
            member.declared = None
        lost = "lost a peer, and " if member.follows == "surely" else ""
        _tell_early(job, member, f"{lost}raised {_OF_GLOO.sub('', raised.error)}")


def _tell_early(job: Job, member: Member, what: str, *, always: bool = False) -> None:
    if always or alike(what) not in job.start.told:
        job.say("warning", f"{job.where(member.rank)}: {what}{early(job)}")
    job.start.told.add(alike(what))


def early(job: Job) -> str:
    """What is added to a loss before the first plan: a program that never says what it trains has no such time."""
    return " before training began" if job.has_declared else ""


def early_node(job: Job) -> str:
    """The same of nodes: they are lost before anybody could have said anything."""
    return "" if job.needs_all else " before training began"


def alike(what: str) -> str:
    """The same for what differs in numbers alone: a rank, a port, an address."""
    return _NUMBERS.sub("#", what)


def incident(job: Job, member: Member, status: int, *, alone: bool = False) -> None:
    """`alone`: before the first plan, where others have come further."""
    injected = job.signalled.get(member.rank)
    if member.raised is not None:
        cause, evidence = f"rank {member.rank} raised {member.raised.error}", member.raised.traceback[-4000:]
    else:
        cause = f"rank {member.rank} {ending(status)}"
        if member.unwilling:
            cause = f"rank {member.rank} cannot start: {member.unwilling}"
        if member.fenced:
            cause = f"rank {member.rank} {member.fenced}"
        evidence = f"pid {member.pid} on node {member.node}: {_ending_of(member, status)}"
    member.exit_status = status
    condemned = root_causes.condemns_its_device(job, member)
    # A dead GPU reaches the script as an exception; and what one rank alone cannot do at the start is its node's, if
    # others can do it: of a program that never says what it trains, nobody knows.
    devices = condemned or root_causes.failed_on_its_device(job, member)
    blamed = (member.raised is None and status != m.ABORT_STATUS) or devices or alone
    # An abort is no program's fault either, nor is storage or a service that it lost.
    nobodys = not blamed and (member.raised is None or root_causes.is_from_outside(job, member.rank))
    before = job.record.dead_devices if job.stage == "gathering" else job.dead_devices  # early, it is its first process
    dead = condemned or (member.node, member.device) in before
    if job.stage != "gathering":  # there it was told when it happened
        job.say("warning", f"{job.where(member.rank)}: {cause.removeprefix(f'rank {member.rank} ')}")
    job.incidents.append(
        Incident(
            kind="fail-stop" if blamed or nobodys else "program",
            component="process" if nobodys else "script" if not blamed else "device" if dead else "process",
            cause=cause,
            evidence=evidence,
            found_at=job.now,
            iteration=under_way(job, {member.rank}),
            epoch=job.epoch,
            ranks={member.rank},
            node=member.node if blamed else None,
            device=member.device if blamed else None,
            detect_s=None if injected is None else job.now - injected,
            condemned=(member.node, member.device) if condemned else None,
        )
    )


def under_way(job: Job, victims: set[int]) -> int:
    """The iteration that lost ranks were in: after the last step that any of them reported."""
    members = [job.members[rank] for rank in victims if rank in job.members]  # some never began
    return max([job.record.committed, *(member.stepped for member in members)]) + 1


def transition_after(job: Job, lost: set[int], reason: str) -> None:
    """After the loss of these ranks: park, unless nobody waits for them: they had no work, or all is done.

    Where all others have been told to park already, they need not be told again: a rack dies within a second.
    """
    if job.stage in ("recovering", "gathering", "ended"):
        return
    if job.departure is not None and transitions.is_settling(job):
        return
    if job.training and job.record.plan is not None:
        done = iterations.is_over(job)
        if done or lost.isdisjoint(job.record.working):
            incidents.log_incidents(job)
            if done:
                iterations.commit_up_to(job, job.record.goal)
                iterations.transition_done(job)
            iterations.halt_when_finished(job)
            return
    if job.transition is not None and job.changing and lost.isdisjoint(job.transition.asked):
        if job.stage != "parking":
            incidents.log_incidents(job)
        return
    if transitions.is_settling(job):
        transitions.go_on_without(job, lost)
    else:
        transitions.park(job, reason)


def node_lost(job: Job, name: str, reason: str, how: HowLost = "silent", *, cannot_start: bool = False) -> None:
    """A node is given up. One that never joined may still come late, unless its agent is known to be gone."""
    node = job.nodes.get(name)
    if (node is None and job.stage != "gathering") or (node is not None and not node.alive):
        return
    if node is None and how == "silent":
        job.log(NodeLost(node=name, reason=reason, how=how))
        ranks = []
    else:
        ranks = leave_node(job, NodeLost(node=name, reason=reason, how=how))
    if job.stage == "gathering":
        job.start.early_at = job.now
        job.say("warning", f"node {name}: {reason}{f'; {_lost(ranks)}' if ranks else ''}")
        if job.departure is None:
            node_lost_early(job, name, reason, cannot_start=cannot_start)
        return
    if job.stage == "halting":
        iterations.end_when_gone(job)
        return
    victims = node_incident(job, name, reason, ranks)
    if victims:
        transition_after(job, victims, f"node {name}: {reason}")


def node_lost_early(job: Job, name: str, reason: str, *, cannot_start: bool = False) -> None:
    """Begin without a node, or end if the rest cannot be enough; for good if no other run would do better."""
    if startup.devices_left(job) >= job.settings.devices_least and not job.needs_all:
        startup.go_on_without(job)
        return
    text = f"node {name}: {reason}{early_node(job) if job.nodes[name].devices else ' before it joined'}"
    explain_early(job)
    if job.needs_all and (cannot_start or not incidents.runs_again(job)):
        job.say("notice", incidents.NOT_RESTARTED)
    if cannot_start:
        incidents.end(job, 5, f"{text}; to be mended first, so not to be run again")
    else:
        incidents.too_few(job, text)


def leave_node(job: Job, entry: NodeLost) -> list[int]:
    """From here on the node is none of the job's; returns the ranks that lived there."""
    ranks = sorted(rank for rank, member in job.members.items() if member.node == entry.node and member.alive)
    silence.ended(job, entry.node, "unconfirmed" if entry.how == "vacated" else "lost", entry.reason)
    job.log(entry)
    job.do(api.DropNode(node=entry.node))
    job.starting -= {rank for rank in job.starting if job.record.placements[rank].node == entry.node}
    job.start.awaited -= {rank for rank in job.start.awaited if job.record.placements[rank].node == entry.node}
    for rank in ranks:
        incidents.bury(job, job.members[rank], None)
    return ranks


def node_incident(job: Job, name: str, reason: str, ranks: list[int]) -> set[int]:
    """The loss of a node as a root cause, of all its workers that were still at work. Returns them."""
    # Workers of the node whose exits came in first are part of the same root cause.
    earlier = [i for i in job.incidents if i.node == name and i.kind == "fail-stop"]
    job.incidents = [i for i in job.incidents if i not in earlier]
    victims = {*ranks, *(rank for i in earlier for rank in i.ranks)}
    broken = [root_causes.own_words(job, job.members[rank]) for i in earlier if i.condemned for rank in sorted(i.ranks)]
    before = f"; before, {broken[0]}" if broken else ""  # hardware that fails may take its node along
    injected = [job.signalled[rank] for rank in sorted(victims) if rank in job.signalled]
    if not victims and job.record.first_plan is not None:  # its workers were gone before, and accounted for
        job.say("warning", f"node {name}: {reason}")
        return victims
    if job.stage != "gathering":  # there it was told when it happened
        job.say("warning", f"node {name}: {reason}; {_lost(victims)}")
    found_at = min([job.now, *(i.found_at for i in earlier)])
    job.incidents.append(
        Incident(
            kind="fail-stop",
            component="node",
            cause=f"node {name}: {reason}{before}",
            evidence=reason,
            found_at=found_at,
            iteration=under_way(job, victims),
            epoch=job.epoch,
            ranks=victims,
            node=name,
            detect_s=max(found_at - min(injected), 0.0) if injected else None,
            died=not broken,
        )
    )
    return victims


def _lost(ranks: Collection[int]) -> str:
    return f"{rank_list(ranks)} {'is' if len(ranks) == 1 else 'are'} lost"


def explain_nodes(job: Job) -> None:
    """Losses of nodes that the journal tells of and no failure does."""
    placements, ended = job.record.placements, job.record.unexplained
    for name, reason in job.record.unexplained_nodes.items():
        ranks = [rank for rank, exit in ended.items() if exit is None and placements[rank].node == name]
        node_incident(job, name, reason, ranks)


def explain_early(job: Job) -> None:
    """What was lost before the first plan becomes failures: of nodes, with what died there before; of processes and
    devices. All of it is on record, so that another supervisor comes to the same. Who exits with status 0 is done,
    unless somebody has said what they train."""
    alone = job.has_declared
    for rank, exit in list(job.record.unexplained.items()):  # as they ended: the first that tells a cause has it
        if rank in job.record.refused:
            never_started(job, rank, job.record.refused[rank])
        elif exit is not None and (exit or alone):
            incident(job, job.members[rank], exit, alone=alone)
    for member in job.members.values() if not alone else ():
        if member.alive and member.raised is not None and member.follows != "surely":
            incident(job, member, 1)  # the first to fail is not always the first to end
    explain_nodes(job)
    incidents.log_incidents(job)


def never_started(job: Job, rank: int, reason: str) -> None:
    """A process that could not be started, as a root cause."""
    place = job.record.placements[rank]
    job.incidents.append(
        Incident(
            kind="fail-stop",
            component="process",
            cause=f"rank {rank} could not be started: {reason}",
            evidence=reason,
            found_at=job.now,
            iteration=job.record.committed + 1,
            epoch=job.epoch,
            ranks={rank},
            node=place.node,
            device=place.device,
        )
    )


def stuck(job: Job, member: Member, stuck: m.Stuck) -> None:
    """A transfer broke under a rank. If that is because a peer died, its exit comes next: `judge.tick` waits for it."""
    transition = job.transition
    if stuck.epoch == job.epoch:
        if job.stuck is None:
            job.stuck = (job.now, member.rank, stuck.error)
    elif transition is not None and job.record.plan is not None and stuck.epoch == job.record.plan.epoch:
        transitions.broke(job, f"rank {member.rank}: {stuck.error}")


def communication_failed(job: Job, evidence: str) -> None:
    """Everybody is alive, yet a transfer broke: rebuild the communicators with the same layout.

    Unlike after a loss, nothing shrinks by it: without a bound it could go on for ever.
    """
    job.stuck = None
    job.rebuilds += 1
    if job.rebuilds > MAX_REBUILDS and job.departure is None:
        incidents.end(job, 1, f"communication failed {job.rebuilds} times without an iteration in between: {evidence}")
        return
    told = _OF_GLOO.sub("", evidence).rstrip(".")
    job.say("warning", f"communication of epoch {job.epoch} failed: {told}; rebuilding")
    job.incidents.append(
        Incident(
            kind="communication",
            component="link",
            cause="communication failed",
            evidence=evidence,
            found_at=job.now,
            iteration=job.record.committed + 1,
            epoch=job.epoch,
        )
    )
    transitions.park(job, evidence, cautious=job.transition is not None and job.transition.cautious)


def _ending_of(member: Member, status: int) -> str:
    """How a process ended; of one that we have killed, why, for its end tells nothing else."""
    if member.fenced and status == -signals.SIGKILL:
        return f"{member.fenced}; then killed by resihp (SIGKILL)"
    return ending(status)


def ending(status: int) -> str:
    """How a process ended, in words: `killed by signal 9 (SIGKILL)`, `exited with status 1`."""
    if status == m.ABORT_STATUS:
        return "exited, since an abort of its communicators did not end"
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"killed by signal {-status} ({signals.Signals(-status).name})"
    except ValueError:
        return f"killed by signal {-status}"
