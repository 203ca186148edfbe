"""Ask for plans while training goes on: for a better plan than the one in effect, and for a plan after each possible
loss.

One question at a time goes to the planning process (`interface.Think`), and nothing waits for the answer. If the plan
in effect was made in a hurry, the first question is for a better one; `replan_policy` then weighs it like any other
change. The next questions are for the loss of each device with work and of each node; in the largest jobs, for one loss
of each kind of place (`resihp.scheduler.losses`). Each question is exactly the one that `next_plan.best` would ask
after that loss, so that its answer is used only if exactly that situation arises. Any change of the situation (another
plan, a slow device, a newcomer, newly learned times) makes all answers void.

Never interrupts training itself. Called by `controller`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from resihp.controller import interface as api
from resihp.controller import replan_policy
from resihp.controller.ahead.answers import Loss, OpenQuestion
from resihp.controller.planning import choices, next_plan, situations
from resihp.controller.state.job import Job
from resihp.scheduler import losses
from resihp.scheduler.questions import canonical, key_of
from resihp.scheduler.situation import Situation
from resihp.scheduler.transition_cost import PREDICTION_ERROR

QUIET_ITERATIONS = 3
"""Number of iterations without any change after which questions are asked. One loss is often followed by others."""
ANSWER_MARGIN_S = 60.0
"""Seconds, beyond the time of the search itself, after which a question counts as unanswered."""
MAX_UNANSWERED = 3
"""Number of unanswered questions in a row after which no more are asked until the situation changes."""


def review(job: Job) -> None:
    """Ask the next question once nothing has changed for some iterations. Called after each event; acts once per
    committed iteration."""
    ahead, committed = job.plan_cache, job.record.committed
    if not job.settings.plans_ahead or not job.may_interrupt or committed == ahead.seen:
        return
    ahead.seen = committed
    asked_of = _asked_of(job)
    if asked_of != ahead.asked_of:
        ahead.forget(asked_of, committed)
        return
    if ahead.asked is not None and job.now - ahead.asked.at > ANSWER_MARGIN_S + job.settings.search_s:
        ahead.asked, ahead.unanswered = None, ahead.unanswered + 1
    if committed - ahead.since >= QUIET_ITERATIONS and job.can_still_gain:
        _ask(job)


def thought(job: Job, event: api.Thought) -> None:
    """Handle an answer, or the reason for its absence. An answer to an outdated question is ignored."""
    ahead = job.plan_cache
    loss = ahead.losses.get(event.question)
    if loss is None:
        return
    ahead.unanswered = 0
    if event.decision:
        ahead.answers[event.question] = event.decision
    if ahead.asked is not None and ahead.asked.key == event.question:
        ahead.asked = None
    if not job.may_interrupt or ahead.asked_of != _asked_of(job):
        return
    if event.decision and not loss.ranks:
        _weigh(job, event.question)
    _ask(job)


def _ask(job: Job) -> None:
    """Ask the next question, unless one is in progress."""
    ahead = job.plan_cache
    if ahead.todo is None:
        ahead.todo = deque([*_improvements(job), *_losses(job)])
    while ahead.todo and ahead.asked is None and ahead.unanswered < MAX_UNANSWERED:
        loss = ahead.todo.popleft()
        situation = _question(job, loss)
        if situation is None:
            continue
        key = key_of(situation)
        if key in ahead.losses:
            continue
        ahead.losses[key] = loss
        ahead.asked = OpenQuestion(key=key, loss=loss, at=job.now)
        job.do(api.Think(question=key, situation=situation, search_s=_search_s(job), why=loss.what))


def _question(job: Job, loss: Loss) -> Situation | None:
    """Return the question that `next_plan.best` will ask after this loss; None if no rank would remain."""
    remaining = set(job.ready).difference(loss.ranks)
    return canonical(next_plan.asked(job, job.epoch + 1, remaining, None).fit) if remaining else None


def _search_s(job: Job) -> float:
    """Return the seconds to spend on the search for a better plan. Only resihp's own planner searches; other planners
    serve as comparison and get 0."""
    return job.settings.search_s if job.settings.planner == "resihp" else 0.0


def _asked_of(job: Job) -> object:
    """Return all facts on which a question depends, apart from the loss. Answers are valid as long as the result is
    equal."""
    record = job.record
    assert record.plan is not None
    return (
        record.plan.epoch,
        job.micro_batches,
        job.profile,
        job.ready,
        frozenset(job.vacating),
        frozenset(record.unfit),
        frozenset(job.unmeasured),
        tuple(sorted((device, slow.speed) for device, slow in record.slow.items())),
        tuple(sorted((link, slow.speed) for link, slow in record.slow_links.items())),
    )


# --- a better plan ------------------------------------------------------------------------------------------------


def _improvements(job: Job) -> Iterable[Loss]:
    """Yield the question for a better plan than the one in effect, if our planner made that plan without a search.

    There is no such question for the layout that the user requested, nor for a layout for which a search was made
    before. Without knowledge of the devices' memory no search is possible.
    """
    record, settings = job.record, job.settings
    assert record.plan is not None
    assert record.first_plan is not None
    now, first = record.plan.without_mirrors().layout.replicas, record.first_plan.without_mirrors().layout
    as_asked = now == first.replicas and len(first.active) >= settings.ranks_asked
    unknown = settings.memory_bytes is None and job.declaration.memory_bytes is None
    if settings.observes or not _search_s(job) or unknown:
        return
    if not as_asked and now != job.plan_cache.searched:
        yield Loss(ranks=(), what="a better plan than the one in effect")


def _weigh(job: Job, key: str) -> None:
    """Have `replan_policy` weigh a found plan, if its iterations would take less time than those of the plan in
    effect."""
    assert job.record.plan is not None
    question = next_plan.asked(job, job.epoch + 1, set(job.ready), None)
    better, present = job.plan_cache.ready(question.fit), choices.present(job, question.situation)
    job.plan_cache.searched = job.record.plan.without_mirrors().layout.replicas
    if better is not None and (present is None or better.seconds < present * (1 - PREDICTION_ERROR)):
        replan_policy.consider_found(job, key)


# --- losses -------------------------------------------------------------------------------------------------------


def _losses(job: Job) -> list[Loss]:
    """Return the loss of each device with work, then of each node with such devices; in large jobs, one loss for each
    kind of place."""
    return [
        Loss(ranks=loss.ranks, what=f"the loss of {f'node {loss.node}' if loss.node else job.where(loss.ranks[0])}")
        for loss in losses.to_ask(situations.now(job))
    ]
