"""Restores the situation in which a recorded plan was decided. Pure.

With each plan, the controller records the facts that are stored nowhere else (`resihp.record.journal.PlanBasis`). An
explanation restores the situation from these facts, the job's model and the layout. Called by the controller when it
proposes a plan, and by `resihp.db.reading.plans.explanations`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from resihp.parallelism.plan import Plan
from resihp.protocol.messages import Declare
from resihp.record.journal import LearnedTimes, PlanBasis, Three
from resihp.scheduler.cost.device_memory import overhead
from resihp.scheduler.cost.profile import Profile, Times
from resihp.scheduler.situation import Situation


def basis_of(situation: Situation, kept_out: Collection[int]) -> PlanBasis:
    """Return the facts of a situation to record with a plan. `kept_out`: ranks of the layout that must not get work."""
    return PlanBasis(
        speeds=tuple(sorted(situation.speeds.items())),
        links=tuple((a, b, speed) for (a, b), speed in sorted(situation.links.items())),
        kept_out=tuple(sorted(kept_out)),
        times=None if situation.profile is None else _times(situation.profile),
    )


def situation_of(
    basis: PlanBasis,
    plan: Plan,
    declared: Declare,
    *,
    nodes: Mapping[int, str],
    tp: int,
    pp: int,
    chunks: int,
    memory_bytes: int | None,
) -> Situation:
    """Return the situation of a recorded plan, as if the plan's own layout had been in effect before."""
    times = basis.times
    return Situation(
        epoch=plan.epoch,
        base=plan.layout,
        available=tuple(rank for rank in plan.layout.ranks if rank not in set(basis.kept_out)),
        nodes=dict(nodes),
        model=declared.model,
        micro_batches=plan.micro_batches,
        tokens=declared.model.sequence,
        tp=tp,
        pp=pp,
        chunks=chunks,
        schedule=plan.schedule,
        sequence_parallel=plan.sequence_parallel,
        speeds=dict(basis.speeds),
        memory_bytes=memory_bytes,
        overhead=overhead(declared.device, declared.back_end),
        profile=None if times is None else profile_of(times, declared.model.layers),
        links={(a, b): speed for a, b, speed in basis.links},
    )


def _times(profile: Profile) -> LearnedTimes:
    layers = tuple(_three(layer) for layer in profile.layers)
    return LearnedTimes(
        layers=layers[:1] if len(set(layers)) == 1 else layers,
        embedding=_three(profile.embedding),
        head=_three(profile.head),
        transfer_s=profile.transfer_s,
        inside_s=profile.inside_s,
        gradient_s=profile.gradient_s,
        step_s=profile.step_s,
    )


def profile_of(times: LearnedTimes, layers: int) -> Profile:
    """Return the recorded times as a profile of `layers` layers."""
    layer_times = [Times(*layer) for layer in times.layers]
    return Profile(
        layers=tuple(layer_times * layers if len(layer_times) == 1 else layer_times),
        embedding=Times(*times.embedding),
        head=Times(*times.head),
        transfer_s=times.transfer_s,
        inside_s=times.inside_s,
        gradient_s=times.gradient_s,
        step_s=times.step_s,
    )


def _three(times: Times) -> Three:
    return times.f, times.b, times.w
