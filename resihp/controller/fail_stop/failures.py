"""Handle a lost worker, a lost node, an exception or broken communication.

`replan_after_loss` starts the change from a lost rank to the next plan; the package lists the steps that follow.
Before the first plan, `startup` takes their place. Does not decide about causes: `own_causes` and `root_causes` do.
"""

from __future__ import annotations

import re
import signal as signals
from collections.abc import Collection
from typing import Literal

from resihp.controller import interface as api
from resihp.controller import iterations, startup, transition
from resihp.controller.fail_stop import endings, incidents, own_causes, silence
from resihp.controller.nodes import joins
from resihp.controller.rounds import restarts
from resihp.controller.state.incidents import Incident
from resihp.controller.state.job import Job
from resihp.controller.state.members import Member
from resihp.detector.diagnosis.diagnosis import read_log
from resihp.protocol import messages as m
from resihp.record.describe import rank_list
from resihp.record.journal import NodeLost
from resihp.record.state import HowLost
from resihp.words import alike

_GLOO_DETAILS = re.compile(r"\[\S*gloo/\S+:\d+\] | This is typically caused by a remote worker crashing\.[^\n]*")
"""Details in gloo's error messages that are left out: the place in gloo's source code, and gloo's advice."""
MAX_REBUILDS = 5
"""Number of communication failures in a row, without a dead rank or a commit, after which the job ends."""


def exited(job: Job, event: api.WorkerExited) -> None:
    member = job.members.get(event.rank)
    if member is None or not member.alive:
        return
    job.nodes[member.node].last_beat = job.now  # its agent has reported it
    member.exit_status, member.clues = event.status, event.clues
    own_causes.note_failed(job, member)
    incidents.mark_dead(job, member, event.status)
    if job.stage == "halting":
        text = f"{job.where(member.rank)}: {ending(event.status)} after training was done"
        if event.status == 0 or member.declared is None or member.fenced is not None:
            iterations.end_when_gone(job)
        elif job.stop_request is not None and job.stop_request.meaning != "warning":
            job.stop_request.interrupted = text
        else:
            endings.end(job, 1, text)
        return
    if job.stage == "restarting":
        return
    if job.stage == "gathering":
        exited_early(job, member, event.status)
        return
    if member.declared is None:
        joins.exited(job, member, ending(event.status))
        return
    incident(job, member, event.status)
    replan_after_loss(job, {member.rank}, f"{job.where(member.rank)}: {_ending_of(member, event.status)}")
    joins.respawn(job, member)


def exited_early(job: Job, member: Member, status: int) -> None:
    """Handle an exit before the first plan: a plain program that is done, or a loss that `early_losses` decides
    about."""
    job.start.awaited.discard(member.rank)
    if status == 0 and member.declared is None:
        return
    job.start.early_at = job.now
    if member.fenced is None and member.raised is None and job.stop_request is None:
        _report_early(job, member, ending(status), always=status < 0 and member.follows != "surely")


def raised(job: Job, member: Member, raised: m.Raised) -> None:
    member.raised, member.raised_clues = raised, read_log(raised.traceback, kernel_lines=False)
    own_causes.note_failed(job, member)
    if member.declared is None and member.joins:
        return
    job.errors[member.rank] = (raised.iteration, raised.error)
    if job.stage == "gathering":
        job.start.early_at = job.now
        if member.alive:  # wait for the end of the process
            job.start.awaited.add(member.rank)
            member.declared = None
        prefix = "lost a peer, and " if member.follows == "surely" else ""
        _report_early(job, member, f"{prefix}raised {_GLOO_DETAILS.sub('', raised.error)}")


def _report_early(job: Job, member: Member, event: str, *, always: bool = False) -> None:
    if always or alike(event) not in job.start.reported:
        job.say("warning", f"{job.where(member.rank)}: {event}{early(job)}")
    job.start.reported.add(alike(event))


def early(job: Job) -> str:
    """Return the words added to the report of a process lost before the first plan; empty for a program that never
    declares, because it has no training to begin."""
    return " before training began" if job.has_declared else ""


def early_node(job: Job) -> str:
    """Return the words added to the report of a node lost before the first plan; empty if the program is known never to
    declare."""
    return "" if job.needs_all else " before training began"


