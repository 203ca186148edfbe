"""Decide when to tune a job's plan to its measured times; `resihp.scheduler.layouts.first_layout` decides how.

`run --tune` starts with a layout chosen by operation and byte counts. Once real times are measured (`learned_times`),
and `RETUNE_ITERATIONS` iterations have passed under a plan, the tuner is called with the measured times; it uses
several chunks per stage if they pay. It is called again only if another plan is in effect, or if the times have changed
by more than `MAX_TIME_DRIFT`. The tuner's plan is weighed like any other change (`transition_cost.verdict`). Each
recent change of this kind makes the next one more expensive. After `VERIFY_ITERATIONS` iterations the effect is
compared with the prediction.

The tuner is not called while a device with work is slow (`replan_policy` handles that), if replicas differ from each
other, under another planner than resihp's own, or in observe mode. Called by `controller` after each event;
`iterations` reports each iteration. The number of trials is limited, because they run in the supervisor's loop.
"""

from __future__ import annotations

import math
import statistics

from resihp.controller import replan_policy
from resihp.controller.fail_slow import learned_times
from resihp.controller.planning import situations
from resihp.controller.state.iterations import Promise
from resihp.controller.state.job import Job
from resihp.errors import LayoutError
from resihp.parallelism.plan import Plan
from resihp.record.journal import ChangeDecided
from resihp.scheduler import transition_cost
from resihp.scheduler.cost.layout_change import movement
from resihp.scheduler.layouts import first_layout

RETUNE_ITERATIONS = 40
"""Number of iterations under a plan before the tuner is called."""
VERIFY_ITERATIONS = 20
"""Number of iterations under the tuned plan, without the first one, after which its effect is verified."""
MAX_TIME_DRIFT = 0.05
"""Change of a measured time, as a share of a layer's time, above which the tuner is called again."""
MAX_SHORTFALL = 0.05
"""Largest excess of the actual over the predicted share of the former iteration time that causes no warning."""
MAX_CHUNKS = 4
"""Largest number of chunks per stage."""
TRIAL_BUDGET = 2000
"""Budget for the tuner: trials times stages times micro-batches of a pipeline. Each unit takes about 25
microseconds."""
MIN_TRIALS = 8
"""Smallest number of trials, whatever the size of the pipeline."""


def note(job: Job, seconds: float | None, tokens: int) -> None:
    """Count an iteration that was committed under the plan in effect."""
    tuning, plan = job.tuning, job.record.plan
    if not job.settings.tune or plan is None:
        return
    if tuning.epoch != plan.epoch:
        tuning.epoch, tuning.seen, tuning.look_at = plan.epoch, 0, RETUNE_ITERATIONS
        tuning.rates.clear()
    tuning.seen += 1
    if seconds and tokens and tuning.seen > 1:
        tuning.rates.append(seconds / tokens)
    promise = tuning.promise
    if promise is not None and promise.epoch == plan.epoch and tuning.seen > VERIFY_ITERATIONS:
        _check(job, promise)
        tuning.promise = None


def review(job: Job) -> replan_policy.Replan | None:
    """Decide whether to interrupt training for a layout that suits the measured times better. The plan is held until
    all ranks have parked."""
    tuning = job.tuning
    if not job.settings.tune or tuning.seen < tuning.look_at or not _may_tune(job):
        return None
    plan = None if job.record.plan is None else job.record.plan.without_mirrors()
    measured = learned_times.now(job)
    if plan is None or measured is None:
        tuning.look_at = tuning.seen + 1
        return None
    tuning.look_at = tuning.seen + RETUNE_ITERATIONS
    work = (plan.layout.replicas, plan.assignment, plan.orders)
    if (
        tuning.settled == work
        and tuning.profile is not None
        and not learned_times.moved(tuning.profile, measured, MAX_TIME_DRIFT)
    ):
        return None
    job.profile = tuning.profile = measured
    tuning.settled = work
    return _answer(job, plan)


def _may_tune(job: Job) -> bool:
    settings = job.settings
    if settings.planner != "resihp" or settings.observes or settings.chunks != 1:
        return False
    if not job.may_interrupt or job.reconsider or not job.can_still_gain:
        return False
    slow = job.record.slow
    return not job.record.slow_links and not any(job.device_of(rank) in slow for rank in job.record.computing)


def _answer(job: Job, plan: Plan) -> replan_policy.Replan | None:
    situation = situations.now(job)
    stages = len(plan.layout.replicas[0].stages)
    trials = max(MIN_TRIALS, TRIAL_BUDGET // max(1, stages * len(plan.assignment[0])))
    tuned = first_layout.tuned(
        plan,
        situation,
        most_chunks=MAX_CHUNKS,
        evaluations=min(trials, first_layout.TUNING_EVALUATIONS),
        name="the plan in effect",
    )
    if not tuned.alternatives:
        job.say("notice", f"tuned by measured times: the plan stays: {tuned.reason}")
        replan_policy.declined(job, "tuned by measured times", tuned.reason)
        return None
    present_s = tuned.alternatives[0][1]
    try:
        change = movement(situation, tuned.plan.layout)
    except LayoutError as error:
        job.say("notice", f"tuned by measured times: the plan stays: {error}")
        replan_policy.declined(job, "tuned by measured times", str(error))
        return None
    verdict = transition_cost.verdict(
        transition_cost.cost(change, transition_cost.calibrated(job.record.costs)),
        present_s,
        tuned.seconds,
        remaining_s=replan_policy.remaining_s(job),
        duration_s=math.inf,
        changes=transition_cost.recent(job.changed_at.get("tuned", ()), job.now),
    )
    if not verdict.go:
        job.say("notice", f"tuned by measured times: the plan stays: {verdict.reason}")
        replan_policy.declined(job, "tuned by measured times", verdict.reason)
        return None
    job.log(ChangeDecided(reason=verdict.reason, tuned=True))
    job.tuning.settled = (tuned.plan.layout.replicas, tuned.plan.assignment, tuned.plan.orders)
    if job.tuning.rates:
        job.tuning.promise = Promise(ratio=tuned.seconds / present_s, before=statistics.median(job.tuning.rates))
    return replan_policy.Replan(reason=f"tuned by measured times: {verdict.reason}", failures=(), plan=tuned.plan)


def _check(job: Job, promise: Promise) -> None:
    actual = statistics.median(job.tuning.rates) / promise.before if job.tuning.rates else math.nan
    text = f"plan of epoch {promise.epoch}, tuned by measured times: predicted {promise.ratio:.1%} of the time before"
    if actual > promise.ratio + MAX_SHORTFALL:
        job.say("warning", f"{text}, actual {actual:.1%}: the measured times are incomplete")
    else:
        job.say("notice", f"{text}, actual {actual:.1%}")
