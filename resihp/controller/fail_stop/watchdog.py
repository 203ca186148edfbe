"""Watch heartbeats and time: suspect silent nodes and ranks, kill ranks that are given up, and apply timeouts. The
limits are defined in `liveness`. Called by `controller` with each heartbeat and each tick."""

from __future__ import annotations

import signal as signals

from resihp.controller import interface as api
from resihp.controller import iterations, startup, transition
from resihp.controller.fail_stop import early_losses, endings, failures, last_to_leave, liveness, silence
from resihp.controller.nodes import joins
from resihp.controller.rounds import restarts, rollback
from resihp.controller.scripts import script_checkpoints, script_hangs, slow_ranks
from resihp.controller.state.job import Job
from resihp.controller.state.members import Member, Node
from resihp.controller.state.transitions import Transition
from resihp.record.journal import NodeLost

LATECOMERS_S = 60.0
"""Seconds that the job waits for nodes that it can start without, once enough nodes have joined."""
STUCK_GRACE_S = 0.5
"""Seconds that the controller waits, after a broken transfer, for the exit of a process that explains it. After that
the broken transfer is a failure of its own."""


def beat(job: Job, event: api.AgentBeat) -> None:
    node = job.nodes.get(event.node)
    if node is None or not node.alive:
        return
    node.last_beat = job.now
    if event.beat.met and job.stage == "gathering":
        early_losses.have_met(job)
    silence.ended(job, node.name, "passed", "heartbeats again")
    for beat in event.beat.workers:
        member = job.members.get(beat.rank)
        if member is None or not member.alive:
            continue
        old = member.beat.progress if member.beat else None
        if beat.progress is not None and (old is None or beat.progress.primitives > old.primitives):
            member.progress_at = job.now
            if member.rank in job.record.working:
                job.progress_at = job.now
            building = job.transition if job.transition and job.stage == "building" else None
            if building is not None and member.rank in building.asked:
                job.progress_at = building.moved_at = job.now
        member.note_beat(beat, job.now)
        saving = beat.progress is not None and beat.progress.activity == "checkpoint"
        if beat.state in liveness.STOPPED_STATES or saving:
            job.still.add(member.rank)
        else:
            job.still.discard(member.rank)


def tick(job: Job) -> None:
    judge_nodes(job)
    if job.stage == "gathering":
        if job.stop_request is None:
            judge_start(job)
        return
    if job.stage == "restarting":
        for name in restarts.overdue(job):
            reason = f"its processes have not ended within {restarts.END_TIMEOUT_S:.0f} s"
            failures.node_lost(job, name, reason, "useless")
        restarts.judge(job)
        return
    if job.stage == "halting":
        judge_leaving(job)
        return
    if job.stage == "closing":
        return
    joins.judge(job)
    if job.stuck is not None and job.now - job.stuck[0] > STUCK_GRACE_S:
        failures.communication_failed(job, f"rank {job.stuck[1]}: {job.stuck[2]}")
    if job.training:
        judge_progress(job)
    elif rollback.is_pending(job):
        transition.decide_when_parked(job)
    elif job.changing:
        judge_transition(job)


def judge_start(job: Job) -> None:
    """Apply the timeouts of the start: nodes have to join, then their processes have to declare their model."""
    if len(job.nodes) < job.settings.nodes:
        judge_absent(job)
    elif job.record.placements:
        early_losses.judge(job)
    else:
        startup.start_workers(job)  # it waits for the search for checkpoints
    if job.stage == "gathering" and job.record.placements:
        last_to_leave.judge(job)
    if job.runs_script:
        script_hangs.judge(job)
        script_checkpoints.watch(job)
        slow_ranks.judge(job)


