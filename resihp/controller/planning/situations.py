"""Describe the situation for which a plan is chosen: ranks, speeds, memory, and the place of the state.

Decides which ranks must stand by, and which ranks still hold the state from which training continues. Never chooses a
plan. Called by the other modules of this folder, and by `transition`, `shutdown`, `ahead` and `tuning`.
"""

from __future__ import annotations

from resihp.controller.fail_slow import learned_times
from resihp.controller.state.job import Job
from resihp.parallelism.ownership import ParameterSpec
from resihp.parallelism.plan import Plan
from resihp.parallelism.transfers import Base, bytes_of, missing
from resihp.scheduler.cost import device_memory, memory
from resihp.scheduler.cost.device_memory import Overhead
from resihp.scheduler.situation import Situation


def situation_of(
    job: Job,
    epoch: int,
    available: set[int],
    base: Base | None,
    old: Plan | None = None,
    *,
    minds_slowness: bool | None = None,
) -> Situation:
    """Return the situation as the planner sees it. `old`: the plan to start from; by default the plan in effect, or the
    first plan if none is in effect yet.

    `minds_slowness`: see `next_plan.best`.
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


def now(job: Job) -> Situation:
    """Return the present situation with all ready ranks, while training goes on."""
    return situation_of(job, job.epoch + 1, set(job.ready), None)


def ranks_kept_out(job: Job, ranks: set[int]) -> set[int]:
    """Return the ranks among `ranks` that must stand by: unfit, not measured yet, or about to leave with their node."""
    leaving = {rank for rank in ranks if job.members[rank].node in job.vacating}
    unfit = set() if job.settings.observes else job.record.unfit
    return leaving | {rank for rank in ranks if job.device_of(rank) in unfit or rank in job.unmeasured}


def _memory_bytes(job: Job, plan: Plan, overhead: Overhead) -> int | None:
    """Return the bytes of memory of each device: the configured value, else that of the smallest device. It is at least
    the estimated need of `plan`, because that plan runs or was requested. None if not known."""
    configured, smallest = job.settings.memory_bytes, job.declaration.memory_bytes
    if configured is not None or smallest is None:
        return configured
    needed, _ = memory.most_needed(plan, job.declaration.model, job.declaration.model.sequence)
    return max(smallest, overhead.with_gaps(needed))


def base(job: Job) -> Base | None:
    """Return which ranks hold the state, once all ranks have parked. None while every rank initialises the state or
    loads it from the checkpoint."""
    if _is_fresh(job):
        return None
    assert job.record.plan is not None
    survivors = tuple(rank for rank in job.record.active if job.members[rank].ready and can_go_on(job, rank))
    return Base(epoch=job.record.plan.epoch, layout=job.record.plan.layout, survivors=survivors)


def _is_fresh(job: Job) -> bool:
    return job.record.plan is None or job.record.committed == job.begins_after


def can_go_on(job: Job, rank: int) -> bool:
    """Return whether a parked rank holds the state after the last committed iteration, under the plan in effect, or can
    still finish that iteration's step.

    Only the controller knows which plan is in effect: a rank that has acknowledged the next plan holds the state of
    both plans.
    """
    parked = job.transition.parked.get(rank) if job.transition else None
    if parked is None or job.record.plan is None or job.record.plan.epoch not in parked.holds:
        return False
    return parked.stepped == job.record.committed or (parked.stepped == job.record.committed - 1 and parked.ready)


def state_lost(job: Job, base: Base | None) -> str | None:
    """Return the reason for which training cannot continue from the surviving state; None if it can."""
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
