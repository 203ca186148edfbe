"""Invariants of plans: when a plan may be decided, and when it may take effect.

Checks the journal entries of plans before they are written. Never checks whether a plan is a good one. Called by the
invariants of entries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from resihp.parallelism.layout import validate
from resihp.parallelism.plan import Plan
from resihp.record.journal import FailureEnded, FailureFound, PlanDecided
from resihp.simulator.holdings import needed
from resihp.simulator.invariants.violations import expect

if TYPE_CHECKING:
    from resihp.simulator.rules import Rules


def check_plan(rules: Rules, decided: PlanDecided) -> None:
    plan = decided.plan
    expect(plan.epoch not in rules.plans, f"two plans for epoch {plan.epoch}")
    validate(plan.layout, rules.world.scenario.model)
    dead = set(plan.layout.ranks) & rules.known_dead
    expect(not dead, f"plan {plan.epoch} contains dead ranks {sorted(dead)}")
    dealt = sorted(index for share in plan.assignment for index in share)
    due = rules.world.scenario.batch_sizes.at(decided.next_iteration)
    expect(dealt == list(range(due)), f"plan {plan.epoch} deals {dealt}")
    expect(len(plan.assignment) == len(plan.layout.replicas), "not one assignment for each replica")
    check_unaffected(rules, decided)
    check_progress(rules, decided)
    rules.bytes_planned = decided.bytes_planned
    expect(not rules.plans or plan.epoch > max(rules.plans), f"plan {plan.epoch} after {max(rules.plans, default=0)}")
    if rules.plan is not None:
        check_ranks(rules, rules.plan, plan)
    rules.plans[plan.epoch] = rules.plan = plan


def check_progress(rules: Rules, decided: PlanDecided) -> None:
    """Check that a plan begins with the iteration after the last committed one, and that no rank has taken its step."""
    plan = decided.plan
    expect(
        decided.next_iteration == rules.committed + 1,
        f"plan {plan.epoch} begins with {decided.next_iteration}, committed are {rules.committed}",
    )
    expect(
        decided.next_iteration > rules.reported,
        f"plan {plan.epoch} redoes iteration {decided.next_iteration}, of which a step was reported",
    )
    for worker in rules.world.workers.values():
        if worker.rank in plan.layout.ranks and worker.alive and not rules.given_up(worker) and rules.counts(worker):
            expect(
                worker.stepped < decided.next_iteration,
                f"plan {plan.epoch} redoes {decided.next_iteration}, which rank {worker.rank} has stepped",
            )
    if decided.finish is not None:
        expect(decided.finish.iteration == rules.committed, f"finishes {decided.finish.iteration}")


def check_ranks(rules: Rules, before: Plan, plan: Plan) -> None:
    """Check that all ranks of a plan have parked for it, and that it omits no live rank of the previous plan."""
    awaited = set(plan.layout.ranks) - rules.parked.get(plan.epoch, set())
    expect(not awaited, f"plan {plan.epoch} is decided though ranks {sorted(awaited)} have not parked for it")
    dropped_ranks = {*before.layout.ranks} - {*plan.layout.ranks}
    fenced = {rank for rank in dropped_ranks if rules.world.workers[rank].fenced}
    unexplained = dropped_ranks - rules.known_dead - fenced - rules.turned_away
    expect(not unexplained, f"plan {plan.epoch} loses {sorted(unexplained)}, which are alive")


def check_unaffected(rules: Rules, decided: PlanDecided) -> None:
    """Check that a plan lists exactly the failures of slow devices without work under the plan."""
    entries = [entry for _, entry in rules.world.entries]
    ended = {entry.failure for entry in entries if isinstance(entry, FailureEnded)}
    verdicts = [entry for entry in entries if isinstance(entry, FailureFound)]
    slow = [failure for failure in verdicts if failure.kind == "fail-slow" and failure.component == "device"]
    placements, active = rules.world.record.placements, decided.plan.computing
    working = {(placements[rank].node, placements[rank].device) for rank in active}
    idle = {
        failure.failure
        for failure in slow
        if failure.failure not in ended and (failure.node, failure.device) not in working
    }
    named = {failure.failure for failure in slow} & set(decided.unaffected_by)
    expect(named == idle, f"plan {decided.plan.epoch}: lists failures {named} as idle, but {idle} are")


def check_effect(rules: Rules, epoch: int) -> None:
    """Check the commit of a transition: all ranks have sent `Ready`, and all slices are those of the last committed
    iteration."""
    plan = rules.plans.get(epoch)
    expect(plan is not None and epoch == rules.highest_epoch, f"epoch {epoch} takes effect out of order")
    expect(epoch not in rules.refused, f"epoch {epoch} takes effect, though it was refused")
    assert plan is not None
    missing = set(plan.layout.ranks) - rules.acknowledged.get(epoch, {}).keys()
    expect(not missing, f"epoch {epoch} takes effect before ranks {sorted(missing)} are ready")
    need = needed(rules.world.scenario.model, plan.layout)
    for rank in plan.layout.active:
        worker = rules.world.workers[rank]
        if not worker.alive or rules.given_up(worker):
            continue
        holding = worker.held.get(epoch)
        expect(holding is not None and holding.slices == need[rank], f"rank {rank} lacks slices of epoch {epoch}")
        assert holding is not None
        right = (holding.iteration, holding.value) == (rules.value.iteration, rules.value.value)
        expect(right, f"rank {rank} holds iteration {holding.iteration}, committed is {rules.value.iteration}")
    rules.in_effect = plan
    rules.underway = False
    rules.objected = 0
