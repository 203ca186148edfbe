"""Which plan is proposed, and from which state: the controller's questions to the scheduler and to the checker.

Decides where the state is (the base of a transition) and what is tried after a plan was refused. Which layout is good
is the scheduler's to say, whether a plan can be carried out the checker's. Called by `startup`, `transition` and
`joins`.
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
    """What the scheduler is asked: the `situation`, and the one without those who are kept out, which is `fit`."""

    situation: Situation
    fit: Situation
    kept_out: frozenset[int]


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
    kept_out: tuple[int, ...] = ()
    """Ranks of the plan that were not to get work."""
    considered: tuple[OtherPlan, ...] = ()
    """What else was possible."""

    @property
    def movement(self) -> Movement:
        """What the change to it has to do. Raises LayoutError naming what nobody holds any more."""
        return movement(self.situation, self.plan.layout)


def first(job: Job) -> Choice:
    """Plan of a job that starts: as it was asked to be where all devices or enough spares are there, else the best for
    the rest.

    Raises LayoutError when it cannot be as the job was asked to be, NotEnoughDevicesError when nothing fits the rest.
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
        found = first_layout.tuned(plan, _situation(job, plan.epoch, set(job.ready), None, plan))
        plan, reason = found.plan, found.reason
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
    """Megatron's grid over as many devices as the job was asked to have, those of spare nodes where others are missing;
    and the nodes of its stand-ins: ranks that nobody has, in the places of devices for which there is none.

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
        micro_batches=declared.micro_batches,  # the most that devices have to have room for
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
    plan = _for_so_many(plan, job.micro_batches)
    layout = _renamed(plan.layout, dict(enumerate(ranks)))
    if absent.keys().isdisjoint(layout.active):
        absent, layout = {}, Layout(layout.replicas, tuple(rank for rank in layout.standby if rank not in absent))
    return msgspec.structs.replace(plan, layout=layout), absent


def _for_so_many(plan: Plan, micro_batches: int) -> Plan:
    """The same layout, with even shares of another batch. Raises LayoutError if a replica would get none."""
    if plan.micro_batches == micro_batches:
        return plan
    return plan.dealing(micro_batches)


def _redealt(plan: Plan, replicas: tuple[Replica, ...], situation: Situation) -> Plan:
    """These replicas of a plan in which stages have no ranks, for the situation. Raises LayoutError if they cannot do
    with each other alone, or lack the memory."""
    used = {rank for replica in replicas for rank in replica.ranks}
    layout = Layout(replicas, tuple(sorted(set(situation.available).difference(used))))
    validate(layout, situation.model)
    plan = msgspec.structs.replace(plan, epoch=situation.epoch, layout=layout).dealing(situation.micro_batches)
    obstacle = overfull(plan, situation)
    if obstacle:
        raise LayoutError(obstacle)
    return plan


def _renamed(layout: Layout, names: Mapping[int, int]) -> Layout:
    """The same layout of other ranks: those that `names` does not have keep theirs."""
    replicas = tuple(
        Replica(tuple(Stage(tuple(names.get(rank, rank) for rank in s.ranks), s.chunks) for s in replica.stages))
        for replica in layout.replicas
    )
    return Layout(replicas, tuple(names.get(rank, rank) for rank in layout.standby))


def _first_with_less(job: Job, grid: Plan, absent: Collection[int]) -> Choice:
    """A first plan without the devices that stand-ins are in the places of. Raises NotEnoughDevicesError."""
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
    """What the scheduler makes of these ranks, checked. `minds_slowness`: whether what is slow counts as such; by
    default where something may be done about it.

    Raises LayoutError when no plan is found, or the one that is found is no good.
    """
    question = asked(job, epoch, available, base, minds_slowness=minds_slowness)
    situation, unfit = question.situation, set(question.kept_out)
    ready = job.foresight.ready(question.fit)
    if ready is not None:
        # without ranks that were kept out, the plan was checked with its answer
        plan = _mirrored(job, with_standby(ready.plan, unfit), situation, checked=not unfit)
        job.foresight.searched = ready.plan.layout.replicas if job.settings.search_s else None
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
    """The question to which `best` answers."""
    minds = not job.settings.observes if minds_slowness is None else minds_slowness
    unfit = _kept_out(job, available)
    situation = _situation(job, epoch, available, base, minds_slowness=minds)
    fit = _situation(job, epoch, available - unfit, base, minds_slowness=minds) if unfit else situation
    return Posed(situation=situation, fit=fit, kept_out=frozenset(unfit))


def resized(job: Job, epoch: int, available: set[int], base: Base | None) -> Choice:
    """The layout in effect, with shares for another number of micro-batches.

    Raises LayoutError where it cannot stay as it is: somebody is gone, a replica would get nothing, memory forbids it,
    or the plan in effect was made for its number by more than shares.
    """
    assert job.record.plan is not None
    old = job.record.plan.without_mirrors()
    fixed = (old.migrations or old.orders) and not old.layout.vacant
    if fixed or not available.issuperset(old.layout.active):
        raise LayoutError("the plan in effect does not suit another number of micro-batches")
    situation = _situation(job, epoch, available, base)
    if set(situation.stale).intersection(old.layout.active) or _kept_out(job, available) - set(old.layout.standby):
        raise LayoutError("the plan in effect does not suit those who are there")
    reason = f"the layout in effect for {situation.micro_batches} micro-batches"
    if old.layout.vacant:
        plan = _mirrored(job, _redealt(old, old.layout.replicas, situation), situation)
        return _choice(job, plan, situation, reason)
    decision = job.planner.without_lost_replicas(situation)
    plan = _mirrored(job, decision.plan, situation)
    return _choice(job, plan, situation, reason, decision.seconds)


def tuned(job: Job, epoch: int, available: set[int], base: Base | None, plan: Plan) -> Choice:
    """A plan that was made while training went on, now that all have parked; whoever has no work in it stands by.

    Raises LayoutError where it does not suit any more: somebody is gone, or is not to work, or the batch has grown.
    """
    unfit = _kept_out(job, available)
    able = (available if base is None else available.intersection(base.survivors)) - unfit
    if not able.issuperset(plan.layout.active) or plan.micro_batches != job.micro_batches:
        raise LayoutError("the tuned plan does not suit those who are there")
    standby = tuple(sorted(available.difference(plan.layout.active)))
    plan = msgspec.structs.replace(plan, epoch=epoch, layout=Layout(plan.layout.replicas, standby))
    situation = _situation(job, epoch, available, base)
    plan = _mirrored(job, plan, situation)
    choice = _choice(job, plan, situation, "layers and orders by measured times")
    if job.tuning.promise is not None:
        job.tuning.promise = replace(job.tuning.promise, epoch=epoch)
    return choice


def situation_now(job: Job) -> Situation:
    """That of all who are ready, while training goes on."""
    return _situation(job, job.epoch + 1, set(job.ready), None)


def best_while_running(job: Job, *, minds_slowness: bool | None = None) -> Choice:
    """What the scheduler would make of all who are ready, were training interrupted now. As `best`, raises as it."""
    return best(job, job.epoch + 1, set(job.ready), None, minds_slowness=minds_slowness)


def first_again(job: Job) -> Choice:
    """The first plan, as if new devices stood in the places of those that are gone; where the job began with less than
    it was asked to have, the plan that it would have begun with.

    Raises LayoutError when state is lost that it needs.
    """
    plan = job.record.first_plan
    assert plan is not None
    plan = _for_so_many(plan.without_mirrors(), job.micro_batches)
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
    """`predicted` where it is known already; `decision` where others were compared with it."""
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
    """Of the plan in effect, dealing as many micro-batches as there are now."""
    plan = job.record.plan
    if plan is None or situation.micro_batches < len(plan.layout.replicas) - len(plan.mirrors):
        return None
    return _price(_for_so_many(plan, situation.micro_batches), situation)


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
    replicas = _renamed(plan.layout, places).replicas
    active = {rank for replica in replicas for rank in replica.ranks}
    layout = Layout(replicas, tuple(rank for rank in plan.layout.ranks if rank not in active))
    return msgspec.structs.replace(plan, layout=layout)


def _mirrored(job: Job, plan: Plan, situation: Situation, *, checked: bool = False) -> Plan:
    """Return the plan, with mirrors for the layers that one stage holds, as far as ranks on standby can hold copies.

    A device that is slow, or failed its probe by its speed, is good enough for a copy. Other rules than ours get none:
    they are there to be compared with. `checked`: whether the plan without mirrors was checked before. Raises PlanError
    if that one cannot be carried out.
    """
    able = [rank for rank in plan.layout.standby if can_hold_copies(job, rank, situation.speeds)]
    protected = mirrors.with_mirrors(plan, situation, able)
    if protected is not plan:
        try:
            job.dependencies.check(protected)
            return protected
        except LayoutError as error:
            job.say("warning", f"no copies of state that one rank holds: {error}")
    if not checked:
        job.dependencies.check(plan)
    return plan


def can_hold_copies(job: Job, rank: int, speeds: Mapping[int, float]) -> bool:
    """Return whether a rank may be part of a mirror: under our own planner, measured, and neither stopped, nor without
    an answer to its last probe, nor about to leave with its node."""
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
    """Return the layers whose state one stage of the plan in effect holds alone."""
    plan = job.record.plan
    return frozenset() if plan is None else mirrors.layers_held_once(plan.layout)


def _kept_out(job: Job, ranks: set[int]) -> set[int]:
    """Of these, those that are to stand by: unfit, not measured yet, or about to leave with their node."""
    leaving = {rank for rank in ranks if job.members[rank].node in job.vacating}
    unfit = set() if job.settings.observes else job.record.unfit
    return leaving | {rank for rank in ranks if job.device_of(rank) in unfit or rank in job.unmeasured}


def cautious(job: Job, epoch: int, available: set[int], base: Base | None) -> Choice:
    """The plan in effect once more if it can be, else without the replicas that lost a rank.

    Raises NotEnoughDevicesError when no replica is whole, LayoutError when not even that can be carried out.
    """
    old = job.record.plan or job.record.first_plan
    assert old is not None
    situation = _situation(job, epoch, available, base)
    able = available if base is None else available.intersection(base.survivors)
    if able.issuperset(old.layout.active):
        standby = tuple(sorted(available - set(old.layout.active)))
        plan = _for_so_many(old, job.micro_batches)
        plan = msgspec.structs.replace(plan, epoch=epoch, layout=Layout(old.layout.replicas, standby))
        reason = "the plan in effect once more"
    elif old.mirrors and able.issuperset(old.computing):
        plan = _for_so_many(old.without_mirrors(), job.micro_batches)
        standby = tuple(sorted(available - set(old.computing)))
        plan = msgspec.structs.replace(plan, epoch=epoch, layout=Layout(plan.layout.replicas, standby))
        reason = "the plan in effect without its mirrors"
    else:
        plan, reason = _without_lost(job, old.without_mirrors(), situation, able)
    job.dependencies.check(plan)
    return _choice(job, plan, situation, reason)


def _without_lost(job: Job, old: Plan, situation: Situation, able: Collection[int]) -> tuple[Plan, str]:
    """`old` without replicas that lost a rank, and why this one; stages without ranks stay so where others hold their
    layers. Raises NotEnoughDevicesError."""
    if old.layout.vacant:
        left = tuple(replica for replica in old.layout.replicas if set(replica.ranks).issubset(able))
        with suppress(LayoutError):
            return _redealt(old, left, situation), "without the replicas that lost a rank"
    try:
        decision = job.planner.without_lost_replicas(situation)
    except LayoutError as error:
        raise NotEnoughDevicesError(f"no whole replica is left: {error}") from None
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
    """The planner's view. `old`: the plan to start from; by default the one in effect, or the first until one is.

    `minds_slowness` as for `best`."""
    declared, settings, old = job.declaration, job.settings, old or job.record.plan or job.record.first_plan
    assert old is not None
    minds = not job.settings.observes if minds_slowness is None else minds_slowness
    slows = job.record.slow if minds else {}
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
        speeds={rank: slows[device].speed for rank in available if (device := job.device_of(rank)) in slows},
        profile=job.profile,
        links=learned_times.links(job) if minds else {},
        stale=tuple(sorted(stale)),
        fresh=_is_fresh(job),
    )


def _memory_bytes(job: Job, plan: Plan, overhead: Overhead) -> int | None:
    """Of each device: what the user says, else what the smallest device has, and no less than `plan` needs by estimate:
    it runs, or was asked for."""
    told, has = job.settings.memory_bytes, job.declaration.memory_bytes
    if told is not None or has is None:
        return told
    needed, _ = memory.most_needed(plan, job.declaration.model, job.declaration.model.sequence)
    return max(has, overhead.with_gaps(needed))


def base(job: Job) -> Base | None:
    """Where the state is once all have parked; None while every rank draws it or loads it from the checkpoint."""
    if _is_fresh(job):
        return None
    assert job.record.plan is not None
    survivors = tuple(rank for rank in job.record.active if job.members[rank].ready and can_go_on(job, rank))
    return Base(epoch=job.record.plan.epoch, layout=job.record.plan.layout, survivors=survivors)


def _is_fresh(job: Job) -> bool:
    return job.record.plan is None or job.record.committed == job.declaration.resume_from


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
