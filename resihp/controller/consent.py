"""Handle the ranks' answers to a proposed plan: each rank confirms the plan or refuses it. State has not moved yet, so
a refused plan costs only the time spent on it.

A plan that any rank refuses never takes effect. If ranks refuse the first plan, the job ends, because the user has
requested an impossible layout. If ranks refuse a later plan, the controller proposes a cautious plan: the plan in
effect once more, or the plan in effect without the replicas that lost a rank. If ranks refuse the cautious plan as
well, the job ends.
"""

from __future__ import annotations

from resihp.controller import transition
from resihp.controller.fail_stop import endings
from resihp.controller.nodes import joins
from resihp.controller.state.job import Job
from resihp.controller.state.members import Member
from resihp.protocol import messages as m


def confirmed(job: Job, member: Member, confirm: m.Confirm) -> None:
    ongoing = job.awaiting(member, confirm.epoch, "proposing")
    if ongoing is None:
        return
    assert ongoing.plan is not None
    if confirm.digest != ongoing.plan.digest:
        objected(job, member, m.Object(epoch=confirm.epoch, reason="computes another digest of the plan"))
        return
    ongoing.waiting.discard(member.rank)
    transition.go_when_confirmed(job)


def objected(job: Job, member: Member, objection: m.Object) -> None:
    ongoing = job.awaiting(member, objection.epoch, "proposing")
    if ongoing is None:
        return
    assert ongoing.plan is not None
    text = f"{job.where(member.rank)}: refuses the plan of epoch {job.epoch}: {objection.reason}"
    if ongoing.plan is job.record.first_plan:
        if len(ongoing.plan.computing) < job.settings.ranks_asked:
            endings.too_few(job, f"{text}; the job started with fewer devices than requested")
        else:
            endings.end(job, 2, text)
        return
    transition.refused(job, member.rank, objection.reason)
    if member.joins and (job.record.plan is None or member.rank not in job.record.plan.layout.ranks):
        joins.turn_away(job, member, objection.reason)
        transition.park(job, "a newcomer cannot take part", cautious=ongoing.cautious)
    elif ongoing.cautious:
        endings.end(job, 1, text)
    else:
        transition.park(job, f"rank {member.rank} refuses the plan", cautious=True)