def judge_absent(job: Job) -> None:
    """Give up nodes that have not joined: after `LATECOMERS_S` if enough nodes have joined, else after the start
    budget.

    If the other nodes are enough, the job starts without the missing nodes, which may still join later.
    """
    settings, budget_s = job.settings, job.settings.start_budget_s
    here = sum(node.alive for node in job.nodes.values())
    if here < settings.nodes - settings.spares:
        job.start.enough_at = None
    elif job.start.enough_at is None:
        job.start.enough_at = job.now
    waited_s = job.now - (job.started_at or 0.0)
    patient = job.start.enough_at is None or job.now - job.start.enough_at <= LATECOMERS_S
    if patient and waited_s <= budget_s:
        return
    absent = [name for name in settings.node_names if name not in job.nodes]
    if here * settings.gpus_per_node < settings.devices_least or not absent:
        for name in absent:
            job.log(NodeLost(node=name, reason=f"has not joined within {waited_s:.0f} s", how="silent"))
        failures.explain_early(job)
        endings.too_few(job, f"only {here} of {settings.nodes} nodes joined within {budget_s:.0f} s")
        return
    for name in absent:
        failures.node_lost(job, name, f"has not joined within {waited_s:.0f} s")


def judge_leaving(job: Job) -> None:
    """End stopped workers at once after training is done. Other workers have the start budget for the rest of their
    script."""
    members = [job.members[rank] for rank in job.live]
    fence(job, [member for member in members if stopped_for_long(job, member)])
    if job.now - job.halted_at > job.settings.start_budget_s:
        names = ", ".join(job.where(member.rank) for member in members)
        job.say("warning", f"{names}: did not exit within {job.settings.start_budget_s:.0f} s of the end")
        iterations.conclude(job)


def stopped_for_long(job: Job, member: Member) -> bool:
    return liveness.is_stopped(
        member, job.now, job.settings
    ) and job.now - member.progress_at > liveness.silence_limit_s(job.settings)


def judge_nodes(job: Job) -> None:
    limit_s = liveness.silence_limit_s(job.settings)
    awaited: set[str] | None = None
    for node in list(job.nodes.values()):
        if not node.alive or job.stage == "ended":
            continue
        if job.now - node.last_beat > limit_s:
            silence.of_node(job, node, limit_s)
        if not (silence.is_suspected(job, node.name) and given_up(job, node)):
            continue
        awaited = nodes_awaited(job) if awaited is None else awaited
        if node.name in awaited:
            failures.node_lost(job, node.name, f"silent for {job.now - node.last_beat:.1f} s, no progress without it")
            awaited = None


def given_up(job: Job, node: Node) -> bool:
    predicted_s = job.predicted_s if job.training else 0.0  # in a transition no collective can progress
    return liveness.node_given_up(node, job.progress_at, predicted_s, job.now, job.settings)


def nodes_awaited(job: Job) -> set[str]:
    """Return the nodes with workers that the job waits for."""
    if job.training:
        return {job.members[rank].node for rank in job.record.active}
    if job.changing:
        assert job.transition is not None
        return {job.members[rank].node for rank in job.transition.waiting}
    return set(job.nodes)


def judge_progress(job: Job) -> None:
    """Suspect ranks that keep all others waiting, and kill them once their time limit has passed."""
    assert job.record.plan is not None
    still = [job.members[rank] for rank in sorted(job.still & job.record.working) if job.members[rank].alive]
    stopped = [member for member in still if stopped_for_long(job, member)]
    if stopped:
        for member in stopped:
            silence.of_rank(job, member, job.now - member.progress_at, liveness.silence_limit_s(job.settings))
        fence(job, stopped)
        return
    if any(is_saving(job, member) for member in still):
        return  # peers rightly wait for a rank that writes a checkpoint
    idle_s = job.now - job.progress_at
    limit_s = liveness.hang_suspected_s(job.settings, job.predicted_s)
    if idle_s <= limit_s:
        end_suspicions_of_ranks(job)
        return
    suspects = liveness.blocking_ranks(busy_members(job), job.now, job.settings)
    for member in suspects:
        silence.of_rank(job, member, idle_s, limit_s)
    if idle_s <= hang_budget_s(job):
        return
    if suspects:
        fence(job, suspects)
    else:
        failures.communication_failed(job, f"no progress for {idle_s:.1f} s, all ranks wait for each other")