def incident(job: Job, member: Member, status: int, *, alone: bool = False) -> None:
    """Add the root cause of a process's end to the incidents. `alone`: the process ended before the first plan while
    other ranks continued."""
    injected = job.signalled.get(member.rank)
    cause, evidence = _words_of_end(member, status)
    member.exit_status = status
    condemned = own_causes.condemns_its_device(job, member)
    # A dead GPU reaches the script as an exception. If one rank alone cannot do something at the start that others can,
    # its node is the cause. For a program that never declares a model, it is not known whether others can.
    device_failed = condemned or own_causes.failed_on_its_device(job, member)
    by_device = (member.raised is None and status != m.ABORT_STATUS) or device_failed or alone
    # The program has not caused an abort either, nor the loss of storage or of a service.
    by_neither = not by_device and (member.raised is None or own_causes.is_from_outside(job, member.rank))
    before = job.record.dead_devices if job.stage == "gathering" else job.dead_devices  # early, it is its first process
    dead = condemned or (member.node, member.device) in before
    if by_neither:
        component: Literal["process", "script", "device"] = "process"
    elif not by_device:
        component = "script"
    else:
        component = "device" if dead else "process"
    if job.stage != "gathering":  # during the start, the exit was reported when it happened
        job.say("warning", f"{job.where(member.rank)}: {cause}")
    job.incidents.append(
        Incident(
            kind="fail-stop" if by_device or by_neither else "program",
            component=component,
            cause=f"rank {member.rank} {cause}",
            evidence=evidence,
            found_at=job.now,
            iteration=under_way(job, {member.rank}),
            epoch=job.epoch,
            ranks={member.rank},
            node=member.node if by_device else None,
            device=member.device if by_device else None,
            detect_s=None if injected is None else job.now - injected,
            condemned=(member.node, member.device) if condemned else None,
        )
    )


def _words_of_end(member: Member, status: int) -> tuple[str, str]:
    """Return (cause, evidence) of a process's end in words. The cause does not name the process."""
    if member.raised is not None:
        return f"raised {member.raised.error}", member.raised.traceback[-4000:]
    if member.fenced:
        cause = member.fenced
    elif member.unwilling:
        cause = f"cannot start: {member.unwilling}"
    else:
        cause = ending(status)
    pid = f"pid {member.pid} on node {member.node}: {_ending_of(member, status)}"
    return cause, f"{pid}\n{member.hang_evidence}" if member.hang_evidence else pid


def under_way(job: Job, victims: set[int]) -> int:
    """Return the iteration in which ranks were lost: the one after the last step that any of these ranks reported."""
    members = [job.members[rank] for rank in victims if rank in job.members]  # some never started
    return max([job.record.committed, *(member.stepped for member in members)]) + 1


def replan_after_loss(job: Job, lost_ranks: set[int], reason: str) -> None:
    """Park all ranks after the loss of `lost_ranks`, unless the lost ranks had no work or training is done.

    If all other ranks have already been ordered to park, the order is not repeated: the nodes of a rack all die within
    a second.
    """
    if job.stage in ("recovering", "gathering", "closing", "ended"):
        return
    if job.stop_request is not None and transition.is_settling(job):
        return
    if job.training and job.record.plan is not None:
        done = iterations.is_over(job)
        if done or lost_ranks.isdisjoint(job.record.working):
            incidents.log_incidents(job)
            if done:
                iterations.commit_up_to(job, job.record.goal)
                iterations.transition_done(job)
            iterations.halt_when_finished(job)
            return
    if job.transition is not None and job.changing and lost_ranks.isdisjoint(job.transition.asked):
        if job.stage != "parking":
            incidents.log_incidents(job)
        return
    if transition.is_settling(job):
        transition.go_on_without(job, lost_ranks)
    else:
        transition.park(job, reason)


def node_lost(job: Job, name: str, reason: str, how: HowLost = "silent", *, cannot_start: bool = False) -> None:
    """Give up a node. A node that never joined may still join later, unless its agent is known to be gone.
    `cannot_start`: see `AgentLost`."""
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
        if job.stop_request is None:
            node_lost_early(job, name, reason, cannot_start=cannot_start)
        return
    if job.stage == "halting":
        iterations.end_when_gone(job)
        return
    victims = node_incident(job, name, reason, ranks)
    if job.stage == "restarting":
        incidents.log_incidents(job)
        restarts.node_ended(job, name)
    elif victims:
        replan_after_loss(job, victims, f"node {name}: {reason}")


def node_lost_early(job: Job, name: str, reason: str, *, cannot_start: bool = False) -> None:
    """Start without a lost node, or end the job if the others cannot be enough. A script that has no process on the
    node runs on. `cannot_start`: running the job again would not help, so it is not requeued."""
    if job.runs_script and all(place.node != name for place in job.record.placements):
        explain_nodes(job)
        incidents.log_incidents(job)
        return
    if not job.needs_all and startup.devices_left(job) >= job.settings.devices_least:
        return startup.go_on_without(job)
    text = f"node {name}: {reason}{early_node(job) if job.nodes[name].devices else ' before it joined'}"
    explain_early(job)
    if job.needs_all and restarts.begin(job, text):
        return
    if cannot_start:
        endings.end(job, 5, f"{text}; not run again, because this must be fixed first")
    else:
        endings.too_few(job, text)


