"""Invariants of ranks without work: they get available work, or copies of state that only one rank has.

Asks the controller's own planner whether there is work for them. Never changes the plan. Called by `rules` and by the
invariants of entries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from resihp.controller import replan_policy
from resihp.controller.planning import next_plan, situations
from resihp.scheduler.layouts.mirrors import layers_held_once, with_mirrors
from resihp.simulator.invariants.violations import expect

if TYPE_CHECKING:
    from resihp.simulator.rules import Rules

MAX_IDLE_ITERATIONS = 6
"""Number of iterations within which a newcomer must get available work."""

LONGEST_CHANGE_S = 15.0
"""Remaining seconds of training below which a change of layout is no longer required; longer than any simulated
change."""


def check_newcomers(rules: Rules) -> None:
    """Check that newcomers that have been ready for some iterations are in the plan.

    They need not be if the planner has no work for them, or if the change was not worth an interruption and will be
    reconsidered.
    """
    assert rules.in_effect is not None
    if rules.world.stopping.is_on:
        return
    idle = {
        rank
        for rank, since in rules.declared_at.items()
        if rules.committed - since > MAX_IDLE_ITERATIONS
        and rank not in rules.known_dead | set(rules.in_effect.layout.ranks)
    }
    job, scenario = rules.world.controller.job, rules.world.scenario
    if not idle or rules.taking_over or not job.training or rules.committed + 2 >= job.record.goal:
        return
    if job.pause is not None:
        return  # a plan for all ready ranks is about to be made
    if scenario.slow or scenario.planner_trouble or scenario.checker_trouble:
        return  # a change that is not worth an interruption waits
    if job.reconsider and job.reconsider_at > rules.world.now:
        return  # the change to be reconsidered covers all ready ranks
    better = next_plan.best_while_running(job).plan
    unused = better.computing == rules.in_effect.computing
    expect(unused, f"ranks {sorted(idle)} have no work, though {better.layout} has some for them")


def check_copies(rules: Rules) -> None:
    """Check that state with one holder gets a second holder within a few iterations, if an idle live rank can hold it.

    This is not required near the end, when the remaining time would not pay for a change, nor after copies were
    refused.
    """
    job, scenario = rules.world.controller.job, rules.world.scenario
    plan = job.record.plan
    settled = job.stage == "running" and not rules.taking_over and not rules.world.stopping.is_on
    if plan is None or not settled or not layers_held_once(plan.layout):
        rules.exposed = None
        return
    able = {rank for rank in job.ready if rank not in job.record.working and replan_policy.could_hold_copies(job, rank)}
    near_end = replan_policy.remaining_s(job) < LONGEST_CHANGE_S
    if not able or near_end or rules.objected or scenario.planner_trouble or scenario.checker_trouble:
        rules.exposed = None
        return
    now = (plan.epoch, frozenset(able))
    if rules.exposed is None or rules.exposed[0] != now:
        rules.exposed = now, rules.committed
        return
    if rules.committed - rules.exposed[1] <= MAX_IDLE_ITERATIONS:
        return
    better = with_mirrors(plan, situations.now(job), able)
    gained = layers_held_once(plan.layout) - layers_held_once(better.layout)
    often = any(
        len(job.changed_at.get(job.device_of(rank), ())) >= replan_policy.MAX_PROTECTIVE_CHANGES for rank in able
    )
    expect(not gained or often, f"layers {sorted(gained)} have one holder, and ranks {sorted(able)} hold no copy")
