"""Beats and time: suspicion, fencing, budgets. The rules themselves are in `liveness`."""

from __future__ import annotations

import signal as signals

from resihp.controller import failures, incidents, liveness
from resihp.controller import interface as api
from resihp.controller.state import Job, Member, Node
from resihp.journal import (
    Suspected,
)

STUCK_GRACE_S = 0.5
"""How long a broken transfer waits for the exit that explains it, before it is a failure of its own."""


def beat(job: Job, event: api.AgentBeat) -> None:
    node = job.nodes.get(event.node)
    if node is None or not node.alive:
        return
    node.last_beat = job.now
    node.furthest_when_heard = job.furthest
    if node.suspected:
        node.suspected = False
        job.do(api.Log(entry=Suspected(rank=None, node=node.name, evidence="beats again", cleared=True)))
    for beat in event.beat.workers:
        member = job.members.get(beat.rank)
        if member is None or not member.alive:
            continue
        old = member.beat.progress if member.beat else None
        if beat.progress is not None and (old is None or beat.progress.primitives > old.primitives):
            member.progress_at = job.now
            if job.plan is not None and job.plan.layout.place(member.rank) is not None:
                job.progress_at = job.now
        member.beat = beat
        member.beat_at = job.now


def tick(job: Job) -> None:
    judge_nodes(job)
    if job.phase == "gathering":
        if job.raised_at is not None:
            failures.tell_early_errors(job)
        return
    if job.stuck is not None and job.now - job.stuck[0] > STUCK_GRACE_S and job.phase != "halting":
        failures.communication_failed(job, f"rank {job.stuck[1]}: {job.stuck[2]}")
    if job.phase == "running":
        judge_progress(job)
    elif job.phase == "transition":
        judge_transition(job)


def judge_nodes(job: Job) -> None:
    for node in list(job.nodes.values()):
        if not node.alive or job.phase == "ended":
            continue
        if job.now - node.last_beat > liveness.silence_limit_s(job.settings) and not node.suspected:
            node.suspected = True
            text = f"{job.settings.silent_beats} missed beats, last {job.now - node.last_beat:.1f} s ago"
            job.do(api.Log(entry=Suspected(rank=None, node=node.name, evidence=text)))
            job.say("notice", f"node {node.name}: suspected, {text}")
        if node.suspected and needed(job, node) and liveness.node_given_up(node, job.furthest, job.now, job.settings):
            failures.node_lost(job, node.name, f"silent for {job.now - node.last_beat:.1f} s, no progress without it")


def needed(job: Job, node: Node) -> bool:
    """Whether the job waits for something that this node's workers have to do."""
    if job.phase == "running":
        assert job.plan is not None
        return any(job.members[rank].node == node.name for rank in job.plan.layout.active)
    if job.phase == "transition":
        assert job.transition is not None
        return any(job.members[rank].node == node.name for rank in job.transition.waiting)
    return True


def judge_progress(job: Job) -> None:
    assert job.plan is not None
    active = [job.members[rank] for rank in job.plan.layout.active if job.members[rank].alive]
    if any(m_.beat and m_.beat.progress and m_.beat.progress.activity == "checkpoint" for m_ in active):
        job.progress_at = max(job.progress_at, job.now - liveness.silence_limit_s(job.settings))
    idle_s = job.now - job.progress_at
    if idle_s <= liveness.hang_suspected_s(job.settings, job.predicted_s):
        for member in active:
            incidents.clear_suspicion(job, member)
        return
    suspects = liveness.culprits(active, job.now, job.settings)
    for member in suspects:
        if not member.suspected:
            member.suspected = True
            found = evidence(job, member, idle_s)
            job.do(api.Log(entry=Suspected(rank=member.rank, node=member.node, evidence=found)))
            job.say("notice", f"{job.where(member.rank)}: suspected, {found}")
    budget_s = liveness.hang_given_up_s(job.settings, job.predicted_s)
    if not job.recent:
        budget_s = job.settings.start_budget_s
    elif job.transition is not None:
        budget_s = max(budget_s, job.settings.transition_budget_s)
    stopped = [member for member in suspects if liveness.is_stopped(member)]
    if stopped:
        fence(job, stopped, idle_s)
    elif idle_s > budget_s and suspects:
        fence(job, suspects, idle_s)
    elif idle_s > budget_s:
        failures.communication_failed(job, f"no progress for {idle_s:.1f} s, all ranks wait for each other")


def judge_transition(job: Job) -> None:
    """Answers that do not come: a stopped process at once, others after the budget of the stage."""
    transition = job.transition
    assert transition is not None
    waited_s = job.now - transition.stage_at
    late = [job.members[rank] for rank in sorted(transition.waiting)]
    stopped = [member for member in late if liveness.is_stopped(member)]
    if stopped and waited_s > liveness.silence_limit_s(job.settings):
        fence(job, stopped, waited_s)
        return
    budget_s = job.settings.hang_given_up_s
    if transition.stage == "building" or transition.initial:
        budget_s = job.settings.transition_budget_s
    if waited_s <= budget_s or not late:
        return
    guilty = late if transition.stage != "building" else liveness.culprits(late, job.now, job.settings)
    if guilty:
        fence(job, guilty, waited_s)
    else:
        failures.communication_failed(job, f"communicators of epoch {job.epoch} were not built within {budget_s:.0f} s")


def evidence(job: Job, member: Member, idle_s: float) -> str:
    if liveness.is_stopped(member):
        return f"process {member.pid} is stopped, no progress for {idle_s:.1f} s"
    if liveness.is_mute(member, job.now, job.settings):
        return f"its interpreter does not answer, no progress for {idle_s:.1f} s"
    return f"no progress for {idle_s:.1f} s while its peers wait for it"


def fence(job: Job, members: list[Member], idle_s: float) -> None:
    """Kill what is given up, so that it cannot come back; its exit starts the transition."""
    for member in members:
        if member.fenced is None:
            member.fenced = "hung: " + evidence(job, member, idle_s)
            job.say("warning", f"{job.where(member.rank)}: given up, {member.fenced}")
            job.do(api.SignalWorker(rank=member.rank, signal=int(signals.SIGKILL)))
