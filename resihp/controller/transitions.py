"""From one plan to the next: park, decide, propose, go, resume. Any failure on the way parks again, one epoch up."""

from __future__ import annotations

from resihp.controller import incidents, iterations
from resihp.controller import interface as api
from resihp.controller.state import Job, Member, Transition
from resihp.journal import PlanDecided
from resihp.layout import Layout
from resihp.plan import Plan, spread
from resihp.protocol import messages as m


def park(job: Job, reason: str) -> None:
    """Open a new epoch: everybody lets go and reports. Restarts a transition that was under way."""
    old = job.transition
    job.epoch += 1
    job.phase = "transition"
    job.stuck = None
    job.transition = Transition(
        stage="parking",
        epoch=job.epoch,
        began_at=old.began_at if old else job.now,
        stage_at=job.now,
        committed_before=old.committed_before if old else job.committed,
        initial=bool(old and old.initial),
        attempts=old.attempts + 1 if old else 1,
        waiting=set(job.live),
        failures=old.failures if old else [],
    )
    for rank in job.live:
        job.members[rank].finished = False
    job.order(job.live, m.Park(epoch=job.epoch, reason=reason))
    decide_when_parked(job)


def parked(job: Job, member: Member, parked: m.Parked) -> None:
    if parked.outcome is not None:
        iterations.note_step(
            job, member, m.Stepped(epoch=parked.epoch, outcome=parked.outcome, seconds=0.0, compute_s=0.0)
        )
    transition = job.transition
    if transition is None or transition.stage != "parking" or parked.epoch != job.epoch:
        return
    transition.parked[member.rank] = parked
    transition.waiting.discard(member.rank)
    decide_when_parked(job)


def decide_when_parked(job: Job) -> None:
    """All survivors are parked: declare the iteration committed or redone, and propose what comes next."""
    transition = job.transition
    if transition is None or transition.stage != "parking" or transition.waiting:
        return
    transition.park_s = job.now - transition.began_at
    iterations.commit_up_to(job, max(job.reports, default=job.committed))
    reason = "; ".join(i.cause for i in job.incidents) or "communication rebuilt"
    transition.failures += incidents.log_incidents(job)
    base = layout_in_force(job)
    lost = frozenset(rank for rank in base.ranks if not job.members[rank].alive)
    stale = frozenset(rank for rank in base.active if rank not in lost and not can_go_on(job, rank))
    layout = base.without(lost | stale)
    layout = Layout(replicas=layout.replicas, standby=tuple(sorted({*layout.standby, *stale})))
    if same_error_everywhere(job, base):
        return
    if not layout.replicas:
        incidents.end(job, 5, f"no whole replica is left: {loss_of_replicas(job, base)}")
        return
    if job.committed > transition.committed_before:
        transition.action = "commit"
    else:
        transition.action = "start" if transition.initial else "redo"
    transition.finish = job.last_outcome
    model = declaration(job)
    transition.stage = "proposing"
    transition.stage_at = job.now
    propose(
        job,
        Plan(
            epoch=job.epoch,
            layout=layout,
            assignment=spread(model.micro_batches, len(layout.replicas)),
            schedule=job.settings.schedule,
        ),
        reason,
    )


def declaration(job: Job) -> m.Declare:
    return next(member.declared for member in job.members.values() if member.declared is not None)


def layout_in_force(job: Job) -> Layout:
    """Layout of the last plan that ranks may hold state for: in this part, layouts only shrink."""
    if job.plan is not None:
        return job.plan.layout
    declared = declaration(job)
    tp, pp = job.settings.tp, job.settings.pp
    dp = job.settings.nodes * job.settings.gpus_per_node // (tp * pp)
    every = range(job.settings.nodes * job.settings.gpus_per_node)
    return Layout.uniform(tp=tp, pp=pp, dp=dp, layers=declared.model.layers, standby=tuple(every[dp * tp * pp :]))