def leave_node(job: Job, entry: NodeLost) -> list[int]:
    """Remove a node from the job; return the live ranks that it had."""
    ranks = sorted(rank for rank, member in job.members.items() if member.node == entry.node and member.alive)
    silence.ended(job, entry.node, "unconfirmed" if entry.how == "vacated" else "lost", entry.reason)
    job.log(entry)
    job.do(api.DropNode(node=entry.node, in_order=entry.how == "vacated"))
    job.starting -= {rank for rank in job.starting if job.record.placements[rank].node == entry.node}
    job.start.awaited -= {rank for rank in job.start.awaited if job.record.placements[rank].node == entry.node}
    for rank in ranks:
        incidents.mark_dead(job, job.members[rank], None)
    return ranks


def node_incident(job: Job, name: str, reason: str, ranks: list[int]) -> set[int]:
    """Add the loss of a node to the incidents, as the root cause for its workers that were lost with it; return the
    ranks of these workers."""
    # Exits of the node's workers that were reported before its loss are part of the same root cause.
    earlier = [i for i in job.incidents if i.node == name and i.kind == "fail-stop"]
    job.incidents = [i for i in job.incidents if i not in earlier]
    victims = {*ranks, *(rank for i in earlier for rank in i.ranks)}
    broken = [
        own_causes.reported_cause(job, job.members[rank]) for i in earlier if i.condemned for rank in sorted(i.ranks)
    ]
    before = f"; before, {broken[0]}" if broken else ""  # broken hardware may bring down its node
    injected = [job.signalled[rank] for rank in sorted(victims) if rank in job.signalled]
    if not victims and job.record.first_plan is not None:  # its workers were gone before, and have causes of their own
        job.say("warning", f"node {name}: {reason}")
        return victims
    if job.stage != "gathering":  # during the start, the loss was reported when it happened
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
    """Add root causes for the lost nodes in the journal that no failure explains yet."""
    placements, ended = job.record.placements, job.record.unexplained
    for name, reason in job.record.unexplained_nodes.items():
        ranks = [rank for rank, exit in ended.items() if exit is None and placements[rank].node == name]
        node_incident(job, name, reason, ranks)


def explain_early(job: Job) -> None:
    """Turn losses before the first plan into failures: of nodes, including the processes that died there, of processes,
    and of devices.

    All of these losses are in the journal, so another supervisor reaches the same conclusions. A process that exits
    with status 0 is done and not a failure, unless any rank has declared a model.
    """
    alone = job.has_declared
    for rank, exit in list(job.record.unexplained.items()):  # in order of ends: the first gets a shared cause
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
    """Add the root cause of a process that could not be started to the incidents."""
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
    """Note that a transfer of a rank broke. If a peer has died, the report of its exit follows; `watchdog.tick` waits
    for that report."""
    ongoing = job.transition
    if stuck.epoch == job.epoch:
        if job.stuck is None:
            job.stuck = (job.now, member.rank, stuck.error)
    elif ongoing is not None and job.record.plan is not None and stuck.epoch == job.record.plan.epoch:
        transition.broke(job, f"rank {member.rank}: {stuck.error}")


def communication_failed(job: Job, evidence: str) -> None:
    """Rebuild the communicators with the same layout, because a transfer broke although all ranks are alive.

    Unlike after a loss, the layout does not shrink, so the number of attempts is limited to `MAX_REBUILDS`.
    """
    job.stuck = None
    job.rebuilds += 1
    if job.rebuilds > MAX_REBUILDS and job.stop_request is None:
        endings.end(job, 1, f"communication failed {job.rebuilds} times without an iteration in between: {evidence}")
        return
    error = _GLOO_DETAILS.sub("", evidence).rstrip(".")
    job.say("warning", f"communication of epoch {job.epoch} failed: {error}; rebuilding")
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
    transition.park(job, evidence, cautious=job.transition is not None and job.transition.cautious)


def _ending_of(member: Member, status: int) -> str:
    """Describe the end of a process. If the controller killed it, the text includes the reason, because the exit status
    alone does not show it."""
    if member.fenced and status == -signals.SIGKILL:
        return f"{member.fenced}; then killed by resihp (SIGKILL)"
    return ending(status)


def ending(status: int) -> str:
    """Describe an exit status in words: `killed by signal 9 (SIGKILL)`, `exited with status 1`."""
    if status == m.ABORT_STATUS:
        return "exited, since an abort of its communicators did not end"
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"killed by signal {-status} ({signals.Signals(-status).name})"
    except ValueError:
        return f"killed by signal {-status}"
