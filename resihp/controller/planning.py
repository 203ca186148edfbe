"""Which plan is proposed, and from which state: the controller's questions to the scheduler and to the checker.

Decides where the state is (the base of a transition) and what is tried after a plan was refused. Which layout is good
is the scheduler's to say, whether a plan can be carried out the checker's. Called by `startup`, `transition` and
`joins`.
"""

from __future__ import annotations

import math

import msgspec

from resihp.controller.fail_slow import learned_times
from resihp.controller.state import Job
from resihp.errors import LayoutError, NotEnoughDevicesError
from resihp.parallelism.layout import Layout, Replica, Stage
from resihp.parallelism.ownership import ParameterSpec
from resihp.parallelism.plan import Plan
from resihp.parallelism.transfers import Base, bytes_of, missing
from resihp.scheduler.cost.layout_change import movement
from resihp.scheduler.cost.prices import iteration_seconds
from resihp.scheduler.layouts import first_layout
from resihp.scheduler.situation import Situation
from resihp.scheduler.transition_cost import Movement


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """A plan for a situation, why this one, and what it promises.

    `predicted`: time of an iteration under it, in the situation's unit; `present`: the same under the plan in effect.
    None where there is no such plan, or where it cannot run.
    """

    plan: Plan
    situation: Situation
    reason: str = ""
    predicted: float | None = None
    present: float | None = None

    @property
    def movement(self) -> Movement:
        """What the change to it has to do. Raises LayoutError naming what nobody holds any more."""
        return movement(self.situation, self.plan.layout)


def first(job: Job) -> Choice:
    """Plan of a job that starts. Raises LayoutError when it cannot be as the job was asked to be."""
    declared, settings = job.declaration, job.settings
    plan = job.dependencies.planner.first_plan(
        model=declared.model,
        nodes={rank: job.members[rank].node for rank in job.ready},
        tp=settings.tp,
        pp=settings.pp,
        micro_batches=declared.micro_batches,
        chunks=settings.chunks,
        schedule=settings.schedule,
        sequence_parallel=settings.sequence_parallel,
        memory_bytes=settings.memory_bytes,
        tokens=declared.model.sequence,
        most=(settings.nodes - settings.spares) * settings.gpus_per_node,
    )
    unfit = _kept_out(job, set(job.ready))
    if unfit.intersection(plan.layout.active):
        plan = _with_spares(job, plan, unfit)
    reason = ""
    if settings.tune and settings.chunks == 1 and not unfit.intersection(plan.layout.active):
        found = first_layout.tuned(plan, _situation(job, plan.epoch, set(job.ready), None, plan))
        plan, reason = found.plan, found.reason
    if unfit.intersection(plan.layout.active):
        fit = set(job.ready) - unfit
        try:
            decision = job.dependencies.planner.decide(_situation(job, plan.epoch, fit, None, plan))
            plan = with_standby(decision.plan, unfit)
        except LayoutError:
            job.say("warning", "not enough devices pass their probe: the others are used as well")
    job.dependencies.check(plan)
    return _choice(job, plan, _situation(job, plan.epoch, set(job.ready), None, plan), reason)


def best(job: Job, epoch: int, available: set[int], base: Base | None) -> Choice:
    """What the scheduler makes of these ranks, checked.

    Raises LayoutError when no plan is found, or the one that is found is no good.
    """
    unfit = _kept_out(job, available)
    situation = _situation(job, epoch, available, base)
    try:
        fit = _situation(job, epoch, available - unfit, base) if unfit else situation
        decision = job.dependencies.planner.decide(fit)
    except LayoutError:
        if not unfit:
            raise
        unfit = set()
        decision = job.dependencies.planner.decide(situation)
    plan = with_standby(decision.plan, unfit)
    job.dependencies.check(plan)
    return _choice(job, plan, situation, decision.reason, decision.seconds)


def best_while_running(job: Job) -> Choice:
    """What the scheduler would make of all who are ready, were training interrupted now. Raises as `best`."""
    return best(job, job.epoch + 1, set(job.ready), None)


def first_again(job: Job) -> Choice:
    """The first plan, as if new devices stood in the places of those that are gone.

    Raises LayoutError when state is lost that it needs.
    """
    plan = job.record.first_plan
    assert plan is not None
    situation = _situation(job, job.epoch + 1, set(job.ready), None)
    return _choice(job, plan, situation, "the first plan", iteration_seconds(plan, situation))


def _choice(job: Job, plan: Plan, situation: Situation, reason: str = "", predicted: float | None = None) -> Choice:
    """`predicted` where it is known already."""
    return Choice(
        plan=plan,
        reason=reason,
        predicted=_price(plan, situation) if predicted is None else predicted,
        present=None if job.record.plan is None else _price(job.record.plan, situation),
        situation=situation,
    )


def _price(plan: Plan, situation: Situation) -> float | None:
    """Predicted time of an iteration; None where the plan has work for a rank that is gone or stands still."""
    if not set(situation.available).difference(situation.stale).issuperset(plan.layout.active):
        return None
    seconds = iteration_seconds(plan, situation)
    return seconds if math.isfinite(seconds) else None


