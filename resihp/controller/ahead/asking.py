"""What is asked while training goes on: a better plan than the one in effect, and a plan for each loss that may come.

One question at a time, to whoever thinks (`interface.Think`); nobody waits for an answer. Under a plan that was made
in haste the first question is whether there is a better one (`replan_policy` weighs it then, as any other change). Then
each device with work and each node is asked for, in the largest jobs one of each kind of place
(`resihp.scheduler.losses`). A question is exactly what `planning.best` will ask, so that its answer is used if and only
if that comes; what makes another question of it (a plan, a slow device, a newcomer, learned times) makes all answers
void.

Called by `controller`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from resihp.controller import interface as api
from resihp.controller import planning, replan_policy
from resihp.controller.ahead.answers import Loss, OpenQuestion
from resihp.controller.state.job import Job
from resihp.scheduler import losses
from resihp.scheduler.questions import canonical, key_of
from resihp.scheduler.situation import Situation
from resihp.scheduler.transition_cost import PREDICTION_ERROR

QUIET = 3
"""Iterations for which nothing has changed before anything is asked: where one thing goes, others often follow."""
PATIENCE_S = 60.0
"""After what time beyond the search's own a question counts as not answered."""
MOST_UNANSWERED = 3
"""In a row: then nobody is asked any more until something changes."""


def review(job: Job) -> None:
    """After each event: ask, once nothing has changed for a while; nothing new is looked at within an iteration."""
    ahead, committed = job.foresight, job.record.committed
    if not job.settings.plans_ahead or not job.may_interrupt or committed == ahead.seen:
        return
    ahead.seen = committed
    asked_of = _asked_of(job)
    if asked_of != ahead.asked_of:
        ahead.forget(asked_of, committed)
        return
    if ahead.asked is not None and job.now - ahead.asked.at > PATIENCE_S + job.settings.search_s:
        ahead.asked, ahead.unanswered = None, ahead.unanswered + 1
    if committed - ahead.since >= QUIET and job.can_still_gain:
        _ask(job)


def thought(job: Job, event: api.Thought) -> None:
    """An answer, or why there is none; it may be one to a question of former times, and then is of no use."""
    ahead = job.foresight
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
    """Put the next question, unless one is under way."""
    ahead = job.foresight
    if ahead.todo is None:
        ahead.todo = deque([*_improvements(job), *_losses(job)])
    while ahead.todo and ahead.asked is None and ahead.unanswered < MOST_UNANSWERED:
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
    """What `planning.best` will ask when that has happened; None where nobody would be left."""
    left = set(job.ready).difference(loss.ranks)
    return canonical(planning.asked(job, job.epoch + 1, left, None).fit) if left else None


def _search_s(job: Job) -> float:
    """Other rules than ours are not searched for anything better: they are there to be compared with."""
    return job.settings.search_s if job.settings.planner == "resihp" else 0.0


def _asked_of(job: Job) -> object:
    """All that a question depends on, beside what is lost: equal as long as answers hold."""
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
    """Whether there is a better plan than the one in effect: asked where that is our planner's own, of a moment.

    The layout that the user asked for stays, and so does what was searched for already. Without knowledge of memory
    there is nothing to search.
    """
    record, settings = job.record, job.settings
    assert record.plan is not None
    assert record.first_plan is not None
    now, first = record.plan.without_mirrors().layout.replicas, record.first_plan.without_mirrors().layout
    as_asked = now == first.replicas and len(first.active) >= settings.ranks_asked
    unknown = settings.memory_bytes is None and job.declaration.memory_bytes is None
    if settings.observes or not _search_s(job) or unknown:
        return
    if not as_asked and now != job.foresight.searched:
        yield Loss(ranks=(), what="a better plan than the one in effect")


def _weigh(job: Job, key: str) -> None:
    """Have a plan that was found weighed, where an iteration would take less than it does."""
    assert job.record.plan is not None
    question = planning.asked(job, job.epoch + 1, set(job.ready), None)
    found, present = job.foresight.ready(question.fit), planning.present(job, question.situation)
    job.foresight.searched = job.record.plan.without_mirrors().layout.replicas
    if found is not None and (present is None or found.seconds < present * (1 - PREDICTION_ERROR)):
        replan_policy.consider_found(job, key)


# --- losses -------------------------------------------------------------------------------------------------------


def _losses(job: Job) -> list[Loss]:
    """Each device that has work, then each node that has such; of large jobs, one for each kind of place."""
    return [
        Loss(ranks=one.ranks, what=f"the loss of {f'node {one.node}' if one.node else job.where(one.ranks[0])}")
        for one in losses.to_ask(planning.situation_now(job))
    ]
