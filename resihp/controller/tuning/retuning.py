"""When a tuned job is tuned again, by its own times: decided here; how, `resihp.scheduler.layouts.first_layout` knows.

`run --tune` begins with a layout that suits what operations and bytes take. Once what they take is measured
(`learned_times`), and `AFTER` iterations have passed under a plan, the tuner is asked with these times, with several
chunks a stage where these pay; it is asked again only where another plan is in effect, or the times have moved by more
than `MOVED`. What it finds is weighed like any other change (`transition_cost.verdict`), each recent change of this
kind makes the next one dearer, and after `CHECKED` iterations it is looked up whether it has kept what it promised.

Nothing is done where a device with work is slow, which `replan_policy` answers to, where replicas are unlike, under
another rule than our own, nor in observe mode. Asked by `controller` after each event; told of iterations by
`iterations`. Trials are bounded, for it runs in the supervisor's loop.
"""

from __future__ import annotations

import math
import statistics

from resihp.controller import planning, replan_policy
from resihp.controller.fail_slow import learned_times
from resihp.controller.state.iterations import Promise
from resihp.controller.state.job import Job
from resihp.errors import LayoutError
from resihp.parallelism.plan import Plan
from resihp.record.journal import ChangeDecided
from resihp.scheduler import transition_cost
from resihp.scheduler.cost.layout_change import movement
from resihp.scheduler.layouts import first_layout

AFTER = 40
"""Iterations under a plan before it is tuned anew."""
CHECKED = 20
"""Iterations under the tuned plan after which its promise is looked at, the first one left out."""
MOVED = 0.05
"""Relative change of a time, of a layer's, beyond which the tuner is asked again."""
BROKEN = 0.05
"""By how much more of the former time than promised iterations may take before it is told."""
MOST_CHUNKS = 4
"""Of a stage."""
WORK = 2000
"""Trials times stages times micro-batches of a pipeline: some 25 microseconds each."""
LEAST_TRIALS = 8


def note(job: Job, seconds: float | None, tokens: int) -> None:
    """An iteration is committed under the plan in effect."""
    tuning, plan = job.tuning, job.record.plan
    if not job.settings.tune or plan is None:
        return
    if tuning.epoch != plan.epoch:
        tuning.epoch, tuning.seen, tuning.look_at = plan.epoch, 0, AFTER
        tuning.rates.clear()
    tuning.seen += 1
    if seconds and tokens and tuning.seen > 1:
        tuning.rates.append(seconds / tokens)
    promise = tuning.promise
    if promise is not None and promise.epoch == plan.epoch and tuning.seen > CHECKED:
        _check(job, promise)
        tuning.promise = None


def review(job: Job) -> replan_policy.Replan | None:
    """Whether to interrupt training for a layout that suits measured times better; it is kept until all have parked."""
    tuning = job.tuning
    if not job.settings.tune or tuning.seen < tuning.look_at or not _may(job):
        return None
    plan = None if job.record.plan is None else job.record.plan.without_mirrors()
    measured = learned_times.now(job)
    if plan is None or measured is None:
        tuning.look_at = tuning.seen + 1
        return None
    tuning.look_at = tuning.seen + AFTER
    work = (plan.layout.replicas, plan.assignment, plan.orders)
    if (
        tuning.settled == work
        and tuning.profile is not None
        and not learned_times.moved(tuning.profile, measured, MOVED)
    ):
        return None
    job.profile = tuning.profile = measured
    tuning.settled = work
    return _answer(job, plan)


def _may(job: Job) -> bool:
    settings = job.settings
    if settings.planner != "resihp" or settings.observes or settings.chunks != 1:
        return False
    if not job.may_interrupt or job.reconsider or not job.can_still_gain:
        return False
    slow = job.record.slow
    return not job.record.slow_links and not any(job.device_of(rank) in slow for rank in job.record.computing)


def _answer(job: Job, plan: Plan) -> replan_policy.Replan | None:
    situation = planning.situation_now(job)
    stages = len(plan.layout.replicas[0].stages)
    trials = max(LEAST_TRIALS, WORK // max(1, stages * len(plan.assignment[0])))
    found = first_layout.tuned(
        plan,
        situation,
        most_chunks=MOST_CHUNKS,
        evaluations=min(trials, first_layout.TUNING_EVALUATIONS),
        name="the plan in effect",
    )
    if not found.alternatives:
        job.say("notice", f"tuned by measured times: the plan stays: {found.reason}")
        replan_policy.declined(job, "tuned by measured times", found.reason)
        return None
    present_s = found.alternatives[0][1]
    try:
        change = movement(situation, found.plan.layout)
    except LayoutError as error:
        job.say("notice", f"tuned by measured times: the plan stays: {error}")
        replan_policy.declined(job, "tuned by measured times", str(error))
        return None
    verdict = transition_cost.verdict(
        transition_cost.cost(change, transition_cost.calibrated(job.record.costs)),
        present_s,
        found.seconds,
        remaining_s=replan_policy.remaining_s(job),
        duration_s=math.inf,
        changes=transition_cost.recent(job.changed_at.get("tuned", ()), job.now),
    )
    if not verdict.go:
        job.say("notice", f"tuned by measured times: the plan stays: {verdict.reason}")
        replan_policy.declined(job, "tuned by measured times", verdict.reason)
        return None
    job.log(ChangeDecided(reason=verdict.reason, tuned=True))
    job.tuning.settled = (found.plan.layout.replicas, found.plan.assignment, found.plan.orders)
    if job.tuning.rates:
        job.tuning.promise = Promise(ratio=found.seconds / present_s, before=statistics.median(job.tuning.rates))
    return replan_policy.Replan(reason=f"tuned by measured times: {verdict.reason}", failures=(), plan=found.plan)


def _check(job: Job, promise: Promise) -> None:
    kept = statistics.median(job.tuning.rates) / promise.before if job.tuning.rates else math.nan
    told = (
        f"the plan of epoch {promise.epoch}, tuned by measured times: promised {promise.ratio:.1%} of the time before"
    )
    if kept > promise.ratio + BROKEN:
        job.say("warning", f"{told}, and takes {kept:.1%}: what was measured does not tell all")
    else:
        job.say("notice", f"{told}, and takes {kept:.1%}")
