"""Choose the first plan of a job: the requested layout, or the best layout for the devices that have joined.

Decides which spare devices take the places of missing or unfit ones; the scheduler decides which layout is best. Called
by `startup`, and by `replacements` to learn the value of new devices.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping

import msgspec

from resihp.controller.planning.choices import Choice, priced, with_micro_batches, with_standby
from resihp.controller.planning.copies import mirrored
from resihp.controller.planning.situations import ranks_kept_out, situation_of
from resihp.controller.state.job import Job
from resihp.errors import LayoutError, NotEnoughDevicesError
from resihp.parallelism.layout import Layout, Replica, Stage
from resihp.parallelism.plan import Plan
from resihp.scheduler.cost import device_memory
from resihp.scheduler.cost.prices import iteration_seconds
from resihp.scheduler.layouts import first_layout
from resihp.words import natural


def choose(job: Job) -> Choice:
    """Return the first plan of a job: the requested layout if all devices or enough spares have joined, else the best
    layout for the devices that have joined.

    Raises LayoutError if the requested layout is impossible, NotEnoughDevicesError if no layout fits the remaining
    devices.
    """
    grid, absent = as_asked(job)
    if absent:
        return _first_with_less(job, grid, absent)
    plan = with_standby(grid, set(job.ready).difference(grid.layout.ranks))
    unfit = ranks_kept_out(job, set(job.ready))
    if unfit.intersection(plan.layout.active):
        plan = _with_spares(job, plan, unfit)
    reason = ""
    if job.settings.tune and job.settings.chunks == 1 and not unfit.intersection(plan.layout.active):
        tuned_plan = first_layout.tuned(plan, situation_of(job, plan.epoch, set(job.ready), None, plan))
        plan, reason = tuned_plan.plan, tuned_plan.reason
    if unfit.intersection(plan.layout.active):
        fit = set(job.ready) - unfit
        try:
            decision = job.planner.decide(situation_of(job, plan.epoch, fit, None, plan))
            plan = with_standby(decision.plan, unfit)
        except LayoutError:
            job.say("warning", "not enough devices pass their probe: the others are used as well")
    situation = situation_of(job, plan.epoch, set(job.ready), None, plan)
    return priced(job, mirrored(job, plan, situation), situation, reason)


def choose_again(job: Job) -> Choice:
    """Return the first plan, as if new devices took the places of the lost ones. If the job started with fewer devices
    than requested, return the requested layout.

    Raises LayoutError if state that the plan needs is lost.
    """
    plan = job.record.first_plan
    assert plan is not None
    plan = with_micro_batches(plan.without_mirrors(), job.micro_batches)
    situation = situation_of(job, job.epoch + 1, set(job.ready), None)
    if len(plan.layout.active) < job.settings.ranks_asked:
        plan, absent = as_asked(job)
        situation = msgspec.structs.replace(situation, nodes=situation.nodes | absent)
    return priced(job, plan, situation, "the first plan", iteration_seconds(plan, situation))


def as_asked(job: Job) -> tuple[Plan, dict[int, str]]:
    """Return Megatron's uniform grid over the requested number of devices, and the nodes of its stand-ins. Devices of
    spare nodes take the places of missing ones. A stand-in is a rank number without a process, in the place of a device
    that is missing all the same.

    Raises LayoutError as `Planner.first_plan` does.
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
    plan = with_micro_batches(plan, job.micro_batches)
    layout = _renamed(plan.layout, dict(enumerate(ranks)))
    if absent.keys().isdisjoint(layout.active):
        absent, layout = {}, Layout(layout.replicas, tuple(rank for rank in layout.standby if rank not in absent))
    return msgspec.structs.replace(plan, layout=layout), absent


def _first_with_less(job: Job, grid: Plan, absent: Collection[int]) -> Choice:
    """Return a first plan without the missing devices. `grid`: the requested layout; `absent`: its stand-ins. Raises
    NotEnoughDevicesError."""
    ready = set(job.ready)
    unfit = ranks_kept_out(job, ready)
    shares = f"{len(absent)} of {job.settings.devices_asked}"
    for kept_out, ask in itertools.product(
        (unfit, set()) if unfit else (unfit,),
        (job.planner.decide, job.planner.without_lost_replicas),
    ):
        try:
            decision = ask(situation_of(job, grid.epoch, ready - kept_out, None, grid))
            plan = with_standby(decision.plan, kept_out)
            situation = situation_of(job, grid.epoch, ready, None, plan)
            plan = mirrored(job, plan, situation)
        except LayoutError as error:
            obstacle = error
            continue
        return priced(
            job, plan, situation, f"{shares} devices are missing; {decision.reason}", decision.seconds, decision
        )
    raise NotEnoughDevicesError(f"{shares} devices are missing, and no layout fits the others: {obstacle}")


def _with_spares(job: Job, plan: Plan, unfit: set[int]) -> Plan:
    """Put spare ranks in the places of unfit ranks, as far as each tensor-parallel group stays within its node."""
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


def _renamed(layout: Layout, names: Mapping[int, int]) -> Layout:
    """Return the layout with ranks renumbered. `names` maps old ranks to new ones; other ranks stay."""
    replicas = tuple(
        Replica(tuple(Stage(tuple(names.get(rank, rank) for rank in s.ranks), s.chunks) for s in replica.stages))
        for replica in layout.replicas
    )
    return Layout(replicas, tuple(names.get(rank, rank) for rank in layout.standby))
