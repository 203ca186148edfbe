"""The choice of a plan and of the state it starts from: the controller's questions to the scheduler and to the checker.

Decides where the state is (the base of a transition), and the alternative after a plan was refused. The scheduler
decides which layout is best, the checker whether a plan can be carried out. Called by `startup` for the first plan, by
`transition` after ranks are lost or join, and by `replan_policy`, `tuning` and `ahead` for better plans.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace

import msgspec

from resihp.controller.fail_slow import learned_times
from resihp.controller.state.job import Job
from resihp.controller.state.members import natural
from resihp.errors import LayoutError, NotEnoughDevicesError
from resihp.parallelism.layout import Layout, Replica, Stage, validate
from resihp.parallelism.ownership import ParameterSpec
from resihp.parallelism.plan import Plan
from resihp.parallelism.transfers import Base, bytes_of, missing
from resihp.record.journal import OtherPlan
from resihp.scheduler.cost import device_memory, memory
from resihp.scheduler.cost.device_memory import Overhead
from resihp.scheduler.cost.layout_change import movement
from resihp.scheduler.cost.prices import iteration_seconds
from resihp.scheduler.layouts import first_layout, mirrors
from resihp.scheduler.orders.lanes import overfull
from resihp.scheduler.situation import Decision, Situation
from resihp.scheduler.transition_cost import Movement


class Posed(msgspec.Struct, frozen=True, kw_only=True):
    """A question to the scheduler: the `situation`, and `fit`, the same situation without the ranks that are kept
    out."""

    situation: Situation
    fit: Situation
    kept_out: frozenset[int]


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """A plan for a situation, the reason for it, and its predicted effect.

    `predicted`: time of an iteration under it, in the situation's unit; `present`: the same under the plan in effect,
    or None if there is none or it cannot run.
    """

    plan: Plan
    situation: Situation
    reason: str = ""
    predicted: float | None = None
    present: float | None = None
    kept_out: tuple[int, ...] = ()
    """Ranks of the plan that were to get no work."""
    considered: tuple[OtherPlan, ...] = ()
    """Other plans that were possible."""

    @property
    def movement(self) -> Movement:
        """State movement that the change to this plan requires. Raises LayoutError naming state that nobody holds."""
        return movement(self.situation, self.plan.layout)


def first(job: Job) -> Choice:
    """Return the plan of a job that starts: the requested one if all devices or enough spares are there, else the best
    for the devices that are.

    Raises LayoutError if the requested plan is impossible, NotEnoughDevicesError if nothing fits the remaining devices.
    """
    grid, absent = as_asked(job)
    if absent:
        return _first_with_less(job, grid, absent)
    plan = with_standby(grid, set(job.ready).difference(grid.layout.ranks))
    unfit = _kept_out(job, set(job.ready))
    if unfit.intersection(plan.layout.active):
        plan = _with_spares(job, plan, unfit)
    reason = ""
    if job.settings.tune and job.settings.chunks == 1 and not unfit.intersection(plan.layout.active):
        tuned_plan = first_layout.tuned(plan, _situation(job, plan.epoch, set(job.ready), None, plan))
        plan, reason = tuned_plan.plan, tuned_plan.reason
    if unfit.intersection(plan.layout.active):
        fit = set(job.ready) - unfit
        try:
            decision = job.planner.decide(_situation(job, plan.epoch, fit, None, plan))
            plan = with_standby(decision.plan, unfit)
        except LayoutError:
            job.say("warning", "not enough devices pass their probe: the others are used as well")
    situation = _situation(job, plan.epoch, set(job.ready), None, plan)
    return _choice(job, _mirrored(job, plan, situation), situation, reason)


def as_asked(job: Job) -> tuple[Plan, dict[int, str]]:
    """Return Megatron's grid over the requested number of devices, with devices of spare nodes in place of missing
    ones; and the nodes of its stand-ins, which are rank numbers without a process in the places of devices that are
    missing.

    Raises LayoutError as `Planner.first_plan`.
    """
    declared, settings = job.declaration, job.settings
    here: dict[str, list[int]] = {name: [] for name in (*settings.node_names, *job.nodes)}
    for rank in job.ready:
        here[job.members[rank].node].append(rank)
    wanted = settings.nodes - settings.spares
    fullest = sorted(sorted(here, key=natural), key=lambda name: -len(here[name]))[:wanted]
    ranks: list[int] = []
    absent: dict[int, str] = {}
    for name in sorted(fullest, key=natural):
        lacking = max(0, settings.gpus_per_node - len(here[name]))
        first = len(job.record.placements) + len(absent)
        absent.update(dict.fromkeys(range(first, first + lacking), name))
        ranks += [*here[name], *range(first, first + lacking)]
    plan = job.planner.first_plan(
        model=declared.model,
        nodes=dict.fromkeys(range(len(ranks)), ""),
        tp=settings.tp,
        pp=settings.pp,
        micro_batches=declared.micro_batches,  # the largest number that devices need memory for
        chunks=settings.chunks,
        schedule=settings.schedule,
        sequence_parallel=settings.sequence_parallel,
        memory_bytes=settings.memory_bytes,
        overhead=device_memory.overhead(declared.device, declared.back_end),
        tokens=declared.model.sequence,
    )
    replicas = len(plan.layout.replicas)
    if job.micro_batches < replicas:
        raise LayoutError(
            f"batch ramp-up: iteration {job.record.committed + 1} has {job.micro_batches} micro-batches, which cannot "
            f"feed {replicas} replicas; begin the ramp-up with {replicas} or more (RampUp(start={replicas}, ...)), or "
            "raise --tp or --pp, which makes fewer replicas"
        )
    plan = _with_micro_batches(plan, job.micro_batches)
    layout = _renamed(plan.layout, dict(enumerate(ranks)))
    if absent.keys().isdisjoint(layout.active):
        absent, layout = {}, Layout(layout.replicas, tuple(rank for rank in layout.standby if rank not in absent))
    return msgspec.structs.replace(plan, layout=layout), absent


def _with_micro_batches(plan: Plan, micro_batches: int) -> Plan:
    """Return the same layout, with even shares of another batch. Raises LayoutError if a replica would get none."""
    if plan.micro_batches == micro_batches:
        return plan
    return plan.dealing(micro_batches)


def _redealt(plan: Plan, replicas: tuple[Replica, ...], situation: Situation) -> Plan:
    """Return a plan for the situation from these replicas of a plan in which some stages have no ranks.

    Raises LayoutError if the replicas do not hold all layers together, or lack the memory.
    """
    used = {rank for replica in replicas for rank in replica.ranks}
    layout = Layout(replicas, tuple(sorted(set(situation.available).difference(used))))
    validate(layout, situation.model)
    plan = msgspec.structs.replace(plan, epoch=situation.epoch, layout=layout).dealing(situation.micro_batches)
    obstacle = overfull(plan, situation)
    if obstacle:
        raise LayoutError(obstacle)
    return plan


def _renamed(layout: Layout, names: Mapping[int, int]) -> Layout:
    """Return the same layout with other ranks: `names` maps old to new; ranks that are not in it stay."""
    replicas = tuple(
        Replica(tuple(Stage(tuple(names.get(rank, rank) for rank in s.ranks), s.chunks) for s in replica.stages))
        for replica in layout.replicas
    )
    return Layout(replicas, tuple(names.get(rank, rank) for rank in layout.standby))


def _first_with_less(job: Job, grid: Plan, absent: Collection[int]) -> Choice:
    """Return a first plan without the missing devices, in whose places the stand-ins are. Raises
    NotEnoughDevicesError."""
    ready = set(job.ready)
    unfit = _kept_out(job, ready)
    shares = f"{len(absent)} of {job.settings.devices_asked}"
    for kept_out, ask in itertools.product(
        (unfit, set()) if unfit else (unfit,),
        (job.planner.decide, job.planner.without_lost_replicas),
    ):
        try:
            decision = ask(_situation(job, grid.epoch, ready - kept_out, None, grid))
            plan = with_standby(decision.plan, kept_out)
            situation = _situation(job, grid.epoch, ready, None, plan)
            plan = _mirrored(job, plan, situation)
        except LayoutError as error:
            obstacle = error
            continue
        return _choice(
            job, plan, situation, f"{shares} devices are missing; {decision.reason}", decision.seconds, decision
        )
    raise NotEnoughDevicesError(f"{shares} devices are missing, and no layout fits the others: {obstacle}")


def best(job: Job, epoch: int, available: set[int], base: Base | None, *, minds_slowness: bool | None = None) -> Choice:
    """Return the scheduler's plan for these ranks, checked. `minds_slowness`: whether slow devices count as slow; by
    default only where something may be done about them (not in observe mode).

    Raises LayoutError if no plan is found, or the plan fails the check.
    """
    question = asked(job, epoch, available, base, minds_slowness=minds_slowness)
    situation, unfit = question.situation, set(question.kept_out)
    ready = job.plan_cache.ready(question.fit)
    if ready is not None:
        # the plan was checked as it was answered, unless kept-out ranks are added now
        plan = _mirrored(job, with_standby(ready.plan, unfit), situation, checked=not unfit)
        job.plan_cache.searched = ready.plan.layout.replicas if job.settings.search_s else None
        return _choice(job, plan, situation, f"{ready.reason}; planned ahead", ready.seconds, ready)
    try:
        decision = job.planner.decide(question.fit)
    except LayoutError:
        if not unfit:
            raise
        unfit = set()
        decision = job.planner.decide(situation)
    plan = _mirrored(job, with_standby(decision.plan, unfit), situation)
    return _choice(job, plan, situation, decision.reason, decision.seconds, decision)


def asked(job: Job, epoch: int, available: set[int], base: Base | None, *, minds_slowness: bool | None = None) -> Posed:
    """Return the question that `best` answers."""
    counts_slowness = not job.settings.observes if minds_slowness is None else minds_slowness
    unfit = _kept_out(job, available)
    situation = _situation(job, epoch, available, base, minds_slowness=counts_slowness)
    fit = _situation(job, epoch, available - unfit, base, minds_slowness=counts_slowness) if unfit else situation
    return Posed(situation=situation, fit=fit, kept_out=frozenset(unfit))


def resized(job: Job, epoch: int, available: set[int], base: Base | None) -> Choice:
    """Return the layout in effect, with shares for another number of micro-batches.

    Raises LayoutError if the layout cannot stay: a rank is gone, a replica would get nothing, memory does not suffice,
    or more than the shares of the plan in effect depends on the number.
    """
    assert job.record.plan is not None
    old = job.record.plan.without_mirrors()
    fixed = (old.migrations or old.orders) and not old.layout.vacant
    if fixed or not available.issuperset(old.layout.active):
        raise LayoutError("the plan in effect does not suit another number of micro-batches")
    situation = _situation(job, epoch, available, base)
    if set(situation.stale).intersection(old.layout.active) or _kept_out(job, available) - set(old.layout.standby):
        raise LayoutError("the plan in effect does not suit the present ranks")
    reason = f"the layout in effect for {situation.micro_batches} micro-batches"
    if old.layout.vacant:
        plan = _mirrored(job, _redealt(old, old.layout.replicas, situation), situation)
        return _choice(job, plan, situation, reason)
    decision = job.planner.without_lost_replicas(situation)
    plan = _mirrored(job, decision.plan, situation)
    return _choice(job, plan, situation, reason, decision.seconds)


def tuned(job: Job, epoch: int, available: set[int], base: Base | None, plan: Plan) -> Choice:
    """Complete a plan that was made while training went on, now that all ranks have parked; ranks without work stand
    by.

    Raises LayoutError if it no longer fits: a rank is gone or is not to work, or the batch has grown.
    """
    unfit = _kept_out(job, available)
    usable = (available if base is None else available.intersection(base.survivors)) - unfit
    if not usable.issuperset(plan.layout.active) or plan.micro_batches != job.micro_batches:
        raise LayoutError("the tuned plan does not suit the present ranks")
    standby = tuple(sorted(available.difference(plan.layout.active)))
    plan = msgspec.structs.replace(plan, epoch=epoch, layout=Layout(plan.layout.replicas, standby))
    situation = _situation(job, epoch, available, base)
    plan = _mirrored(job, plan, situation)
    choice = _choice(job, plan, situation, "layers and orders by measured times")
    if job.tuning.promise is not None:
        job.tuning.promise = replace(job.tuning.promise, epoch=epoch)
    return choice


def situation_now(job: Job) -> Situation:
    """Return the situation of all ready ranks, while training goes on."""
    return _situation(job, job.epoch + 1, set(job.ready), None)


def best_while_running(job: Job, *, minds_slowness: bool | None = None) -> Choice:
    """Return the plan for all ready ranks as if training were interrupted now. Raises as `best`."""
    return best(job, job.epoch + 1, set(job.ready), None, minds_slowness=minds_slowness)


def first_again(job: Job) -> Choice:
    """Return the first plan, as if new devices took the places of those that are gone. If the job started with fewer
    devices than requested, return the plan it would have started with.

    Raises LayoutError if state that it needs is lost.
    """
    plan = job.record.first_plan
    assert plan is not None
    plan = _with_micro_batches(plan.without_mirrors(), job.micro_batches)
    situation = _situation(job, job.epoch + 1, set(job.ready), None)
    if len(plan.layout.active) < job.settings.ranks_asked:
        plan, absent = as_asked(job)
        situation = msgspec.structs.replace(situation, nodes=situation.nodes | absent)
    return _choice(job, plan, situation, "the first plan", iteration_seconds(plan, situation))


def _choice(
    job: Job,
    plan: Plan,
    situation: Situation,
    reason: str = "",
    predicted: float | None = None,
    decision: Decision | None = None,
) -> Choice:
    """Return the plan with its predicted times. `predicted`: if known already; `decision`: if it was compared with
    others."""
    others = () if decision is None else decision.alternatives
    return Choice(
        plan=plan,
        reason=reason,
        predicted=_price(plan, situation) if predicted is None or plan.mirrors else predicted,
        present=present(job, situation),
        situation=situation,
        kept_out=tuple(sorted(_kept_out(job, set(plan.layout.standby).intersection(situation.available)))),
        considered=tuple(OtherPlan(name=name, predicted=s) for name, s in others if math.isfinite(s)),
    )


def present(job: Job, situation: Situation) -> float | None:
    """Return the predicted time of the plan in effect, with the present number of micro-batches; None if it cannot
    run."""
    plan = job.record.plan
    if plan is None or situation.micro_batches < len(plan.layout.replicas) - len(plan.mirrors):
        return None
    return _price(_with_micro_batches(plan, situation.micro_batches), situation)


def _price(plan: Plan, situation: Situation) -> float | None:
    """Return the predicted time of an iteration; None if the plan has work for a rank that is gone or stopped."""
    if not set(situation.available).difference(situation.stale).issuperset(plan.layout.active):
        return None
    seconds = iteration_seconds(plan, situation)
    return seconds if math.isfinite(seconds) else None


def with_standby(plan: Plan, ranks: set[int]) -> Plan:
    """Return the same plan, with more standby ranks."""
    if not ranks:
        return plan
    layout = plan.layout
    standby = tuple(sorted({*layout.standby, *ranks}))
    return msgspec.structs.replace(plan, layout=Layout(layout.replicas, standby))


def _with_spares(job: Job, plan: Plan, unfit: set[int]) -> Plan:
    """Put spares in the places of unfit ranks, as far as tensor-parallel groups stay within their node."""
    spares = [rank for rank in plan.layout.standby if rank not in unfit]
    places: dict[int, int] = {}
    for replica in plan.layout.replicas:
        for stage in replica.stages:
            for rank in unfit.intersection(stage.ranks):
                node = job.members[rank].node
                candidates = [spare for spare in spares if stage.tp == 1 or job.members[spare].node == node]
                if candidates:
                    places[rank] = min(candidates, key=lambda spare: (job.members[spare].node != node, spare))
                    spares.remove(places[rank])
    replicas = _renamed(plan.layout, places).replicas
    active = {rank for replica in replicas for rank in replica.ranks}
    layout = Layout(replicas, tuple(rank for rank in plan.layout.ranks if rank not in active))
    return msgspec.structs.replace(plan, layout=layout)


def _mirrored(job: Job, plan: Plan, situation: Situation, *, checked: bool = False) -> Plan:
    """Return the plan, with mirrors for layers that only one stage holds, as far as standby ranks can hold copies.

    A device that is slow, or failed its probe by its speed, is good enough for a copy. Plans of other planners than
    ours get no mirrors: they serve as comparison. `checked`: whether the plan without mirrors was checked before.
    Raises PlanError if that plan cannot be carried out.
    """
    candidates = [rank for rank in plan.layout.standby if can_hold_copies(job, rank, situation.speeds)]
    protected = mirrors.with_mirrors(plan, situation, candidates)
    if protected is not plan:
        try:
            job.dependencies.check(protected)
            return protected
        except LayoutError as error:
            job.say("warning", f"state that only one rank holds gets no copy: {error}; training goes on without")
    if not checked:
        job.dependencies.check(plan)
    return plan


def can_hold_copies(job: Job, rank: int, speeds: Mapping[int, float]) -> bool:
    """Return whether a rank may be part of a mirror.

    It may under our own planner, once measured, and unless it is stopped, has not answered its last probe, or is about
    to leave with its node.
    """
    member = job.members[rank]
    return (
        job.settings.planner == "resihp"
        and member.ready
        and rank not in job.unmeasured
        and member.node not in job.vacating
        and job.device_of(rank) not in job.record.unanswered
        and speeds.get(rank, 1.0) > 0
    )


def layers_at_risk(job: Job) -> frozenset[int]:
    """Return the layers whose state only one stage of the plan in effect holds."""
    plan = job.record.plan
    return frozenset() if plan is None else mirrors.layers_held_once(plan.layout)


def _kept_out(job: Job, ranks: set[int]) -> set[int]:
    """Return those of the ranks that are to stand by: unfit, not measured yet, or about to leave with their node."""
    leaving = {rank for rank in ranks if job.members[rank].node in job.vacating}
    unfit = set() if job.settings.observes else job.record.unfit
    return leaving | {rank for rank in ranks if job.device_of(rank) in unfit or rank in job.unmeasured}


def cautious(job: Job, epoch: int, available: set[int], base: Base | None) -> Choice:
    """Return the plan in effect once more if possible, else that plan without the replicas that lost a rank.

    Raises NotEnoughDevicesError if no replica is complete, LayoutError if not even that plan can be carried out.
    """
    old = job.record.plan or job.record.first_plan
    assert old is not None
    situation = _situation(job, epoch, available, base)
    usable = available if base is None else available.intersection(base.survivors)
    if usable.issuperset(old.layout.active):
        standby = tuple(sorted(available - set(old.layout.active)))
        plan = _with_micro_batches(old, job.micro_batches)
        plan = msgspec.structs.replace(plan, epoch=epoch, layout=Layout(old.layout.replicas, standby))
        reason = "the plan in effect once more"
    elif old.mirrors and usable.issuperset(old.computing):
        plan = _with_micro_batches(old.without_mirrors(), job.micro_batches)
        standby = tuple(sorted(available - set(old.computing)))
        plan = msgspec.structs.replace(plan, epoch=epoch, layout=Layout(plan.layout.replicas, standby))
        reason = "the plan in effect without its mirrors"
    else:
        plan, reason = _without_lost(job, old.without_mirrors(), situation, usable)
    job.dependencies.check(plan)
    return _choice(job, plan, situation, reason)


def _without_lost(job: Job, old: Plan, situation: Situation, usable: Collection[int]) -> tuple[Plan, str]:
    """Return `old` without the replicas that lost a rank, and the reason. Stages without ranks stay empty if other
    replicas hold their layers. Raises NotEnoughDevicesError."""
    if old.layout.vacant:
        intact = tuple(replica for replica in old.layout.replicas if set(replica.ranks).issubset(usable))
        with suppress(LayoutError):
            return _redealt(old, intact, situation), "without the replicas that lost a rank"
    try:
        decision = job.planner.without_lost_replicas(situation)
    except LayoutError as error:
        raise NotEnoughDevicesError(f"no complete replica is left: {error}") from None
    return decision.plan, decision.reason


def _situation(
    job: Job,
    epoch: int,
    available: set[int],
    base: Base | None,
    old: Plan | None = None,
    *,
    minds_slowness: bool | None = None,
) -> Situation:
    """Return the planner's view. `old`: the plan to start from; by default the one in effect, or the first one before
    that.

    `minds_slowness` as for `best`.
    """
    declared, settings, old = job.declaration, job.settings, old or job.record.plan or job.record.first_plan
    assert old is not None
    counts_slowness = not job.settings.observes if minds_slowness is None else minds_slowness
    slow = job.record.slow if counts_slowness else {}
    stale = set() if base is None else available & set(old.layout.active) - set(base.survivors)
    overhead = device_memory.overhead(declared.device, declared.back_end)
    return Situation(
        epoch=epoch,
        base=old.without_mirrors().layout,
        mirrors=tuple(old.layout.replicas[d] for d in old.mirrors),
        available=tuple(sorted(available)),
        nodes=job.node_of,
        model=declared.model,
        micro_batches=job.micro_batches,
        tokens=declared.model.sequence,
        tp=settings.tp,
        pp=settings.pp,
        chunks=settings.chunks,
        schedule=settings.schedule,
        sequence_parallel=settings.sequence_parallel,
        memory_bytes=_memory_bytes(job, old, overhead),
        overhead=overhead,
        speeds={rank: slow[device].speed for rank in available if (device := job.device_of(rank)) in slow},
        profile=job.profile,
        links=learned_times.links(job) if counts_slowness else {},
        stale=tuple(sorted(stale)),
        fresh=_is_fresh(job),
    )


def _memory_bytes(job: Job, plan: Plan, overhead: Overhead) -> int | None:
    """Return the memory of each device: as configured, else that of the smallest device, but at least what `plan` needs
    by estimate, since that plan runs or was requested."""
    configured, smallest = job.settings.memory_bytes, job.declaration.memory_bytes
    if configured is not None or smallest is None:
        return configured
    needed, _ = memory.most_needed(plan, job.declaration.model, job.declaration.model.sequence)
    return max(smallest, overhead.with_gaps(needed))


def base(job: Job) -> Base | None:
    """Return where the state is once all have parked; None while every rank initialises it or loads it from the
    checkpoint."""
    if _is_fresh(job):
        return None
    assert job.record.plan is not None
    survivors = tuple(rank for rank in job.record.active if job.members[rank].ready and can_go_on(job, rank))
    return Base(epoch=job.record.plan.epoch, layout=job.record.plan.layout, survivors=survivors)


def _is_fresh(job: Job) -> bool:
    return job.record.plan is None or job.record.committed == job.declaration.resume_from


def can_go_on(job: Job, rank: int) -> bool:
    """Return whether a parked rank holds the last committed iteration's state of the plan in effect, or can finish its
    step.

    Only the controller knows which plan is in effect: a rank that acknowledged the next one holds the state of both.
    """
    parked = job.transition.parked.get(rank) if job.transition else None
    if parked is None or job.record.plan is None or job.record.plan.epoch not in parked.holds:
        return False
    return parked.stepped == job.record.committed or (parked.stepped == job.record.committed - 1 and parked.ready)


def state_lost(job: Job, base: Base | None) -> str | None:
    """Return the reason why training cannot continue from the surviving state, or None if it can."""
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