def with_standby(plan: Plan, ranks: set[int]) -> Plan:
    """The same plan, with more ranks that stand by."""
    if not ranks:
        return plan
    layout = plan.layout
    standby = tuple(sorted({*layout.standby, *ranks}))
    return msgspec.structs.replace(plan, layout=Layout(layout.replicas, standby))


def _with_spares(job: Job, plan: Plan, unfit: set[int]) -> Plan:
    """Spares in the places of unfit ranks, as far as that keeps groups within their node."""
    spares = [rank for rank in plan.layout.standby if rank not in unfit]
    places: dict[int, int] = {}
    for replica in plan.layout.replicas:
        for stage in replica.stages:
            for rank in unfit.intersection(stage.ranks):
                node = job.members[rank].node
                able = [spare for spare in spares if stage.tp == 1 or job.members[spare].node == node]
                if able:
                    places[rank] = min(able, key=lambda spare: (job.members[spare].node != node, spare))
                    spares.remove(places[rank])
    replicas = tuple(
        Replica(tuple(Stage(tuple(places.get(rank, rank) for rank in s.ranks), s.chunks) for s in replica.stages))
        for replica in plan.layout.replicas
    )
    active = {rank for replica in replicas for rank in replica.ranks}
    layout = Layout(replicas, tuple(rank for rank in plan.layout.ranks if rank not in active))
    return msgspec.structs.replace(plan, layout=layout)


def _kept_out(job: Job, ranks: set[int]) -> set[int]:
    """Of these, those that are to stand by: unfit, not measured yet, or about to leave with their node."""
    leaving = {rank for rank in ranks if job.members[rank].node in job.vacating}
    return leaving | {rank for rank in ranks if job.device_of(rank) in job.record.unfit or rank in job.unmeasured}


def cautious(job: Job, epoch: int, available: set[int], base: Base | None) -> Choice:
    """The plan in effect once more if it can be, else without the replicas that lost a rank.

    Raises NotEnoughDevicesError when no replica is whole, LayoutError when not even that can be carried out.
    """
    old = job.record.plan or job.record.first_plan
    assert old is not None
    situation = _situation(job, epoch, available, base)
    if available.issuperset(old.layout.active) and (base is None or set(base.survivors) >= set(old.layout.active)):
        standby = tuple(sorted(available - set(old.layout.active)))
        plan = msgspec.structs.replace(old, epoch=epoch, layout=Layout(old.layout.replicas, standby))
        reason = "the plan in effect once more"
    else:
        try:
            decision = job.dependencies.planner.without_lost_replicas(situation)
        except LayoutError as error:
            raise NotEnoughDevicesError(f"no whole replica is left: {error}") from None
        plan, reason = decision.plan, decision.reason
    job.dependencies.check(plan)
    return _choice(job, plan, situation, reason)


def _situation(job: Job, epoch: int, available: set[int], base: Base | None, old: Plan | None = None) -> Situation:
    """The planner's view. `old`: the plan to start from; by default the one in effect, or the first until one is."""
    declared, settings, old = job.declaration, job.settings, old or job.record.plan or job.record.first_plan
    assert old is not None
    slows = job.record.slow
    stale = set() if base is None else available & set(old.layout.active) - set(base.survivors)
    return Situation(
        epoch=epoch,
        base=old.layout,
        available=tuple(sorted(available)),
        nodes=job.node_of,
        model=declared.model,
        micro_batches=declared.micro_batches,
        tokens=declared.model.sequence,
        tp=settings.tp,
        pp=settings.pp,
        chunks=settings.chunks,
        schedule=settings.schedule,
        sequence_parallel=settings.sequence_parallel,
        memory_bytes=settings.memory_bytes,
        speeds={rank: slows[device].speed for rank in available if (device := job.device_of(rank)) in slows},
        profile=job.profile,
        links=learned_times.links(job),
        stale=tuple(sorted(stale)),
    )


def base(job: Job) -> Base | None:
    """Where the state is once all have parked; None while every rank draws it or loads it from the checkpoint."""
    if job.record.plan is None or job.record.committed == job.declaration.resume_from:
        return None
    survivors = tuple(rank for rank in job.record.active if job.members[rank].ready and can_go_on(job, rank))
    return Base(epoch=job.record.plan.epoch, layout=job.record.plan.layout, survivors=survivors)


def can_go_on(job: Job, rank: int) -> bool:
    """Whether a parked rank holds the last committed iteration's state of the plan in effect, or can finish its step.

    Which plan is in effect is known here alone: a rank that acknowledged the next one holds both.
    """
    parked = job.transition.parked.get(rank) if job.transition else None
    if parked is None or job.record.plan is None or job.record.plan.epoch not in parked.holds:
        return False
    return parked.stepped == job.record.committed or (parked.stepped == job.record.committed - 1 and parked.ready)


def state_lost(job: Job, base: Base | None) -> str | None:
    """Why training cannot go on from what survived, or None when it can."""
    return None if base is None else missing(base, specs(job))


def bytes_planned(job: Job, base: Base | None, plan: Plan) -> int:
    if base is None:
        return 0
    names = {spec.name: spec for spec in specs(job)}
    return sum(bytes_of(move, names) for move in job.dependencies.moves(base, plan.layout, specs(job), job.node_of))


def specs(job: Job) -> tuple[ParameterSpec, ...]:
    if not job.specs:
        job.specs = tuple(job.dependencies.outline(job.declaration.model))
    return job.specs