def end_suspicions_of_ranks(job: Job) -> None:
    """End all suspicions of ranks, because there is progress again. This includes ranks that stand by under a new
    plan."""
    for subject in list(job.record.suspects_silent):
        if isinstance(subject, int):
            silence.ended(job, subject, "passed", "progress again")


def busy_members(job: Job) -> list[Member]:
    """Return the live ranks that still have work to do under the plan in effect."""
    active = [job.members[rank] for rank in job.record.active if job.members[rank].alive]
    return [member for member in active if not (member.finished or awaits_plan(job, member))]


def hang_budget_s(job: Job) -> float:
    """Return the seconds without progress after which ranks are given up. The limit is higher before the first
    iterations and during a transition."""
    if not job.record.recent:
        return job.settings.start_budget_s
    budget_s = liveness.hang_given_up_s(job.settings, job.predicted_s)
    if job.transition is None:
        return budget_s
    return max(budget_s, job.settings.transition_budget_s)


def awaits_plan(job: Job, member: Member) -> bool:
    """Return whether a rank waits for a plan: its next iteration has another number of micro-batches than the plan in
    effect."""
    assert job.record.plan is not None
    due = job.declaration.batch_sizes.at(member.stepped + 1)
    return member.stepped < job.record.goal and due != job.record.plan.micro_batches


def is_saving(job: Job, member: Member) -> bool:
    """Return whether a rank is writing a checkpoint, according to its own recent heartbeats, and is still within the
    time allowed for that."""
    if member.beat is None or member.beat.progress is None or liveness.is_mute(member, job.now, job.settings):
        return False
    saving = member.beat.progress.activity == "checkpoint"
    return saving and job.now - member.progress_at <= job.settings.start_budget_s


def judge_transition(job: Job) -> None:
    """Kill ranks that do not answer in a transition: a stopped process soon, others after the time budget of the
    stage."""
    ongoing = job.transition
    assert ongoing is not None
    waited_s = job.now - max(ongoing.stage_at, ongoing.moved_at)
    late = [job.members[rank] for rank in sorted(ongoing.waiting) if not is_saving(job, job.members[rank])]
    stopped = [member for member in late if liveness.is_stopped(member, job.now, job.settings)]
    if stopped and waited_s > liveness.silence_limit_s(job.settings):
        fence(job, stopped)
        return
    if late and waited_s > liveness.hang_suspected_s(job.settings, job.predicted_s):
        transition.urge(job, f"did not finish the iteration within {waited_s:.1f} s")
    budget_s = stage_budget_s(job, ongoing)
    if job.stage == "proposing" and waited_s <= job.settings.transition_budget_s:
        # Each rank checks the whole plan, without progress in its heartbeats: for 8,192 ranks this takes many seconds.
        late = [member for member in late if liveness.is_mute(member, job.now, job.settings)]
    if waited_s <= budget_s or not late:
        return
    if job.stage != "building":  # a step taken meanwhile is a sign of life
        fence(job, [member for member in late if job.now - member.progress_at > budget_s])
        return
    blocking = liveness.blocking_ranks(late, job.now, job.settings)
    if blocking:
        fence(job, blocking)
    else:
        failures.communication_failed(job, f"communicators of epoch {job.epoch} were not built within {budget_s:.0f} s")


def stage_budget_s(job: Job, ongoing: Transition) -> float:
    """Return the seconds within which ranks have to answer in the present stage of a transition."""
    if job.stage == "building" or ongoing.initial:
        return job.settings.transition_budget_s
    return job.settings.hang_given_up_s


def fence(job: Job, members: list[Member]) -> None:
    """Kill processes that are given up, so that they cannot resume. Their exits start the transition."""
    for member in members:
        if member.fenced is None:
            member.fenced = "hung: " + silence.evidence(job, member)
            job.say("warning", f"{job.where(member.rank)}: given up, {member.fenced}")
            job.do(api.SignalWorker(rank=member.rank, signal=int(signals.SIGKILL)))