def can_go_on(job: Job, rank: int) -> bool:
    """Whether an active rank holds the state of the last committed iteration, or can finish its step."""
    parked = job.transition.parked.get(rank) if job.transition else None
    if parked is None:
        return False
    return parked.stepped == job.committed or (parked.stepped == job.committed - 1 and parked.ready)


def propose(job: Job, plan: Plan, reason: str) -> None:
    transition = job.transition
    assert transition is not None
    transition.plan = plan
    transition.next_iteration = job.committed + 1
    transition.waiting = set(plan.layout.ranks)
    job.do(
        api.Log(
            entry=PlanDecided(
                plan=plan,
                next_iteration=transition.next_iteration,
                action=transition.action,
                finish=transition.finish,
                reason=reason,
            )
        )
    )
    job.order(plan.layout.ranks, m.Propose(plan=plan, next_iteration=transition.next_iteration))


def confirmed(job: Job, member: Member, confirm: m.Confirm) -> None:
    transition = job.transition
    if transition is None or transition.stage != "proposing" or confirm.epoch != job.epoch:
        return
    assert transition.plan is not None
    if confirm.digest != transition.plan.digest:
        objected(job, member, m.Object(epoch=confirm.epoch, reason="computes another digest of the plan"))
        return
    transition.waiting.discard(member.rank)
    go_when_confirmed(job)


def go_when_confirmed(job: Job) -> None:
    transition = job.transition
    if transition is None or transition.stage != "proposing" or transition.waiting or job.store is None:
        return
    assert transition.plan is not None
    transition.plan_s = job.now - transition.stage_at
    transition.stage = "building"
    transition.stage_at = job.now
    transition.waiting = set(transition.plan.layout.active)
    job.plan = transition.plan
    job.stuck = None
    host, port = job.store
    job.order(
        job.plan.layout.ranks,
        m.Go(
            epoch=job.epoch,
            store_host=host,
            store_port=port,
            next_iteration=transition.next_iteration,
            finish=transition.finish,
        ),
    )


def objected(job: Job, member: Member, objection: m.Object) -> None:
    transition = job.transition
    if transition is None or transition.stage != "proposing" or objection.epoch != job.epoch:
        return
    code = 2 if transition.initial else 1
    incidents.end(job, code, f"{job.where(member.rank)}: refuses the plan of epoch {job.epoch}: {objection.reason}")


def resumed(job: Job, member: Member, resumed: m.Resumed) -> None:
    transition = job.transition
    if transition is None or transition.stage != "building" or resumed.epoch != job.epoch:
        return
    transition.groups_s = max(transition.groups_s, resumed.groups_s)
    transition.state_s = max(transition.state_s, resumed.state_s)
    transition.waiting.discard(member.rank)
    if transition.waiting:
        return
    assert job.plan is not None
    transition.stage = "first-iteration"
    transition.stage_at = transition.resumed_at = job.now
    job.phase = "running"
    job.progress_at = job.now
    verb = "started" if transition.initial else "resumed"
    job.say("notice", f"{verb}: {job.plan.layout.describe()}, epoch {job.epoch}, iteration {job.committed + 1}")
    if job.committed >= job.goal:
        iterations.transition_done(job)
    iterations.halt_when_finished(job)


def same_error_everywhere(job: Job, base: Layout) -> bool:
    """End the job when two ranks raised the same: a script or a sample that no other device would digest better."""
    by_error: dict[tuple[int, str], list[int]] = {}
    for rank, error in job.errors.items():
        by_error.setdefault(error, []).append(rank)
    worst = max(by_error.values(), key=len, default=[])
    if len(worst) >= 2 or (worst and base.active == tuple(worst)):
        job.incidents = []
        incidents.program_is_broken(job, min(worst), len(worst))
        return True
    return False


def loss_of_replicas(job: Job, base: Layout) -> str:
    return "; ".join(
        f"replica {d} lost rank {', '.join(str(r) for r in replica.ranks if not job.members[r].alive) or 'state'}"
        for d, replica in enumerate(base.replicas)
    )
